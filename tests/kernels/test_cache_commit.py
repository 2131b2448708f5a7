"""Accepted rows move to the front, all of them read before one is overwritten, and nothing else changes."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.cache_commit import cache_commit


def commit(device, cache, prefix_len, path, max_path: int = 12) -> np.ndarray:
    on_device = device.put(cache)
    padded = np.full(max_path, -1, np.int32)
    padded[: len(path)] = path
    cache_commit(on_device, *(device.put(a, np.int32) for a in ([prefix_len], padded, [len(path)])))
    return device.host(on_device)


def expected(cache, prefix_len, path) -> np.ndarray:
    moved = cache.copy()
    for slot, node in enumerate(path):
        moved[:, prefix_len + slot] = cache[:, prefix_len + node]
    return moved


@pytest.mark.parametrize(
    "path", [[0], [0, 1], [0, 2, 3], [0, 2, 5], [0, 1, 2, 3], [0, 5, 6, 7, 8, 9], [0, 9], list(range(10))]
)
@pytest.mark.parametrize(("layers", "features", "prefix_len"), [(1, 1, 0), (3, 255, 7), (2, 257, 10), (5, 576, 1)])
def test_paths(device, layers, features, prefix_len, path):
    """Also rows that are read and written: path [0, 2, 3] moves 2 to 1 and 3 to 2. Every bit comes along, NaN's too."""
    rng = np.random.default_rng(features)
    cache = rng.standard_normal((layers, 20, features)).astype(np.float32)
    cache.view(np.uint32)[:, :, 0] = 0x7FC00000 + rng.integers(1, 9999, (layers, 20))
    assert_same_bits(commit(device, cache, prefix_len, path), expected(cache, prefix_len, path))


def test_rows_of_bfloat16(device):
    """Two bytes a value, each of the 65,536 there are."""
    cache = np.arange(2**16, dtype=np.uint16).view(bfloat16).reshape(2, 32, -1)
    moved = commit(device, cache, 3, [0, 2, 3, 9])
    assert_same_bits(moved.view(np.uint16), expected(cache, 3, [0, 2, 3, 9]).view(np.uint16))


def test_random_paths(device):
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 1100, 33)).astype(np.float32)
    for _ in range(40):
        path = [0, *np.sort(rng.permutation(np.arange(1, 1025))[: rng.integers(0, 33)])]
        prefix_len = int(rng.integers(0, 76))
        assert_same_bits(commit(device, cache, prefix_len, path, 40), expected(cache, prefix_len, path))


def test_features_are_gathered_by_the_path(device):
    """Path [0, 2, 5] gathers rows 0, 2 and 5, not the first three."""
    features = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3)
    assert_same_bits(commit(device, features, 0, [0, 2, 5])[:, :3], features[:, [0, 2, 5]])


def test_everything_rejected_changes_nothing(device):
    cache = np.random.default_rng(1).standard_normal((2, 9, 40)).astype(np.float32)
    assert_same_bits(commit(device, cache, 4, [0]), cache)
    assert_same_bits(commit(device, cache, 4, []), cache)


def test_rounds_follow_one_another(device):
    """Two rounds with what is on the device alone, as a captured graph would replay them."""
    cache = np.arange(1 * 30 * 2, dtype=np.float32).reshape(1, 30, 2)
    on_device, prefix_len = device.put(cache), device.put([5], np.int32)
    path, length = device.put([0, 3, 4, -1], np.int32), device.put([3], np.int32)
    cache_commit(on_device, prefix_len, path, length)
    prefix_len += length
    path[:], length[:] = device.put([0, 2, -1, -1], np.int32), 2
    cache_commit(on_device, prefix_len, path, length)
    assert_same_bits(device.host(on_device), expected(expected(cache, 5, [0, 3, 4]), 8, [0, 2]))
    assert device.host(prefix_len).tolist() == [8]


def test_any_order_of_threads(device):
    cache = np.random.default_rng(2).standard_normal((3, 30, 300)).astype(np.float32)
    device.every_schedule(lambda: [device.put(commit(device, cache, 3, [0, 2, 3, 7, 8]))])


def test_nothing_to_keep(device):
    for shape in ((0, 9, 4), (2, 9, 0)):
        assert commit(device, np.zeros(shape, np.float32), 1, [0, 2]).shape == shape


def test_numpy_arrays_take_the_specification():
    cache = np.random.default_rng(3).standard_normal((2, 9, 4)).astype(np.float32)
    moved = cache.copy()
    cache_commit(moved, np.array([3], np.int32), np.array([0, 2, 3, -1], np.int32), np.array([3], np.int32))
    assert_same_bits(moved, expected(cache, 3, [0, 2, 3]))


def test_refuses(device):
    one, path = device.empty(1, np.int32), device.empty(4, np.int32)
    with pytest.raises(ValueError, match=r"cache_commit: cache \[9, 4\], expected \[layers, capacity, features\]"):
        cache_commit(device.empty((9, 4), np.float32), one, path, one)
    with pytest.raises(TypeError, match=r"cache_commit: cache is float64"):
        cache_commit(device.empty((2, 9, 4), np.float64), one, path, one)
    with pytest.raises(TypeError, match=r"cache_commit: .*'path' is int64"):
        cache_commit(device.empty((2, 9, 4), np.float32), one, path.astype(np.int64), one)
    with pytest.raises(ValueError, match=r"cache_commit: .*'cache'.*expected C-contiguous"):
        cache_commit(device.empty((2, 9, 8), np.float32)[..., ::2], one, path, one)
