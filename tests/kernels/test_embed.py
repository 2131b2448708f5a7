"""Rows of a table, exactly."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.embed import embed


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
@pytest.mark.parametrize(("tokens", "rows", "features"), [(1, 1, 1), (5, 7, 33), (64, 300, 1030), (0, 3, 8)])
def test_rows_arrive_exactly(device, tokens, rows, features, dtype):
    """The first and the last among them, some twice."""
    rng = np.random.default_rng(features)
    table = rng.standard_normal((rows, features)).astype(dtype)
    token_ids = rng.permutation(np.r_[0, rows - 1, rng.integers(0, rows, 62)][:tokens]).astype(np.int32)
    y = device.host(embed(device.put(table), device.put(token_ids)))
    assert_same_bits(y, table[token_ids].astype(np.float32))


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (3, 3), (0, 5), (2, 2)])
def test_the_rest_is_one_token(device, tokens, rows):
    """A drafter's block: the last committed token, and masks."""
    table = np.random.default_rng(2).standard_normal((9, 40)).astype(bfloat16)
    ids = np.array([7, 0, 8], np.int32)[:tokens]
    expected = table[[*ids, *[4] * (rows - tokens)]].astype(np.float32)
    assert_same_bits(device.host(embed(device.put(table), device.put(ids), rows, 4)), expected)
    assert_same_bits(embed(table, ids, rows, 4), expected)


def test_padding_reads_nothing_before_the_table(device):
    table = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    y = device.host(embed(device.put(table), device.put([2, -1, 3], np.int32)))
    assert_same_bits(y[[0, 2]], table[[2, 3]])
    assert np.isfinite(y[1]).all()


def test_numpy_arrays_take_the_specification():
    table = np.random.default_rng(1).standard_normal((6, 5)).astype(bfloat16)
    ids = np.array([5, 0, 5], np.int32)
    assert_same_bits(embed(table, ids), table[ids].astype(np.float32))


def test_refuses(device):
    with pytest.raises(ValueError, match=r"embed: table \[4\] and token_ids \[2\], expected"):
        embed(device.empty(4, np.float32), device.empty(2, np.int32))
    with pytest.raises(ValueError, match=r"embed: table \[4, 3\] and token_ids \[2, 1\], expected"):
        embed(device.empty((4, 3), np.float32), device.empty((2, 1), np.int32))
    with pytest.raises(TypeError, match=r"embed: table is float64, expected float32"):
        embed(device.empty((4, 3), np.float64), device.empty(2, np.int32))
    with pytest.raises(TypeError, match=r"embed: .*'token_ids' is int64"):
        embed(device.empty((4, 3), np.float32), device.empty(2, np.int64))
