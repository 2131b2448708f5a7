"""The tensor-core product: the exact one within a bound, the same bits in every geometry, rows that are alone."""

import re

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels import w4a16_mma as module
from kdtree_nb.kernels.launch import MAX_SHARED_BYTES
from kdtree_nb.kernels.w4a16_gemm import w4a16_gemm
from kdtree_nb.kernels.w4a16_mma import (
    Geometry,
    TiledWeight,
    geometry_of,
    launch,
    plan_of,
    tile_weight,
    untile_weight,
    w4a16_mma,
)
from kdtree_nb.quantization import QuantizedWeight, pack

from .processors import PROCESSORS
from .products import EPSILON, assert_row_invariant, mma_roundings, random_int4

SHAPES = [
    (0, 5, 64),
    (1, 1, 32),
    (1, 33, 64),
    (3, 31, 96),
    (7, 64, 256),
    (8, 128, 288),
    (9, 65, 1024),
    (16, 129, 1056),
    (17, 40, 2080),
    (33, 17, 1408),
    (64, 7, 7168),
    (5, 0, 32),
]
"""Rows, out, in: nothing, one, primes, one more and one less than a tile, half a step at the end, parts without any."""


def assert_product(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Within the bound of the kernel's order of summation."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    exact, magnitude = x @ weight.T, np.abs(x) @ np.abs(weight).T
    assert y.dtype == np.float32
    assert y.shape == exact.shape
    excess = np.abs(y - exact) - mma_roundings(weight.shape[-1]) * EPSILON * magnitude
    assert excess.size == 0 or excess.max() <= 0, f"{excess.max()} beyond the bound"


def random_x(rng: np.random.Generator, rows: int, in_features: int) -> np.ndarray:
    return rng.standard_normal((rows, in_features)).astype(bfloat16)


def put(device, weight: QuantizedWeight) -> TiledWeight:
    return tile_weight(device.put(weight.qweight), device.put(weight.scales))


@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_product(device, rows, out_features, in_features):
    rng = np.random.default_rng(rows + out_features)
    weight = random_int4(rng, out_features, in_features, bfloat16)
    x = random_x(rng, rows, in_features)
    assert_product(device.host(w4a16_mma(device.put(x), put(device, weight))), x, weight.dequantized)


def test_agrees_with_the_exact_kernel(device):
    """Both are within their bounds of the same numbers: codes −8 … 7 times a bfloat16 scale, no weight rounded."""
    rng = np.random.default_rng(1)
    weight = random_int4(rng, 70, 1088, bfloat16)
    x = random_x(rng, 11, 1088)
    fast = device.host(w4a16_mma(device.put(x), put(device, weight)))
    exact = w4a16_gemm(device.put(x.astype(np.float32)), device.put(weight.qweight), device.put(weight.scales))
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weight.dequantized.T.astype(np.float64))
    assert (np.abs(fast - device.host(exact)) <= (168 + 34) * EPSILON * magnitude).all()  # their bounds


def test_whole_numbers_give_the_specification_to_the_bit(device):
    """Sums that need no rounding do not depend on their order."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (70, 320)).astype(np.int8)
    weight = QuantizedWeight(pack(codes), np.exp2(rng.integers(-4, 5, (70, 10))).astype(bfloat16))
    x = rng.integers(-8, 9, (13, 320)).astype(bfloat16)
    y = device.host(w4a16_mma(device.put(x), put(device, weight)))
    assert_same_bits(y, (x.astype(np.float64) @ weight.dequantized.T.astype(np.float64)).astype(np.float32))


def test_one_hot_rows_read_every_code_with_every_scale(device):
    """Row i of the identity gives column i, exactly: the 16 codes in each place of a group, scales of 8 bits."""
    codes = (np.arange(64)[:, None] // 4 + np.arange(64)) % 16 - 8
    scales = (np.arange(128).reshape(64, 2) + 128) * np.exp2(np.arange(128).reshape(64, 2) % 9 - 4.0)
    weight = QuantizedWeight(pack(codes.astype(np.int8)), scales.astype(bfloat16))
    y = device.host(w4a16_mma(device.put(np.eye(64, dtype=bfloat16)), put(device, weight)))
    np.testing.assert_array_equal(y, weight.dequantized.T)


@pytest.mark.parametrize("in_features", [96, 1408])
def test_a_row_does_not_depend_on_the_rows_beside_it(device, in_features):
    rng = np.random.default_rng(2)
    weight = put(device, random_int4(rng, 37, in_features, bfloat16))
    x = device.put(random_x(rng, 64, in_features))
    assert_row_invariant(lambda rows: w4a16_mma(device.xp.ascontiguousarray(rows), weight), x, device.host)


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_no_geometry_changes_a_bit(device, parts):
    """Of those with the same parts: tiles and rows of a block, stages that are more or fewer than a part's steps."""
    rng = np.random.default_rng(3)
    weight = put(device, random_int4(rng, 150, 1120, bfloat16))
    x = device.put(random_x(rng, 35, 1120))
    first, *others = (
        device.host(launch(x, weight, Geometry(parts, *rest)))
        for rest in [(1, 8, 6), (2, 8, 2), (4, 16, 3), (2, 16, 4), (4, 32, 2), (1, 32, 3)]
    )
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize(("out_features", "in_features"), [(2048, 7168), (4096, 7168), (7168, 2048), (1408, 2048)])
def test_parts_follow_from_the_weight_alone(out_features, in_features):
    geometries = [geometry_of(rows, out_features, in_features) for rows in range(1, 200)]
    assert {geometry.parts for geometry in geometries} == {plan_of(out_features, in_features).parts}
    for processor in PROCESSORS.values():
        assert all(g.within(processor.shared_bytes).shared_bytes <= processor.shared_bytes for g in geometries)
    assert all(geometry.within(MAX_SHARED_BYTES) == geometry for geometry in geometries)


