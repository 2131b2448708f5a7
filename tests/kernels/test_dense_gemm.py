"""Products with a float weight, alone and in stacks."""

import sys

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.dense_gemm import dense_gemm

from .products import assert_product, assert_row_invariant

SHAPES = [
    (0, 3, 7),
    (1, 1, 1),
    (2, 33, 31),
    (8, 32, 32),
    (9, 65, 33),
    (17, 40, 257),
    (64, 3, 1031),
    (5, 31, 2111),
    (5, 0, 7),
    (3, 5, 0),
]
"""Rows, out, in: nothing, one, primes, neighbours of the tiles' sizes, more than is staged at a time."""


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_product(device, rows, out_features, in_features, dtype):
    rng = np.random.default_rng(rows + out_features)
    weight = rng.standard_normal((out_features, in_features)).astype(dtype)
    x = rng.standard_normal((rows, in_features)).astype(np.float32)
    y = dense_gemm(device.put(x), device.put(weight))
    assert_product(device.host(y), x, weight)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 33), (4, 9, 40, 64), (2, 0, 5, 8), (0, 3, 5, 8)])
def test_a_stack_of_products(device, shape):
    """The heads of a token: the result of a token lies together."""
    stack, rows, out_features, in_features = shape
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((stack, out_features, in_features)).astype(np.float32)
    x = rng.standard_normal((stack, rows, in_features)).astype(np.float32)
    y = dense_gemm(device.put(x), device.put(weight))
    assert_product(device.host(y), x, weight)
    assert y.swapaxes(0, 1).flags.c_contiguous
    for head in range(stack):
        assert_same_bits(device.host(dense_gemm(device.put(x[head]), device.put(weight[head]))), device.host(y[head]))


