"""What a token's projections become: queries in two parts, and at its slot in the cache alone a latent and a key."""

import re
from typing import NamedTuple

import numpy as np
import pytest
from builders import YARN, tiny_config
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.mla_inputs import mla_inputs
from kdtree_nb.kernels.rms_norm import rms_norm
from kdtree_nb.reference.norm import LATENT_EPS
from kdtree_nb.reference.rope import Rope, apply_rope, rope, rope_table


class Layer(NamedTuple):
    """The latent's weight, how positions turn, and their table."""

    weight: np.ndarray
    rotation: Rope
    table: tuple[np.ndarray, np.ndarray]


def layer_of(kv_lora: int, dim: int, **options) -> Layer:
    rotation = rope(tiny_config(kv_lora_rank=kv_lora, qk_rope_head_dim=dim, **options))
    weight = np.random.default_rng(kv_lora).standard_normal(kv_lora).astype(np.float32)
    return Layer(weight, rotation, rope_table(rotation, np.arange(300)))


def run(device, layer, queries, compressed, prefix_len, depths, dtype=np.float32, capacity=240) -> list[np.ndarray]:
    """Both parts of the queries, and the cache after the call; what was not written is NaN."""
    cache = device.put(np.full((capacity, compressed.shape[1]), np.nan, dtype))
    arrays = device.put([prefix_len], np.int32), device.put(depths, np.int32)
    weight, table = device.put(layer.weight), tuple(map(device.put, layer.table))
    parts = mla_inputs(queries, compressed, weight, table, *arrays, cache)
    return [device.host(array).view(dtype) for array in (*parts, cache)]


def split(device, layer, queries, prefix_len, depths) -> list[np.ndarray]:
    """Both parts of the queries, beside a latent and a key of NaN."""
    compressed = device.empty((len(queries), len(layer.weight) + 2 * layer.table[0].shape[1]), np.float32)
    return run(device, layer, queries, compressed, prefix_len, depths)[:2]


def write(device, layer, compressed, prefix_len, depths, dtype=np.float32) -> np.ndarray:
    """The cache, beside queries of NaN."""
    queries = device.empty((len(compressed), 1, 2 * layer.table[0].shape[1]), np.float32)
    return run(device, layer, queries, compressed, prefix_len, depths, dtype)[2]


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("yarn", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "dim", "kv_lora", "prefix_len"),
    [
        (1, 1, 1, 2, 1, 0),
        (5, 64, 128, 64, 512, 200),
        (1, 16, 128, 64, 512, 239),
        (17, 3, 12, 10, 24, 200),
        (17, 1, 5, 6, 31, 3),
        (2, 5, 257, 62, 3, 200),
        (33, 1, 3, 62, 257, 207),
        (3, 2, 0, 4, 5, 200),
        (240, 1, 2, 8, 24, 0),
    ],
)
def test_against_the_specification(device, tokens, heads, nope, dim, kv_lora, prefix_len, yarn, dtype):
    """As float32 to the bit; as bfloat16 the same rounded once."""
    layer = layer_of(kv_lora, dim, rope_scaling=yarn)
    rng = np.random.default_rng(tokens)
    queries = rng.standard_normal((tokens, heads, nope + dim)).astype(np.float32)
    compressed = rng.standard_normal((tokens, kv_lora + dim)).astype(np.float32)
    depths = rng.integers(0, 33, tokens)
    inputs = device.put(queries), device.put(compressed)
    plain, absorbed, cache = run(device, layer, *inputs, prefix_len, depths, dtype)

    positions = prefix_len + depths
    assert_same_bits(plain, queries[..., :nope].astype(dtype))
    turned = apply_rope(queries[..., nope:], positions, layer.rotation)
    assert_same_bits(absorbed[..., kv_lora:].copy(), turned.astype(dtype))
    if device.is_emulated:
        assert np.isnan(absorbed[..., :kv_lora].astype(np.float32)).all()  # nobody has written there

    rows = cache[prefix_len : prefix_len + tokens]
    latent = device.host(rms_norm(device.put(compressed[:, :kv_lora]), device.put(layer.weight), LATENT_EPS))
    assert_same_bits(rows[:, :kv_lora], latent.astype(dtype))  # whose bound is in test_rms_norm.py
    key = apply_rope(compressed[:, kv_lora:], positions, layer.rotation)
    assert_same_bits(rows[:, kv_lora:], key.astype(dtype))
    assert np.isnan(cache[:prefix_len]).all() and np.isnan(cache[prefix_len + tokens :]).all()


def test_no_tokens(device):
    queries, compressed = np.zeros((0, 3, 8), np.float32), np.zeros((0, 12), np.float32)
    plain, absorbed, cache = run(device, layer_of(8, 4), device.put(queries), device.put(compressed), 5, np.zeros(0))
    assert (plain.shape, absorbed.shape) == ((0, 3, 4), (0, 3, 12))
    assert np.isnan(cache).all()


