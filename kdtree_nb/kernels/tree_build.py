"""The best-first draft tree."""

import numpy as np

from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import tree as reference
from kdtree_nb.reference.tree import DraftTree

MAX_BUDGET = 1024
THREADS = 256
NEAR_BYTES = 32 * 1024
"""Of shared memory for the tables: with conditionals of 32 candidates at 15 positions 8 ranks of each row."""
_tree_build = Kernel("tree_build.cu")


def tree_build(
    root: Array,
    log_probs: Array,
    token_ids: Array,
    node_budget: int,
    children: Array | None = None,
    costs: Array | None = None,
    gain: float = 1.0,
    left: Array | None = None,
    chain: bool = False,
) -> DraftTree:
    """The ``node_budget`` most probable prefixes: see :func:`kdtree_nb.reference.tree.tree_build`.

    Parameters
    ----------
    root : int32 [1]
        The last committed token.
    log_probs : float32 [L, K], or with children [L, K, K]
        At most 0, descending; on a GPU this is not checked, and NaN counts as −inf.
    token_ids : int32 [L, K]
    node_budget : int
        B, without the root; at most 1,024 on a GPU.
    children : int32 [L, K, K], optional
        As :func:`kdtree_nb.kernels.transition.condition` makes them; on a GPU not checked.
    costs : float32 [node_budget + 1], optional
        Seconds of a round with n nodes besides the root: the nodes that pay end where most tokens per second are
        expected, and on a GPU the search may end once no later node can pay.
    gain : float
        Drafted tokens that are accepted for each that the probabilities promise.
    left : int32 [1], optional
        Tokens that may be committed still, of which a round's last is the target's own: no node is as deep.
    chain : bool
        Whether each node has one child, the most probable.

    Returns
    -------
    DraftTree
        On a GPU ``num_nodes`` and ``paying`` are arrays, int32 [1]: the host does not know them.

    Raises
    ------
    ValueError, TypeError
        If shapes, dtypes or the budget do not fit; the message names them.
    """
    if not runs_cuda(log_probs):
        log_probs = reference.cut(log_probs, len(log_probs) if left is None else int(left[0]) - 1, chain)
        return reference.tree_build(int(root[0]), log_probs, token_ids, node_budget, children, costs, gain)
    reference.check_shapes(log_probs, token_ids, children)
    if not 0 <= node_budget <= MAX_BUDGET:
        raise ValueError(f"tree_build: node_budget={node_budget}, expected 0 to {MAX_BUDGET}")
    if costs is not None and costs.shape != (node_budget + 1,):
        raise ValueError(f"tree_build: costs {list(costs.shape)}, expected [{node_budget + 1}]")
    xp, (length, width) = array_module(log_probs), token_ids.shape
    columns = [xp.empty(node_budget + 1, np.int32) for _ in range(3)]
    scores, num_nodes, paying = xp.empty(node_budget + 1, np.float32), xp.empty(1, np.int32), xp.empty(1, np.int32)
    depth_limit = min(length, node_budget)
    ranks = min(1 if chain else width, node_budget)  # a node comes after its elder siblings
    rank_bytes = 8 * depth_limit * (1 if children is None else width)
    near = min(ranks, NEAR_BYTES // max(rank_bytes, 1))
    sizes = [np.int32(n) for n in (depth_limit, width, node_budget, ranks, near)]
    arrays = (root, log_probs, token_ids, children, costs, left, *columns, scores, num_nodes, paying)
    _tree_build((1,), (THREADS,), (*arrays, *sizes, np.float64(gain)), shared_bytes=near * rank_bytes)
    return DraftTree(columns[0], columns[1], columns[2], scores, num_nodes, paying)
