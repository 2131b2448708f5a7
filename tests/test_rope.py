"""Rotary positions, YaRN's frequencies and the softmax scale."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden.make_parity import load
from kdtree_nb.config import ModelConfig, YarnScaling
from kdtree_nb.reference.rope import Rope, apply_rope, rope, softmax_scale

K2 = ModelConfig(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    max_position_embeddings=262144,
    rope_theta=50000.0,
    rope_scaling=YarnScaling(64.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
)
PLAIN_FREQUENCIES = 50000.0 ** -(np.arange(32) / 32)
UNROTATED = Rope(PLAIN_FREQUENCIES, 1.0)


def scaled(**changes: float) -> ModelConfig:
    """Kimi K2 with another YaRN."""
    assert K2.rope_scaling is not None
    return dataclasses.replace(K2, rope_scaling=dataclasses.replace(K2.rope_scaling, **changes))


# Frequencies


def test_without_yarn_frequencies_are_powers_of_theta() -> None:
    frequencies, magnitude = rope(dataclasses.replace(K2, rope_scaling=None))
    np.testing.assert_allclose(frequencies, PLAIN_FREQUENCIES, rtol=1e-14)
    assert magnitude == 1


@pytest.mark.parametrize(("beta_fast", "low", "high"), [(1.0, 19, 20), (32.0, 8, 20)])
def test_yarn_of_kimi_k2_ramps_between_these_dimensions(beta_fast: float, low: int, high: int) -> None:
    frequencies, _ = rope(scaled(beta_fast=beta_fast))
    kept = frequencies / PLAIN_FREQUENCIES
    np.testing.assert_allclose(kept[: low + 1], 1, rtol=1e-14)  # as trained
    np.testing.assert_allclose(kept[high:], 1 / 64, rtol=1e-14)  # interpolated
    share = (np.arange(low + 1, high) - low) / (high - low)
    np.testing.assert_allclose(kept[low + 1 : high], share / 64 + 1 - share, rtol=1e-14)


def test_yarn_bounds_that_coincide_make_a_step() -> None:
    both = 4096 / (2 * math.pi) * 50000.0 ** -(20 / 32)  # rotations of dimension 20; floor and ceil meet there
    frequencies, _ = rope(scaled(beta_fast=both * (1 - 1e-9), beta_slow=both * (1 + 1e-9)))
    np.testing.assert_allclose(frequencies[:21], PLAIN_FREQUENCIES[:21], rtol=1e-14)
    np.testing.assert_allclose(frequencies[21:], PLAIN_FREQUENCIES[21:] / 64, rtol=1e-14)


def test_yarn_bounds_stay_within_the_dimensions() -> None:
    frequencies, _ = rope(scaled(original_max_position_embeddings=4, beta_slow=1e-9))
    assert np.isfinite(frequencies).all()
    assert frequencies[0] == 1  # the lower bound is 0, not negative
    assert frequencies[-1] > PLAIN_FREQUENCIES[-1] / 64  # the upper is 63, past the last frequency


# Factors


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "magnitude"),
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (1.0, 0.5, (0.1 * math.log(64) + 1) / (0.05 * math.log(64) + 1)),
        (0.707, 1.0, (0.0707 * math.log(64) + 1) / (0.1 * math.log(64) + 1)),
        (0.0, 0.0, 0.1 * math.log(64) + 1),
        (0.707, 0.0, 0.1 * math.log(64) + 1),
        (0.0, 0.707, 0.1 * math.log(64) + 1),
    ],
)
def test_factor_on_cos_and_sin(mscale: float, mscale_all_dim: float, magnitude: float) -> None:
    assert rope(scaled(mscale=mscale, mscale_all_dim=mscale_all_dim)).magnitude == pytest.approx(magnitude, rel=1e-14)


@pytest.mark.parametrize(
    ("mscale_all_dim", "m_squared"), [(1.0, 2.00474), (0.707, (0.0707 * math.log(64) + 1) ** 2), (0.0, 1.0)]
)
def test_softmax_scale_holds_m_squared(mscale_all_dim: float, m_squared: float) -> None:
    for mscale in (0.0, 0.707, 1.0):  # has no part in it
        scale = softmax_scale(scaled(mscale=mscale, mscale_all_dim=mscale_all_dim))
        assert scale == pytest.approx(192**-0.5 * m_squared, rel=1e-6)


def test_softmax_scale_without_yarn_comes_from_the_whole_head() -> None:
    assert softmax_scale(dataclasses.replace(K2, rope_scaling=None)) == 192**-0.5


def test_a_context_that_is_not_extended_changes_nothing() -> None:
    config = scaled(factor=1.0)
    np.testing.assert_allclose(rope(config).inverse_frequencies, PLAIN_FREQUENCIES, rtol=1e-14)
    assert rope(config).magnitude == 1
    assert softmax_scale(config) == 192**-0.5


@pytest.mark.parametrize("name", ["yarn", "yarn_groups", "q_lora_yarn", "q_lora_yarn_groups"])
def test_frequencies_against_a_loop(name: str) -> None:
    config = load(name).config
    scaling, dim, theta = config.rope_scaling, config.qk_rope_head_dim, config.rope_theta
    assert scaling is not None
    low, high = (
        dim * math.log(scaling.original_max_position_embeddings / (2 * math.pi * beta)) / (2 * math.log(theta))
        for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    if low == high:
        high += 0.001
    for i, frequency in enumerate(rope(config).inverse_frequencies):
        f = theta ** (2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert frequency == pytest.approx(ramp / (scaling.factor * f) + (1 - ramp) / f, rel=1e-14)


# Rotation


def test_dimension_1_is_the_odd_partner_of_dimension_0() -> None:
    """A half-split reading would pair dimension 1 with 33 and turn it by the second frequency."""
    key = np.eye(64)[1][None]
    rotated = apply_rope(key, np.array([1]), UNROTATED)[0]
    assert np.flatnonzero(rotated).tolist() == [0, 32]
    assert rotated[[0, 32]] == pytest.approx([-math.sin(1), math.cos(1)])


def test_position_0_only_reorders() -> None:
    x = np.arange(8.0)[None]
    rotated = apply_rope(x, np.array([0]), Rope(np.ones(4), 1.0))
    np.testing.assert_array_equal(rotated, [[0, 2, 4, 6, 1, 3, 5, 7]])


def test_pairs_turn_as_complex_numbers() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 64))
    positions = np.array([0, 7, 7, 1, 90])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[:, None, None] * PLAIN_FREQUENCIES) * 1.25
    rotated = apply_rope(x, positions, Rope(PLAIN_FREQUENCIES, 1.25))
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-13)


def test_a_row_is_the_same_alone_and_without_a_head_axis() -> None:
    x = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    positions = np.array([3, 4, 5, 5, 6, 5])
    together = apply_rope(x, positions, UNROTATED)
    assert together.dtype == np.float32
    np.testing.assert_array_equal(apply_rope(x[:, None], positions, UNROTATED)[:, 0], together)
    for row in range(6):
        np.testing.assert_array_equal(apply_rope(x[[row]], positions[[row]], UNROTATED)[0], together[row])


@settings(deadline=None)
@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_scores_depend_on_the_distance_only(query: int, key: int, shift: int) -> None:
    q, k = np.random.default_rng(2).standard_normal((2, 1, 64))

    def score(at_query: int, at_key: int) -> float:
        rotated = [apply_rope(x, np.array([at]), UNROTATED) for x, at in ((q, at_query), (k, at_key))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(query, key) == pytest.approx(score(query + shift, key + shift), abs=1e-9)


def test_far_positions_keep_their_precision_in_float32() -> None:
    """Angles are made in float64: at position 200,000 a float32 angle is wrong in its second decimal."""
    x = np.ones((1, 64))
    exact = apply_rope(x, np.array([200_001]), UNROTATED)
    single = apply_rope(x.astype(np.float32), np.array([200_001]), UNROTATED)
    np.testing.assert_allclose(single, exact, atol=1e-6)
