"""The end of a round: its state moves on, and all that the host has to read is put together."""

import numpy as np

from kdtree_nb.kernels.gemm import threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.kernels.tree_accept import Acceptance

_close_round = Kernel("close_round.cu")


def close_round(accepted: Acceptance, num_nodes: Array | int, paying: Array | int, root: Array, left: Array) -> Array:
    """Make the last committed token the root, and take the committed from what is left.

    Parameters
    ----------
    num_nodes, paying : int, or int32 [1] where only the device knows it
        Of the tree.
    root, left : int32 [1]
        Changed in place.

    Returns
    -------
    int32 [3 + 2 · max_path]
        ``num_nodes``, ``paying`` and ``accepted.length``, then ``accepted.tokens`` and ``accepted.path``.
    """
    path, tokens, length = accepted
    if not runs_cuda(tokens):
        root[:] = tokens[length - 1]
        left -= length
        return np.concatenate([np.array([num_nodes, paying], np.int32), length, tokens, path])
    report = array_module(tokens).empty(3 + 2 * len(path), np.int32)
    sizes = num_nodes, paying
    pointers = [None if isinstance(size, int) else size for size in sizes]
    numbers = [np.int32(size if isinstance(size, int) else 0) for size in sizes]
    arrays = path, tokens, length, *pointers, root, left, report
    _close_round((1,), (threads_for(len(path)),), (*arrays, *numbers, np.int32(len(path))))
    return report
