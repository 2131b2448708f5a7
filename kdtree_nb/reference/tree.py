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
    num_nodes : int, or on a GPU int32 [1]
        Rows that are nodes, root included; the rest is padding.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    num_nodes: int | np.ndarray

    def _repr_svg_(self) -> str | None:
        """The tree drawn, as notebooks show it; a tree on a GPU is shown as text."""
        if hasattr(self.tokens, "__cuda_array_interface__"):
            return None
        return tree_svg([str(token) for token in self.tokens], self.parents)


def tree_build(root: int, log_probs: np.ndarray, token_ids: np.ndarray, node_budget: int) -> DraftTree:
    """The ``node_budget`` most probable prefixes under the product of the drafter's marginals.

    A prefix scores ``score(parent) + log_probs[depth − 1, rank]``, one float32 addition a node in the
    order of the path. Higher scores come first, equal ones by the lexicographically smaller path of
    ranks, a prefix before its extensions.

    Parameters
    ----------
    root : int
        The last committed token.
    log_probs : float32 [L, K]
        At most 0, descending in each row; −inf entries never become nodes.
    token_ids : int [L, K]
    node_budget : int
        B ≥ 0, without the root.

    Raises
    ------
    ValueError
        For shapes that differ, NaN, positive or ascending log-probabilities, or a negative budget.
    """
    log_probs = np.asarray(log_probs, np.float32)
    check_marginals(log_probs, token_ids, node_budget)
    depth_limit, width = log_probs.shape
    tokens, parents, depths = [root], [-1], [0]
    frontier: list[tuple[float, tuple[int, ...], int, np.float32]] = []

    def propose(ranks: tuple[int, ...], parent: int, parent_score: np.float32) -> None:
        if len(ranks) <= depth_limit and ranks[-1] < width:
            score = parent_score + log_probs[len(ranks) - 1, ranks[-1]]
            if score > -np.inf:
                heapq.heappush(frontier, (-score, ranks, parent, parent_score))

    propose((0,), 0, np.float32(0))
    while frontier and len(tokens) <= node_budget:
        negative_score, ranks, parent, parent_score = heapq.heappop(frontier)
        tokens.append(int(token_ids[len(ranks) - 1, ranks[-1]]))
        parents.append(parent)
        depths.append(len(ranks))
        propose((*ranks, 0), len(tokens) - 1, np.float32(-negative_score))  # first child
        propose((*ranks[:-1], ranks[-1] + 1), parent, parent_score)  # next sibling

    padding = [-1] * (node_budget + 1 - len(tokens))
    arrays = [np.array(column + padding, np.int32) for column in (tokens, parents, depths)]
    return DraftTree(arrays[0], arrays[1], arrays[2], len(tokens))


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


def check_marginals(log_probs: np.ndarray, token_ids: np.ndarray, node_budget: int) -> None:
    """Raise a ValueError unless these are marginals as :func:`tree_build` takes them."""
    if node_budget < 0:
        raise ValueError(f"tree_build: node_budget={node_budget}, expected 0 or more")
    if log_probs.ndim != 2 or log_probs.shape != token_ids.shape:
        raise ValueError(
            f"tree_build: log_probs {list(log_probs.shape)} and token_ids {list(token_ids.shape)}, "
            "expected the same [L, K]"
        )
    if np.isnan(log_probs).any():
        raise ValueError("tree_build: log_probs hold NaN")
    if (log_probs > 0).any():
        raise ValueError(f"tree_build: log_probs reach {log_probs.max()}, expected at most 0")
    if (log_probs[:, 1:] > log_probs[:, :-1]).any():
        raise ValueError("tree_build: log_probs ascend within a row, expected the most probable token first")
