"""The end of a round, against the same by hand."""

import numpy as np
import pytest

from kdtree_nb.kernels.close_round import close_round
from kdtree_nb.kernels.tree_accept import Acceptance


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("max_path", "length"), [(1, 1), (8, 1), (8, 5), (8, 8), (33, 2), (1025, 1000)])
def test_against_the_same_by_hand(device, max_path, length, known):
    rng = np.random.default_rng(max_path)
    path, tokens = np.full(max_path, -1, np.int32), np.full(max_path, -1, np.int32)
    path[:length], tokens[:length] = np.arange(length) * 3, rng.integers(0, 1000, length)
    root, left = device.put(np.array([77], np.int32)), device.put(np.array([2000], np.int32))
    accepted = Acceptance(*map(device.put, (path, tokens, np.array([length], np.int32))))
    nodes, paying = (40, 17) if known else (device.put(np.array([count], np.int32)) for count in (40, 17))
    report = device.host(close_round(accepted, nodes, paying, root, left))
    assert report.dtype == np.int32
    assert report.tolist() == [40, 17, length, *tokens.tolist(), *path.tolist()]
    assert (device.host(root).tolist(), device.host(left).tolist()) == ([tokens[length - 1]], [2000 - length])


def test_numpy_has_no_padding():
    root, left = np.array([7], np.int32), np.array([9], np.int32)
    accepted = Acceptance(np.array([0, 2], np.int32), np.array([5, 6], np.int32), np.array([2], np.int32))
    assert close_round(accepted, 4, 3, root, left).tolist() == [4, 3, 2, 5, 6, 0, 2]
    assert (root.tolist(), left.tolist()) == ([6], [7])
