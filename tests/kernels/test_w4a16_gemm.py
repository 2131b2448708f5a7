"""Products with an INT4 weight: the exact product within a bound, and rows that do not know each other."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.w4a16_gemm import w4a16_gemm
from kdtree_nb.quantization import QuantizedWeight, pack, quantize

from .products import assert_product, assert_row_invariant, random_int4

SHAPES = [
    (0, 5, 32),
    (1, 1, 32),
    (1, 33, 64),
    (3, 31, 96),
    (7, 64, 256),
    (8, 32, 288),
    (9, 65, 1024),
    (16, 1, 1056),
    (17, 40, 2080),
    (64, 7, 7168),
    (5, 0, 32),
]
"""Rows, out, in: nothing, one, primes, one more and one less than a tile, more than is staged at a time."""


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_product(device, rows, out_features, in_features, dtype):
    rng = np.random.default_rng(rows + out_features)
    weight = random_int4(rng, out_features, in_features, dtype)
    x = rng.standard_normal((rows, in_features)).astype(np.float32)
    y = w4a16_gemm(device.put(x), device.put(weight.qweight), device.put(weight.scales))
    assert_product(device.host(y), x, weight.dequantized)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_whole_numbers_give_the_specification_to_the_bit(device, dtype):
    """Sums that need no rounding do not depend on their order."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (70, 320)).astype(np.int8)
    weight = QuantizedWeight(pack(codes), np.exp2(rng.integers(-4, 5, (70, 10))).astype(dtype))
    x = rng.integers(-8, 9, (13, 320)).astype(np.float32)
    y = device.host(w4a16_gemm(device.put(x), device.put(weight.qweight), device.put(weight.scales)))
    assert_same_bits(y, (x.astype(np.float64) @ weight.dequantized.T.astype(np.float64)).astype(np.float32))


