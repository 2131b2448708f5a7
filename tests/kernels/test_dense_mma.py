"""The tensor-core product with a float weight: within a bound, the same bits in every geometry, rows that are alone."""

import re

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels import dense_mma as module
from kdtree_nb.kernels.dense_mma import FEW, MANY, MIDDLE, SOME, Geometry, dense_mma, geometry_of, launch
from kdtree_nb.kernels.gemm import spread
from kdtree_nb.kernels.gpu import Processor
from kdtree_nb.kernels.launch import MAX_SHARED_BYTES

from .processors import PROCESSORS
from .products import EPSILON, assert_row_invariant

SHAPES = [
    (0, 5, 64),
    (1, 1, 8),
    (1, 33, 64),
    (3, 31, 104),
    (7, 64, 256),
    (8, 128, 280),
    (9, 65, 1024),
    (16, 129, 1064),
    (17, 40, 2072),
    (33, 17, 1400),
    (65, 7, 2048),
    (2, 8300, 136),
    (5, 0, 32),
]
"""Rows, out, in: nothing, one, primes, one more and one less than a tile, parts of a step at the end, each plan."""


def assert_product(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Within the bound of the kernel's order of summation.

    A part is a chain of mma of 16 products and the sum so far, each of which may lose as much as 4 roundings (tensor
    cores align to the largest product and cut; the emulator rounds once); then there are up to 16 parts.
    """
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    steps, parts = -(-weight.shape[-1] // 64), geometry_of(1, weight.shape).parts
    exact, magnitude = x @ weight.swapaxes(-1, -2), np.abs(x) @ np.abs(weight).swapaxes(-1, -2)
    assert y.dtype == np.float32
    assert y.shape == exact.shape
    excess = np.abs(y - exact) - (4 * 4 * -(-steps // parts) + parts) * EPSILON * magnitude
    assert excess.size == 0 or excess.max() <= 0, f"{excess.max()} beyond the bound"


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(bfloat16)


@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_product(device, rows, out_features, in_features):
    rng = np.random.default_rng(rows + out_features)
    weight, x = random(rng, out_features, in_features), random(rng, rows, in_features)
    assert_product(device.host(dense_mma(device.put(x), device.put(weight))), x, weight)


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 5, 7, 40), (4, 9, 40, 128), (2, 0, 5, 8), (0, 3, 5, 8)])
def test_a_stack_of_products(device, shape):
    """The heads of a token: the result of a token lies together, and each is what a head gives alone."""
    stack, rows, out_features, in_features = shape
    rng = np.random.default_rng(0)
    weight, x = random(rng, stack, out_features, in_features), random(rng, stack, rows, in_features)
    y = dense_mma(device.put(x), device.put(weight))
    assert_product(device.host(y), x, weight)
    assert y.swapaxes(0, 1).flags.c_contiguous
    for head in range(stack):
        assert_same_bits(device.host(dense_mma(device.put(x[head]), device.put(weight[head]))), device.host(y[head]))


def test_a_stack_whose_matrices_lie_apart(device):
    """Heads of [tokens, heads, features], of which a part is taken, NaN beside it; no copy is made."""
    rng = np.random.default_rng(1)
    weight = device.put(random(rng, 4, 6, 24))
    wide = np.full((9, 4, 40), np.nan, bfloat16)
    wide[:, :, 8:32] = random(rng, 9, 4, 24)
    x = wide[:, :, 8:32].swapaxes(0, 1)
    expected = device.host(dense_mma(device.put(x), weight))
    assert np.isfinite(expected).all()
    on_device = device.put(wide)[:, :, 8:32].swapaxes(0, 1)
    assert_same_bits(device.host(dense_mma(on_device, weight)), expected)
    backwards = device.put(wide)[::-1, :, 8:32].swapaxes(0, 1)
    assert_same_bits(device.host(dense_mma(backwards, weight)), expected[:, ::-1].copy())


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_a_result_has_its_place(device, dtype):
    """Beside other numbers of each head, which stay; the bits are those of a result of its own, rounded once."""
    rng = np.random.default_rng(9)
    weight, x = device.put(random(rng, 4, 21, 40)), device.put(random(rng, 4, 9, 40))
    wide = device.put(np.full((9, 4, 30), 7, dtype))
    dense_mma(x, weight, wide[:, :, 3:24].swapaxes(0, 1))
    found = device.host(wide).view(dtype)
    assert_same_bits(found[:, :, 3:24].swapaxes(0, 1).copy(), device.host(dense_mma(x, weight)).astype(dtype))
    assert (found[:, :, :3] == 7).all() and (found[:, :, 24:] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_whole_numbers_give_the_specification_to_the_bit(device, dtype):
    """Sums that need no rounding do not depend on their order; as bfloat16 they are rounded once, to nearest even."""
    rng = np.random.default_rng(0)
    weight, x = (rng.integers(-8, 9, shape).astype(bfloat16) for shape in ((70, 320), (13, 320)))
    out = device.put(np.zeros((13, 70), dtype))
    y = device.host(dense_mma(device.put(x), device.put(weight), out))
    expected = (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)
    assert (expected.astype(bfloat16) != expected).any()
    assert_same_bits(y.view(dtype), expected.astype(dtype))


def test_weights_arrive_exactly(device):
    """One-hot rows give the weight back: each input of each output, signs, the smallest normal number, the largest."""
    weight = random(np.random.default_rng(2), 50, 200)
    weight[3, :4] = [2.0**-126, -(2.0**-126), 3.3895e38, -3.3895e38]
    y = device.host(dense_mma(device.put(np.eye(200, dtype=bfloat16)), device.put(weight)))
    np.testing.assert_array_equal(y.T, weight.astype(np.float32))


@pytest.mark.parametrize("in_features", [56, 1416])
def test_a_row_does_not_depend_on_the_rows_beside_it(device, in_features):
    rng = np.random.default_rng(3)
    weight = device.put(random(rng, 37, in_features))
    x = device.put(random(rng, 70, in_features))
    assert_row_invariant(lambda rows: dense_mma(rows, weight), x, device.host)


CUTS = [(1, 8, 6), (2, 8, 2), (4, 16, 2), (1, 64, 2), (4, 32, 2), (2, 16, 3)]


@pytest.mark.parametrize(
    ("parts", "cuts"), [(1, CUTS), (4, CUTS), (8, CUTS), (16, [(1, 8, 3), (2, 8, 2), (1, 16, 3), (1, 32, 2)])]
)
def test_no_geometry_changes_a_bit(device, parts, cuts):
    """Of those with the same parts: tiles and rows of a block, stages that are more or fewer than a part's steps."""
    rng = np.random.default_rng(4)
    weight, x = device.put(random(rng, 150, 1128)), device.put(random(rng, 35, 1128))
    first, *others = (device.host(launch(x, weight, Geometry(parts, *cut))) for cut in cuts)
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize(
    ("weight", "parts"),
    [
        ((3648, 2048), 8),
        ((64, 2048), 8),
        ((2048, 2048), 8),
        ((2048, 2816), 8),
        ((5632, 2048), 4),
        ((22528, 2048), 4),
        ((16, 512, 128), 2),
        ((16, 128, 512), 8),
        ((163840, 2048), 4),
        ((7168, 8192), 4),
        ((5, 8), 1),
    ],
)
def test_parts_follow_from_the_weight_alone(weight, parts):
    geometries = [geometry_of(rows, weight) for rows in range(1, 200)]
    assert {geometry.parts for geometry in geometries} == {parts}


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_every_geometry_has_its_shared_memory(processor):
    for plan in (FEW, SOME, MIDDLE, MANY):
        for cut in plan.geometries.values():
            wanted = Geometry(plan.parts, *cut)
            taken = wanted.within(processor.shared_bytes)
            assert taken.shared_bytes <= processor.shared_bytes and taken.parts == wanted.parts
            assert taken == wanted or processor.shared_bytes < MAX_SHARED_BYTES


def test_a_smaller_block_changes_no_bit(device):
    rng = np.random.default_rng(4)
    weight, x = device.put(random(rng, 150, 1128)), device.put(random(rng, 75, 1128))
    wanted = Geometry(4, 4, 72, 3)
    expected = device.host(launch(x, weight, wanted))
    cuts = {wanted.within(kilobytes * 1024) for kilobytes in (163, 99, 48, 24)}
    assert len(cuts) == 4
    for smaller in cuts:
        assert_same_bits(device.host(launch(x, weight, smaller)), expected)


def test_the_order_depends_on_the_parts(device):
    """If it did not, the tests above would see nothing."""
    rng = np.random.default_rng(4)
    weight, x = device.put(random(rng, 150, 1128)), device.put(random(rng, 35, 1128))
    few, many = (device.host(launch(x, weight, Geometry(parts, 1, 8, 2))) for parts in (4, 8))
    assert (few != many).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_nan_weight_reaches_only_its_own_output(device, poison):
    rng = np.random.default_rng(5)
    weight, x = random(rng, 40, 104), random(rng, 11, 104)
    weight[17, 103] = poison
    y = device.host(dense_mma(device.put(x), device.put(weight)))
    others = np.arange(40) != 17
    assert not np.isfinite(y[:, 17]).any()
    assert_product(y[:, others], x, weight[others])


@pytest.mark.parametrize("row", [0, 5, 10])
def test_a_nan_row_reaches_only_itself(device, row):
    """With half a step at the end, where the lanes of the other half must not read the next row."""
    rng = np.random.default_rng(6)
    weight, x = random(rng, 40, 104), random(rng, 11, 104)
    x[row] = np.nan
    y = device.host(dense_mma(device.put(x), device.put(weight)))
    assert np.isnan(y[row]).all()
    assert_product(np.delete(y, row, 0), np.delete(x, row, 0), weight)


def test_any_order_of_threads(device):
    rng = np.random.default_rng(7)
    weight, x = device.put(random(rng, 40, 1128)), device.put(random(rng, 9, 1128))
    device.every_schedule(lambda: [dense_mma(x, weight)])


@pytest.mark.parametrize("shape", [(11, 64), (3, 11, 64)])
def test_numpy_arrays_take_the_specification(shape):
    rng = np.random.default_rng(8)
    weight, x = random(rng, *shape[:-2], 40, 64), random(rng, *shape)
    y = dense_mma(x, weight)
    assert_product(y, x, weight)
    out = np.empty(y.shape, bfloat16)
    assert dense_mma(x, weight, out) is out
    assert_same_bits(out, y.astype(bfloat16))


def test_the_source_names_the_same_step():
    assert re.findall(r"constexpr int STEP = (\d+)", module._dense_mma.source.text) == [str(module.STEP)]


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, 8), (3, 16), r"x \[2, 8\], expected \[rows, 16\]"),
        ((4, 2, 8), (3, 8), r"x \[4, 2, 8\], expected \[rows, 8\]"),
        ((5, 2, 8), (4, 3, 8), r"x \[5, 2, 8\], expected \[4, rows, 8\]"),
        ((2, 8), (8,), r"weight \[8\], expected \[out, in\] or \[stack, out, in\]"),
        ((2, 12), (3, 12), r"weight \[3, 12\], expected .* with in a positive multiple of 8"),
        ((2, 0), (3, 0), r"weight \[3, 0\], expected .* with in a positive multiple of 8"),
    ],
)
def test_refuses_shapes(device, x, weight, message):
    with pytest.raises(ValueError, match=f"dense_mma: {message}"):
        dense_mma(device.empty(x, np.uint16), device.empty(weight, np.uint16))


