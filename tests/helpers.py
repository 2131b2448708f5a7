"""What several tests share: random trees, root paths climbed by hand, equality of bits."""

import numpy as np
from hypothesis import strategies as st

from kdtree_nb.reference.sampling import top_k


@st.composite
def random_parents(draw: st.DrawFn, max_nodes: int = 12, max_padding: int = 0) -> np.ndarray:
    """Parents of a random tree, root first, each parent before its children, then padding of −1."""
    links = draw(
        st.binary(max_size=max_nodes - 1)
    )  # drawn as one value: hypothesis is ten times slower number by number
    padding = draw(st.integers(0, max_padding))
    return np.array([-1, *(link % (node + 1) for node, link in enumerate(links)), *[-1] * padding], np.int32)


def count_nodes(parents: np.ndarray) -> int:
    return 1 + sum(int(parent) >= 0 for parent in parents[1:])


def root_path(parents: np.ndarray, node: int) -> list[int]:
    """A node's ancestors, root first, and the node."""
    path = [node]
    while path[-1] != 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal dtype, shape and bytes: tighter than ``==``, which takes −0 for 0 and refuses NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    differing = np.count_nonzero(actual != expected)
    assert actual.tobytes() == expected.tobytes(), f"{differing} of {actual.size} elements differ"


def random_draft(
    rng: np.random.Generator, length: int, width: int, rank: int, scale: float = 1.0
) -> tuple[np.ndarray, ...]:
    """Marginals of the best of twice as many tokens, and tables whose scores have a deviation of about ``scale``."""
    log_probs, token_ids = top_k(rng.normal(0, 2, (length, 2 * width)).astype(np.float32), width)
    tables = [rng.normal(0, 1, (rows, rank)).astype(np.float32) for rows in (length, 2 * width, 2 * width)]
    tables[2] *= np.float32(scale / np.sqrt(max(rank, 1)))
    return log_probs, token_ids, *tables


def assert_conditionals(
    actual: tuple[np.ndarray, np.ndarray],
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    gates: np.ndarray,
    parent_table: np.ndarray,
    child_table: np.ndarray,
) -> None:
    """What ``condition`` promises: values within a bound of those in float64, and the order of its own values.

    In units of 2^-24: a hidden value x · sigmoid(x) carries a rounding of x, which moves it by at most 1 + |x| times
    as much, and 8 of its own; a score one for each product and sum. These move Z in proportion. The two sums and their
    exponentials add K + 12 to it, and the tail, a difference from 1, K + 8 of 1; the rest are roundings of the result.
    """
    conditionals, children = actual
    depth_limit, width = log_probs.shape
    assert (conditionals.dtype, children.dtype) == (np.float32, np.int32)
    assert conditionals.shape == children.shape == (depth_limit, width, width)
    assert (conditionals <= 0).all()  # not NaN either
    for values, which in zip(conditionals.reshape(-1, width), children.reshape(-1, width), strict=True):
        assert sorted(which.tolist()) == list(range(width))
        in_order = list(zip(-values, which, strict=True))
        assert sorted(in_order) == in_order

    by_candidate = np.empty_like(conditionals)
    np.put_along_axis(by_candidate, children, conditionals, axis=2)
    assert_same_bits(by_candidate[:1, :1], log_probs[:1, None])
    assert (by_candidate[:1, 1:] == -np.inf).all()
    epsilon = 2.0**-24
    for depth in range(1, depth_limit):
        possible = np.flatnonzero(log_probs[depth] > -np.inf)
        marginal = log_probs[depth, possible].astype(np.float64)
        tail = max(0.0, 1 - np.exp(marginal).sum())
        for parent in range(width):
            row = by_candidate[depth, parent]
            if not log_probs[depth - 1, parent] > -np.inf:
                assert (row == -np.inf).all()
                continue
            x = parent_table[token_ids[depth - 1, parent]].astype(np.float64) + gates[depth]
            hidden = x / (1 + np.exp(-x))
            child = child_table[token_ids[depth, possible]].astype(np.float64)
            adjusted = marginal + child @ hidden
            z = np.exp(adjusted).sum() + tail
            of_scores = (np.abs(child) @ (np.abs(hidden) * (10 + np.abs(x) + len(x)))).max(initial=0)
            of_z = epsilon * (of_scores + (width + 12) + (width + 8) / z)
            assert of_z < 0.25, "a bound too wide to say anything"
            highest = max(adjusted.max(initial=-np.inf), np.log(tail) if tail > 1e-12 else -np.inf)
            of_result = epsilon * (of_scores + 4 * (np.abs(adjusted) + abs(highest) + abs(np.log(z) - highest)))
            error = np.abs(row[possible] - np.minimum(adjusted - np.log(z), 0))
            assert (error <= of_result - np.log1p(-of_z)).all(), (error.max(), depth, parent)
            assert (np.delete(row, possible) == -np.inf).all()
