"""Engine.generate against the reference, against itself across decoders, and against bad input."""

import dataclasses
import functools
import itertools
import re
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import YARN, Built, build, build_text_model, tiny_config
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.bundle import Bundle, BundleError
from kdtree_nb.engine import Drafter, Engine, Generation, Oracle, PromptLookup, Round
from kdtree_nb.engine import engine as front_door
from kdtree_nb.engine import model as engine_model
from kdtree_nb.engine import rounds as engine_rounds
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import Proposal
from kdtree_nb.quantization import quantized_names, routed_experts
from kdtree_nb.reference.model import forward, greedy

TOLERANCE = 1e-4
DECODERS = ("ar", "chain", "ddtree")
PROMPT = [5, 3, 60, 3, 5, 3]
SEED = 1  # its texts do not fall into a loop at once


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("model") / "tiny.kdtr", tiny_config(), SEED)


@pytest.fixture(scope="module")
def engine(built: Built) -> Engine:
    return Engine.load(built.path)


def random_prompt(length: int, vocab_size: int = 67, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, vocab_size, length)


ENDING = random_prompt(30, seed=20)  # ten other tokens follow it


def whole_text(prompt: np.ndarray, generation: Generation) -> np.ndarray:
    return np.concatenate([prompt, generation.tokens]).astype(np.int32)


def assert_same_generation(actual: Generation, expected: Generation) -> None:
    assert actual.tokens == expected.tokens
    assert actual.finish_reason == expected.finish_reason
    assert_same_bits(actual.logits, expected.logits)


# ---- drafters that are right, wrong or odd on purpose ----------------------------------------------------------------


class Scripted(Drafter):
    """Marginals of any width, length and hit rate, −inf among them; the answer at random ranks."""

    def __init__(self, answer: np.ndarray, vocab_size: int, length: int, width: int, hit_rate: float, seed: int):
        self.answer, self.vocab_size, self.length, self.width = answer, vocab_size, length, width
        self.hit_rate, self.random = hit_rate, np.random.default_rng(seed)

    def propose(self, tokens: np.ndarray) -> Proposal:
        shape, random = (self.length, self.width), self.random
        token_ids = np.argsort(random.random((self.length, self.vocab_size)), axis=1)[:, : self.width]
        for depth, position in enumerate(range(len(tokens), min(len(tokens) + self.length, len(self.answer)))):
            if random.random() < self.hit_rate and self.answer[position] not in token_ids[depth]:
                token_ids[depth, random.integers(self.width)] = self.answer[position]
        log_probs = -random.exponential(1.0, shape)
        log_probs[random.random(shape) < 0.1] = -np.inf
        return Proposal(-np.sort(-log_probs.astype(np.float32), axis=1), token_ids.astype(np.int32))


class Fixed(Drafter):
    """The same marginals at every round."""

    def __init__(self, log_probs: np.ndarray, token_ids: np.ndarray) -> None:
        self.marginals = Proposal(np.asarray(log_probs, np.float32), np.asarray(token_ids))

    def propose(self, tokens: np.ndarray) -> Proposal:
        return self.marginals


class AlwaysWrong(Drafter):
    """A full chain and siblings that the target never takes."""

    def __init__(self, answer: np.ndarray, vocab_size: int) -> None:
        self.answer, self.vocab_size = answer, vocab_size

    def propose(self, tokens: np.ndarray) -> Proposal:
        right = np.append(self.answer, [0] * 8)[len(tokens) : len(tokens) + 5, None]
        return Proposal(np.full((5, 3), -1, np.float32), (right + [[1, 2, 3]]) % self.vocab_size)


def uniform(length: int, width: int, first: int = 0) -> Fixed:
    """Siblings of equal scores: every marginal is uniform over ``width`` tokens."""
    ids = np.broadcast_to(np.arange(first, first + width), (length, width))
    return Fixed(np.full(ids.shape, -np.log(width)), ids)


# ---- against the reference -------------------------------------------------------------------------------------------

