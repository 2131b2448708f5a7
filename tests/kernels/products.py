"""What the tests of products share: random INT4 weights, and how far a sum in float32 may be from the exact one."""

from collections.abc import Callable

import numpy as np
from helpers import assert_same_bits

from kdtree_nb.kernels.launch import Array
from kdtree_nb.quantization import QuantizedWeight, pack

EPSILON = 2.0**-24
"""Largest relative error of one rounding to float32."""


def random_int4(
    rng: np.random.Generator, out_features: int, in_features: int, dtype: type = np.float32
) -> QuantizedWeight:
    """Every code, and scales that give the weight a deviation of about 1/√in."""
    codes = rng.integers(-8, 8, (out_features, in_features)).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, (out_features, in_features // 32)) / (4.6 * np.sqrt(max(in_features, 1)))
    return QuantizedWeight(pack(codes), scales.astype(dtype))


def assert_product(y: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Within the bound of gemm.cuh's order: 32 additions for each 8th group, 8 for the slices, one rounding each."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    additions = 32 * -(-weight.shape[-1] // 256) + 8
    exact, magnitude = x @ weight.swapaxes(-1, -2), np.abs(x) @ np.abs(weight).swapaxes(-1, -2)
    assert y.dtype == np.float32
    assert y.shape == exact.shape
    excess = np.abs(y - exact) - additions * EPSILON * magnitude
    assert excess.size == 0 or excess.max() <= 0, f"{excess.max()} beyond the bound"


def mma_roundings(in_features: int) -> int:
    """How many times the order of w4a16_mma.cuh rounds, at most, where an element's inputs have 4 to 16 parts.

    A group is two mma of 16 products, which may lose as much as 4 roundings each (tensor cores align to the largest
    product and cut; the emulator rounds once), and one fmaf; a part is its groups' chain, and there are up to 16 parts.
    """
    steps = -(-in_features // 64)
    groups = 2 * -(-steps // 4)  # of a part, were there as few as 4
    return 2 * 4 + groups + 16


def assert_row_invariant(product: Callable[[Array], Array], x: Array, host: Callable[[Array], np.ndarray]) -> None:
    """A row has the same bits with 1 … len(x) rows, at the start of a block and in each place within one."""
    whole = host(product(x))
    for rows in range(1, len(x) + 1):
        assert_same_bits(host(product(x[:rows])), whole[:rows])
    for first in range(1, 9):
        assert_same_bits(host(product(x[first:])), whole[first:])
    assert_same_bits(host(product(x[::-1])), whole[::-1])
