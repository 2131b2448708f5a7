"""Root-mean-square normalisation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.reference.norm import LATENT_EPS, rms_norm


def test_the_latents_eps_is_that_of_transformers() -> None:
    assert LATENT_EPS == 1e-6


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(0, 5), st.floats(1e-4, 1e4), st.sampled_from([1e-6, 1e-5, 0.1]))
def test_against_a_loop(features: int, rows: int, size: float, eps: float) -> None:
    random = np.random.default_rng(features)
    x, weight = random.standard_normal((rows, features)) * size, random.standard_normal(features)
    normed = rms_norm(x, weight, eps)
    assert normed.shape == x.shape
    for row, result in zip(x, normed, strict=True):
        root = math.sqrt(math.fsum(value * value for value in row) / features + eps)
        np.testing.assert_allclose(result, [value / root * w for value, w in zip(row, weight, strict=True)], rtol=1e-12)


def test_eps_is_inside_the_root() -> None:
    assert rms_norm(np.array([0.003]), np.ones(1), 1.6e-5)[0] == pytest.approx(0.003 / 0.005)


def test_zeros_stay_zeros() -> None:
    np.testing.assert_array_equal(rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), 1e-6), 0)


def test_the_mean_is_not_subtracted() -> None:
    np.testing.assert_allclose(rms_norm(np.full((1, 8), 3.0), np.ones(8), 1e-12), 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_kept(dtype: type) -> None:
    assert rms_norm(np.ones((2, 3, 8), dtype), np.ones(8, dtype), 1e-6).dtype == dtype


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
    weight = np.random.default_rng(1).standard_normal(96).astype(np.float32)
    together = rms_norm(x, weight, 1e-6)
    for row in range(16):
        np.testing.assert_array_equal(rms_norm(x[[row]], weight, 1e-6)[0], together[row])
    x[3] = np.nan
    np.testing.assert_array_equal(rms_norm(x, weight, 1e-6)[4:], together[4:])
