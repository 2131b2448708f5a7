"""Draft trees: building them best-first, and walking them (DDTree, arXiv 2604.12989).

Node 0 is the root: the last committed token, whose row is not in the cache yet. It is not counted in
the node budget B, so a verify pass has N = B + 1 rows.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from kdtree_nb.reference.tree_svg import tree_svg


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree of N = node_budget + 1 rows, its nodes first, in the order of the best-first search.

    tokens : int32 [N]
        Token of each node; −1 in padding, so that no target can match it.
    parents : int32 [N]
        Index of each node's parent, always smaller than its own; −1 for the root and in padding.
    depths : int32 [N]
        0 for the root; −1 in padding. A node's position is prefix_len + depth.
    scores : float32 [N]
        Log-probability of each node's path as it was drafted; 0 for the root, −inf in padding.
    num_nodes : int, or on a GPU int32 [1]
        Rows that are nodes, root included; the rest is padding.
    paying : int, or on a GPU int32 [1]
        The first of them, with which a round brings most tokens per second; all, where costs are not known.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    num_nodes: int | np.ndarray
    paying: int | np.ndarray

    def first(self, rows: int) -> "DraftTree":
        """The tree's first rows; counts that only a GPU knows stay as they are, of the whole tree."""
        tokens, parents, depths, scores = self.tokens, self.parents, self.depths, self.scores
        nodes, paying = (min(n, rows) if isinstance(n, int) else n for n in (self.num_nodes, self.paying))
        return DraftTree(tokens[:rows], parents[:rows], depths[:rows], scores[:rows], nodes, paying)

    def _repr_svg_(self) -> str | None:
        """The tree drawn, as notebooks show it; a tree on a GPU is shown as text."""
        if hasattr(self.tokens, "__cuda_array_interface__"):
            return None
        return tree_svg([str(token) for token in self.tokens], self.parents)


def tree_build(
    root: int,
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    node_budget: int,
    children: np.ndarray | None = None,
    costs: np.ndarray | None = None,
    gain: float = 1.0,
) -> DraftTree:
    """The ``node_budget`` most probable prefixes under the drafter's marginals, or under its conditionals.

    A prefix scores ``score(parent) + log_probs[depth − 1, rank]``, one float32 addition a node in the
    order of the path. Higher scores come first, equal ones by the lexicographically smaller path of
    ranks, a prefix before its extensions.

    With ``children`` a node's own children are ranked: each depth has K candidates, and the r-th child
    of the node that took candidate i is candidate ``children[depth, i, r]`` of its depth, with
    ``log_probs[depth, i, r]``. Marginals are the case where every row i is the same and r is the candidate.

    Parameters
    ----------
    root : int
        The last committed token.
    log_probs : float32 [L, K], or with children [L, K, K]
        At most 0, descending in each row; −inf entries never become nodes.
    token_ids : int [L, K]
        Of the candidates of each depth.
    node_budget : int
        B ≥ 0, without the root.
    children : int32 [L, K, K], optional
        Different candidates in each row, where log_probs are above −inf. At depth 0 only row 0 is read,
        there and in log_probs: the root is the only parent.
    costs : float32 [node_budget + 1], optional
        Seconds that a round takes with n nodes besides the root. The nodes that pay then end, in the tree's order,
        where the expected tokens per second, :func:`expected_rate` with this ``gain``, are highest.

    Raises
    ------
    ValueError
        For shapes that differ, NaN, positive or ascending log-probabilities, children that are no
        candidates or the same twice, or a negative budget.
    """
    log_probs = np.asarray(log_probs, np.float32)
    if node_budget < 0:
        raise ValueError(f"tree_build: node_budget={node_budget}, expected 0 or more")
    if costs is not None and costs.shape != (node_budget + 1,):
        raise ValueError(f"tree_build: costs {list(costs.shape)}, expected [{node_budget + 1}]")
    check_marginals(log_probs, token_ids, children)
    depth_limit, width = token_ids.shape
    if children is None:
        log_probs = np.broadcast_to(log_probs[:, None], (depth_limit, width, width))
        children = np.broadcast_to(np.arange(width), (depth_limit, width, width))
    tokens, parents, depths = [root], [-1], [0]
    scores, candidates = [np.float32(0)], [0]  # of each node; the root's children are in row 0
    frontier: list[tuple[float, tuple[int, ...], int]] = []

    def propose(ranks: tuple[int, ...], parent: int) -> None:
        if len(ranks) <= depth_limit and ranks[-1] < width:
            score = scores[parent] + log_probs[len(ranks) - 1, candidates[parent], ranks[-1]]
            if score > -np.inf:
                heapq.heappush(frontier, (-score, ranks, parent))

    propose((0,), 0)
    while frontier and len(tokens) <= node_budget:
        negative_score, ranks, parent = heapq.heappop(frontier)
        depth, rank = len(ranks), ranks[-1]
        candidates.append(int(children[depth - 1, candidates[parent], rank]))
        scores.append(np.float32(-negative_score))
        tokens.append(int(token_ids[depth - 1, candidates[-1]]))
        parents.append(parent)
        depths.append(depth)
        propose((*ranks, 0), len(tokens) - 1)  # first child
        propose((*ranks[:-1], rank + 1), parent)  # next sibling

    nodes = paying = len(tokens)
    if costs is not None:
        paying = 1 + int(expected_rate(np.array(scores), costs, gain).argmax())
    padding = [-1] * (node_budget + 1 - nodes)
    arrays = [np.array(column + padding, np.int32) for column in (tokens, parents, depths)]
    path_scores = np.array(scores + [-np.inf] * len(padding), np.float32)
    return DraftTree(arrays[0], arrays[1], arrays[2], path_scores, nodes, paying)


