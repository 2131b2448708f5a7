"""A drafter's queries, keys and values: against norm and rotation in float64, in their places and nowhere else."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.block_write import block_write
from kdtree_nb.kernels.rms_norm import rms_norm
from kdtree_nb.reference.drafter import rotate_halves
from kdtree_nb.reference.norm import rms_norm as norm_of
from kdtree_nb.reference.rope import Rope, rope_table

from .products import EPSILON

THETA, POSITIONS, CAPACITY, EPS = 500.0, 60, 40, 1e-5
SIZES = [(1, 1, 1, 2), (5, 4, 2, 6), (7, 3, 3, 62), (8, 8, 1, 64), (3, 5, 5, 130), (9, 0, 2, 34)]
"""Tokens, heads, kv_heads, size: alone, grouped, with more pairs than threads of a warp, and keys and values alone."""


def table_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    return rope_table(Rope(THETA ** (-np.arange(0, size, 2) / size), 1.0), np.arange(POSITIONS))


class Layer:
    """Random projections and norms of a layer on a device, and a cache of poison."""

    def __init__(self, device, tokens: int, heads: int, kv_heads: int, size: int, seed: int = 0) -> None:
        rng = np.random.default_rng([tokens, size, seed])
        self.device, self.heads, self.kv_heads, self.size = device, heads, kv_heads, size
        self.projected = rng.standard_normal((tokens, (heads + 2 * kv_heads) * size)).astype(np.float32)
        self.norms = [rng.standard_normal(size).astype(np.float32) for _ in range(2)]

    def write(
        self, prefix_len: int, tokens: slice = slice(None), dtype: type = np.float32
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, and the whole cache of keys and values after it."""
        queries, *cache = write_layers(self.device, [self], prefix_len, tokens, dtype)
        return queries[:, 0], cache[0][0], cache[1][0]

    def by_head(self) -> list[np.ndarray]:
        """Projected queries, keys and values [tokens, heads, size]."""
        heads = self.projected.reshape(len(self.projected), -1, self.size)
        return np.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)


def write_layers(device, layers: list[Layer], prefix_len: int, tokens: slice = slice(None), dtype: type = np.float32):
    """Of layers of the same sizes, in one launch: queries, keys and values; those of bfloat16 as it is on the host."""
    put, host = device.put, device.host
    shape = (len(layers), CAPACITY, layers[0].kv_heads, layers[0].size)
    keys, values = (put(np.full(shape, np.nan, dtype)) for _ in range(2))
    norms, table = ([put(np.stack([layer.norms[of] for layer in layers])) for of in (0, 1)], table_of(layers[0].size))
    projected = put(np.concatenate([layer.projected[tokens] for layer in layers], axis=1))
    length = put([prefix_len], np.int32)
    queries = block_write(projected, (norms[0], norms[1]), EPS, tuple(map(put, table)), length, keys, values)
    return host(queries), *(host(cached).view(dtype) for cached in (keys, values))


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_layers_side_by_side_are_each_alone(device, layers, dtype):
    """With queries and without, as a block has them and as the tokens that were committed."""
    for heads in (4, 0):
        each = [Layer(device, 7, heads, 2, 34, seed) for seed in range(layers)]
        together = write_layers(device, each, 9, dtype=dtype)
        for at, layer in enumerate(each):
            queries, keys, values = layer.write(9, dtype=dtype)
            assert_same_bits(np.ascontiguousarray(together[0][:, at]), np.ascontiguousarray(queries))
            assert_same_bits(together[1][at], keys)
            assert_same_bits(together[2][at], values)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), SIZES)
