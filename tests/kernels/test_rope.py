"""Rotated heads: the specification to the bit, as the table comes from it."""

import numpy as np
import pytest
from builders import YARN, tiny_config
from helpers import assert_same_bits

from kdtree_nb.kernels.rope import rope
from kdtree_nb.reference.rope import apply_rope, rope_table
from kdtree_nb.reference.rope import rope as rotation_of


def table_of(config, positions: int = 300) -> tuple[np.ndarray, np.ndarray]:
    return rope_table(rotation_of(config), np.arange(positions))


def run(device, x, table, prefix_len, depths) -> np.ndarray:
    arrays = device.put([prefix_len], np.int32), device.put(depths, np.int32)
    return device.host(rope(device.put(x), tuple(map(device.put, table)), *arrays))


@pytest.mark.parametrize("yarn", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (5, 64, 64), (17, 3, 10), (2, 5, 62)])
def test_against_the_specification(device, tokens, heads, dim, yarn):
    config = tiny_config(qk_rope_head_dim=dim, rope_scaling=yarn)
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    depths = rng.integers(0, 33, tokens)
    y = run(device, x, table_of(config), 200, depths)
    assert_same_bits(y, apply_rope(x, 200 + depths, rotation_of(config)))


def test_no_tokens(device):
    y = run(device, np.zeros((0, 3, 8), np.float32), table_of(tiny_config()), 5, np.zeros(0))
    assert (y.dtype, y.shape) == (np.float32, (0, 3, 8))


def test_pairs_are_neighbours(device):
    """One-hot at dimension 1, position 1: the partner is dimension 0, and the results lie in both halves."""
    config = tiny_config(qk_rope_head_dim=8, rope_scaling=None)
    x = np.eye(8, dtype=np.float32)[1].reshape(1, 1, 8)
    y = run(device, x, table_of(config), 1, [0])
    expected = np.zeros(8)
    expected[[0, 4]] = -np.sin(1), np.cos(1)
    np.testing.assert_allclose(y[0, 0], expected, atol=1e-7)


def test_positions_follow_depths_not_slots(device):
    """Parents [−1, 0, 0, 1]: the siblings get one position, and slot 3 that of depth 2."""
    config = tiny_config(qk_rope_head_dim=4)
    x = np.tile(np.random.default_rng(0).standard_normal(4).astype(np.float32), (4, 1, 1))
    y = run(device, x, table_of(config), 40, [0, 1, 1, 2])
    assert_same_bits(y, apply_rope(x, np.array([40, 41, 41, 42]), rotation_of(config)))


def test_padding_reads_nothing_before_the_table(device):
    config = tiny_config(qk_rope_head_dim=4)
    y = run(device, np.ones((3, 2, 4), np.float32), table_of(config), 0, [0, 1, -1])
    assert_same_bits(y[2], y[0])


def test_queries_are_a_part_of_wider_heads(device):
    """Behind the part without position, tokens and heads apart; NaN is beside what is read."""
    config = tiny_config(qk_rope_head_dim=8)
    rng = np.random.default_rng(1)
    wide = np.full((6, 3, 30), np.nan, np.float32)
    wide[..., 20:28] = rng.standard_normal((6, 3, 8))
    table, depths = tuple(map(device.put, table_of(config))), device.put(np.arange(6), np.int32)
    prefix_len = device.put([7], np.int32)
    expected = apply_rope(wide[..., 20:28], 7 + np.arange(6), rotation_of(config))
    assert_same_bits(device.host(rope(device.put(wide)[..., 20:28], table, prefix_len, depths)), expected)
    by_head = device.put(wide[..., 20:28].swapaxes(0, 1).copy()).swapaxes(0, 1)
    assert_same_bits(device.host(rope(by_head, table, prefix_len, depths)), expected)


def test_more_tokens_than_a_grid_is_high(device):
    config = tiny_config(qk_rope_head_dim=2)
    tokens, depths = 65_537, np.arange(65_537) % 33
    x = np.random.default_rng(2).standard_normal((tokens, 1, 2)).astype(np.float32)
    assert_same_bits(run(device, x, table_of(config), 3, depths), apply_rope(x, 3 + depths, rotation_of(config)))


def test_nan_stays_in_its_pair(device):
    x = np.ones((2, 2, 6), np.float32)
    x[1, 0, 3] = np.nan
    y = run(device, x, table_of(tiny_config(qk_rope_head_dim=6)), 5, [0, 1])
    assert np.argwhere(np.isnan(y)).tolist() == [[1, 0, 1], [1, 0, 4]]


def test_numpy_arrays_take_the_specification():
    config, depths = tiny_config(), np.array([0, 1, -1], np.int32)
    x = np.random.default_rng(3).standard_normal((3, 2, 8)).astype(np.float32)
    y = rope(x, table_of(config), np.array([9], np.int32), depths)
    assert_same_bits(y, apply_rope(x, np.array([9, 10, 9]), rotation_of(config)))


def test_refuses(device):
    table = tuple(map(device.put, table_of(tiny_config())))

    def rotate(shape: tuple, depths: int, dtype: type = np.float32):
        return rope(device.empty(shape, dtype), table, device.empty(1, np.int32), device.empty(depths, np.int32))

    with pytest.raises(
        ValueError, match=r"rope: x \[3, 2, 6\] and depths \[3\], expected \[tokens, heads, 8\] and \[tokens\]"
    ):
        rotate((3, 2, 6), 3)
    with pytest.raises(ValueError, match=r"rope: x \[3, 2, 8\] and depths \[4\]"):
        rotate((3, 2, 8), 4)
    with pytest.raises(ValueError, match=r"rope: x \[3, 8\] and depths \[3\]"):
        rotate((3, 8), 3)
    with pytest.raises(TypeError, match=r"rope: .*'x' is float64"):
        rotate((3, 2, 8), 3, np.float64)
    apart = device.empty((3, 2, 16), np.float32)[..., ::2]
    with pytest.raises(ValueError, match=r"rope: the heads of x are not contiguous"):
        rope(apart, table, device.empty(1, np.int32), device.empty(3, np.int32))