def cut(log_probs: np.ndarray, most_depth: int, chain: bool) -> np.ndarray:
    """A proposal's log-probabilities with −inf where there shall be no node.

    Parameters
    ----------
    log_probs : float32 [L, K] or [L, K, K]
    most_depth : int
        Of a node.
    chain : bool
        Whether each node has one child, the most probable.
    """
    wanted = np.arange(len(log_probs)).reshape(-1, *[1] * (log_probs.ndim - 1)) < most_depth
    if chain:
        wanted = wanted & (np.arange(log_probs.shape[-1]) == 0)
    return np.where(wanted, log_probs, np.float32(-np.inf))


def expected_rate(scores: np.ndarray, costs: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """Tokens per second to expect of a tree's first 0, 1, … nodes (arXiv 2606.01813).

    A round commits one token and every drafted one whose path is right: 1 + gain · Σ exp(score) are expected. Where a
    drafter's probabilities are those with which the target takes its tokens, the gain is 1. Greedy decoding takes the
    most probable ones more often than that.

    Parameters
    ----------
    scores : float32 [N]
        Of the tree's nodes, the root first, which stands for the token that is certain.
    costs : float32 [N or more]
        Seconds of a round with n nodes besides the root.

    Returns
    -------
    float64 [N]
    """
    expected = np.exp(scores.astype(np.float64))
    expected[1:] *= gain
    return expected.cumsum() / costs[: len(scores)]


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Each node's path from the root to itself: int [N, longest path], −1 after its end and in padding."""
    steps = [np.arange(len(parents))]  # from each node upwards
    while True:
        above = np.where(steps[-1] >= 0, parents[steps[-1]], -1)
        if (above < 0).all():
            break
        steps.append(above)
    upwards = np.stack(steps, axis=1)
    depths = (upwards >= 0).sum(axis=1, keepdims=True) - 1
    order = depths - np.arange(len(steps))
    paths = np.where(order >= 0, np.take_along_axis(upwards, np.maximum(order, 0), axis=1), -1)
    paths[1:][parents[1:] < 0] = -1
    return paths


def visibility(parents: np.ndarray) -> np.ndarray:
    """Which rows a row attends to, besides the prefix: bool [N, N], its ancestors and itself."""
    paths = ancestors(parents)
    visible = np.zeros((len(parents), len(parents) + 1), bool)  # column −1 takes what is no node
    np.put_along_axis(visible, paths, True, axis=1)
    return visible[:, :-1]


def tree_accept(tokens: np.ndarray, parents: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, int]:
    """Walk from the root while a child carries the token that the target chose at its parent.

    Parameters
    ----------
    tokens, parents : int [N]
    targets : int [N]
        The target's token after each node: its argmax, or its sample.

    Returns
    -------
    path : int32 [1 + accepted drafts]
        Accepted nodes in order, the root first.
    bonus : int
        The target's token after the last of them. The round commits the accepted drafts and the bonus.
    """
    path = [0]
    while True:
        matches = np.flatnonzero((parents == path[-1]) & (tokens == targets[path[-1]]))
        if not len(matches):
            return np.array(path, np.int32), int(targets[path[-1]])
        path.append(int(matches[0]))


def cache_commit(cache: np.ndarray, prefix_len: int, path: np.ndarray) -> None:
    """Move the accepted nodes' rows to the end of the prefix, in place.

    Parameters
    ----------
    cache : float [layers, capacity, features]
        Row prefix_len + i holds node i.
    path : int [n]
        Ascending; all of its rows are read before one is written.
    """
    cache[:, prefix_len : prefix_len + len(path)] = cache[:, prefix_len + path]


def check_marginals(log_probs: np.ndarray, token_ids: np.ndarray, children: np.ndarray | None = None) -> None:
    """Raise a ValueError unless these are the marginals, or with children conditionals, of :func:`tree_build`."""
    check_shapes(log_probs, token_ids, children)
    rows = log_probs if children is None else _rows_read(log_probs)
    if np.isnan(rows).any():
        raise ValueError("tree_build: log_probs hold NaN")
    if (rows > 0).any():
        raise ValueError(f"tree_build: log_probs reach {rows.max()}, expected at most 0")
    if (rows[:, 1:] > rows[:, :-1]).any():
        raise ValueError("tree_build: log_probs ascend within a row, expected the most probable token first")
    if children is not None:
        width = token_ids.shape[1]
        which, possible = _rows_read(children), rows > -np.inf
        named = which[possible]
        if ((named < 0) | (named >= width)).any():
            raise ValueError(
                f"tree_build: children name candidates {named.min()}..{named.max()}, expected 0 to {width - 1}"
            )
        in_order = np.sort(np.where(possible, which, width + np.arange(width)), axis=1)
        if (in_order[:, 1:] == in_order[:, :-1]).any():
            raise ValueError("tree_build: children name a candidate twice in a row, expected different ones")


def check_shapes(log_probs: np.ndarray, token_ids: np.ndarray, children: np.ndarray | None) -> None:
    """Raise a ValueError unless the shapes fit together: [L, K] twice, or with children [L, K, K] twice and [L, K]."""
    if children is None:
        if log_probs.ndim != 2 or log_probs.shape != token_ids.shape:
            raise ValueError(
                f"tree_build: log_probs {list(log_probs.shape)} and token_ids {list(token_ids.shape)}, "
                "expected the same [L, K]"
            )
    elif token_ids.ndim != 2 or not log_probs.shape == children.shape == (*token_ids.shape, token_ids.shape[1]):
        raise ValueError(
            f"tree_build: log_probs {list(log_probs.shape)}, children {list(children.shape)} and "
            f"token_ids {list(token_ids.shape)}, expected [L, K, K], [L, K, K] and [L, K]"
        )


def _rows_read(conditionals: np.ndarray) -> np.ndarray:
    """The rows [·, K] of [L, K, K] that a search can come to: at depth 0 the first alone."""
    read = np.ones(conditionals.shape[:2], bool)
    read[:1, 1:] = False
    return conditionals[read]