def test_a_cache_of_bfloat16_has_the_same_numbers_rounded(device, tokens, heads, kv_heads, size):
    layer = Layer(device, tokens, heads, kv_heads, size)
    exact, rounded = layer.write(11), layer.write(11, dtype=bfloat16)
    assert_same_bits(rounded[0], exact[0])
    for found, expected in zip(rounded[1:], exact[1:], strict=True):
        written = slice(11, 11 + tokens)
        assert_same_bits(found[written], expected[written].astype(bfloat16))
        assert np.isnan(np.delete(found, np.r_[written], axis=0).astype(np.float32)).all()


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), SIZES)
def test_against_norm_and_rotation_in_float64(device, tokens, heads, kv_heads, size):
    """A turned element is two products of numbers that have the norm's error; cos and sin are rounded as well."""
    layer, prefix_len = Layer(device, tokens, heads, kv_heads, size), 11
    queries, keys, values = layer.write(prefix_len)
    positions, rows = prefix_len + np.arange(tokens), slice(prefix_len, prefix_len + tokens)
    bound = (0.5 * (-(-size // 256) + 5 + 8) + 7 + 4) * EPSILON
    for found, by_head, norm in zip((queries, keys[rows]), layer.by_head(), layer.norms, strict=False):
        normed = norm_of(by_head.astype(np.float64), norm.astype(np.float64), EPS)
        expected = rotate_halves(normed, positions, THETA)
        both = np.abs(normed[..., : size // 2]) + np.abs(normed[..., size // 2 :])
        assert (np.abs(found - expected) <= bound * np.concatenate([both, both], axis=2)).all()
    assert_same_bits(values[rows], layer.by_head()[2])
    for cached in (keys, values):
        assert np.isnan(np.delete(cached, np.r_[rows], axis=0)).all()


def test_a_head_has_the_bits_of_rms_norm_and_of_the_table(device):
    layer = Layer(device, 6, 3, 2, 40)
    queries, keys, _ = layer.write(5)
    cosines, sines = (part[5:11, None] for part in table_of(40))
    for found, by_head, norm in zip((queries, keys[5:11]), layer.by_head(), layer.norms, strict=False):
        rows = device.put(by_head.reshape(-1, 40))
        normed = device.host(rms_norm(rows, device.put(norm), EPS)).reshape(by_head.shape)
        first, second = normed[..., :20], normed[..., 20:]
        expected = np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=2)
        assert_same_bits(found, expected)


def test_a_token_does_not_depend_on_the_tokens_beside_it(device):
    """Written behind the tokens before it, each alone gives what all together give."""
    layer = Layer(device, 9, 4, 2, 38)
    queries, keys, values = layer.write(3)
    for first in range(9):
        for end in {first + 1, 9}:
            some, rows = slice(first, end), slice(3 + first, 3 + end)
            found = layer.write(3 + first, some)
            assert_same_bits(found[0], queries[some])
            assert_same_bits(found[1][rows], keys[rows])
            assert_same_bits(found[2][rows], values[rows])


def test_nan_stays_in_its_head(device):
    layer = Layer(device, 4, 3, 1, 10)
    layer.projected[2, 10 + 3] = np.nan  # a query
    queries, keys, values = layer.write(0)
    assert np.argwhere(np.isnan(queries).any(axis=2)).tolist() == [[2, 1]]
    assert not np.isnan(keys[:4]).any() and not np.isnan(values[:4]).any()


def test_no_tokens(device):
    queries, keys, values = Layer(device, 0, 3, 1, 10).write(7)
    assert queries.shape == (0, 3, 10)
    assert np.isnan(keys).all() and np.isnan(values).all()


def test_any_order_of_threads(device):
    layer = Layer(device, 5, 2, 1, 130)
    device.every_schedule(lambda: [device.put(array) for array in layer.write(2)])


def test_numpy_arrays_take_the_specification():
    class Host:
        put, host = staticmethod(np.array), staticmethod(np.array)

    layer = Layer(Host, 5, 4, 2, 6)
    queries, keys, values = layer.write(11)
    for found, by_head, norm in zip((queries, keys[11:16]), layer.by_head(), layer.norms, strict=False):
        expected = rotate_halves(norm_of(by_head, norm, EPS), np.arange(11, 16), THETA)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert_same_bits(values[11:16], layer.by_head()[2])
    assert np.isnan(np.delete(keys, np.r_[11:16], axis=0)).all()


def test_refuses(device):
    def write(
        projected: tuple,
        keys: tuple,
        values: tuple | None = None,
        norm: int = 8,
        pairs: int = 4,
        dtype: type = np.float32,
    ):
        empty = device.empty
        norms = empty((1, 8), np.float32), empty((1, norm), np.float32)
        table = empty((9, pairs), np.float32), empty((9, pairs), np.float32)
        cache = empty(keys, dtype), empty(values or keys, np.float32)
        block_write(empty(projected, np.float32), norms, EPS, table, empty(1, np.int32), *cache)

    with pytest.raises(ValueError, match=r"block_write: projected \[2, 2, 8\], keys \[1, 9, 1, 8\]"):
        write((2, 2, 8), (1, 9, 1, 8))
    with pytest.raises(ValueError, match=r"keys \[1, 9, 1, 8\] and values \[1, 9, 2, 8\]"):
        write((2, 24), (1, 9, 1, 8), (1, 9, 2, 8))
    with pytest.raises(ValueError, match=r"keys \[9, 1, 8\] and values .*\[layers, capacity, kv_heads, size\]"):
        write((2, 24), (9, 1, 8))
    with pytest.raises(TypeError, match=r"block_write: argument 'values' is float32 .*, expected bfloat16"):
        write((2, 24), (1, 9, 1, 8), dtype=np.uint16)
    with pytest.raises(TypeError, match=r"block_write: keys is float64, expected float32, bfloat16"):
        write((2, 24), (1, 9, 1, 8), dtype=np.float64)
    for columns in (20, 8):
        with pytest.raises(
            ValueError, match=rf"projected \[2, {columns}\], expected of each of 1 layers heads of 8, 2"
        ):
            write((2, columns), (1, 9, 1, 8))
    with pytest.raises(ValueError, match=r"projected \[2, 24\], expected of each of 2 layers heads of 8, 2 or more"):
        write((2, 24), (2, 9, 1, 8))
    with pytest.raises(
        ValueError, match=r"norms \[1, 8\] and \[1, 7\], table \[9, 4\], expected \[1, 8\] and \[positio"
    ):
        write((2, 24), (1, 9, 1, 8), norm=7)
    with pytest.raises(ValueError, match=r"table \[9, 3\], expected \[1, 8\] and \[positions, 4\]"):
        write((2, 24), (1, 9, 1, 8), pairs=3)
