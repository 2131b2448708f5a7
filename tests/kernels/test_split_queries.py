"""Queries in two parts: the specification's rotation to the bit, the rest as it was, and room that is left alone."""

import numpy as np
import pytest
from builders import YARN, tiny_config
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.split_queries import split_queries
from kdtree_nb.reference.rope import apply_rope, rope_table
from kdtree_nb.reference.rope import rope as rotation_of


def table_of(config, positions: int = 300) -> tuple[np.ndarray, np.ndarray]:
    return rope_table(rotation_of(config), np.arange(positions))


def run(device, x, config, prefix_len, depths, kv_lora, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    arrays = device.put([prefix_len], np.int32), device.put(depths, np.int32)
    parts = split_queries(x, tuple(map(device.put, table_of(config))), *arrays, kv_lora, dtype)
    plain, absorbed = (device.host(part).view(dtype) for part in parts)
    return plain, absorbed


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("yarn", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "dim", "kv_lora"),
    [(1, 1, 1, 2, 1), (5, 64, 128, 64, 512), (17, 3, 12, 10, 24), (2, 5, 257, 62, 3), (3, 2, 0, 4, 5)],
)
def test_against_the_specification(device, tokens, heads, nope, dim, kv_lora, yarn, dtype):
    """As float32 to the bit; as bfloat16 the same rounded once."""
    config = tiny_config(qk_rope_head_dim=dim, rope_scaling=yarn)
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, heads, nope + dim)).astype(np.float32)
    depths = rng.integers(0, 33, tokens)
    plain, absorbed = run(device, device.put(x), config, 200, depths, kv_lora, dtype)
    assert_same_bits(plain, x[..., :nope].astype(dtype))
    rotated = apply_rope(x[..., nope:], 200 + depths, rotation_of(config))
    assert_same_bits(absorbed[..., kv_lora:].copy(), rotated.astype(dtype))
    if device.is_emulated:
        assert np.isnan(absorbed[..., :kv_lora].astype(np.float32)).all()  # nobody has written there


def test_no_tokens(device):
    plain, absorbed = run(device, device.put(np.zeros((0, 3, 12), np.float32)), tiny_config(), 5, np.zeros(0), 7)
    assert (plain.shape, absorbed.shape) == ((0, 3, 4), (0, 3, 15))


def test_positions_follow_depths_not_slots_and_padding_is_the_root(device):
    """Parents [−1, 0, 0, 1] and a row of padding: the siblings get one position, slot 3 that of depth 2."""
    config = tiny_config(qk_rope_head_dim=4)
    x = np.tile(np.random.default_rng(0).standard_normal(6).astype(np.float32), (5, 1, 1))
    _, absorbed = run(device, device.put(x), config, 0, [0, 1, 1, 2, -1], 0)
    assert_same_bits(absorbed, apply_rope(x[..., 2:], np.array([0, 1, 1, 2, 0]), rotation_of(config)))


def test_heads_of_a_wider_product(device):
    """Tokens apart, NaN beside what is read, as queries lie beside the latent in their common product."""
    config = tiny_config(qk_rope_head_dim=8)
    wide = np.full((6, 50), np.nan, np.float32)
    wide[:, :36] = np.random.default_rng(1).standard_normal((6, 36))
    queries = device.put(wide)[:, :36].reshape(6, 3, 12)
    plain, absorbed = run(device, queries, config, 7, np.arange(6), 5)
    expected = wide[:, :36].reshape(6, 3, 12)
    assert_same_bits(plain, expected[..., :4].copy())
    assert_same_bits(absorbed[..., 5:].copy(), apply_rope(expected[..., 4:], 7 + np.arange(6), rotation_of(config)))


def test_more_tokens_than_a_grid_is_high(device):
    config = tiny_config(qk_rope_head_dim=2)
    tokens, depths = 65_537, np.arange(65_537) % 33
    x = np.random.default_rng(2).standard_normal((tokens, 1, 3)).astype(np.float32)
    plain, absorbed = run(device, device.put(x), config, 3, depths, 0)
    assert_same_bits(plain, x[..., :1].copy())
    assert_same_bits(absorbed, apply_rope(x[..., 1:], 3 + depths, rotation_of(config)))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_numpy_arrays_take_the_specification(dtype):
    config, depths = tiny_config(), np.array([0, 1, -1], np.int32)
    x = np.random.default_rng(3).standard_normal((3, 2, 13)).astype(np.float32)
    plain, absorbed = split_queries(x, table_of(config), np.array([9], np.int32), depths, 6, dtype)
    assert_same_bits(plain, x[..., :5].astype(dtype))
    rotated = apply_rope(x[..., 5:], np.array([9, 10, 9]), rotation_of(config))
    assert_same_bits(absorbed[..., 6:].copy(), rotated.astype(dtype))


def test_refuses(device):
    table = tuple(map(device.put, table_of(tiny_config())))

    def split(shape: tuple, depths: int, dtype: type = np.float32):
        arrays = device.empty(1, np.int32), device.empty(depths, np.int32)
        return split_queries(device.empty(shape, dtype), table, *arrays, 4)

    with pytest.raises(
        ValueError, match=r"split_queries: x \[3, 2, 6\] and depths \[3\], expected \[tokens, heads, 8 or more\] and \["
    ):
        split((3, 2, 6), 3)
    with pytest.raises(ValueError, match=r"split_queries: x \[3, 2, 12\] and depths \[4\]"):
        split((3, 2, 12), 4)
    with pytest.raises(ValueError, match=r"split_queries: x \[3, 12\] and depths \[3\]"):
        split((3, 12), 3)
    with pytest.raises(TypeError, match=r"split_queries: .*'x' is float64"):
        split((3, 2, 12), 3, np.float64)
    apart = device.empty((3, 2, 24), np.float32)[..., ::2]
    with pytest.raises(ValueError, match=r"split_queries: the heads of x are not contiguous"):
        split_queries(apart, table, device.empty(1, np.int32), device.empty(3, np.int32), 4)
