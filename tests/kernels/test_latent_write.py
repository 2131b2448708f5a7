"""What a token leaves in the cache: its latent normalised, its key rotated, at its slot and nowhere else."""

import numpy as np
import pytest
from builders import tiny_config
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.latent_write import latent_write
from kdtree_nb.kernels.rms_norm import rms_norm
from kdtree_nb.reference.norm import LATENT_EPS
from kdtree_nb.reference.rope import apply_rope, rope, rope_table


def setting(kv_lora: int, dim: int):
    config = tiny_config(kv_lora_rank=kv_lora, qk_rope_head_dim=dim)
    weight = np.random.default_rng(kv_lora).standard_normal(kv_lora).astype(np.float32)
    return weight, rope(config), rope_table(rope(config), np.arange(200))


def write(device, compressed, weight, table, prefix_len, depths, capacity: int = 120) -> np.ndarray:
    """The cache after the call; what was not written is NaN."""
    cache = device.empty((capacity, compressed.shape[1]), np.float32)
    arrays = device.put([prefix_len], np.int32), device.put(depths, np.int32)
    latent_write(compressed, device.put(weight), tuple(map(device.put, table)), *arrays, cache)
    return device.host(cache)


@pytest.mark.parametrize(
    ("tokens", "kv_lora", "dim", "prefix_len"),
    [(1, 1, 2, 0), (1, 512, 64, 119), (17, 31, 6, 3), (33, 257, 62, 87), (120, 24, 8, 0)],
)
def test_against_the_specification(device, tokens, kv_lora, dim, prefix_len):
    weight, rotation, table = setting(kv_lora, dim)
    rng = np.random.default_rng(tokens)
    compressed = rng.standard_normal((tokens, kv_lora + dim)).astype(np.float32)
    depths = rng.integers(0, 33, tokens)
    cache = write(device, device.put(compressed), weight, table, prefix_len, depths)
    rows = cache[prefix_len : prefix_len + tokens]
    latent = device.host(rms_norm(device.put(compressed[:, :kv_lora]), device.put(weight), LATENT_EPS))
    assert_same_bits(rows[:, :kv_lora], latent)  # whose bound is in test_rms_norm.py
    assert_same_bits(rows[:, kv_lora:], apply_rope(compressed[:, kv_lora:], prefix_len + depths, rotation))
    assert np.isnan(cache[:prefix_len]).all() and np.isnan(cache[prefix_len + tokens :]).all()


def test_no_tokens(device):
    weight, _, table = setting(8, 4)
    assert np.isnan(write(device, device.put(np.zeros((0, 12), np.float32)), weight, table, 5, np.zeros(0))).all()


def test_slots_follow_the_index_and_positions_the_depth(device):
    """Parents [−1, 0, 0, 1]: four slots, three positions."""
    weight, rotation, table = setting(8, 4)
    compressed = np.tile(np.random.default_rng(0).standard_normal(12).astype(np.float32), (4, 1))
    cache = write(device, device.put(compressed), weight, table, 40, [0, 1, 1, 2])
    assert_same_bits(cache[40:44, 8:], apply_rope(compressed[:, 8:], np.array([40, 41, 41, 42]), rotation))
    assert np.isnan(cache[44:]).all()


def test_a_token_leaves_the_same_alone(device):
    """Alone behind a longer prefix, in a prompt, or as a padded tree's node; also from rows that lie apart."""
    weight, _, table = setting(24, 8)
    wide = np.full((30, 50), np.nan, np.float32)
    wide[:, 9:41] = np.random.default_rng(1).standard_normal((30, 32))
    prompt = write(device, device.put(wide[:, 9:41]), weight, table, 10, np.arange(30))
    apart = write(device, device.put(wide)[:, 9:41], weight, table, 10, np.arange(30))
    assert_same_bits(apart, prompt)
    for token in (0, 7, 29):
        alone = write(device, device.put(wide[token : token + 1, 9:41]), weight, table, 10 + token, [0])
        assert_same_bits(alone[10 + token], prompt[10 + token])
    padded = write(device, device.put(wide[:5, 9:41]), weight, table, 10, [0, 1, 2, -1, -1])
    assert_same_bits(padded[10:13], prompt[10:13])


