"""The router, and the weighted sum of experts."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from golden.make_parity import load
from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.linear import tile
from kdtree_nb.reference.model import experts, mlp
from kdtree_nb.reference.moe import expert_blocks, moe, moe_by_blocks, moe_route, sigmoid, swiglu

TINY = load("plain").config


def router(
    experts: int, top_k: int, *, groups: int = 1, kept: int = 1, norm: bool = True, scaling: float = 1.0
) -> ModelConfig:
    return dataclasses.replace(
        TINY,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=norm,
        routed_scaling_factor=scaling,
    )


def logit(score: float) -> float:
    return math.log(score / (1 - score)) if 0 < score < 1 else math.copysign(40, score - 0.5)


def route_scores(scores: list[float], bias: list[float], config: ModelConfig) -> tuple[list[int], list[float]]:
    """Route one token whose experts have these scores."""
    logits = np.array([[logit(score) for score in scores]], np.float32)
    expert_ids, weights = moe_route(logits, np.array(bias, np.float32), config)
    return expert_ids[0].tolist(), weights[0].tolist()


def route_by_loop(
    logits: np.ndarray, bias: np.ndarray, config: ModelConfig
) -> tuple[list[list[int]], list[list[np.float32]]]:
    """The router as a person would do it, token by token, in float32."""
    size = config.n_routed_experts // config.n_group
    all_ids, all_weights = [], []
    for scores in sigmoid(logits):
        choice = [score + b for score, b in zip(scores, bias, strict=True)]
        group_scores = [
            sum(sorted(choice[group * size : (group + 1) * size])[-2:], np.float32(0))
            for group in range(config.n_group)
        ]
        best_groups = sorted(range(config.n_group), key=lambda group: (-group_scores[group], group))
        eligible = [
            expert for group in best_groups[: config.topk_group] for expert in range(group * size, (group + 1) * size)
        ]
        ids = sorted(eligible, key=lambda expert: (-choice[expert], expert))[: config.num_experts_per_tok]
        weights = [scores[expert] for expert in ids]
        if config.norm_topk_prob:
            total = sum(weights, np.float32(0)) + np.float32(1e-20)
            weights = [weight / total for weight in weights]
        all_ids.append(ids)
        all_weights.append([weight * np.float32(config.routed_scaling_factor) for weight in weights])
    return all_ids, all_weights


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, ModelConfig]:
    """Logits and biases from a coarse grid, where ties are common, and a router for them."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kept = draw(st.integers(1, groups))
    config = router(
        groups * size,
        draw(st.integers(1, kept * size)),
        groups=groups,
        kept=kept,
        norm=draw(st.booleans()),
        scaling=draw(st.sampled_from([1.0, 2.827])),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = draw(st.sampled_from([1, 3, 1000]))
    logits = random.integers(-steps, steps, (draw(st.integers(0, 6)), groups * size), endpoint=True) / np.float32(steps)
    bias = random.integers(-steps, steps, groups * size, endpoint=True) / np.float32(steps) - draw(
        st.sampled_from([0, 2])
    )
    return (4 * logits).astype(np.float32), bias.astype(np.float32), config


@settings(deadline=None)
@given(routings())
def test_router_against_a_loop(routing: tuple[np.ndarray, np.ndarray, ModelConfig]) -> None:
    logits, bias, config = routing
    expert_ids, weights = moe_route(logits, bias, config)
    expected_ids, expected_weights = route_by_loop(logits, bias, config)
    shape = len(logits), config.num_experts_per_tok
    assert (expert_ids.dtype, expert_ids.shape) == (np.int32, shape)
    assert (weights.dtype, weights.shape) == (np.float32, shape)
    np.testing.assert_array_equal(expert_ids, np.array(expected_ids).reshape(shape))
    np.testing.assert_array_equal(weights, np.array(expected_weights).reshape(shape))


def test_router_of_384_experts_against_a_loop() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((40, 384)).astype(np.float32)
    bias = random.standard_normal(384).astype(np.float32)
    config = router(384, 8, scaling=2.827)
    expert_ids, weights = moe_route(logits, bias, config)
    expected_ids, expected_weights = route_by_loop(logits, bias, config)
    np.testing.assert_array_equal(expert_ids, expected_ids)
    np.testing.assert_array_equal(weights, expected_weights)
    np.testing.assert_allclose(weights.sum(axis=1), 2.827, rtol=1e-6)


# The faults that routers have had


def test_the_bias_chooses_but_does_not_weigh() -> None:
    ids, weights = route_scores([0.2, 0.8, 0.6, 0.4], [5, 0, 0, 0], router(4, 2, norm=False))
    assert ids == [0, 1]
    assert weights == pytest.approx([0.2, 0.8])
    ids, weights = route_scores([0.2, 0.8, 0.6, 0.4], [5, 0, 0, 0], router(4, 2))
    assert weights == pytest.approx([0.2, 0.8])


def test_masked_groups_lose_also_against_negative_choices() -> None:
    """All biases −2 leave every choice below 0, the value that masked experts must not get."""
    config = router(8, 3, groups=4, kept=2)
    ids, _ = route_scores([0.1, 0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 0.1], [-2] * 8, config)
    assert ids == [2, 3, 6]
    ids, _ = route_scores(
        [0.1, 0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 0.1], [-2] * 8, dataclasses.replace(config, num_experts_per_tok=4)
    )
    assert ids == [2, 3, 6, 7]


def test_weights_are_the_scores_themselves_not_choice_minus_bias() -> None:
    """sigmoid(−17) + 12 − 12 is 0 in float32."""
    logits, bias = np.full((1, 4), -17, np.float32), np.full(4, 12, np.float32)
    score = 1 / (1 + math.exp(17))
    _, weights = moe_route(logits, bias, router(4, 2, norm=False))
    np.testing.assert_allclose(weights, score, rtol=1e-6)
    _, weights = moe_route(logits, bias, router(4, 2))
    np.testing.assert_allclose(weights, 0.5, rtol=1e-6)


def test_a_group_is_worth_its_two_best_experts() -> None:
    config = router(6, 2, groups=3, kept=1)
    ids, weights = route_scores([0.9, 0, 0.6, 0.6, 0.1, 0.2], [0] * 6, config)
    assert ids == [2, 3]
    assert weights == pytest.approx([0.5, 0.5])


def test_a_third_expert_does_not_count_for_its_group() -> None:
    ids, _ = route_scores([0.5, 0.5, 0.5, 0.6, 0.6, 0.0], [0] * 6, router(6, 1, groups=2, kept=1))
    assert ids == [3]


@pytest.mark.parametrize("groups", [1, 4])
def test_ties_go_to_the_lowest_ids_every_time(groups: int) -> None:
    """An all-zero gate row: every expert and every group is as good as the others."""
    config = router(64, 6, groups=groups, kept=max(1, groups // 2))
    expert_ids, weights = moe_route(np.zeros((20, 64), np.float32), np.zeros(64, np.float32), config)
    assert expert_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 20
    np.testing.assert_allclose(weights, 1 / 6, rtol=1e-6)


def test_routed_scaling_factor_is_applied_once() -> None:
    _, weights = route_scores([0.2, 0.8, 0.6, 0.4], [0] * 4, router(4, 3, scaling=2.5))
    assert sum(weights) == pytest.approx(2.5)
    _, weights = route_scores([0.2, 0.8, 0.6, 0.4], [0] * 4, router(4, 3, scaling=2.5, norm=False))
    assert weights == pytest.approx([2.0, 1.5, 1.0])


def test_scores_of_zero_do_not_divide_by_zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, weights = moe_route(np.full((1, 4), -1000, np.float32), np.zeros(4, np.float32), router(4, 2))
    np.testing.assert_array_equal(weights, 0)


def test_a_token_routes_the_same_alone() -> None:
    random = np.random.default_rng(1)
    logits, bias = random.standard_normal((16, 12)).astype(np.float32), random.standard_normal(12).astype(np.float32)
    config = router(12, 4, groups=4, kept=2)
    together = moe_route(logits, bias, config)
    for row in range(16):
        for alone, all_rows in zip(moe_route(logits[[row]], bias, config), together, strict=True):
            np.testing.assert_array_equal(alone[0], all_rows[row])


# The sum of experts


def matrices(experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((experts, 8, 8))


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_moe_against_a_loop(tokens: int, top_k: int, seed: int) -> None:
    random, weight = np.random.default_rng(seed), matrices(6)
    x = random.standard_normal((tokens, 8))
    expert_ids = np.array([random.permutation(6)[:top_k] for _ in range(tokens)], np.int32).reshape(tokens, top_k)
    weights = random.random((tokens, top_k))
    called: list[int] = []

    def expert(chosen: int, rows: np.ndarray) -> np.ndarray:
        called.append(chosen)
        return rows @ weight[chosen].T

    output = moe(x, expert_ids, weights, expert)
    assert output.shape == x.shape
    assert sorted(called) == sorted(set(expert_ids.ravel().tolist()))  # each once, and none without a token
    for token in range(tokens):
        terms = [w * (weight[e] @ x[token]) for e, w in zip(expert_ids[token], weights[token], strict=True)]
        np.testing.assert_allclose(output[token], sum(terms), atol=1e-12)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_moe_by_blocks_against_a_loop(tokens: int, top_k: int, shared: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    gate_up, down = random.standard_normal((8, 10, 8)), random.standard_normal((8, 8, 5))
    x = random.standard_normal((tokens, 8))
    expert_ids = np.array([random.permutation(6)[:top_k] for _ in range(tokens)], np.int32).reshape(tokens, top_k)
    weights, shared_ids = random.random((tokens, top_k)), range(6, 6 + shared)
    output = moe_by_blocks(x, expert_ids, weights, shared_ids, lambda e: (tile(gate_up[e]), tile(down[e])))
    assert output.shape == x.shape
    for token in range(tokens):
        total = np.zeros(8)
        for expert, weight in [*zip(expert_ids[token], weights[token], strict=True), *((e, 1) for e in shared_ids)]:
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            total += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        np.testing.assert_allclose(output[token], total, atol=1e-12)
        alone = slice(token, token + 1)
        again = moe_by_blocks(
            x[alone], expert_ids[alone], weights[alone], shared_ids, lambda e: (tile(gate_up[e]), tile(down[e]))
        )
        assert_same_bits(again[0], output[token])


def test_blocks_are_filled_before_another_begins() -> None:
    experts, places = expert_blocks([[2, 0]] * 5 + [[0, 1]])
    assert experts == [2, 0, 2, 0, 1]
    assert places.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [13, 16]]


def test_all_tokens_to_one_expert() -> None:
    x, weight = np.random.default_rng(2).standard_normal((50, 8)), matrices(384)
    output = moe(
        x, np.full((50, 1), 383, np.int32), np.full((50, 1), 2.0), lambda chosen, rows: rows @ weight[chosen].T
    )
    np.testing.assert_allclose(output, 2 * x @ weight[383].T, atol=1e-12)


def test_zero_tokens() -> None:
    config = router(12, 4, groups=4, kept=2)
    expert_ids, weights = moe_route(np.zeros((0, 12), np.float32), np.zeros(12, np.float32), config)
    assert expert_ids.shape == weights.shape == (0, 4)
    assert moe(np.zeros((0, 8), np.float32), expert_ids, weights, lambda chosen, rows: rows).shape == (0, 8)


def test_moe_keeps_float32() -> None:
    ids, weights = np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    assert moe(np.ones((3, 8), np.float32), ids, weights, lambda chosen, rows: rows).dtype == np.float32


def test_a_nan_stays_with_its_token() -> None:
    x = np.ones((3, 8))
    x[1] = np.nan
    output = moe(x, np.zeros((3, 1), np.int32), np.ones((3, 1)), lambda chosen, rows: rows)
    np.testing.assert_array_equal(np.isnan(output).all(axis=1), [False, True, False])


@pytest.mark.parametrize("shared", [0, 1])
def test_the_shared_expert_is_added_unscaled(shared: int) -> None:
    parity = load("q_lora_yarn")
    own = {name.removeprefix("model.layers.1."): w.astype(np.float64) for name, w in parity.weights.items()}
    x = np.random.default_rng(3).standard_normal((5, 64))
    config = dataclasses.replace(parity.config, routed_scaling_factor=1e-9, n_shared_experts=shared)
    expected = mlp(own, "mlp.shared_experts", x) if shared else np.zeros_like(x)
    np.testing.assert_allclose(experts(own, config, x), expected, atol=1e-7)


# Their functions


@settings(deadline=None)
@given(st.floats(-1e4, 1e4))
def test_sigmoid_is_exact_and_does_not_overflow(x: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        score = float(sigmoid(np.array([x]))[0])
    assert score == pytest.approx(1 / (1 + math.exp(-x)) if x > -700 else 0, rel=1e-14, abs=1e-300)


def test_swiglu_puts_silu_on_the_gate() -> None:
    assert swiglu(np.array([2.0]), np.array([3.0]))[0] == pytest.approx(6 / (1 + math.exp(-2)))
    assert swiglu(np.array([-1e4]), np.array([3.0]))[0] == 0
