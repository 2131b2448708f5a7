"""The greedy walk through a verified tree."""

from typing import NamedTuple

import numpy as np

from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import tree as reference

_tree_accept = Kernel("tree_accept.cu")


class Acceptance(NamedTuple):
    """What a round commits; on a GPU with −1 after the end, in NumPy without.

    path : int32 [max_path]
        Accepted nodes, the root first.
    tokens : int32 [max_path]
        The accepted drafts and the bonus token.
    length : int32 [1]
        How many entries of both count.
    """

    path: Array
    tokens: Array
    length: Array


def tree_accept(tokens: Array, parents: Array, targets: Array, max_path: int) -> Acceptance:
    """Walk from the root while a child carries the target's token: see :func:`kdtree_nb.reference.tree.tree_accept`.

    Parameters
    ----------
    tokens, parents, targets : int32 [N]
        ``targets`` are the target's argmax or its samples.
    max_path : int
        Nodes on the longest path, the root included.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit, or for a path without a root; the message names them.
    """
    if not tokens.shape == parents.shape == targets.shape == (tokens.size,) or not tokens.size:
        raise ValueError(
            f"tree_accept: tokens {list(tokens.shape)}, parents {list(parents.shape)}, targets {list(targets.shape)}, "
            "expected the same [N], with a root at least"
        )
    if max_path < 1:
        raise ValueError(f"tree_accept: max_path={max_path}, expected 1 or more")
    if not runs_cuda(tokens):
        path, bonus = reference.tree_accept(tokens, parents, targets)
        committed = np.append(tokens[path[1:]], bonus).astype(np.int32)
        return Acceptance(path, committed, np.array([len(path)], np.int32))
    xp = array_module(tokens)
    accepted = Acceptance(xp.empty(max_path, np.int32), xp.empty(max_path, np.int32), xp.empty(1, np.int32))
    _tree_accept((1,), (32,), (tokens, parents, targets, *accepted, np.int32(len(tokens)), np.int32(max_path)))
    return accepted
