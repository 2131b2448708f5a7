"""silu(gate) · up: within a few roundings of the exact product, whatever the gate's size."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.swiglu import swiglu
from kdtree_nb.reference.moe import swiglu as specification

CLOSE = 8 * 2.0**-24
"""Relative: an exponential (two units in the last place), a sum, a quotient, two products."""


def exact(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (3, 255), (2, 256), (5, 257), (7, 1408), (4, 0)])
def test_against_the_exact_product(device, rows, width):
    gate_up = np.random.default_rng(width).normal(0, 5, (rows, 2 * width)).astype(np.float32)
    y = device.host(swiglu(device.put(gate_up)))
    assert (y.dtype, y.shape) == (np.float32, (rows, width))
    np.testing.assert_allclose(y, exact(gate_up), rtol=CLOSE, atol=0)


def test_large_gates(device):
    """Where e^-gate overflows the result is 0, where it vanishes the gate itself; neither is NaN."""
    gates = np.array([-1e30, -1e4, -100, -88, -1e-30, 0, 1e-30, 88, 1e4, 1e18], np.float32)
    gate_up = np.stack([gates, np.full(10, 3, np.float32)], axis=1)
    y = device.host(swiglu(device.put(gate_up)))[:, 0]
    np.testing.assert_allclose(
        y, exact(gate_up)[:, 0], rtol=CLOSE, atol=4e-36
    )  # CuPy compiles with -ftz=true: a subnormal sigmoid is 0
    assert (y[:2] == 0).all() and (y[-2:] == 3 * gates[-2:]).all()


def test_the_gate_is_the_first_half(device):
    y = device.host(swiglu(device.put([[2, 20, 3, 30]], np.float32)))
    np.testing.assert_allclose(y, [[6 / (1 + np.exp(-2)), 600 / (1 + np.exp(-20))]], rtol=CLOSE)


def test_rows_and_columns_do_not_know_each_other(device):
    gate_up = np.random.default_rng(0).standard_normal((9, 2 * 70)).astype(np.float32)
    whole = device.host(swiglu(device.put(gate_up)))
    assert_same_bits(device.host(swiglu(device.put(gate_up[4:5]))), whole[4:5])
    gate_up[4, 75] = np.nan
    y = device.host(swiglu(device.put(gate_up)))
    assert np.argwhere(np.isnan(y)).tolist() == [[4, 5]]


def test_as_bfloat16_it_is_the_same_rounded_once(device):
    gate_up = device.put(np.random.default_rng(3).normal(0, 5, (9, 2 * 300)), np.float32)
    rounded, whole = device.host(swiglu(gate_up, bfloat16)), device.host(swiglu(gate_up))
    assert_same_bits(rounded.view(bfloat16), whole.astype(bfloat16))


def test_more_rows_than_a_grid_is_high(device):
    gate_up = np.random.default_rng(1).standard_normal((65_537, 2)).astype(np.float32)
    np.testing.assert_allclose(device.host(swiglu(device.put(gate_up))), exact(gate_up), rtol=CLOSE)


def test_numpy_arrays_take_the_specification():
    gate_up = np.random.default_rng(2).standard_normal((3, 14)).astype(np.float32)
    expected = specification(gate_up[:, :7], gate_up[:, 7:])
    assert_same_bits(swiglu(gate_up), expected)
    assert_same_bits(swiglu(gate_up, bfloat16), expected.astype(bfloat16))


def test_refuses(device):
    with pytest.raises(ValueError, match=r"swiglu: gate_up \[2, 7\], expected \[rows, 2 · width\]"):
        swiglu(device.empty((2, 7), np.float32))
    with pytest.raises(ValueError, match=r"swiglu: gate_up \[8\], expected \[rows, 2 · width\]"):
        swiglu(device.empty(8, np.float32))
    with pytest.raises(TypeError, match=r"swiglu: .*'gate_up' is float64"):
        swiglu(device.empty((2, 8), np.float64))
    with pytest.raises(ValueError, match=r"swiglu: the rows of gate_up are not contiguous"):
        swiglu(device.empty((8, 2), np.float32).T)


def test_rows_may_lie_apart(device):
    gate_up = device.put(np.random.default_rng(0).normal(0, 5, (5, 70)).astype(np.float32))
    apart, together = gate_up[:, 7:67], device.put(np.ascontiguousarray(device.host(gate_up)[:, 7:67]))
    assert_same_bits(device.host(swiglu(apart)), device.host(swiglu(together)))
