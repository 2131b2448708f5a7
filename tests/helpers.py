"""What several tests share: random trees, root paths climbed by hand, equality of bits."""

import numpy as np
from hypothesis import strategies as st


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
