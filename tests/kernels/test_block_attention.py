"""Attention of a drafter's block: the exact softmax within a bound, and nothing of what it must not see."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.block_attention import MAX_SIZE, block_attention
from kdtree_nb.reference.drafter import block_attention as specification

from .products import EPSILON

TILE = 32


def random_block(rng, rows: int, heads: int, kv_heads: int, size: int, prefix_len: int, window: int | None = None):
    """Queries, keys and values; NaN in the rows that no block sees, before the window and beyond the end."""
    queries = rng.standard_normal((rows, heads, size)).astype(np.float32)
    seen = seen_rows(rows, prefix_len, window)
    keys, values = np.full((2, prefix_len + rows + 3, kv_heads, size), np.nan, np.float32)
    keys[seen], values[seen] = rng.standard_normal((2, len(seen), kv_heads, size))
    return queries, keys, values


def seen_rows(rows: int, prefix_len: int, window: int | None) -> np.ndarray:
    first = 0 if window is None else max(0, prefix_len - window)
    return np.arange(first, prefix_len + rows)


def run(device, queries, keys, values, prefix_len: int, window: int | None = None) -> np.ndarray:
    arrays = map(device.put, (queries, keys, values))
    output = block_attention(*arrays, device.put([prefix_len], np.int32), window)
    assert output.shape == queries.shape
    return device.host(output)


def check(output, queries, keys, values, prefix_len: int, window: int | None = None) -> None:
    """Against the softmax in float64, one row and head at a time.

    A score is a sum of ``size`` products; its error, twice, is the relative one of its weight. A weight goes through
    two more exponentials at the end of each tile, and the sums have one rounding a key.
    """
    rows, heads, size = queries.shape
    seen = seen_rows(rows, prefix_len, window)
    for row in range(rows):
        for head in range(heads):
            kv_head = head * keys.shape[1] // heads
            query = queries[row, head].astype(np.float64)
            key, value = (cached[seen, kv_head].astype(np.float64) for cached in (keys, values))
            scores = key @ query / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            largest = (np.abs(key) @ np.abs(query)).max() / np.sqrt(size)
            roundings = 2 * (size + 3) * largest + 2 * len(seen) + 8 * (len(seen) // TILE) + 20
            excess = np.abs(output[row, head] - weights @ value) - EPSILON * roundings * (weights @ np.abs(value))
            assert excess.max() <= 0, f"row {row}, head {head}: {excess.max()} beyond the bound"


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size", "prefix_len", "window"),
    [
        (1, 1, 1, 1, 0, None),
        (1, 1, 1, 2, 1, None),
        (2, 3, 1, 6, 30, None),  # the block's end is a tile's
        (8, 8, 8, 32, 100, 256),
        (8, 4, 2, 24, 40, 7),
        (8, 6, 3, 31, 63, 1),
        (3, 2, 2, 33, 31, 31),
        (5, 4, 1, 64, 500, None),
        (5, 4, 1, 64, 500, 33),
        (16, 9, 3, 127, 17, None),
        (16, 2, 1, 128, 70, 70),
        (7, 2, 2, 129, 70, 71),
        (4, 3, 3, 255, 33, 2**31 - 1),
        (16, 2, 1, MAX_SIZE, 90, 64),
        (2, 2, 1, 40, 510, None),  # the last warp has one tile, as the others
        (2, 2, 1, 40, 511, None),  # the first has two
        (3, 4, 2, 8, 1100, 1030),
    ],
)
def test_against_the_exact_softmax(device, rows, heads, kv_heads, size, prefix_len, window):
    rng = np.random.default_rng([rows, size])
    block = random_block(rng, rows, heads, kv_heads, size, prefix_len, window)
    output = run(device, *block, prefix_len, window)
    check(output, *block, prefix_len, window)
    seen = seen_rows(rows, prefix_len, window)
    expected = specification(*block, int(seen[0]), int(seen[-1]) + 1)
    check(expected, *block, prefix_len, window)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)


def test_any_sizes(device):
    rng = np.random.default_rng(1)
    for _ in range(60):
        rows, group, kv_heads, size, prefix_len = rng.integers(1, [17, 4, 4, 50, 100])
        window = None if rng.random() < 0.3 else int(rng.integers(1, 120))
        block = random_block(rng, rows, group * kv_heads, kv_heads, size, prefix_len, window)
        check(run(device, *block, prefix_len, window), *block, prefix_len, window)


@pytest.mark.parametrize("scale", [30.0, 1e15])
def test_scores_too_large_for_an_exponential(device, scale):
    """The highest comes early, late, or in the tile before; the others' shares fade to nothing or nearly."""
    rng = np.random.default_rng(2)
    for highest in (0, 31, 32, 70, 100):
        queries, keys, values = random_block(rng, 2, 2, 1, 16, 99)
        keys[highest] = scale * queries[:, :1].mean(axis=0)
        check(run(device, queries, keys, values, 99), queries, keys, values, 99)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_scores_give_the_mean(device, sign):
    """Of 64 rows: every share is exactly 1, whatever the sign of a zero."""
    queries, keys = np.full((4, 1, 5), -0.0, np.float32), np.full((64, 1, 5), sign, np.float32)
    values = np.broadcast_to(np.arange(64, dtype=np.float32)[:, None, None], keys.shape).copy()
    assert (run(device, queries, keys, values, 60) == 31.5).all()