def test_refuses_what_it_would_misread(device):
    x, weight = device.put(np.ones((4, 128), bfloat16)), device.put(np.ones((3, 128), bfloat16))
    for wrong in ((device.empty((4, 128), np.float32), weight), (x, device.empty((3, 128), np.float16))):
        with pytest.raises(TypeError, match=r"dense_mma: (x is float32|weight is float16), expected bfloat16"):
            dense_mma(*wrong)
    with pytest.raises(ValueError, match=r"dense_mma: out \[4, 4\] with strides .*, expected \[4, 3\] with contiguous"):
        dense_mma(x, weight, device.empty((4, 4), np.float32))
    with pytest.raises(ValueError, match=r"dense_mma: out \[4, 3\] with strides \(4, 16\), expected \[4, 3\] with con"):
        dense_mma(x, weight, device.empty((3, 4), np.float32).T)
    with pytest.raises(ValueError, match=r"dense_mma: the rows of x are not contiguous"):
        dense_mma(device.put(np.ones((128, 4), bfloat16)).T, weight)
    with pytest.raises(ValueError, match=r"dense_mma: the rows of x are not multiples of 8 elements apart"):
        dense_mma(device.put(np.ones((4, 132), bfloat16))[:, :128], weight)
    with pytest.raises(ValueError, match=r"dense_mma: argument 'x' is not aligned to 16 bytes"):
        dense_mma(device.put(np.ones((4, 136), bfloat16))[:, 4:132], weight)
    with pytest.raises(ValueError, match=r"dense_mma: .*'weight'.*expected C-contiguous"):
        dense_mma(x, device.put(np.ones((6, 128), bfloat16))[::2])


@pytest.mark.parametrize("blocks", [1, 132, 133, 256, 352, 528, 5120])
@pytest.mark.parametrize("needed", [10_000, 60_000, 150_000])
def test_no_multiprocessor_takes_more_than_its_share(blocks, needed):
    """Of an H200's 132; a block that needs more has fewer beside it anyway."""
    total, most = 228 * 1024, 227 * 1024
    asked = spread(needed, blocks, Processor("90", most, 132, total))
    fit, share = total // (asked + 1024), -(-blocks // 132)
    assert needed <= asked <= most
    assert fit == min(share, total // (needed + 1024))
    assert spread(needed, blocks, Processor("", most)) == needed
