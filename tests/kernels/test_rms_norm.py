"""Normalised rows: the exact quotient within a bound, and rows that do not know each other."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.rms_norm import add_norm, cut_of, rms_norm

from .products import EPSILON, assert_row_invariant


def exact(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight


def bound(features: int) -> float:
    """Relative: half of what a thread's sum, the warp's and the block's lose, then seven roundings."""
    cut = cut_of(features)
    return (0.5 * (cut["VALUES"] + 5 + cut["THREADS"] // 32) + 7) * EPSILON


@pytest.mark.parametrize("features", [1, 2, 31, 32, 33, 255, 256, 257, 511, 1021, 7168])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_against_the_exact_quotient(device, rows, features):
    rng = np.random.default_rng(features)
    x = (rng.standard_normal((rows, features)) * 10.0 ** rng.integers(-4, 5, (rows, 1))).astype(np.float32)
    weight = rng.standard_normal(features).astype(np.float32)
    y = device.host(rms_norm(device.put(x), device.put(weight), 1e-6))
    assert (y.dtype, y.shape) == (np.float32, x.shape)
    np.testing.assert_allclose(y, exact(x, weight, 1e-6), rtol=bound(features), atol=0)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_eps_is_added_to_the_mean(device, eps):
    """It decides where a row is about as small, and keeps a row of zeros at zero."""
    x = np.array([[1e-3] * 5, [1e-4] * 5, [0] * 5], np.float32)
    y = device.host(rms_norm(device.put(x), device.put(np.ones(5), np.float32), eps))
    np.testing.assert_allclose(y, exact(x, np.ones(5), eps), rtol=bound(5))
    assert (y[2] == 0).all()


def test_powers_of_two_give_the_specification_to_the_bit(device):
    """Mean square 1 or 4: nothing needs rounding."""
    rng = np.random.default_rng(0)
    x = rng.choice([-2, 2], (5, 512)).astype(np.float32)
    weight = rng.standard_normal(512).astype(np.float32)
    assert_same_bits(device.host(rms_norm(device.put(x), device.put(weight), 0.0)), x / 2 * weight)


@pytest.mark.parametrize("features", [40, 600, 2100])
def test_a_row_does_not_depend_on_the_rows_beside_it(device, features):
    rng = np.random.default_rng(1)
    weight = device.put(rng.standard_normal(features), np.float32)
    x = device.put(rng.standard_normal((64, features)), np.float32)
    assert_row_invariant(lambda rows: rms_norm(rows, weight, 1e-6), x, device.host)


def test_rows_that_lie_apart(device):
    rng = np.random.default_rng(2)
    wide = np.full((9, 100), np.nan, np.float32)
    wide[:, 10:73] = rng.standard_normal((9, 63))
    weight = device.put(rng.standard_normal(63), np.float32)
    expected = device.host(rms_norm(device.put(wide[:, 10:73]), weight, 1e-6))
    assert_same_bits(device.host(rms_norm(device.put(wide)[:, 10:73], weight, 1e-6)), expected)
    assert_same_bits(device.host(rms_norm(device.put(wide)[::-2, 10:73], weight, 1e-6)), expected[::-2].copy())


@pytest.mark.parametrize("features", [33, 600])
def test_as_bfloat16_it_is_the_same_rounded_once(device, features):
    rng = np.random.default_rng(6)
    x, weight = rng.standard_normal((9, features)).astype(np.float32), rng.standard_normal(features).astype(np.float32)
    whole = device.host(rms_norm(device.put(x), device.put(weight), 1e-6))
    rounded = device.host(rms_norm(device.put(x), device.put(weight), 1e-6, bfloat16))
    assert_same_bits(rounded.view(bfloat16), whole.astype(bfloat16))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("features", [1, 33, 255, 600, 1021])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_sum_and_its_norm_have_the_bits_of_two_steps(device, rows, features, dtype):
    """The sum of magnitudes far apart, where it rounds; where it goes, there is poison beside it."""
    rng = np.random.default_rng(features)
    a, b = (
        (rng.standard_normal((rows, features)) * 10.0 ** rng.integers(-4, 5, (rows, 1))).astype(np.float32)
        for _ in range(2)
    )
    weight = device.put(rng.standard_normal(features), np.float32)
    total, y = add_norm(device.put(a), device.put(b), weight, 1e-6, dtype)
    assert_same_bits(device.host(total), a + b)
    assert_same_bits(device.host(y), device.host(rms_norm(device.put(a + b), weight, 1e-6, dtype)))
    stack = device.empty((3, rows, features), np.float32)
    returned, y_too = add_norm(device.put(a), device.put(b), weight, 1e-6, dtype, out=stack[1])
    assert_same_bits(device.host(returned), a + b)
    assert_same_bits(device.host(stack[1]), a + b)
    assert_same_bits(device.host(y_too), device.host(y))
    assert np.isnan(device.host(stack[::2])).all()


@pytest.mark.parametrize("features", [1, 40, 600])
def test_rows_of_a_sum_may_lie_apart(device, features):
    """Among the outputs of other layers, from which the next sum takes it."""
    rng = np.random.default_rng(8)
    weight = device.put(rng.standard_normal(features), np.float32)
    a, b = (device.put(rng.standard_normal((5, features)), np.float32) for _ in range(2))
    expected, _ = add_norm(a, b, weight, 1e-6)
    taps = device.empty((5, 3, features), np.float32)
    total, y = add_norm(a, b, weight, 1e-6, out=taps[:, 1])
    found = device.host(taps)
    assert_same_bits(np.ascontiguousarray(found[:, 1]), device.host(expected))
    assert np.isnan(found[:, ::2]).all()
    for apart, together in zip(add_norm(total, y, weight, 1e-6), add_norm(expected, y, weight, 1e-6), strict=True):
        assert_same_bits(device.host(apart), device.host(together))


@pytest.mark.parametrize("features", [40, 600])
def test_a_row_of_a_sum_does_not_depend_on_the_rows_beside_it(device, features):
    rng = np.random.default_rng(7)
    weight = device.put(rng.standard_normal(features), np.float32)
    a, b = (device.put(rng.standard_normal((40, features)), np.float32) for _ in range(2))
    whole = [device.host(array) for array in add_norm(a, b, weight, 1e-6)]
    for rows in range(1, 40):
        for first in (0, 40 - rows):
            some = slice(first, first + rows)
            for array, expected in zip(add_norm(a[some], b[some], weight, 1e-6), whole, strict=True):
                assert_same_bits(device.host(array), expected[some])


def test_nan_stays_in_its_row(device):
    x = np.random.default_rng(3).standard_normal((6, 300)).astype(np.float32)
    x[2, 299], x[4, 0] = np.nan, np.inf
    y = device.host(rms_norm(device.put(x), device.put(np.ones(300), np.float32), 1e-6))
    assert np.isnan(y[2]).all() and np.isnan(y[4, 0])
    finite = [0, 1, 3, 5]
    np.testing.assert_allclose(y[finite], exact(x[finite], np.ones(300), 1e-6), rtol=bound(300))


def test_any_order_of_threads(device):
    rng = np.random.default_rng(4)
    x, weight = device.put(rng.random((5, 700), np.float32)), device.put(rng.random(700, np.float32))
    device.every_schedule(lambda: [rms_norm(x, weight, 1e-6), *add_norm(x, x, weight, 1e-6)])


def test_more_rows_than_a_grid_is_high(device):
    x = np.tile(np.array([-3, 5], np.float32), (65_537, 1)) * np.arange(65_537, dtype=np.float32)[:, None]
    y = device.host(rms_norm(device.put(x), device.put(np.ones(2), np.float32), 1e-6))
    np.testing.assert_allclose(y, exact(x, np.ones(2), 1e-6), rtol=bound(2))


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((3, 50)).astype(np.float32), rng.standard_normal(50).astype(np.float32)
    y = rms_norm(x, weight, 1e-6)
    np.testing.assert_allclose(y, exact(x, weight, 1e-6), rtol=1e-6)
    assert_same_bits(rms_norm(x, weight, 1e-6, bfloat16), y.astype(bfloat16))
    total, normed = add_norm(x, x[::-1], weight, 1e-6, bfloat16)
    assert_same_bits(total, x + x[::-1])
    assert_same_bits(normed, rms_norm(total, weight, 1e-6, bfloat16))


def test_refuses(device):
    def norm(x: tuple, weight: tuple, dtype: type = np.float32):
        return rms_norm(device.empty(x, dtype), device.empty(weight, np.float32), 1e-6)

    with pytest.raises(ValueError, match=r"rms_norm: x \[2, 8\], expected \[rows, 7\]"):
        norm((2, 8), (7,))
    with pytest.raises(ValueError, match=r"rms_norm: x \[8\], expected \[rows, 8\]"):
        norm((8,), (8,))
    with pytest.raises(ValueError, match=r"rms_norm: x \[2, 3, 8\], expected \[rows, 8\]"):
        norm((2, 3, 8), (8,))
    with pytest.raises(TypeError, match=r"rms_norm: .*'x' is float64"):
        norm((2, 8), (8,), np.float64)
    with pytest.raises(ValueError, match=r"rms_norm: the rows of x are not contiguous"):
        rms_norm(device.empty((8, 2), np.float32).T, device.empty(8, np.float32), 1e-6)
    with pytest.raises(ValueError, match=r"add_norm: x \[2, 8\], expected \[rows, 7\]"):
        add_norm(*(device.empty(shape, np.float32) for shape in ((2, 8), (2, 8), 7)), 1e-6)
    x, weight = device.empty((2, 8), np.float32), device.empty(8, np.float32)
    with pytest.raises(ValueError, match=r"add_norm: x \[2, 8\], delta \[1, 8\] and out \[2, 8\] differ in shape"):
        add_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match=r"add_norm: x \[2, 8\], delta \[2, 8\] and out \[3, 8\] differ in shape"):
        add_norm(x, x, weight, 1e-6, out=device.empty((3, 8), np.float32))
    with pytest.raises(ValueError, match=r"add_norm: the rows of out are not contiguous"):
        add_norm(x, x, weight, 1e-6, out=device.empty((2, 16), np.float32)[:, ::2])
    with pytest.raises(ValueError, match=r"add_norm: .*'delta'.*expected C-contiguous"):
        add_norm(x, device.empty((2, 16), np.float32)[:, ::2], weight, 1e-6)
    with pytest.raises(TypeError, match=r"add_norm: .*'sum' is float64"):
        add_norm(x, x, weight, 1e-6, out=device.empty((2, 8), np.float64))