def test_the_norm_covers_the_latent_only(device):
    weight, _, table = setting(8, 4)
    compressed = np.ones((1, 12), np.float32)
    compressed[:, 8:] = 1e6
    cache = write(device, device.put(compressed), weight, table, 0, [0])
    np.testing.assert_allclose(cache[0, :8], weight, rtol=1e-6)
    assert np.abs(cache[0, 8:]).max() >= 1e6


def test_a_cache_of_bfloat16_gets_the_same_rounded_once(device):
    weight, _, table = setting(24, 8)
    compressed = np.random.default_rng(5).standard_normal((4, 32)).astype(np.float32)
    whole = write(device, device.put(compressed), weight, table, 3, np.arange(4))
    cache = device.put(np.full((9, 32), np.nan, bfloat16))
    arrays = device.put([3], np.int32), device.put(np.arange(4), np.int32)
    latent_write(device.put(compressed), device.put(weight), tuple(map(device.put, table)), *arrays, cache)
    rows = device.host(cache).view(bfloat16)
    assert_same_bits(rows[3:7], whole[3:7].astype(bfloat16))
    assert np.isnan(rows[:3]).all() and np.isnan(rows[7:]).all()


def test_nan_stays_in_its_row(device):
    weight, _, table = setting(8, 4)
    compressed = np.random.default_rng(2).standard_normal((5, 12)).astype(np.float32)
    compressed[1, 2], compressed[3, 9] = np.nan, np.nan
    cache = write(device, device.put(compressed), weight, table, 0, np.arange(5))[:5]
    assert np.isnan(cache[1, :8]).all() and not np.isnan(cache[1, 8:]).any()
    assert np.flatnonzero(np.isnan(cache[3])).tolist() == [8, 10]
    assert not np.isnan(cache[[0, 2, 4]]).any()


def test_any_order_of_threads(device):
    weight, _, table = setting(300, 64)
    compressed = device.put(np.random.default_rng(3).random((7, 364), np.float32))
    device.every_schedule(lambda: [device.put(write(device, compressed, weight, table, 3, np.arange(7)))])


def test_numpy_arrays_take_the_specification():
    weight, rotation, table = setting(24, 8)
    compressed = np.random.default_rng(4).standard_normal((4, 32)).astype(np.float32)
    cache, depths = np.zeros((9, 32), np.float32), np.array([0, 1, 1, -1], np.int32)
    latent_write(compressed, weight, table, np.array([3], np.int32), depths, cache)
    np.testing.assert_allclose(cache[3:7, :24], rms_norm(compressed[:, :24], weight, LATENT_EPS))
    assert_same_bits(cache[3:7, 24:].copy(), apply_rope(compressed[:, 24:], np.array([3, 4, 4, 3]), rotation))
    assert not cache[:3].any() and not cache[7:].any()
    narrow = np.zeros((9, 32), bfloat16)
    latent_write(compressed, weight, table, np.array([3], np.int32), depths, narrow)
    assert_same_bits(narrow, cache.astype(bfloat16))


def test_refuses(device):
    weight, _, table = setting(8, 4)

    def refuse(compressed: tuple, cache: tuple, depths: int, dtype: type = np.float32) -> None:
        arrays = (
            device.put(weight),
            tuple(map(device.put, table)),
            device.put([0], np.int32),
            device.empty(depths, np.int32),
        )
        latent_write(device.empty(compressed, dtype), *arrays, device.empty(cache, np.float32))

    with pytest.raises(ValueError, match=r"latent_write: x \[2, 13\], expected \[rows, 12\]"):
        refuse((2, 13), (9, 13), 2)
    with pytest.raises(
        ValueError, match=r"latent_write: compressed \[2, 12\], cache \[9, 13\], depths \[2\] do not fit"
    ):
        refuse((2, 12), (9, 13), 2)
    with pytest.raises(
        ValueError, match=r"latent_write: compressed \[2, 12\], cache \[9, 12\], depths \[3\] do not fit"
    ):
        refuse((2, 12), (9, 12), 3)
    with pytest.raises(ValueError, match=r"latent_write: x \[2, 1, 12\]"):
        refuse((2, 1, 12), (9, 12), 2)
    with pytest.raises(TypeError, match=r"latent_write: .*'compressed' is float64"):
        refuse((2, 12), (9, 12), 2, np.float64)