def test_positions_of_queries_follow_depths_and_padding_is_the_root(device):
    """Parents [−1, 0, 0, 1] and a row of padding: the siblings get one position, slot 3 that of depth 2."""
    layer = layer_of(1, 4)
    queries = np.tile(np.random.default_rng(0).standard_normal(6).astype(np.float32), (5, 1, 1))
    _, absorbed = split(device, layer, device.put(queries), 0, [0, 1, 1, 2, -1])
    expected = apply_rope(queries[..., 2:], np.array([0, 1, 1, 2, 0]), layer.rotation)
    assert_same_bits(absorbed[..., 1:].copy(), expected)


def test_slots_follow_the_index_and_positions_of_keys_the_depth(device):
    """Parents [−1, 0, 0, 1]: four slots, three positions."""
    layer = layer_of(8, 4)
    compressed = np.tile(np.random.default_rng(0).standard_normal(12).astype(np.float32), (4, 1))
    cache = write(device, layer, device.put(compressed), 40, [0, 1, 1, 2])
    assert_same_bits(cache[40:44, 8:], apply_rope(compressed[:, 8:], np.array([40, 41, 41, 42]), layer.rotation))
    assert np.isnan(cache[44:]).all()


@pytest.mark.parametrize("apart", [0, 2], ids=["heads together", "heads apart"])
def test_parts_of_a_wider_product(device, apart):
    """Tokens apart, NaN beside what is read: queries and latent lie side by side in their common product."""
    layer, depths = layer_of(5, 8), np.arange(6)
    rng = np.random.default_rng(1)
    queries, compressed = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 3, 12), (6, 13)))
    wide = np.full((6, 60), np.nan, np.float32)
    end = 3 * (12 + apart)
    wide[:, :end].reshape(6, 3, -1)[..., :12] = queries
    wide[:, -13:] = compressed
    product = device.put(wide)
    inputs = product[:, :end].reshape(6, 3, -1)[..., :12], product[:, -13:]
    parts = run(device, layer, *inputs, 7, depths)
    alone = run(device, layer, device.put(queries), device.put(compressed), 7, depths)
    for part, same in zip(parts, alone, strict=True):
        assert_same_bits(part, same)
    plain, absorbed, cache = parts
    assert_same_bits(plain, queries[..., :4].copy())
    assert_same_bits(absorbed[..., 5:].copy(), apply_rope(queries[..., 4:], 7 + depths, layer.rotation))
    assert_same_bits(cache[7:13, 5:], apply_rope(compressed[:, 5:], 7 + depths, layer.rotation))


def test_more_tokens_than_a_grid_is_high(device):
    layer, tokens, depths = layer_of(1, 2), 65_537, np.arange(65_537) % 33
    rng = np.random.default_rng(2)
    queries, compressed = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, 1, 3), (tokens, 3)))
    inputs = device.put(queries), device.put(compressed)
    plain, absorbed, cache = run(device, layer, *inputs, 3, depths, capacity=tokens + 3)
    assert_same_bits(plain, queries[..., :1].copy())
    assert_same_bits(absorbed[..., 1:].copy(), apply_rope(queries[..., 1:], 3 + depths, layer.rotation))
    assert_same_bits(cache[3:, 1:].copy(), apply_rope(compressed[:, 1:], 3 + depths, layer.rotation))
    assert not np.isnan(cache[3:]).any()


def test_a_token_leaves_the_same_alone(device):
    """Alone behind a longer prefix, in a prompt, or as a padded tree's node; also from rows that lie apart."""
    layer = layer_of(24, 8)
    wide = np.full((30, 50), np.nan, np.float32)
    wide[:, 9:41] = np.random.default_rng(1).standard_normal((30, 32))
    queries = np.random.default_rng(6).standard_normal((30, 2, 11)).astype(np.float32)

    def of(tokens: slice, prefix_len: int, depths) -> list[np.ndarray]:
        """Of these tokens the queries' parts that are written, and the cache's rows."""
        inputs = device.put(queries[tokens]), device.put(wide[tokens, 9:41])
        plain, absorbed, cache = run(device, layer, *inputs, prefix_len, depths)
        return [plain, absorbed[..., 24:], cache[prefix_len : prefix_len + len(depths)]]

    prompt = of(slice(None), 10, np.arange(30))
    apart = write(device, layer, device.put(wide)[:, 9:41], 10, np.arange(30))
    assert_same_bits(apart[10:40], prompt[2])
    for token in (0, 7, 29):
        for alone, together in zip(of(slice(token, token + 1), 10 + token, [0]), prompt, strict=True):
            assert_same_bits(alone[0], together[token])
    for padded, together in zip(of(slice(5), 10, [0, 1, 2, -1, -1]), prompt, strict=True):
        assert_same_bits(padded[:3], together[:3])