def test_one_hot_rows_read_every_code_of_the_weight(device):
    """Row i of the identity gives column i: each of the 16 codes in each of the 32 places of a group."""
    codes = (np.arange(64)[:, None] // 4 + np.arange(64)) % 16 - 8
    weight = QuantizedWeight(
        pack(codes.astype(np.int8)), np.exp2(np.arange(128).reshape(64, 2) % 9 - 4.0, dtype=np.float32)
    )
    y = device.host(
        w4a16_gemm(device.put(np.eye(64), np.float32), device.put(weight.qweight), device.put(weight.scales))
    )
    np.testing.assert_array_equal(y, weight.dequantized.T)


@pytest.mark.parametrize(
    "group",
    [[0, 0, 0, 0], [-6, 2, 3, -2], [-8, 7, -7, -1], [1e-6, -1e-6, 5e-7, 0]],
    ids=["zeros", "small numbers", "the lowest code", "1e-6"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_groups_that_were_once_wrong(device, group, dtype):
    values = np.tile(np.array(group, np.float32), 8)[None].astype(dtype)
    weight = quantize(values)
    y = device.host(
        w4a16_gemm(device.put(np.eye(32), np.float32), device.put(weight.qweight), device.put(weight.scales))
    )
    np.testing.assert_array_equal(y[:, 0], weight.dequantized[0])
    step = weight.scales.astype(np.float32).max()
    np.testing.assert_allclose(y[:, 0], values[0].astype(np.float32), atol=0.51 * step, rtol=0)


def test_a_scale_of_1e_6_in_half_precision(device):
    """It is subnormal there."""
    scales = np.array([[1e-6]], np.float16)
    assert 0 < scales[0, 0] < np.finfo(np.float16).tiny
    weight = QuantizedWeight(pack(np.arange(-8, 8).repeat(2)[None].astype(np.int8)), scales)
    y = device.host(
        w4a16_gemm(device.put(np.eye(32), np.float32), device.put(weight.qweight), device.put(weight.scales))
    )
    np.testing.assert_array_equal(y[:, 0], weight.dequantized[0])


@pytest.mark.parametrize("in_features", [96, 1088])
def test_a_row_does_not_depend_on_the_rows_beside_it(device, in_features):
    rng = np.random.default_rng(1)
    weight = random_int4(rng, 37, in_features)
    qweight, scales = device.put(weight.qweight), device.put(weight.scales)
    x = device.put(rng.standard_normal((64, in_features)), np.float32)
    assert_row_invariant(lambda rows: w4a16_gemm(rows, qweight, scales), x, device.host)


def test_rows_that_lie_apart(device):
    """A slice of a wider array, every other row, rows backwards, one row again and again; NaN around what is read."""
    rng = np.random.default_rng(2)
    weight = random_int4(rng, 33, 96)
    qweight, scales = device.put(weight.qweight), device.put(weight.scales)
    wide = np.full((20, 160), np.nan, np.float32)
    wide[:, 32:128] = rng.standard_normal((20, 96))
    on_device = device.put(wide)[:, 32:128]
    expected = device.host(w4a16_gemm(device.put(wide[:, 32:128]), qweight, scales))
    assert not np.isnan(expected).any()
    for rows in (slice(None), slice(None, None, 3), slice(None, None, -1), slice(5, 6)):
        assert_same_bits(device.host(w4a16_gemm(on_device[rows], qweight, scales)), expected[rows])
    repeated = device.xp.broadcast_to(on_device[4], (9, 96))
    assert_same_bits(device.host(w4a16_gemm(repeated, qweight, scales)), np.tile(expected[4], (9, 1)))


def test_a_nan_scale_reaches_only_its_own_output(device):
    rng = np.random.default_rng(3)
    weight = random_int4(rng, 40, 64)
    x = rng.standard_normal((11, 64)).astype(np.float32)
    for poison in (np.nan, np.inf):
        scales = weight.scales.copy()
        scales[17, 1] = poison
        y = device.host(w4a16_gemm(device.put(x), device.put(weight.qweight), device.put(scales)))
        others = np.arange(40) != 17
        assert not np.isfinite(y[:, 17]).any()
        assert_product(y[:, others], x, weight.dequantized[others])


@pytest.mark.parametrize("row", [0, 5, 10])
def test_a_nan_row_reaches_only_itself(device, row):
    rng = np.random.default_rng(4)
    weight = random_int4(rng, 40, 64)
    x = rng.standard_normal((11, 64)).astype(np.float32)
    x[row, 3] = np.nan
    y = device.host(w4a16_gemm(device.put(x), device.put(weight.qweight), device.put(weight.scales)))
    assert np.isnan(y[row]).all()
    assert_product(np.delete(y, row, 0), np.delete(x, row, 0), weight.dequantized)


def test_more_rows_than_a_grid_is_high(device):
    weight = QuantizedWeight(
        pack(np.arange(-8, 8).repeat(4).reshape(2, 32).astype(np.int8)), np.ones((2, 1), np.float32)
    )
    x = (np.arange(65_543 * 32) % 17).reshape(-1, 32).astype(np.float32)
    y = w4a16_gemm(device.put(x), device.put(weight.qweight), device.put(weight.scales))
    np.testing.assert_array_equal(device.host(y), x @ weight.dequantized.T)


def test_any_order_of_threads(device):
    rng = np.random.default_rng(5)
    weight = random_int4(rng, 40, 1120)
    x, qweight, scales = (device.put(a) for a in (rng.random((9, 1120), np.float32), weight.qweight, weight.scales))
    device.every_schedule(lambda: [w4a16_gemm(x, qweight, scales)])


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(6)
    weight = random_int4(rng, 40, 64, bfloat16)
    x = rng.standard_normal((11, 64)).astype(np.float32)
    assert_product(w4a16_gemm(x, weight.qweight, weight.scales), x, weight.dequantized)


@pytest.mark.parametrize(
    ("x", "qweight", "scales", "message"),
    [
        ((2, 7176), (4, 897), (4, 224), r"qweight \[4, 897\] and scales \[4, 224\], .* multiple of group_size=32"),
        ((2, 128), (4, 16), (4, 2), r"qweight \[4, 16\] and scales \[4, 2\], expected \[out, in/8\] and"),
        ((2, 128), (4, 16), (4, 8), r"qweight \[4, 16\] and scales \[4, 8\]"),
        ((2, 128), (4, 16), (5, 4), r"qweight \[4, 16\] and scales \[5, 4\]"),
        ((2, 128), (64,), (4, 4), r"qweight \[64\] and scales \[4, 4\]"),
        ((2, 96), (4, 16), (4, 4), r"x \[2, 96\], expected \[rows, 128\]"),
        ((128,), (4, 16), (4, 4), r"x \[128\], expected \[rows, 128\]"),
        ((2, 3, 128), (4, 16), (4, 4), r"x \[2, 3, 128\], expected \[rows, 128\]"),
    ],
    ids=["K = 7176", "groups of 64", "groups of 16", "scales of another weight", "one axis", "x", "one row", "3-D"],
)  # fmt: skip
def test_refuses_shapes(device, x, qweight, scales, message):
    arrays = device.empty(x, np.float32), device.empty(qweight, np.int32), device.empty(scales, np.float32)
    with pytest.raises(ValueError, match=f"w4a16_gemm: {message}"):
        w4a16_gemm(*arrays)


def test_refuses_what_it_would_misread(device):
    x, qweight = device.empty((2, 64), np.float32), device.empty((4, 8), np.int32)
    scales = device.empty((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"w4a16_gemm: the rows of x are not contiguous"):
        w4a16_gemm(device.empty((64, 2), np.float32).T, qweight, scales)
    with pytest.raises(ValueError, match=r"w4a16_gemm: .*'qweight'.*expected C-contiguous"):
        w4a16_gemm(x, device.empty((8, 8), np.int32)[::2], scales)
    with pytest.raises(ValueError, match=r"w4a16_gemm: .*'scales'.*expected C-contiguous"):
        w4a16_gemm(x, qweight, device.empty((4, 4), np.float32)[:, ::2])
    with pytest.raises(TypeError, match=r"w4a16_gemm: .*'x' is float64 \[.*\], expected float32"):
        w4a16_gemm(x.astype(np.float64), qweight, scales)
    with pytest.raises(TypeError, match=r"w4a16_gemm: .*'qweight' is int64"):
        w4a16_gemm(x, qweight.astype(np.int64), scales)
    with pytest.raises(TypeError, match=r"w4a16_gemm: scales is float64, expected float32, bfloat16"):
        w4a16_gemm(x, qweight, scales.astype(np.float64))