def test_negative_zeros_among_the_values(device):
    """They add nothing, and are no NaN."""
    queries, keys, values = random_block(np.random.default_rng(3), 3, 2, 1, 8, 40)
    values[:43] = -0.0
    assert (run(device, queries, keys, values, 40) == 0).all()


def test_rows_see_each_other_in_both_directions(device):
    queries, keys, values = random_block(np.random.default_rng(4), 6, 2, 2, 8, 20)
    before = run(device, queries, keys, values, 20)
    for changed in (0, 20, 25):
        others = values.copy()
        others[changed] += 1
        assert (run(device, queries, keys, others, 20) != before).all(axis=(1, 2)).all(), f"nobody sees row {changed}"


def test_a_window_is_the_text_without_its_start(device):
    queries, keys, values = random_block(np.random.default_rng(5), 6, 4, 2, 24, 80)
    assert_same_bits(run(device, queries, keys, values, 80, 50), run(device, queries, keys[30:], values[30:], 50))


@pytest.mark.parametrize("prefix_len", [0, 31, 70])
def test_a_row_and_a_head_do_not_depend_on_the_others_queries(device, prefix_len):
    queries, keys, values = random_block(np.random.default_rng(6), 8, 6, 3, 20, prefix_len)
    whole = run(device, queries, keys, values, prefix_len)
    others = queries.copy()
    others[:, 1:] = np.nan
    others[1:] = np.nan
    alone = run(device, others, keys, values, prefix_len)
    assert_same_bits(alone[0, 0], whole[0, 0])
    one_head = run(device, queries[:, 2:4], keys[:, 1:2], values[:, 1:2], prefix_len)
    assert_same_bits(one_head, np.ascontiguousarray(whole[:, 2:4]))


def test_a_nan_reaches_only_those_who_see_it(device):
    queries, keys, values = random_block(np.random.default_rng(7), 3, 4, 2, 8, 40)
    expected = run(device, queries, keys, values, 40)
    values[5, 1, 3] = np.nan
    output = run(device, queries, keys, values, 40)
    assert np.isnan(output[:, 2:, 3]).all()
    output[:, 2:, 3] = expected[:, 2:, 3]
    assert_same_bits(output, expected)