def test_the_norm_covers_the_latent_only(device):
    layer = layer_of(8, 4)
    compressed = np.ones((1, 12), np.float32)
    compressed[:, 8:] = 1e6
    cache = write(device, layer, device.put(compressed), 0, [0])
    np.testing.assert_allclose(cache[0, :8], layer.weight, rtol=1e-6)
    assert np.abs(cache[0, 8:]).max() >= 1e6


def test_a_cache_of_bfloat16_gets_the_same_rounded_once(device):
    layer = layer_of(24, 8)
    compressed = np.random.default_rng(5).standard_normal((4, 32)).astype(np.float32)
    whole = write(device, layer, device.put(compressed), 3, np.arange(4))
    rows = write(device, layer, device.put(compressed), 3, np.arange(4), bfloat16)
    assert_same_bits(rows[3:7], whole[3:7].astype(bfloat16))
    assert np.isnan(rows[:3]).all() and np.isnan(rows[7:]).all()


def test_nan_stays_in_its_row(device):
    layer = layer_of(8, 4)
    compressed = np.random.default_rng(2).standard_normal((5, 12)).astype(np.float32)
    compressed[1, 2], compressed[3, 9] = np.nan, np.nan
    cache = write(device, layer, device.put(compressed), 0, np.arange(5))[:5]
    assert np.isnan(cache[1, :8]).all() and not np.isnan(cache[1, 8:]).any()
    assert np.flatnonzero(np.isnan(cache[3])).tolist() == [8, 10]
    assert not np.isnan(cache[[0, 2, 4]]).any()


def test_any_order_of_threads(device):
    layer, rng = layer_of(300, 64), np.random.default_rng(3)
    inputs = device.put(rng.random((7, 2, 100), np.float32)), device.put(rng.random((7, 364), np.float32))
    device.every_schedule(lambda: [device.put(array) for array in run(device, layer, *inputs, 3, np.arange(7))])


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_numpy_arrays_take_the_specification(dtype):
    layer, depths, positions = layer_of(24, 8), np.array([0, 1, 1, -1], np.int32), np.array([3, 4, 4, 3])
    rng = np.random.default_rng(4)
    queries, compressed = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 2, 13), (4, 32)))
    cache = np.zeros((9, 32), dtype)
    inputs = queries, compressed, layer.weight, layer.table, np.array([3], np.int32), depths
    plain, absorbed = mla_inputs(*inputs, cache)
    assert_same_bits(plain, queries[..., :5].astype(dtype))
    assert_same_bits(absorbed[..., 24:].copy(), apply_rope(queries[..., 5:], positions, layer.rotation).astype(dtype))
    latent = rms_norm(compressed[:, :24], layer.weight, LATENT_EPS)
    assert_same_bits(cache[3:7, :24].copy(), latent.astype(dtype))
    assert_same_bits(cache[3:7, 24:].copy(), apply_rope(compressed[:, 24:], positions, layer.rotation).astype(dtype))
    assert not cache[:3].any() and not cache[7:].any()


def test_refuses(device):
    layer = layer_of(8, 4)
    weight, table, start = device.put(layer.weight), tuple(map(device.put, layer.table)), device.put([0], np.int32)

    def refuse(queries=(2, 3, 10), compressed=(2, 12), cache=(9, 12), depths=2, dtypes="ff", step=1):
        projections = device.empty(queries, dtypes[0])[..., ::step], device.empty(compressed, dtypes[1])
        at = start, device.put(np.zeros(depths, np.int32))
        mla_inputs(*projections, weight, table, *at, device.empty(cache, np.float32))

    refuse()  # what differs below is all that is wrong
    for queries in ((2, 3, 3), (3, 3, 10), (2, 10)):
        message = f"mla_inputs: queries {list(queries)}, expected [2, heads, 4 or more]"
        with pytest.raises(ValueError, match=re.escape(message)):
            refuse(queries)
    with pytest.raises(ValueError, match=r"mla_inputs: the heads of queries are not contiguous"):
        refuse((2, 3, 20), step=2)
    with pytest.raises(ValueError, match=r"mla_inputs: compressed \[2, 13\], expected \[rows, 12\]"):
        refuse(compressed=(2, 13))
    with pytest.raises(ValueError, match=r"mla_inputs: compressed \[2, 1, 12\], expected \[rows, 12\]"):
        refuse(compressed=(2, 1, 12))
    with pytest.raises(ValueError, match=r"mla_inputs: compressed \[2, 12\], cache \[9, 13\], depths \[2\] do not fit"):
        refuse(cache=(9, 13))
    with pytest.raises(ValueError, match=r"mla_inputs: compressed \[2, 12\], cache \[9, 12\], depths \[3\] do not fit"):
        refuse(depths=3)
    with pytest.raises(TypeError, match=r"mla_inputs: .*'queries' is float64"):
        refuse(dtypes="df")
    with pytest.raises(TypeError, match=r"mla_inputs: .*'compressed' is float64"):
        refuse(dtypes="fd")