def test_the_order_depends_on_the_parts(device):
    """If it did not, the test above would see nothing."""
    rng = np.random.default_rng(3)
    weight = put(device, random_int4(rng, 150, 1120, bfloat16))
    x = device.put(random_x(rng, 35, 1120))
    few, many = (device.host(launch(x, weight, Geometry(parts, 1, 8, 2))) for parts in (4, 16))
    assert (few != many).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_nan_scale_reaches_only_its_own_output(device, poison):
    rng = np.random.default_rng(4)
    weight = random_int4(rng, 40, 96, bfloat16)
    x = random_x(rng, 11, 96)
    scales = weight.scales.copy()
    scales[17, 1] = poison
    y = device.host(w4a16_mma(device.put(x), put(device, QuantizedWeight(weight.qweight, scales))))
    others = np.arange(40) != 17
    assert not np.isfinite(y[:, 17]).any()
    assert_product(y[:, others], x, weight.dequantized[others])


@pytest.mark.parametrize("row", [0, 5, 10])
def test_a_nan_row_reaches_only_itself(device, row):
    """With half a step at the end, where the lanes of the other half must not read the next row."""
    rng = np.random.default_rng(5)
    weight = random_int4(rng, 40, 96, bfloat16)
    x = random_x(rng, 11, 96)
    x[row] = np.nan
    y = device.host(w4a16_mma(device.put(x), put(device, weight)))
    assert np.isnan(y[row]).all()
    assert_product(np.delete(y, row, 0), np.delete(x, row, 0), weight.dequantized)


def test_any_order_of_threads(device):
    rng = np.random.default_rng(6)
    weight = put(device, random_int4(rng, 40, 1120, bfloat16))
    x = device.put(random_x(rng, 9, 1120))
    device.every_schedule(lambda: [w4a16_mma(x, weight)])


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(7)
    weight = random_int4(rng, 40, 64, bfloat16)
    x = random_x(rng, 11, 64)
    assert_product(w4a16_mma(x, tile_weight(weight.qweight, weight.scales)), x, weight.dequantized)


@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (16, 64), (130, 96), (256, 7168)])
def test_a_tiled_weight_holds_the_weight(out_features, in_features):
    weight = random_int4(np.random.default_rng(8), out_features, in_features, bfloat16)
    again = untile_weight(tile_weight(weight.qweight, weight.scales))
    assert_same_bits(again.qweight, weight.qweight)
    assert_same_bits(again.scales.view(np.uint16), weight.scales.view(np.uint16))


def test_where_a_code_goes():
    """Output 25, input 75: tile 1, upper row 1; step 1, its first group, pair 1, code 3 of the word."""
    codes = np.zeros((32, 128), np.int8)
    codes[25, 75] = 5
    tiled = tile_weight(pack(codes), np.ones((32, 4), bfloat16))
    changed = np.argwhere(tiled.codes.view(np.uint32) != 0x88888888)
    inside = changed[changed[:, 0] < 2]  # tiles from 2 on are padding
    assert inside.tolist() == [[1, 1, 4 * 1 + 1, 1]]
    (nibble,) = np.flatnonzero([tiled.codes.view(np.uint32)[1, 1, 5, 1] >> 4 * i & 15 != 8 for i in range(8)])
    assert nibble == module.NIBBLES[3] == 5


def test_the_source_names_the_same_step():
    source = module._w4a16_mma.source.text
    assert re.findall(r"constexpr int STEP = (\d+)", source) == [str(module.STEP)]


@pytest.mark.parametrize(
    ("qweight", "scales", "message"),
    [
        ((4, 897), (4, 224), r"qweight \[4, 897\] and scales \[4, 224\], .* multiple of group_size=32"),
        ((4, 16), (4, 2), r"qweight \[4, 16\] and scales \[4, 2\], expected \[out, in/8\] and"),
        ((64,), (4, 4), r"qweight \[64\] and scales \[4, 4\]"),
    ],
    ids=["K = 7176", "groups of 64", "one axis"],
)
def test_tile_weight_refuses_shapes(device, qweight, scales, message):
    with pytest.raises(ValueError, match=f"tile_weight: {message}"):
        tile_weight(device.empty(qweight, np.int32), device.empty(scales, np.uint16))


def test_refuses_what_it_would_misread(device):
    weight = put(device, random_int4(np.random.default_rng(9), 4, 128, bfloat16))
    x = device.put(np.ones((4, 128), bfloat16))
    with pytest.raises(TypeError, match=r"tile_weight: qweight is int32 and scales float32, expected int32 and bfl"):
        tile_weight(device.empty((4, 16), np.int32), device.empty((4, 4), np.float32))
    with pytest.raises(ValueError, match=r"w4a16_mma: x \[4, 96\], expected \[rows, 128\]"):
        w4a16_mma(x[:, :96], weight)
    with pytest.raises(TypeError, match=r"w4a16_mma: x is float32, expected bfloat16"):
        w4a16_mma(device.empty((4, 128), np.float32), weight)
    with pytest.raises(ValueError, match=r"w4a16_mma: .*'x'.*expected C-contiguous"):
        w4a16_mma(x[::2], weight)