SHAPES = {
    "q_lora": dict(q_lora_rank=24),
    "q_proj": dict(q_lora_rank=None),
}
SCALING = {
    "yarn": dict(rope_scaling=YARN),
    "yarn m=1": dict(rope_scaling=dataclasses.replace(YARN, mscale=0.0, mscale_all_dim=0.0)),
    "rope": dict(rope_scaling=None),
}
ROUTING = {
    "groups": dict(n_group=3, topk_group=2),
    "one group": dict(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0),
}
DENSE = {"no dense": 0, "one dense": 1, "all dense": 2}
SHARED = (0, 1, 2)
HIDDEN = (32, 96, 64)
STORAGE: list[dict] = [
    dict(storage="int4"),
    dict(storage="float32"),
    dict(storage="bfloat16"),
    dict(select=routed_experts),
    dict(storage="bfloat16", select=lambda name: True),
]
COMBINATIONS = list(itertools.product(SHAPES, SCALING, ROUTING, DENSE))[::2]
CASES = {
    f"{shape}, {scaling}, {routing}, {dense}, shared={SHARED[i * 7 // 3 % 3]}, hidden={HIDDEN[i * 5 // 4 % 3]}, "
    f"{'tied' if i % 4 == 1 else 'untied'}, storage {i % len(STORAGE)}": i
    for i, (shape, scaling, routing, dense) in enumerate(COMBINATIONS)
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_reference_with_any_feature(case: int, tmp_path: Path) -> None:
    shape, scaling, routing, dense = COMBINATIONS[case]
    config = tiny_config(
        **SHAPES[shape],
        **SCALING[scaling],
        **ROUTING[routing],
        first_k_dense_replace=DENSE[dense],
        n_shared_experts=SHARED[case * 7 // 3 % 3],
        hidden_size=HIDDEN[case * 5 // 4 % 3],
        tie_word_embeddings=case % 4 == 1,
    )
    model = build(tmp_path / "model.kdtr", config, seed=case, **STORAGE[case % len(STORAGE)])
    engine = Engine.load(model.path)
    for length in (1, 2, 63, 64, 65, 130):
        prompt = random_prompt(length)
        generation = engine.generate(prompt, max_new_tokens=2, keep_logits=True)
        expected = forward(model.weights, config, whole_text(prompt, generation))[length - 1 : -1]
        assert generation.tokens == expected.argmax(axis=1).tolist()
        assert np.abs(generation.logits - expected).max() <= TOLERANCE
        assert expected.std() > 0.5  # else the tolerance would say nothing


def test_hidden_size_that_no_tile_divides(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=37, kv_lora_rank=13, moe_intermediate_size=11, num_attention_heads=3)
    model = build(tmp_path / "odd.kdtr", config, storage="float32")
    prompt = random_prompt(70)
    plain = Engine.load(model.path).generate(prompt, "ar", max_new_tokens=12, keep_logits=True)
    expected = forward(model.weights, config, whole_text(prompt, plain))[69:-1]
    assert plain.tokens == expected.argmax(axis=1).tolist()
    assert np.abs(plain.logits - expected).max() <= TOLERANCE
    drafter = Oracle(whole_text(prompt, plain), 67, hit_rate=0.6)
    drafted = Engine.load(model.path).generate(prompt, max_new_tokens=12, drafter=drafter, keep_logits=True)
    assert_same_generation(drafted, plain)


@pytest.mark.parametrize("rows", [3, 63, 1000])
def test_prefill_chunks_change_no_bit(engine: Engine, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(130)
    expected = engine.generate(prompt, "ar", max_new_tokens=3, keep_logits=True)
    monkeypatch.setattr(engine_rounds, "PREFILL_ROWS", rows)
    assert_same_generation(engine.generate(prompt, "ar", max_new_tokens=3, keep_logits=True), expected)


# ---- bit for bit -----------------------------------------------------------------------------------------------------

NEW_TOKENS = 14
PROMPT_LENGTHS = (1, 2, 17, 61, 64, 122)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[int, Generation]:
    return {
        length: engine.generate(random_prompt(length), "ar", max_new_tokens=NEW_TOKENS, keep_logits=True)
        for length in PROMPT_LENGTHS
    }


def test_plain_decoding_is_one_token_a_forward(plain: dict[int, Generation]) -> None:
    for generation in plain.values():
        assert generation.rounds == [Round(drafted=0, accepted=0)] * NEW_TOKENS
        assert generation.acceptance_length == 1
        assert len(set(generation.tokens)) >= 4


@settings(max_examples=40, deadline=None)
@given(
    prompt_length=st.sampled_from(PROMPT_LENGTHS),
    decoder=st.sampled_from(["chain", "ddtree", "ddtree", "ddtree"]),
    node_budget=st.sampled_from([0, 1, 2, 5, 16, 64, 200]),
    length=st.integers(0, 9),
    width=st.sampled_from([1, 2, 3, 8, 67]),
    hit_rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_trees_are_bit_exact(
    engine, plain, prompt_length, decoder, node_budget, length, width, hit_rate, seed
) -> None:
    prompt, expected = random_prompt(prompt_length), plain[prompt_length]
    drafter = Scripted(whole_text(prompt, expected), 67, length, width, hit_rate, seed)
    actual = engine.generate(prompt, decoder, node_budget, NEW_TOKENS, drafter=drafter, keep_logits=True)
    assert_same_generation(actual, expected)
    assert sum(round.accepted + 1 for round in actual.rounds) == NEW_TOKENS
    assert all(round.accepted <= round.drafted <= node_budget for round in actual.rounds)


@pytest.mark.parametrize("node_budget", [0, 1, 2, 16, 64, 1024])
def test_any_node_budget_is_bit_exact(engine: Engine, plain: dict[int, Generation], node_budget: int) -> None:
    prompt, expected = random_prompt(61), plain[61]
    drafter = Scripted(whole_text(prompt, expected), 67, 6, 9, 0.95, seed=node_budget)
    actual = engine.generate(prompt, "ddtree", node_budget, NEW_TOKENS, drafter=drafter, keep_logits=True)
    assert_same_generation(actual, expected)
    drafted = [round.drafted for round in actual.rounds]
    assert max(drafted) == node_budget  # 9 + 9² + 9³ + … prefixes are more than any of these


def test_budget_above_what_the_marginals_give(engine: Engine, plain: dict[int, Generation]) -> None:
    actual = engine.generate(random_prompt(17), "ddtree", 1024, NEW_TOKENS, drafter=uniform(2, 3), keep_logits=True)
    assert_same_generation(actual, plain[17])
    assert actual.rounds[0].drafted == 3 + 9


def test_wide_products_are_bit_exact(tmp_path: Path) -> None:
    """From about 500 inputs on, BLAS sums in another order for other numbers of rows."""
    config = tiny_config(hidden_size=1024, num_hidden_layers=1, intermediate_size=1024, q_lora_rank=None)
    engine = Engine.load(build(tmp_path / "wide.kdtr", config).path)
    prompt = random_prompt(40)
    plain = engine.generate(prompt, "ar", max_new_tokens=8, keep_logits=True)
    for decoder, node_budget in (("chain", 5), ("ddtree", 16), ("ddtree", 100)):
        drafter = Scripted(whole_text(prompt, plain), 67, 5, 8, 0.9, seed=node_budget)
        assert_same_generation(
            engine.generate(prompt, decoder, node_budget, 8, drafter=drafter, keep_logits=True), plain
        )


def test_500_tokens(engine: Engine) -> None:
    prompt = random_prompt(9)
    plain = engine.generate(prompt, "ar", max_new_tokens=500, keep_logits=True)
    drafter = Oracle(whole_text(prompt, plain), 67, hit_rate=0.7)
    drafted = engine.generate(prompt, "ddtree", 12, 500, drafter=drafter, keep_logits=True)
    assert_same_generation(drafted, plain)
    assert len(plain.tokens) == 500
    assert drafted.target_forwards < 250


ODD_DRAFTERS: dict[str, Callable[[np.ndarray], Drafter]] = {
    "all −inf": lambda answer: Fixed(np.full((4, 3), -np.inf), np.zeros((4, 3), int)),
    "all −inf after the first": lambda answer: Fixed([[0, -np.inf]] * 3, np.zeros((3, 2), int)),
    "no position": lambda answer: Fixed(np.empty((0, 3)), np.empty((0, 3), int)),
    "no candidate": lambda answer: Fixed(np.empty((3, 0)), np.empty((3, 0), int)),
    "token 0 everywhere": lambda answer: Fixed(np.full((4, 3), -1.0), np.zeros((4, 3), int)),
    "K = V, equal scores": lambda answer: uniform(4, 67),
    "siblings of equal scores": lambda answer: uniform(5, 2, first=int(answer[-1])),
    "log-probability 0 at every node": lambda answer: Fixed(np.zeros((4, 4)), np.tile(np.arange(4), (4, 1))),
    "all wrong": lambda answer: AlwaysWrong(answer, 67),
    "all right": lambda answer: Oracle(answer, 67, hit_rate=1),
    "deeper than what is left": lambda answer: Oracle(answer, 67, length=40, hit_rate=1),
    "never at rank 0": lambda answer: Oracle(answer, 67, hit_rate=0, width=3),
}


@pytest.mark.parametrize("make", ODD_DRAFTERS.values(), ids=ODD_DRAFTERS)
@pytest.mark.parametrize("decoder", ["chain", "ddtree"])
def test_odd_drafters_are_bit_exact(engine: Engine, plain: dict[int, Generation], decoder: str, make: Callable) -> None:
    drafter = make(whole_text(random_prompt(61), plain[61]))
    actual = engine.generate(random_prompt(61), decoder, 70, NEW_TOKENS, drafter=drafter, keep_logits=True)
    assert_same_generation(actual, plain[61])


def test_everything_rejected_for_many_rounds(engine: Engine, plain: dict[int, Generation]) -> None:
    drafter = AlwaysWrong(whole_text(random_prompt(61), plain[61]), 67)
    actual = engine.generate(random_prompt(61), "ddtree", 16, NEW_TOKENS, drafter=drafter, keep_logits=True)
    assert_same_generation(actual, plain[61])
    assert [round.accepted for round in actual.rounds] == [0] * NEW_TOKENS
    assert [round.drafted for round in actual.rounds] == [*[16] * (NEW_TOKENS - 3), 3 + 9, 3, 0]


def test_everything_accepted(engine: Engine, plain: dict[int, Generation]) -> None:
    drafter = Oracle(whole_text(random_prompt(61), plain[61]), 67, length=6, hit_rate=1)
    actual = engine.generate(random_prompt(61), "chain", 6, NEW_TOKENS, drafter=drafter)
    assert actual.rounds == [Round(6, 6), Round(6, 6)]
    assert actual.acceptance_length == 7


def test_chain_takes_the_first_rank_and_no_sibling(engine: Engine) -> None:
    run = engine.generate(PROMPT, "chain", 16, 8, drafter=uniform(4, 3))
    assert [round.drafted for round in run.rounds[:3]] == [4, 4, 4]


# ---- at the edges, on NumPy and on the kernels, against the reference's greedy text ----------------------------------


@pytest.fixture(scope="module", params=["cpu", "emulated"])
def either(request: pytest.FixtureRequest, built: Built) -> Engine:
    return Engine.load(built.path, request.param, capacity=100)


EDGE_TOKENS = 7


@pytest.fixture(scope="module")
def greedy_text(built: Built) -> Callable[[int], list[int]]:
    """The reference's continuation of ``random_prompt(length)``."""

    @functools.cache
    def text(length: int) -> list[int]:
        return greedy(built.weights, built.config, random_prompt(length), EDGE_TOKENS).tokens.tolist()

    return text


EDGES: dict[str, tuple[int, int, Callable[[np.ndarray], Drafter], int, list[int] | None]] = {
    "a prompt longer than a block of the prefill": (70, 9, lambda a: Oracle(a, 67, hit_rate=0.7), 9, None),
    "a prompt of one token": (1, 9, lambda a: Oracle(a, 67, hit_rate=0.7), 9, None),
    "B = 0": (17, 0, lambda a: Oracle(a, 67, hit_rate=1), 0, [0] * 7),
    "B = 1": (17, 1, lambda a: Oracle(a, 67, hit_rate=1), 1, [1, 1, 1, 0]),
    "a budget above what the marginals give": (17, 60, lambda a: uniform(2, 3), 3 + 9, None),
    "K = V": (17, 90, lambda a: uniform(2, 67), 90, [1, 1, 1, 0]),
    "all rejected": (17, 6, lambda a: AlwaysWrong(a, 67), 6, [0] * 7),
}
"""Length of the prompt, node budget, drafter, and of the tree's rounds the most drafted and all accepted."""


@pytest.mark.parametrize(("length", "node_budget", "make", "drafted", "accepted"), EDGES.values(), ids=EDGES)
def test_edges(either: Engine, greedy_text, length: int, node_budget: int, make, drafted: int, accepted) -> None:
    prompt = random_prompt(length)
    plain = either.generate(prompt, "ar", max_new_tokens=EDGE_TOKENS, keep_logits=True)
    assert plain.tokens == greedy_text(length)
    drafter = make(whole_text(prompt, plain))
    for decoder in ("chain", "ddtree"):
        run = either.generate(prompt, decoder, node_budget, EDGE_TOKENS, drafter=drafter, keep_logits=True)
        assert_same_generation(run, plain)
    assert max(round.drafted for round in run.rounds) == drafted
    assert accepted is None or [round.accepted for round in run.rounds] == accepted


@pytest.mark.parametrize("decoder", ["chain", "ddtree"])
def test_end_of_text_inside_an_accepted_path(either: Engine, greedy_text, decoder: str, tmp_path: Path) -> None:
    prompt, expected = random_prompt(17), greedy_text(17)
    assert expected[3] not in expected[:3]
    path = build(tmp_path / "ending.kdtr", tiny_config(eos_token_ids=(expected[3],)), SEED).path
    engine = Engine.load(path, either.device.name, capacity=100)
    drafter = Oracle(np.append(prompt, expected), 67, length=6, hit_rate=1)
    run = engine.generate(prompt, decoder, 12, EDGE_TOKENS, drafter=drafter)
    assert (run.tokens, run.finish_reason) == (expected[:4], "stop")
    assert [round.accepted for round in run.rounds] == [3]


@pytest.mark.parametrize("decoder", ["chain", "ddtree"])
def test_capacity_reached_inside_a_tree(either: Engine, built: Built, greedy_text, decoder: str) -> None:
    prompt, expected = random_prompt(17), greedy_text(17)
    engine = Engine.load(built.path, either.device.name, capacity=17 + 5)
    drafter = Oracle(np.append(prompt, expected), 67, length=12, hit_rate=1)
    run = engine.generate(prompt, decoder, 16, 500, drafter=drafter)
    assert (run.tokens, run.finish_reason) == (expected[:5], "capacity")
    assert [round.accepted for round in run.rounds] == [4]


def test_one_engine_and_one_prefix_many_times(either: Engine, greedy_text) -> None:
    prompt, expected = random_prompt(17), greedy_text(17)
    drafter = Oracle(np.append(prompt, expected), 67, hit_rate=0.6)
    for known, decoder in ((0, "ddtree"), (3, "ar"), (0, "chain"), (5, "ddtree"), (0, "ar"), (0, "ddtree")):
        longer = [*prompt, *expected[:known]]
        run = either.generate(longer, decoder, 9, EDGE_TOKENS - known, drafter=drafter)
        assert run.tokens == expected[known:]


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_a_seed_gives_one_text_on_every_device(either: Engine, engine: Engine, cut: dict) -> None:
    def sample(engine: Engine, decoder: str, node_budget: int, drafter: Drafter | None = None) -> Generation:
        return engine.generate(PROMPT, decoder, node_budget, EDGE_TOKENS, 1.2, 5, drafter=drafter, **cut)

    expected = sample(engine, "ar", 0)
    drafter = Scripted(whole_text(PROMPT, expected), 67, 4, 4, 0.8, seed=1)
    for decoder, node_budget in (("ar", 0), ("chain", 4), ("ddtree", 1), ("ddtree", 11)):
        assert sample(either, decoder, node_budget, drafter).tokens == expected.tokens


# ---- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "seed"), [(0.3, 0), (1.0, 1), (1.7, 2**64 - 1)])
def test_a_seed_gives_one_text_whatever_the_decoder(engine: Engine, temperature: float, seed: int) -> None:
    def sample(decoder: str, node_budget: int = 16, drafter: Drafter | None = None) -> Generation:
        return engine.generate(PROMPT, decoder, node_budget, 12, temperature, seed, drafter=drafter, keep_logits=True)

    expected = sample("ar")
    answer = whole_text(PROMPT, expected)
    for hit_rate, node_budget in itertools.product((0.5, 0.9), (1, 7, 40)):
        for decoder in ("chain", "ddtree"):
            drafter = Scripted(answer, 67, 5, 4, hit_rate, seed=node_budget)
            assert_same_generation(sample(decoder, node_budget, drafter), expected)


def test_other_seeds_and_temperatures_give_other_texts(engine: Engine) -> None:
    texts = {tuple(engine.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=seed).tokens) for seed in range(8)}
    assert len(texts) == 8
    greedy = tuple(engine.generate(PROMPT, max_new_tokens=12).tokens)
    assert greedy not in texts
    assert tuple(engine.generate(PROMPT, max_new_tokens=12, temperature=1e-6, seed=5).tokens) == greedy
    assert tuple(engine.generate(PROMPT, max_new_tokens=12, seed=5).tokens) == greedy


def test_samples_follow_the_reference_distribution(built: Built, engine: Engine) -> None:
    prompt = [60]
    logits = forward(built.weights, built.config, np.array(prompt))[-1].astype(np.float64) / 0.8
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    count = 300
    drawn = [engine.generate(prompt, max_new_tokens=1, temperature=0.8, seed=s).tokens[0] for s in range(count)]
    likely = np.argsort(-probabilities)[:6]
    observed = np.bincount(drawn, minlength=67)[likely]
    expected = count * probabilities[likely]
    assert expected.min() > 5
    assert (np.square(observed - expected) / expected).sum() < 22.5  # χ² with 6 degrees of freedom: p = 0.001


def test_sampled_ranks_are_as_probable_as_the_logits_say(engine: Engine) -> None:
    """Over a long text, the sum of p(token) has the mean Σ p² of independent draws."""
    run = engine.generate(PROMPT, max_new_tokens=120, temperature=1.0, seed=11, keep_logits=True)
    p = np.exp(run.logits - run.logits.max(axis=1, keepdims=True)).astype(np.float64)
    p /= p.sum(axis=1, keepdims=True)
    taken = p[np.arange(120), run.tokens]
    mean, square = (p * p).sum(axis=1), (p**3).sum(axis=1)
    assert abs((taken - mean).sum()) < 4 * np.sqrt((square - mean**2).sum())


# ---- where a text ends -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Callable[[int], Engine]:
    """The same model with the token at an index of its greedy text as end of text."""
    tokens = engine.generate(ENDING, "ar", max_new_tokens=14).tokens

    def ending_at(index: int) -> Engine:
        assert tokens[index] not in tokens[:index], "seed gives a repeated token, expected a new one"
        path = tmp_path_factory.mktemp("ending") / "tiny.kdtr"
        return Engine.load(build(path, tiny_config(eos_token_ids=(tokens[index], 66)), SEED).path)

    return ending_at


@pytest.mark.parametrize("index", [0, 1, 3, 6, 7, 8])
def test_end_of_text_cuts_right_there(engine: Engine, ending: Callable[[int], Engine], index: int) -> None:
    endless = engine.generate(ENDING, "ar", max_new_tokens=14, keep_logits=True)
    short = ending(index)
    for decoder, length in itertools.product(DECODERS, (3, 7)):
        seen: list[int] = []
        drafter = Oracle(whole_text(ENDING, endless), 67, length=length, hit_rate=1)
        run = short.generate(ENDING, decoder, 16, 14, drafter=drafter, on_token=seen.append, keep_logits=True)
        assert run.finish_reason == "stop"
        assert run.tokens == seen == endless.tokens[: index + 1]
        assert_same_bits(run.logits, endless.logits[: index + 1])


def test_end_of_text_as_the_roots_bonus(engine: Engine, ending: Callable[[int], Engine]) -> None:
    drafter = Fixed(np.full((3, 2), -np.inf), np.zeros((3, 2), int))
    run = ending(3).generate(ENDING, "ddtree", 16, 14, drafter=drafter)
    assert (len(run.tokens), run.finish_reason) == (4, "stop")
    assert run.rounds == [Round(0, 0)] * 4


def test_prompt_with_end_of_text_goes_on(engine: Engine, tmp_path: Path) -> None:
    stopping = Engine.load(build(tmp_path / "m.kdtr", tiny_config(eos_token_ids=(60, 3)), SEED).path)
    expected = engine.generate([5, 60, 3], "ar", max_new_tokens=5, keep_logits=True)
    assert not {60, 3} & set(expected.tokens)
    for decoder in DECODERS:
        assert_same_generation(
            stopping.generate([5, 60, 3], decoder, max_new_tokens=5, keep_logits=True),
            expected,
        )


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 8, 9])
def test_max_new_tokens_holds_when_more_would_be_accepted(
    engine: Engine, plain: dict[int, Generation], max_new_tokens: int
) -> None:
    seen: list[int] = []
    drafter = Oracle(whole_text(random_prompt(61), plain[61]), 67, length=3, hit_rate=1)
    run = engine.generate(
        random_prompt(61), "ddtree", 16, max_new_tokens, drafter=drafter, on_token=seen.append, keep_logits=True
    )
    assert run.tokens == seen == plain[61].tokens[:max_new_tokens]
    assert_same_bits(run.logits, plain[61].logits[:max_new_tokens])
    assert run.finish_reason == "length"
    assert run.target_forwards == -(-max_new_tokens // 4)


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("decoder", DECODERS)
def test_capacity_ends_a_text_inside_a_tree(
    built: Built, plain: dict[int, Generation], decoder: str, room: int
) -> None:
    """``room`` tokens fit; with 1, the prompt is one short of the capacity."""
    prompt, expected = random_prompt(61), plain[61]
    engine = Engine.load(built.path, capacity=61 + room)
    drafter = Oracle(whole_text(prompt, expected), 67, length=12, hit_rate=0.9)
    run = engine.generate(prompt, decoder, 16, 500, drafter=drafter, keep_logits=True)
    assert run.tokens == expected.tokens[:room]
    assert run.finish_reason == "capacity"
    assert_same_bits(run.logits, expected.logits[:room])
    assert engine.generate(prompt, decoder, 16, room, drafter=drafter).finish_reason == "length"


def test_end_of_text_on_the_last_row_is_a_stop(engine: Engine, tmp_path: Path) -> None:
    last = engine.generate(ENDING, "ar", max_new_tokens=4).tokens[-1]
    path = build(tmp_path / "m.kdtr", tiny_config(eos_token_ids=(last,)), SEED).path
    for decoder in DECODERS:
        run = Engine.load(path, capacity=34).generate(ENDING, decoder, max_new_tokens=50)
        assert (run.tokens[-1], run.finish_reason) == (last, "stop")


def test_capacity_is_the_models_by_default(tmp_path: Path) -> None:
    path = build(tmp_path / "m.kdtr", tiny_config(max_position_embeddings=12)).path
    run = Engine.load(path).generate(PROMPT, max_new_tokens=100)
    assert (len(run.tokens), run.finish_reason) == (6, "capacity")


# ---- bad input -------------------------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[object, str]] = {
    "empty": ([], "an empty prompt, expected 1 token or more"),
    "2-D": ([[1, 2]], "prompt of shape [1, 2], expected a list"),
    "ragged": ([[1, 2], [3]], "prompt [[1, 2], [3]], expected a list of tokens"),
    "a number": (7, "prompt of shape [], expected a list"),
    "None": (None, "prompt of shape [], expected a list"),
    "floats": ([1.0, 2.0], "prompt of dtype float64, expected whole numbers"),
    "booleans": ([True], "prompt of dtype bool, expected whole numbers"),
    "strings": (["a"], "prompt of dtype <U1, expected whole numbers"),
    "too large": ([1, 67], "token ids 1..67, expected 0 to 66"),
    "negative": ([-1, 5], "token ids -1..5, expected 0 to 66"),
    "beyond int64": ([2**70], "prompt of dtype object, expected whole numbers"),
    "as long as the capacity": ([1] * 1024, "prompt of 1024 tokens, expected fewer than 1024"),
    "text without a tokenizer": ("text", "names no tokenizer: give the prompt as token ids"),
}
BAD_ARGUMENTS: list[tuple[str, object, str]] = [
    ("decoder", "greedy", "decoder='greedy', expected one of ar, chain, ddtree"),
    ("decoder", None, "decoder=None, expected one of"),
    ("node_budget", -1, "node_budget=-1, expected a whole number from 0 to 1024"),
    ("node_budget", 1025, "node_budget=1025, expected"),
    ("node_budget", 2.5, "node_budget=2.5, expected a whole number"),
    ("node_budget", "16", "node_budget='16', expected a whole number"),
    ("max_new_tokens", 0, "max_new_tokens=0, expected a whole number from 1"),
    ("max_new_tokens", 2.5, "max_new_tokens=2.5, expected a whole number"),
    ("max_new_tokens", None, "max_new_tokens=None, expected a whole number"),
    ("temperature", -0.5, "temperature=-0.5, expected 0, or a finite number from 1e-06"),
    ("temperature", float("nan"), "temperature=nan, expected 0, or a finite number"),
    ("temperature", float("inf"), "temperature=inf, expected 0, or a finite number"),
    ("temperature", 1e-310, "temperature=1e-310, expected 0, or a finite number from 1e-06"),
    ("temperature", "1", "temperature='1', expected 0, or a finite number"),
    ("seed", -1, "seed=-1, expected a whole number from 0 to 18446744073709551615"),
    ("seed", 2**64, "seed=18446744073709551616, expected"),
    ("seed", 1.5, "seed=1.5, expected a whole number"),
    ("top_k", -1, "top_k=-1, expected a whole number from 0"),
    ("top_k", 2.0, "top_k=2.0, expected a whole number from 0"),
    ("top_k", None, "top_k=None, expected a whole number from 0"),
    ("top_p", 0.0, "top_p=0.0, expected a number above 0 and at most 1"),
    ("top_p", 1.5, "top_p=1.5, expected a number above 0"),
    ("top_p", float("nan"), "top_p=nan, expected a number above 0"),
    ("top_p", "0.9", "top_p='0.9', expected a number above 0"),
]
BAD_LOADS: list[tuple[str, object, str]] = [
    ("device", "tpu", "device='tpu', expected one of auto, cuda, cpu, emulated"),
    ("device", None, "device=None, expected one of auto, cuda, cpu, emulated"),
    ("capacity", 1, "capacity=1, expected 2 to max_position_embeddings=1024"),
    ("capacity", -4, "capacity=-4, expected 2 to"),
    ("capacity", 1025, "capacity=1025, expected 2 to"),
    ("capacity", 2.5, "capacity=2.5, expected 2 to"),
    ("capacity", "64", "capacity=64, expected 2 to"),
    ("capacity", float("nan"), "capacity=nan, expected 2 to"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts_are_named(engine: Engine, prompt: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(engine: Engine, name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^generate: {re.escape(message)}"):
        engine.generate(PROMPT, **{name: value})


@pytest.mark.parametrize(("name", "value", "message"), BAD_LOADS)
def test_bad_loads_are_named(built: Built, name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Engine.load: {re.escape(message)}"):
        Engine.load(built.path, **{name: value})


def test_missing_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nothing\.kdtr: no such file"):
        Engine.load(tmp_path / "nothing.kdtr")


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
def test_any_whole_numbers_are_a_prompt(engine: Engine, dtype: type) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=4).tokens
    assert engine.generate(np.array(PROMPT, dtype), max_new_tokens=4).tokens == expected
    assert engine.generate(tuple(PROMPT), max_new_tokens=np.int64(4), node_budget=np.int32(3)).tokens == expected


BAD_DRAFTS: dict[str, tuple[np.ndarray, np.ndarray, str]] = {
    "NaN": (np.full((2, 2), np.nan), np.zeros((2, 2), int), "log_probs hold NaN"),
    "above 0": (np.full((2, 2), 0.5), np.zeros((2, 2), int), "log_probs reach 0.5, expected at most 0"),
    "ascending": (np.array([[-2.0, -1.0]]), np.zeros((1, 2), int), "ascend within a row"),
    "shapes": (np.full((2, 2), -1.0), np.zeros((2, 3), int), "log_probs [2, 2] and token_ids [2, 3]"),
    "vocabulary too large": (np.full((2, 2), -1.0), np.array([[1, 67], [1, 2]]), "proposed token ids 1..67"),
    "negative ids": (np.full((2, 2), -1.0), np.array([[-4, 2], [1, 2]]), "proposed token ids -4..2, expected 0 to 66"),
}


@pytest.mark.parametrize(("log_probs", "token_ids", "message"), BAD_DRAFTS.values(), ids=BAD_DRAFTS)
def test_bad_drafts_are_named(engine: Engine, log_probs: np.ndarray, token_ids: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.generate(PROMPT, drafter=Fixed(log_probs, token_ids))


def test_ids_outside_the_vocabulary_may_stand_where_there_is_no_draft(engine: Engine) -> None:
    drafter = Fixed([[-1.0, -np.inf]], np.array([[3, 9999]]))
    expected = engine.generate(PROMPT, "ar", max_new_tokens=3).tokens
    assert engine.generate(PROMPT, max_new_tokens=3, drafter=drafter).tokens == expected


def test_a_drafter_that_counts_as_false_is_used(engine: Engine) -> None:
    class Empty(Fixed):
        asked = 0

        def __len__(self) -> int:
            return 0

        def propose(self, tokens: np.ndarray) -> Proposal:
            self.asked += 1
            return super().propose(tokens)

    drafter = Empty(np.full((1, 1), -1.0), np.zeros((1, 1), int))
    engine.generate(PROMPT, max_new_tokens=3, drafter=drafter)
    assert drafter.asked > 0


# ---- one engine, many texts ------------------------------------------------------------------------------------------


def test_generations_in_a_row_are_the_same(built: Built, plain: dict[int, Generation]) -> None:
    engine = Engine.load(built.path)
    for length, decoder in [(122, "ddtree"), (2, "ar"), (61, "chain"), (122, "ar"), (1, "ddtree"), (61, "ddtree")]:
        run = engine.generate(random_prompt(length), decoder, max_new_tokens=NEW_TOKENS, keep_logits=True)
        assert_same_generation(run, plain[length])


def test_engines_inside_each_other(built: Built, engine: Engine, tmp_path: Path) -> None:
    other = Engine.load(build(tmp_path / "other.kdtr", tiny_config(n_group=1, topk_group=1), seed=9).path)
    expected = [e.generate(PROMPT, max_new_tokens=5, keep_logits=True) for e in (engine, other)]
    assert expected[0].tokens != expected[1].tokens
    inner: list[Generation] = []

    def nested(token: int) -> None:
        inner.append(other.generate(PROMPT, max_new_tokens=5, keep_logits=True))
        inner.append(engine.generate(PROMPT, max_new_tokens=5, keep_logits=True))

    outer = engine.generate(PROMPT, max_new_tokens=5, keep_logits=True, on_token=nested)
    assert_same_generation(outer, expected[0])
    for i, run in enumerate(inner):
        assert_same_generation(run, expected[1 - i % 2])
    assert len(inner) == 10


@dataclasses.dataclass
class Compared(PromptLookup):
    """Equal to others of its kind, so no dictionary takes it as a key."""

    length: int = 3
    width: int = 2
    longest_match: int = 4


def test_a_drafter_need_not_be_hashable(built: Built, plain: dict[int, Generation]) -> None:
    engine, drafter = Engine.load(built.path), Compared()
    with pytest.raises(TypeError):
        hash(drafter)
    for _ in range(3):
        run = engine.generate(random_prompt(61), max_new_tokens=NEW_TOKENS, drafter=drafter, keep_logits=True)
        assert_same_generation(run, plain[61])
    engine.drafter = drafter
    for _ in range(2):
        assert engine.generate(random_prompt(61), max_new_tokens=NEW_TOKENS).tokens == plain[61].tokens


def test_a_smaller_cache_is_freed_before_a_larger_one_is_made(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(built.path)
    engine.generate(PROMPT, "ar", max_new_tokens=3)
    (kept,) = map(weakref.ref, engine._kept)
    alive: list[bool] = []

    class Watched(engine_rounds.Rounds):
        def __init__(self, *arguments: Any) -> None:
            alive.append(kept() is not None)
            super().__init__(*arguments)

    monkeypatch.setattr(front_door, "Rounds", Watched)
    engine.generate(PROMPT, "ar", max_new_tokens=5)
    assert alive == []
    engine.generate(PROMPT, "ar", max_new_tokens=front_door.ROWS_AT_ONCE + 1)
    assert alive == [False]


def test_release_frees_what_was_kept(built: Built) -> None:
    engine = Engine.load(built.path)
    before = engine.generate(PROMPT, "ar", max_new_tokens=3).tokens
    (kept,) = map(weakref.ref, engine._kept)
    engine.release()
    assert kept() is None
    assert engine.generate(PROMPT, "ar", max_new_tokens=3).tokens == before


def test_tokens_are_streamed_round_by_round(engine: Engine, plain: dict[int, Generation]) -> None:
    events: list[tuple[str, int]] = []

    class Watched(Oracle):
        def propose(self, tokens: np.ndarray) -> Proposal:
            events.append(("propose", len(tokens) - 61))
            return super().propose(tokens)

    drafter = Watched(whole_text(random_prompt(61), plain[61]), 67, length=3, hit_rate=1)
    run = engine.generate(
        random_prompt(61), "ddtree", 16, 9, drafter=drafter, on_token=lambda token: events.append(("token", token))
    )
    first, second, third = run.tokens[:4], run.tokens[4:8], run.tokens[8:]
    assert events == [
        ("propose", 0),
        *(("token", token) for token in first),
        ("propose", 4),
        *(("token", token) for token in second),
        *(("token", token) for token in third),  # one token is left: nothing to draft
    ]
    assert all(type(token) is int for token in run.tokens)


def test_an_exception_in_on_token_leaves_the_engine_usable(built: Built, plain: dict[int, Generation]) -> None:
    engine = Engine.load(built.path)

    seen: list[int] = []

    def fail_at_third(token: int) -> None:
        seen.append(token)
        if len(seen) == 3:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        engine.generate(random_prompt(61), max_new_tokens=NEW_TOKENS, on_token=fail_at_third)
    run = engine.generate(random_prompt(61), max_new_tokens=NEW_TOKENS, keep_logits=True)
    assert_same_generation(run, plain[61])


def test_logits_are_kept_only_when_asked(engine: Engine) -> None:
    assert engine.generate(PROMPT, max_new_tokens=3).logits is None
    logits = engine.generate(PROMPT, max_new_tokens=3, keep_logits=True).logits
    assert (logits.dtype, logits.shape) == (np.float32, (3, 67))


def test_timings(engine: Engine) -> None:
    run = engine.generate(random_prompt(60), max_new_tokens=8)
    assert run.prefill_seconds > 0
    assert run.tokens_per_second == pytest.approx(8 / run.decode_seconds)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_text_prompts(tmp_path: Path) -> None:
    engine = Engine.load(build_text_model(tmp_path).path)
    from_text = engine.generate("naïve", max_new_tokens=9)
    from_ids = engine.generate(engine.tokenizer.encode("naïve").ids, max_new_tokens=9)
    assert from_text.tokens == from_ids.tokens
    assert from_text.text == from_ids.text == engine.tokenizer.decode(from_text.tokens)


def test_no_text_without_a_tokenizer(engine: Engine) -> None:
    assert engine.generate(PROMPT, max_new_tokens=2).text is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "an empty prompt"), ("\udcff\udcfe", r"prompt '\udcff\udcfe' with lone surrogates, expected Unicode")],
    ids=["empty", "surrogates"],
)
def test_bad_texts_are_named(tmp_path: Path, prompt: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine.load(build_text_model(tmp_path).path).generate(prompt)


def test_missing_or_broken_tokenizer_is_named_before_the_work(tmp_path: Path) -> None:
    path = build_text_model(tmp_path).path
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer: "):
        Engine.load(path).generate("a")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"names the tokenizer tokenizer.json, which is not beside it"):
        Engine.load(path).generate("a")
    answer = Engine.load(path).generate([1, 2], max_new_tokens=2)
    assert len(answer.tokens) == 2 and answer.text is None


def test_weights_that_a_gpu_has_no_memory_for_are_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(engine.bundle, None, engine.capacity, engine.device._replace(name="cuda"))
    monkeypatch.setattr(Device, "description", lambda device: "GPU 0")
    monkeypatch.setattr(Device, "running", lambda device: nullcontext())
    monkeypatch.setattr(Device, "bytes_free", lambda device: engine.bundle.nbytes - 1)
    monkeypatch.setattr(engine.model, "preload", lambda progress: None)
    with pytest.raises(ValueError, match=r"\.kdtr: weights of \S+ GB, more than the \S+ GB that are free on GPU 0$"):
        engine.preload()
    monkeypatch.setattr(Device, "bytes_free", lambda device: engine.bundle.nbytes)
    engine.preload()


# ---- lazy ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each stored tensor was read."""
    counts: Counter = Counter()
    read = Bundle.__getitem__

    def counting(self: Bundle, name: str) -> np.ndarray:
        counts[name] += 1
        return read(self, name)

    monkeypatch.setattr(Bundle, "__getitem__", counting)
    return counts


@pytest.mark.parametrize("tied", [False, True])
def test_only_chosen_experts_are_read_and_each_weight_once(
    tmp_path: Path, reads: Counter, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    config = tiny_config(n_routed_experts=24, num_hidden_layers=3, tie_word_embeddings=tied)
    engine = Engine.load(build(tmp_path / "m.kdtr", config).path)
    reads.clear()
    chosen: list[set[int]] = []
    route = engine_model.moe_route

    def recording(*args: object) -> tuple:
        expert_ids, weights = route(*args)
        chosen.append(set(expert_ids.ravel().tolist()))
        return expert_ids, weights

    monkeypatch.setattr(engine_model, "moe_route", recording)
    engine.generate([7, 8], "ar", max_new_tokens=2)
    per_layer = {1: set.union(*chosen[0::2]), 2: set.union(*chosen[1::2])}
    assert all(len(experts) < 24 for experts in per_layer.values())

    packed = quantized_names(config)
    used = [
        name
        for name in config.weight_shapes()
        if ".experts." not in name or int(name.split(".")[5]) in per_layer[int(name.split(".")[2])]
    ]
    stored = [part for name in used for part in ((f"{name}.qw", f"{name}.sc") if name in packed else (name,))]
    assert reads == Counter(stored)

    engine.generate([7, 8], "ar", max_new_tokens=2)
    assert reads == Counter(stored)


def test_loading_reads_no_weight(built: Built, reads: Counter) -> None:
    Engine.load(built.path)
    assert not reads


@pytest.mark.parametrize("tied", [False, True])
def test_memory_stays_within_twice_the_weights_used(tmp_path: Path, reads: Counter, tied: bool) -> None:
    config = tiny_config(
        vocab_size=1024 if tied else 2048,
        hidden_size=128,
        num_hidden_layers=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=128,
        intermediate_size=512,
        n_routed_experts=24,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    path = build(tmp_path / "m.kdtr", config).path
    tracemalloc.start()
    try:
        Engine.load(path, "cpu").generate([1, 2, 3], "ar", max_new_tokens=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    shapes = config.weight_shapes()
    used = {name.removesuffix(".qw").removesuffix(".sc") for name in reads}
    used_bytes = sum(4 * int(np.prod(shapes[name])) for name in used)
    assert len(used) < 0.8 * len(shapes)
    assert peak <= 2 * used_bytes


@pytest.mark.parametrize("kind", ["gate", "even experts"])
def test_weights_of_one_product_may_be_stored_in_two_ways(tmp_path: Path, kind: str) -> None:
    """A bundle may pack a gate and not its up projection, or every other expert; the kernels take it as NumPy does."""

    def select(name: str) -> bool:
        return (
            name.endswith("gate_proj") if kind == "gate" else ".experts." in name and int(name.split(".")[5]) % 2 == 0
        )

    path = build(tmp_path / "mixed.kdtr", tiny_config(), SEED, select=select).path
    texts = [Engine.load(path, device).generate([5, 3, 60], "ar", max_new_tokens=4) for device in ("cpu", "emulated")]
    assert texts[0].tokens == texts[1].tokens
