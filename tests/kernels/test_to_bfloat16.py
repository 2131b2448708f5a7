"""Rounding to bfloat16: to nearest, ties to even, as the type's own conversion has it."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.to_bfloat16 import to_bfloat16


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 255), (2, 256), (5, 7, 11)])
def test_shapes(device, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert_same_bits(device.host(to_bfloat16(device.put(x))).view(bfloat16), x.astype(bfloat16))


def test_between_two_neighbours(device):
    """From a power of two upwards: a tie, a bit less and a bit more; overflow at the end, zeros and infinities."""
    ties = np.arange(0x3F800000, 0x40000000, 0x8000, np.uint32)
    bits = np.concatenate([ties - 1, ties, ties + 1, ties | 0x80000000])
    ends = np.float32([0, -0.0, np.inf, -np.inf, 3.3895e38, 3.4e38, 2.0**-126])
    x = np.concatenate([bits.view(np.float32), ends])
    assert_same_bits(device.host(to_bfloat16(device.put(x))).view(bfloat16), x.astype(bfloat16))
    assert np.isnan(device.host(to_bfloat16(device.put([np.nan], np.float32))).view(bfloat16)).all()


def test_numpy_arrays_take_the_types_own():
    x = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    assert_same_bits(to_bfloat16(x), x.astype(bfloat16))


def test_refuses(device):
    with pytest.raises(TypeError, match=r"to_bfloat16: .*'x' is float64"):
        to_bfloat16(device.empty((2, 8), np.float64))
    with pytest.raises(ValueError, match=r"to_bfloat16: .*'x'.*expected C-contiguous"):
        to_bfloat16(device.empty((2, 8), np.float32)[:, ::2])