def test_any_order_of_threads(device):
    block = [*map(device.put, random_block(np.random.default_rng(8), 5, 4, 2, 40, 70, 50))]
    prefix_len = device.put([70], np.int32)
    device.every_schedule(lambda: [block_attention(*block, prefix_len, 50)])


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "size"), [(8, 8, 8, 32), (5, 6, 2, 34), (3, 2, 1, MAX_SIZE)])
def test_a_cache_of_bfloat16_counts_as_the_numbers_that_it_holds(device, rows, heads, kv_heads, size):
    """The same bits as of a float32 cache with these numbers; a result in bfloat16 is that, rounded."""
    queries, keys, values = random_block(np.random.default_rng(11), rows, heads, kv_heads, size, 70, 50)
    keys, values = keys.astype(bfloat16), values.astype(bfloat16)
    expected = run(device, queries, keys.astype(np.float32), values.astype(np.float32), 70, 50)
    assert_same_bits(run(device, queries, keys, values, 70, 50), expected)
    arrays = map(device.put, (queries, keys, values))
    rounded = block_attention(*arrays, device.put([70], np.int32), 50, bfloat16)
    assert_same_bits(device.host(rounded).view(bfloat16), expected.astype(bfloat16))


def test_no_rows(device):
    assert run(device, *random_block(np.random.default_rng(9), 0, 2, 1, 8, 5), 5).shape == (0, 2, 8)


def test_numpy_arrays_take_the_specification():
    block = random_block(np.random.default_rng(10), 4, 4, 2, 8, 20)
    prefix_len = np.array([20], np.int32)
    assert_same_bits(block_attention(*block, prefix_len, 9), specification(*block, 11, 24))
    assert_same_bits(block_attention(*block, prefix_len, None), specification(*block, 0, 24))
    rounded = block[0], *(cached.astype(bfloat16) for cached in block[1:])
    exact = specification(*(array.astype(np.float32) for array in rounded), 11, 24)
    assert_same_bits(block_attention(*rounded, prefix_len, 9), exact)
    assert_same_bits(block_attention(*rounded, prefix_len, 9, bfloat16), exact.astype(bfloat16))


@pytest.mark.parametrize(
    ("queries", "keys", "values", "message"),
    [
        ((2, 8), (9, 1, 8), (9, 1, 8), r"queries \[2, 8\], keys .* expected \[rows, heads, size\]"),
        ((2, 4, 8), (9, 8), (9, 8), r".* keys \[9, 8\] .* expected"),
        ((2, 4, 8), (9, 2, 8), (9, 2, 7), r".* values \[9, 2, 7\], expected"),
        ((2, 4, 8), (9, 2, 7), (9, 2, 7), r"queries \[2, 4, 8\], keys \[9, 2, 7\] .* expected"),
        ((2, 4, 8), (9, 3, 8), (9, 3, 8), r".* keys \[9, 3, 8\] .* heads a multiple of kv_heads"),
        ((2, 4, 8), (9, 0, 8), (9, 0, 8), r".* keys \[9, 0, 8\] .* heads a multiple of kv_heads"),
        ((2, 1, 257), (9, 1, 257), (9, 1, 257), "heads of 257 elements, expected at most 256"),
    ],
)
def test_refuses_shapes(device, queries, keys, values, message):
    arrays = [device.empty(shape, np.float32) for shape in (queries, keys, values)]
    with pytest.raises(ValueError, match=f"block_attention: {message}"):
        block_attention(*arrays, device.put([1], np.int32), None)


@pytest.mark.parametrize("which", range(3))
def test_refuses_dtypes(device, which):
    arrays = [device.empty((4, 2, 8), np.float64 if which == at else np.float32) for at in range(3)]
    said = ("argument 'queries' is float64", "keys is float64", "argument 'values' is float64")[which]
    with pytest.raises(TypeError, match=f"block_attention: {said}"):
        block_attention(*arrays, device.put([1], np.int32), None)


def test_refuses_keys_and_values_of_two_dtypes(device):
    arrays = [device.empty((4, 2, 8), dtype) for dtype in (np.float32, np.float32, np.uint16)]
    with pytest.raises(TypeError, match="block_attention: argument 'values' is uint16"):
        block_attention(*arrays, device.put([1], np.int32), None)
