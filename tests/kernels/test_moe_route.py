"""The router: choices as the specification makes them, weights within a bound, the faults that routers have had."""

import dataclasses
import math

import numpy as np
import pytest
from builders import tiny_config
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.config import ModelConfig
from kdtree_nb.kernels.moe_pairs import MAX_EXPERTS, ROWS, sort_pairs
from kdtree_nb.kernels.moe_route import moe_route, routing
from kdtree_nb.kernels.swiglu import swiglu
from kdtree_nb.reference.moe import moe_route as specification

CLOSE = 1e-6
"""Relative error of a weight: an exponential (two units in the last place), two quotients, a product, some sums."""
UNDECIDED = 1e-5
"""Choices that are closer, but not equal, may fall either way: two exponentials decide."""


def router(
    experts: int, top_k: int, groups: int = 1, kept: int = 1, norm: bool = True, scaling: float = 1.0
) -> ModelConfig:
    return tiny_config(
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=norm,
        routed_scaling_factor=scaling,
    )


def run(device, logits, bias, config, shared: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = moe_route(device.put(logits, np.float32), device.put(bias, np.float32), config, shared)
    return device.host(ids), device.host(weights)


def decided(logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Which tokens' choices do not hang on the last bits of an exponential: bool [tokens]."""

    def apart(values: np.ndarray) -> np.ndarray:
        steps = np.diff(np.sort(values, axis=1), axis=1)
        return ((steps == 0) | (steps > UNDECIDED)).all(axis=1)

    choice = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    best_two = np.sort(choice.reshape(-1, config.n_group, config.n_routed_experts // config.n_group), axis=2)[:, :, -2:]
    return apart(choice) & apart(best_two.sum(axis=2))


def check(device, logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Compare with the specification where it decides; returns where."""
    ids, weights = run(device, logits, bias, config)
    expected_ids, expected_weights = specification(logits, bias, config)
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    assert ids.shape == weights.shape == expected_ids.shape
    rows = decided(logits, bias, config)
    np.testing.assert_array_equal(ids[rows], expected_ids[rows])
    np.testing.assert_allclose(weights[rows], expected_weights[rows], rtol=CLOSE)
    return rows


def random_routing(rng) -> tuple[np.ndarray, np.ndarray, ModelConfig]:
    """Logits and biases of a few values each, where ties are common, or of many."""
    groups, size = rng.integers(1, 10, 2).tolist()
    kept = int(rng.integers(1, groups + 1))
    top_k = int(rng.integers(1, kept * size + 1))
    config = router(groups * size, top_k, groups, kept, bool(rng.integers(2)), float(rng.choice([1, 2.827])))
    shape = rng.integers(0, 7), groups * size
    if rng.integers(2):
        logits, bias = rng.choice([-1, 0.5, 2.25], shape), rng.choice([-2, 0, 0.3125], groups * size)
    else:
        logits, bias = rng.normal(0, 2, shape), rng.normal(0, 1, groups * size)
    return logits.astype(np.float32), bias.astype(np.float32), config


def test_against_the_specification(device):
    rng = np.random.default_rng(3)
    rows = np.concatenate([check(device, *random_routing(rng)) for _ in range(300)])
    assert len(rows) > 800 and rows.mean() > 0.9


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "kept"),
    [
        (1, 1, 1, 1),
        (31, 5, 1, 1),
        (33, 33, 1, 1),
        (64, 6, 1, 1),
        (256, 8, 8, 4),
        (384, 8, 1, 1),
        (1024, 40, 64, 3),
        (1024, 1, 1024, 7),
    ],
)
def test_sizes(device, experts, top_k, groups, kept):
    rng = np.random.default_rng(experts)
    logits, bias = rng.normal(0, 3, (30, experts)), rng.normal(0, 0.5, experts)
    config = router(experts, top_k, groups, kept, scaling=2.5)
    check(device, logits.astype(np.float32), bias.astype(np.float32), config)


def route_scores(device, scores, bias, config) -> tuple[list[int], list[float]]:
    """Route one token whose experts have these scores."""
    logits = [[math.log(score / (1 - score)) if 0 < score < 1 else math.copysign(40, score - 0.5) for score in scores]]
    ids, weights = run(device, logits, bias, config)
    return ids[0].tolist(), weights[0].tolist()


def test_the_bias_chooses_but_does_not_weigh(device):
    ids, weights = route_scores(device, [0.2, 0.8, 0.6, 0.4], [5, 0, 0, 0], router(4, 2, norm=False))
    assert ids == [0, 1] and weights == pytest.approx([0.2, 0.8])
    ids, weights = route_scores(device, [0.2, 0.8, 0.6, 0.4], [5, 0, 0, 0], router(4, 2))
    assert ids == [0, 1] and weights == pytest.approx([0.2, 0.8])


def test_masked_groups_lose_also_against_negative_choices(device):
    scores, config = [0.1, 0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 0.1], router(8, 3, groups=4, kept=2)
    assert route_scores(device, scores, [-2] * 8, config)[0] == [2, 3, 6]
    config = dataclasses.replace(config, num_experts_per_tok=4)
    assert route_scores(device, scores, [-2] * 8, config)[0] == [2, 3, 6, 7]


def test_weights_are_the_scores_themselves_not_choice_minus_bias(device):
    """sigmoid(−17) + 12 − 12 is 0 in float32."""
    for norm, expected in ((False, 1 / (1 + math.exp(17))), (True, 0.5)):
        _, weights = run(device, np.full((1, 4), -17), np.full(4, 12), router(4, 2, norm=norm))
        np.testing.assert_allclose(weights, expected, rtol=CLOSE)


def test_a_group_is_worth_its_two_best_experts(device):
    ids, weights = route_scores(device, [0.9, 0, 0.6, 0.6, 0.1, 0.2], [0] * 6, router(6, 2, groups=3))
    assert ids == [2, 3] and weights == pytest.approx([0.5, 0.5])
    assert route_scores(device, [0.5, 0.5, 0.5, 0.6, 0.6, 0.0], [0] * 6, router(6, 1, groups=2))[0] == [3]
    assert route_scores(device, [0.1, 0.9, 0.2], [0] * 3, router(3, 1, groups=3))[0] == [1]


@pytest.mark.parametrize(("experts", "groups", "kept"), [(64, 1, 1), (64, 4, 2), (384, 1, 1), (1024, 32, 3)])
def test_ties_go_to_the_lowest_ids_every_time(device, experts, groups, kept):
    """All-zero rows of the gate, 20 tokens, under every order of threads."""
    logits, bias = device.put(np.zeros((20, experts)), np.float32), device.put(np.zeros(experts), np.float32)
    ids, weights = device.every_schedule(lambda: moe_route(logits, bias, router(experts, 6, groups, kept)))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 20
    np.testing.assert_allclose(weights, 1 / 6, rtol=CLOSE)


def test_ties_among_others(device):
    logits = np.zeros((1, 70), np.float32)
    logits[0, [3, 35, 67, 64, 32]] = 1
    ids, _ = run(device, logits, np.zeros(70), router(70, 7))
    assert ids.tolist() == [[3, 32, 35, 64, 67, 0, 1]]


def test_routed_scaling_factor_is_applied_once(device):
    _, weights = route_scores(device, [0.2, 0.8, 0.6, 0.4], [0] * 4, router(4, 3, scaling=2.5))
    assert sum(weights) == pytest.approx(2.5)
    _, weights = route_scores(device, [0.2, 0.8, 0.6, 0.4], [0] * 4, router(4, 3, scaling=2.5, norm=False))
    assert weights == pytest.approx([2.0, 1.5, 1.0])


def test_scores_of_zero_do_not_divide_by_zero(device):
    _, weights = run(device, np.full((1, 4), -1000), np.zeros(4), router(4, 2))
    np.testing.assert_array_equal(weights, 0)


def test_weights_are_summed_in_the_order_of_the_choice(device):
    """A score of 0.5 and many of 2^-26: added after it each is lost, added before it they count."""
    small = -np.log(2.0**26 - 1)
    logits = np.append(np.full(63, small), 0.0)[None]
    ids, weights = run(device, logits, np.append(np.zeros(63), 1), router(64, 64))
    assert ids[0, 0] == 63 and weights[0, 0] == 1
    ids, weights = run(device, logits, np.append(np.zeros(63), -1), router(64, 64))
    assert ids[0, -1] == 63 and weights[0, -1] == pytest.approx(0.5 / (0.5 + 63 * 2.0**-26), rel=1e-7)


def test_a_token_does_not_depend_on_the_tokens_beside_it(device):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(0, 1, (64, 48)).astype(np.float32), rng.normal(0, 0.1, 48)
    config = router(48, 6, groups=8, kept=3)
    whole = run(device, logits, bias, config)
    for rows in (1, 2, 7, 33):
        for alone, all_rows in zip(run(device, logits[:rows], bias, config), whole, strict=True):
            assert_same_bits(alone, all_rows[:rows])
    order = rng.permutation(64)
    for shuffled, all_rows in zip(run(device, logits[order], bias, config), whole, strict=True):
        assert_same_bits(shuffled, all_rows[order])


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_nan_is_never_chosen_while_another_is_left(device, groups, kept):
    """Nor does it reach another token, and what is chosen are experts whatever the logits are."""
    rng = np.random.default_rng(1)
    logits, config = rng.normal(0, 1, (5, 16)).astype(np.float32), router(16, 4, groups, kept)
    expected = run(device, logits, np.zeros(16), config)
    best = expected[0][2, 0]
    logits[2, best], logits[3], logits[4] = np.nan, np.nan, [np.inf, -np.inf] * 8
    ids, weights = run(device, logits, np.zeros(16), config)
    for row in range(5):
        assert len(set(ids[row].tolist())) == 4 and (0 <= ids[row]).all() and (ids[row] < 16).all()
    assert best not in ids[2] and np.isfinite(weights[2]).all()
    assert_same_bits(ids[:2], expected[0][:2])
    assert_same_bits(weights[:2], expected[1][:2])


def test_choices_stay_experts_also_under_impossible_biases(device):
    ids, _ = run(
        device, np.zeros((2, 8)), [np.inf, -np.inf, np.nan, np.inf, -np.inf, -np.inf, np.nan, 0], router(8, 8, 4, 4)
    )
    assert np.sort(ids, axis=1).tolist() == [list(range(8))] * 2


@pytest.mark.parametrize("shared", [1, 2, 33])
def test_shared_experts_stand_behind_the_choice(device, shared):
    """With the ids that follow, unscaled; the choice before them has the bits that it has without them."""
    rng = np.random.default_rng(shared)
    logits, bias, config = rng.normal(0, 1, (7, 12)), rng.normal(0, 1, 12), router(12, 4, groups=4, kept=2, scaling=2.5)
    ids, weights = run(device, logits, bias, config, shared)
    for found, alone in zip((ids, weights), run(device, logits, bias, config), strict=True):
        assert_same_bits(found[:, :4].copy(), alone)
    np.testing.assert_array_equal(ids[:, 4:], np.tile(np.arange(12, 12 + shared), (7, 1)))
    np.testing.assert_array_equal(weights[:, 4:], np.ones((7, shared)))


def test_more_tokens_than_a_grid_is_high(device):
    logits = (np.arange(65_537)[:, None] * 7 % 11 == np.arange(11)).astype(np.float32)
    ids, _ = run(device, logits, np.zeros(11), router(11, 1))
    np.testing.assert_array_equal(ids[:, 0], np.arange(65_537) * 7 % 11)


def test_rows_may_lie_apart(device):
    logits, bias = np.random.default_rng(1).normal(0, 1, (5, 40)).astype(np.float32), np.zeros(12, np.float32)
    config = router(12, 4)
    apart = moe_route(device.put(logits)[:, 9:21], device.put(bias), config)
    together = moe_route(device.put(np.ascontiguousarray(logits[:, 9:21])), device.put(bias), config)
    for found, expected in zip(apart, together, strict=True):
        assert_same_bits(device.host(found), device.host(expected))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "width"), [(0, 12, 5), (1, 12, 1), (3, 64, 2816), (5, 40, 33)])
def test_swiglu_beside_the_choice(device, tokens, experts, width, dtype):
    """The bits of the two kernels that do one each, from rows that lie apart."""
    rng = np.random.default_rng(experts)
    product = device.put(rng.normal(0, 3, (tokens, experts + 2 * width + 4)).astype(np.float32))[:, 4:]
    bias, config = device.put(rng.normal(0, 1, experts).astype(np.float32)), router(experts, 3)
    found = routing(product, bias, config, dtype=dtype)
    for one, expected in zip(found[:2], moe_route(product[:, :experts], bias, config), strict=True):
        assert_same_bits(device.host(one), device.host(expected))
    assert found.activations.shape == (tokens, width)
    assert_same_bits(device.host(found.activations), device.host(swiglu(product[:, experts:], dtype)))


@pytest.mark.parametrize("shared", [0, 2])
def test_one_token_needs_no_sorting(device, shared):
    """Each of its experts is a block with one pair, the choice's: what the sort would find, in another order."""
    rng = np.random.default_rng(2)
    logits, bias = device.put(rng.normal(0, 1, (1, 70)).astype(np.float32)), device.put(np.zeros(70, np.float32))
    found = routing(logits, bias, router(70, 9), shared)
    assert found.activations is None
    experts, pairs, count = map(device.host, found.blocks)
    ids = device.host(found.expert_ids)[0]
    assert count.tolist() == [9 + shared]
    assert experts.tolist() == ids.tolist()
    assert pairs[:, 0].tolist() == list(range(9 + shared))
    assert (pairs[:, 1:] == -1).all() and pairs.shape[1] == ROWS
    sorted_experts, sorted_pairs, _ = map(device.host, sort_pairs(found.expert_ids, 70 + shared, ROWS))
    order = np.argsort(experts)
    assert_same_bits(experts[order], sorted_experts)
    assert_same_bits(pairs[order], sorted_pairs)
    two = device.put(np.repeat(device.host(logits), 2, axis=0))
    assert routing(two, bias, router(70, 9), shared).blocks is None


def test_no_tokens(device):
    ids, weights = run(device, np.zeros((0, 12)), np.zeros(12), router(12, 4))
    assert (ids.dtype, ids.shape, weights.shape) == (np.int32, (0, 4), (0, 4))


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(2)
    logits, bias = rng.normal(0, 1, (7, 12)).astype(np.float32), rng.normal(0, 1, 12).astype(np.float32)
    config = router(12, 4, groups=4, kept=2)
    for actual, expected in zip(moe_route(logits, bias, config), specification(logits, bias, config), strict=True):
        assert_same_bits(actual, expected)
    ids, weights = moe_route(logits, bias, config, shared=2)
    assert_same_bits(ids, np.hstack([specification(logits, bias, config)[0], np.tile(np.int32([12, 13]), (7, 1))]))
    assert (weights[:, 4:] == 1).all() and weights.dtype == np.float32


def test_refuses(device):
    def route(logits: tuple, bias: tuple, experts: int, dtype: type = np.float32):
        return moe_route(device.empty(logits, dtype), device.empty(bias, np.float32), router(experts, 1))

    with pytest.raises(ValueError, match=r"moe_route: logits \[2, 8\] and bias \[7\], expected 8 experts"):
        route((2, 8), (7,), 8)
    with pytest.raises(ValueError, match=r"moe_route: logits \[2, 8\] and bias \[8\], expected 9 experts"):
        route((2, 8), (8,), 9)
    with pytest.raises(ValueError, match=r"moe_route: logits \[8\] and bias \[8\], expected 8 experts"):
        route((8,), (8,), 8)
    with pytest.raises(ValueError, match=r"n_routed_experts=1025, expected at most 1024"):  # by the config already
        route((2, MAX_EXPERTS + 1), (MAX_EXPERTS + 1,), MAX_EXPERTS + 1)
    with pytest.raises(TypeError, match=r"moe_route: .*'logits' is float64"):
        route((2, 8), (8,), 8, np.float64)
    with pytest.raises(ValueError, match=r"moe_route: product \[1, 17\] .* expected \[tokens, 12 \+ 2 · width\]"):
        routing(device.empty((1, 17), np.float32), device.empty(12, np.float32), router(12, 4))