def test_a_stack_whose_matrices_lie_apart(device):
    """Heads of [tokens, heads, features], of which a part is taken, NaN beside it; no copy is made."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((4, 6, 12)).astype(np.float32)
    wide = np.full((9, 4, 20), np.nan, np.float32)
    wide[:, :, 3:15] = rng.standard_normal((9, 4, 12))
    x = wide[:, :, 3:15].swapaxes(0, 1)
    expected = device.host(dense_gemm(device.put(x), device.put(weight)))
    assert_product(expected, x, weight)
    on_device = device.put(wide)[:, :, 3:15].swapaxes(0, 1)
    assert_same_bits(device.host(dense_gemm(on_device, device.put(weight))), expected)
    backwards = device.put(wide)[::-1, :, 3:15].swapaxes(0, 1)
    assert_same_bits(device.host(dense_gemm(backwards, device.put(weight))), expected[:, ::-1].copy())


@pytest.mark.parametrize("stack", [(), (4,)])
def test_a_result_has_its_place(device, stack):
    """Beside other numbers of each head, which stay; also on NumPy arrays."""
    rng = np.random.default_rng(9)
    weight, x = (rng.standard_normal((*stack, *shape)).astype(np.float32) for shape in ((21, 40), (9, 40)))
    wide = device.put(np.full((9, *stack, 30), 7, np.float32))
    dense_gemm(device.put(x), device.put(weight), np.moveaxis(wide, 0, -2)[..., 3:24])
    found = np.moveaxis(device.host(wide), 0, -2)
    assert_same_bits(found[..., 3:24].copy(), device.host(dense_gemm(device.put(x), device.put(weight))))
    assert (found[..., :3] == 7).all() and (found[..., 24:] == 7).all()
    with pytest.raises(ValueError, match=r"dense_gemm: out .* with strides .*, expected \[.*9, 21\] with contiguous"):
        dense_gemm(device.put(x), device.put(weight), np.moveaxis(wide, 0, -2))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_whole_numbers_give_the_specification_to_the_bit(device, dtype):
    rng = np.random.default_rng(2)
    weight = rng.integers(-16, 17, (70, 301)).astype(dtype)
    x = rng.integers(-16, 17, (13, 301)).astype(np.float32)
    y = device.host(dense_gemm(device.put(x), device.put(weight)))
    assert_same_bits(y, x @ weight.astype(np.float32).T)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_weights_arrive_exactly(device, dtype):
    """One-hot rows give the weight back: signs, subnormals, the largest."""
    info = np.finfo(dtype) if dtype != bfloat16 else None
    ends = [float(info.smallest_subnormal), float(info.max)] if info else [2.0**-133, 3.3895e38]
    weight = np.array([[0, 1, -1, 1 / 3, -1e-3, *ends, -ends[0], -ends[1]]]).astype(dtype)
    y = device.host(dense_gemm(device.put(np.eye(9), np.float32), device.put(weight)))
    expected = weight[0].astype(np.float32)
    if not device.is_emulated:  # CuPy compiles with -ftz=true
        expected[np.abs(expected) < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(y[:, 0], expected)


@pytest.mark.parametrize("in_features", [50, 1100])
def test_a_row_does_not_depend_on_the_rows_beside_it(device, in_features):
    rng = np.random.default_rng(3)
    weight = device.put(rng.standard_normal((37, in_features)), np.float32)
    x = device.put(rng.standard_normal((64, in_features)), np.float32)
    assert_row_invariant(lambda rows: dense_gemm(rows, weight), x, device.host)


def test_nan_stays_in_its_row_and_its_output(device):
    rng = np.random.default_rng(4)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 50), (11, 50)))
    weight[7, 49], x[10, 0] = np.nan, np.inf
    y = device.host(dense_gemm(device.put(x), device.put(weight)))
    assert np.isnan(y[:, 7]).all() and not np.isfinite(y[10]).any()
    keep = np.arange(40) != 7
    assert_product(y[:10, keep], x[:10], weight[keep])


@pytest.mark.parametrize("shape", [(2**15 + 1, 256, 256), (1, 2**20 + 1, 2048)], ids=["stack", "one weight"])
def test_more_than_2_31_elements(device, shape):
    if device.is_emulated:
        pytest.skip("takes a GPU some milliseconds, the emulator a minute")
    weight = device.xp.zeros(shape, np.float16)
    weight[-1, -1, -1] = 3
    y = device.host(dense_gemm(device.xp.ones((shape[0], 1, shape[2]), np.float32), weight))
    assert y[-1, 0, -1] == 3
    assert np.count_nonzero(y) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks for more memory than there may be")
def test_rows_that_lie_more_than_2_31_elements_apart(device):
    memory = device.sparse((2**31 + 8,), np.float32)
    x = device.xp.lib.stride_tricks.as_strided(memory, (2, 8), (2**33, 4))
    x[:, 3] = device.put(np.array([2, 3], np.float32))
    weight = device.put(np.arange(16).reshape(2, 8), np.float32)
    np.testing.assert_array_equal(device.host(dense_gemm(x, weight)), [[6, 22], [9, 33]])


def test_any_order_of_threads(device):
    rng = np.random.default_rng(5)
    weight, x = (device.put(rng.standard_normal(shape), np.float32) for shape in ((2, 40, 1100), (2, 9, 1100)))
    device.every_schedule(lambda: [dense_gemm(x, weight)])


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(6)
    weight = rng.standard_normal((3, 40, 50)).astype(bfloat16)
    x = rng.standard_normal((3, 11, 50)).astype(np.float32)
    assert_product(dense_gemm(x, weight), x, weight)
    assert_product(dense_gemm(x[0], weight[0]), x[0], weight[0])


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, 7), (3, 8), r"x \[2, 7\], expected \[rows, 8\]"),
        ((7,), (3, 7), r"x \[7\], expected \[rows, 7\]"),
        ((4, 2, 7), (3, 7), r"x \[4, 2, 7\], expected \[rows, 7\]"),
        ((2, 7), (4, 3, 7), r"x \[2, 7\], expected \[4, rows, 7\]"),
        ((5, 2, 7), (4, 3, 7), r"x \[5, 2, 7\], expected \[4, rows, 7\]"),
        ((2, 7), (7,), r"weight \[7\], expected \[out, in\] or \[stack, out, in\]"),
        ((2, 2, 2, 7), (2, 2, 3, 7), r"weight \[2, 2, 3, 7\], expected"),
    ],
)
def test_refuses_shapes(device, x, weight, message):
    with pytest.raises(ValueError, match=f"dense_gemm: {message}"):
        dense_gemm(device.empty(x, np.float32), device.empty(weight, np.float32))


def test_refuses_what_it_would_misread(device):
    x, weight = device.empty((2, 7), np.float32), device.empty((3, 7), np.float32)
    with pytest.raises(ValueError, match=r"dense_gemm: the rows of x are not contiguous"):
        dense_gemm(device.empty((7, 2), np.float32).T, weight)
    with pytest.raises(ValueError, match=r"dense_gemm: .*'weight'.*expected C-contiguous"):
        dense_gemm(x, device.empty((7, 3), np.float32).T)
    with pytest.raises(TypeError, match=r"dense_gemm: .*'x' is float64"):
        dense_gemm(x.astype(np.float64), weight)
    for dtype in (np.float64, np.int32):
        with pytest.raises(
            TypeError, match=rf"dense_gemm: weight is {np.dtype(dtype).name}, expected float32, bfloat16"
        ):
            dense_gemm(x, device.empty((3, 7), dtype))
