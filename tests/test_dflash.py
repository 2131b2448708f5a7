"""The trained drafter in the engine: after any history, its proposal is the specification's, computed from scratch."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from builders import Built, build, tiny_config, tiny_drafter_config
from helpers import assert_same_bits

from kdtree_nb.bundle import BundleError, write_bundle
from kdtree_nb.engine import Drafter, Engine, Generation, Oracle, PromptLookup
from kdtree_nb.engine.dflash import DFlash
from kdtree_nb.engine.drafter import Proposal
from kdtree_nb.reference.drafter import draft_rows
from kdtree_nb.reference.model import hidden_states
from kdtree_nb.reference.tree import tree_build

TOLERANCE = 2e-4
"""Of log-probabilities in float32, target and drafter, against float64 for both."""
TARGET = tiny_config(num_hidden_layers=3)
SEED = 1  # its texts do not fall into a loop at once
DRAFTERS: dict[str, dict] = {
    "transition": dict(),
    "int4": dict(storage="int4", num_hidden_layers=3, num_key_value_heads=4),
    "window": dict(sliding_window=5, block_size=4, target_layer_ids=(1,)),
    "window of one": dict(sliding_window=1, transition_rank=0, num_candidates=67),
    "no transition": dict(transition_rank=0, block_size=9, storage="bfloat16", mask_token_id=0),
    "block of two": dict(block_size=2, num_candidates=67, num_key_value_heads=1, target_layer_ids=(0, 1, 2)),
    "one candidate": dict(num_candidates=1, head_dim=2, sliding_window=200),
}


class Pair(NamedTuple):
    """A target and its drafter, each with the weights of the reference."""

    target: Built
    drafter: Built

    def load(self, device: str = "cpu", capacity: int | None = None) -> Engine:
        return Engine.load(self.target.path, device, capacity)


def build_pair(folder: Path, storage: str = "float32", **changes: object) -> Pair:
    """A drafter beside its target, where the engine finds it."""
    config = tiny_drafter_config(TARGET, **changes)
    target = build(folder / "tiny.kdtr", TARGET, SEED)
    return Pair(target, build(folder / "tiny.drafter.kdtr", config, SEED + 1, storage))


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), **DRAFTERS[request.param])


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("plain"))


def random_prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, TARGET.vocab_size, length)


# ---- proposals -------------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    tokens: np.ndarray
    proposal: Proposal


class Recorder(Drafter):
    """Keeps what a drafter proposes, and has the tree built of what another one does, whose paths are longer."""

    def __init__(self, inner: Drafter, instead: Drafter, kept: list[Recorded] | None = None) -> None:
        self.inner, self.instead, self.taps = inner, instead, inner.taps
        self.kept: list[Recorded] = [] if kept is None else kept

    def start(self, cache) -> "Recorder":
        return Recorder(self.inner.start(cache), self.instead, self.kept)

    def observe(self, features: np.ndarray) -> None:
        self.inner.observe(features)

    def propose(self, tokens: np.ndarray) -> Proposal:
        self.kept.append(Recorded(tokens.copy(), self.inner.propose(tokens)))
        return self.instead.propose(tokens)


class Scratch:
    """The specification of a text's proposals, in float64, from the target's hidden states of the text."""

    def __init__(self, pair: Pair, text: np.ndarray) -> None:
        self.pair, self.text = pair, text
        _, *outputs = hidden_states(pair.target.weights, pair.target.config, text, np.float64)
        self.features = np.concatenate([outputs[layer] for layer in pair.drafter.config.target_layer_ids], axis=1)

    def rows(self, tokens: int) -> np.ndarray:
        """The rows that the head reads after so many committed tokens: [block_size − 1, hidden]."""
        config, embedding = self.pair.drafter.config, self.pair.target.weights["model.embed_tokens"]
        block = [self.text[tokens - 1], *[config.mask_token_id] * (config.block_size - 1)]
        return draft_rows(self.pair.drafter.weights, config, self.features[: tokens - 1], embedding[block], np.float64)

    def check(self, recorded: Recorded) -> None:
        """Every candidate's log-probability, and that there are none better; of each child after each parent, too."""
        (tokens, (log_probs, token_ids, children)), config = recorded, self.pair.drafter.config
        np.testing.assert_array_equal(tokens, self.text[: len(tokens)])
        rows = self.rows(len(tokens))
        marginals = log_softmax(rows @ self.pair.target.weights["lm_head"].T.astype(np.float64))
        candidates = np.take_along_axis(marginals, token_ids, axis=1)
        depth_limit, width = config.block_size - 1, config.num_candidates
        assert token_ids.shape == (depth_limit, width)
        assert all(len(set(ids.tolist())) == width for ids in token_ids)
        best = -np.sort(-marginals, axis=1)[:, :width]
        np.testing.assert_allclose(candidates, best, rtol=0, atol=TOLERANCE)
        if not config.transition_rank:
            assert children is None
            np.testing.assert_allclose(log_probs, candidates, rtol=0, atol=TOLERANCE)
            return
        assert children.shape == log_probs.shape == (depth_limit, width, width)
        by_candidate = np.empty_like(log_probs)
        np.put_along_axis(by_candidate, children, log_probs, axis=2)
        np.testing.assert_allclose(by_candidate[0, 0], candidates[0], rtol=0, atol=TOLERANCE)
        for depth in range(1, depth_limit):
            expected = self.after_each_parent(rows[depth], token_ids[depth - 1], token_ids[depth], candidates[depth])
            np.testing.assert_allclose(by_candidate[depth], expected, rtol=0, atol=TOLERANCE)

    def after_each_parent(self, row, parents, children, marginal) -> np.ndarray:
        """log p(child | parent): candidates reweighted by their scores, the rest of the vocabulary as it was."""
        weights = self.pair.drafter.weights
        gate = weights["transition.gate"].astype(np.float64) @ row
        conditionals = np.empty((len(parents), len(children)))
        for i, parent in enumerate(parents):
            x = weights["transition.parent_table"][parent] + gate
            scores = weights["transition.child_table"][children] @ (x / (1 + np.exp(-x)))
            total = np.exp(marginal + scores).sum() + 1 - np.exp(marginal).sum()
            conditionals[i] = marginal + scores - np.log(total)
        return conditionals


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def histories(
    pair: Pair, engine: Engine, prompt: np.ndarray, settings: list[tuple[str, int, float]], new_tokens: int = 14
) -> Iterator[tuple[Generation, list[Recorded]]]:
    """A prompt's text, committed in paths of many lengths, and what the drafter proposed on the way."""
    plain = engine.generate(prompt, "ar", max_new_tokens=new_tokens, keep_logits=True)
    answer = np.concatenate([prompt, plain.tokens])
    length = pair.drafter.config.block_size - 1
    for seed, (decoder, budget, hit_rate) in enumerate(settings):
        recorder = Recorder(engine.drafter, Oracle(answer, TARGET.vocab_size, length, hit_rate=hit_rate, seed=seed))
        generation = engine.generate(prompt, decoder, budget, new_tokens, drafter=recorder, keep_logits=True)
        assert generation.tokens == plain.tokens
        assert_same_bits(generation.logits, plain.logits)
        assert recorder.kept
        yield generation, recorder.kept


HISTORIES = [("ddtree", 16, 0.7), ("ddtree", 40, 0.3), ("chain", 8, 0.9), ("ddtree", 1, 0.5)]


@pytest.mark.parametrize("length", [1, 2, 65, 66, 150])
def test_any_history_gives_the_specification_s_proposals(pair: Pair, length: int) -> None:
    """The prompt comes in chunks of 64 tokens; at equal texts, other histories give the same bits."""
    engine, prompt = pair.load(), random_prompt(length)
    assert isinstance(engine.drafter, DFlash)
    seen: dict[int, Proposal] = {}
    accepted: set[int] = set()
    scratch: Scratch | None = None
    for generation, kept in histories(pair, engine, prompt, HISTORIES):
        accepted |= {round.accepted for round in generation.rounds}
        scratch = scratch or Scratch(pair, np.concatenate([prompt, generation.tokens]))
        for recorded in kept:
            same = seen.setdefault(len(recorded.tokens), recorded.proposal)
            if same is recorded.proposal:
                scratch.check(recorded)
            for actual, expected in zip(recorded.proposal, same, strict=True):
                if expected is not None:
                    assert_same_bits(actual, expected)
    assert len(accepted) >= min(3, pair.drafter.config.block_size), f"paths of {accepted} alone"
    assert len(seen) >= 8


def test_any_history_in_the_emulator(pair: Pair) -> None:
    engine, prompt = pair.load("emulated"), random_prompt(6)
    for generation, kept in histories(pair, engine, prompt, HISTORIES[:1], new_tokens=7):
        scratch = Scratch(pair, np.concatenate([prompt, generation.tokens]))
        for recorded in kept:
            scratch.check(recorded)


def test_texts_of_one_engine_do_not_know_of_each_other(plain_pair: Pair) -> None:
    """One after the other, and the first once more."""
    engine, first = plain_pair.load(), None
    for seed in (0, 1, 2, 0):
        ((generation, kept),) = histories(plain_pair, engine, random_prompt(20, seed), HISTORIES[:1])
        scratch = Scratch(plain_pair, np.concatenate([random_prompt(20, seed), generation.tokens]))
        for recorded in kept:
            scratch.check(recorded)
        first = first or kept
    for again, before in zip(kept, first, strict=True):
        for actual, expected in zip(again.proposal, before.proposal, strict=True):
            assert_same_bits(actual, expected)


def test_a_window_hides_what_lies_before_it(tmp_path: Path) -> None:
    """A proposal does not move with a token outside of the window of features, though the target's states all do."""
    pair = build_pair(tmp_path, sliding_window=4)
    text = random_prompt(30)
    scratch = Scratch(pair, text)
    before = scratch.rows(30)
    for token, moves in ((24, False), (25, True), (28, True)):  # the block begins at 29: 25 to 28 are seen
        features = scratch.features.copy()
        scratch.features[token] += 1
        assert (scratch.rows(30) != before).any() == moves
        scratch.features = features


# ---- generating with it ----------------------------------------------------------------------------------------------


def check_decoders(pair: Pair, engine: Engine, budgets: list[tuple[str, int]], new_tokens: int) -> None:
    """The tokens and the bits of plain decoding; trees as large as they may be."""
    prompt = random_prompt(20)
    plain = engine.generate(prompt, "ar", max_new_tokens=new_tokens, keep_logits=True)
    depth_limit, width = min(pair.drafter.config.block_size, new_tokens) - 1, pair.drafter.config.num_candidates
    for decoder, budget in budgets:
        run = engine.generate(prompt, decoder, budget, new_tokens, keep_logits=True)
        assert run.tokens == plain.tokens
        assert_same_bits(run.logits, plain.logits)
        prefixes = depth_limit if decoder == "chain" else sum(width**depth for depth in range(1, depth_limit + 1))
        assert run.rounds[0].drafted == min(budget, prefixes)


def test_every_decoder_gives_the_same_bits(pair: Pair) -> None:
    check_decoders(pair, pair.load(), [("chain", 16), *(("ddtree", budget) for budget in (0, 1, 16, 64))], 12)


def test_every_decoder_gives_the_same_bits_in_the_emulator(plain_pair: Pair) -> None:
    check_decoders(plain_pair, plain_pair.load("emulated"), [("chain", 16), ("ddtree", 16)], 6)


def test_samples_are_plain_decoding_s(plain_pair: Pair) -> None:
    engine = plain_pair.load()
    for seed in range(3):
        runs = [engine.generate(random_prompt(9), d, 24, 12, 0.9, seed).tokens for d in ("ar", "chain", "ddtree")]
        assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("device", "room"), [*(("cpu", room) for room in (1, 2, 3, 6, 7)), ("emulated", 1), ("emulated", 3)]
)
def test_up_to_the_capacity(plain_pair: Pair, device: str, room: int) -> None:
    """The block reaches beyond the last position that there is."""
    engine, prompt = plain_pair.load(device, capacity=24), random_prompt(24 - room)
    plain = engine.generate(prompt, "ar", max_new_tokens=50)
    for decoder in ("chain", "ddtree"):
        run = engine.generate(prompt, decoder, 16, 50)
        assert (run.tokens, run.finish_reason) == (plain.tokens, "capacity")
        assert len(run.tokens) == room


def test_a_drafter_that_is_right(plain_pair: Pair, tmp_path: Path) -> None:
    """A target that always says its last token + 1, and a drafter that learnt it by its transition head alone."""
    vocab, hidden, rank = 32, 32, 32
    config = tiny_config(vocab_size=vocab, hidden_size=hidden, q_lora_rank=None)
    weights = {name: np.zeros(shape, np.float32) for name, shape in config.weight_shapes().items()}
    weights["model.embed_tokens"] = np.eye(vocab, dtype=np.float32)
    weights["model.norm"] += 1
    weights["lm_head"] = np.roll(np.eye(vocab, dtype=np.float32), 1, axis=0)
    write_bundle(tmp_path / "m.kdtr", config, weights)
    drafter = tiny_drafter_config(config, transition_rank=rank, num_candidates=vocab, block_size=5)
    weights = {name: np.zeros(shape, np.float32) for name, shape in drafter.weight_shapes().items()}
    weights["norm"] += 1
    weights["transition.parent_table"] = 40 * np.eye(vocab, dtype=np.float32)
    weights["transition.child_table"] = np.roll(np.eye(vocab, dtype=np.float32), 1, axis=0)
    write_bundle(tmp_path / "m.drafter.kdtr", drafter, weights)
    run = Engine.load(tmp_path / "m.kdtr").generate([7], "ddtree", vocab * 5, 20)
    assert run.tokens == [*range(8, 28)]
    assert [round.accepted for round in run.rounds] == [4] * 4


# ---- bundles ---------------------------------------------------------------------------------------------------------


def test_a_drafter_is_found_beside_its_model(plain_pair: Pair, tmp_path: Path) -> None:
    for file in plain_pair.target.path.parent.iterdir():
        shutil.copy(file, tmp_path)
    for path in (tmp_path, tmp_path / "tiny.kdtr"):
        engine = Engine.load(path)
        assert engine.bundle.path == tmp_path / "tiny.kdtr"
        assert isinstance(engine.drafter, DFlash) and engine.drafter.config == plain_pair.drafter.config
        assert repr(engine.drafter).startswith("DFlash(DrafterConfig(")
    (tmp_path / "tiny.drafter.kdtr").rename(tmp_path / "other.drafter.kdtr")
    assert isinstance(Engine.load(tmp_path).drafter, PromptLookup)
    assert isinstance(Engine.load(tmp_path, drafter=tmp_path / "other.drafter.kdtr").drafter, DFlash)


@pytest.mark.parametrize("limit", [None, 20_000])
def test_a_drafter_in_shards_and_a_model_in_shards(plain_pair: Pair, tmp_path: Path, limit: int | None) -> None:
    """Neither is taken for the other in their folder."""
    target, drafter = plain_pair
    write_bundle(tmp_path / "m.drafter.kdtr", drafter.config, drafter.weights, max_shard_bytes=9000)
    assert (tmp_path / "m.drafter.kdtr.index.json").exists()
    written = write_bundle(tmp_path / "m.kdtr", target.config, target.weights, max_shard_bytes=limit)
    for path in (tmp_path, written, tmp_path / "m.kdtr"):
        engine = Engine.load(path)
        assert engine.bundle.path == written
        assert isinstance(engine.drafter, DFlash)
    assert engine.generate(random_prompt(5), max_new_tokens=4).tokens == (
        engine.generate(random_prompt(5), "ar", max_new_tokens=4).tokens
    )


def test_each_in_the_other_s_place(plain_pair: Pair) -> None:
    target, drafter = plain_pair.target.path, plain_pair.drafter.path
    with pytest.raises(ValueError, match=r"tiny\.drafter\.kdtr holds a drafter, expected the model that it drafts for"):
        Engine.load(drafter)
    with pytest.raises(ValueError, match=r"tiny\.kdtr holds a model, expected a drafter"):
        Engine.load(target, drafter=target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=68), "the drafter has vocab_size=68, its target 67"),
        (dict(hidden_size=64), "the drafter has hidden_size=64, its target 32"),
        (dict(target_layer_ids=(0, 3)), r"the drafter reads layers \[0, 3\], its target has 3"),
    ],
)
def test_a_drafter_of_another_target(plain_pair: Pair, tmp_path: Path, changes: dict, message: str) -> None:
    config = dataclasses.replace(plain_pair.drafter.config, **changes)
    other = build(tmp_path / "other.kdtr", config, storage="float32")
    with pytest.raises(ValueError, match=rf"other\.kdtr: {message}"):
        Engine.load(plain_pair.target.path, drafter=other.path)


def test_a_drafter_that_is_not_there_or_broken(plain_pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"none\.drafter\.kdtr: no such file"):
        Engine.load(plain_pair.target.path, drafter=tmp_path / "none.drafter.kdtr")
    shutil.copy(plain_pair.target.path, tmp_path / "tiny.kdtr")
    whole = plain_pair.drafter.path.read_bytes()
    for broken in (whole[:-10], whole[:100], b"", whole.replace(b"block_size", b"block_sise")):
        (tmp_path / "tiny.drafter.kdtr").write_bytes(broken)
        with pytest.raises(BundleError, match=r"tiny\.drafter\.kdtr: "):
            Engine.load(tmp_path / "tiny.kdtr")
    (tmp_path / "tiny.drafter.kdtr").unlink()
    assert isinstance(Engine.load(tmp_path / "tiny.kdtr").drafter, PromptLookup)


def test_a_tree_of_what_it_proposes(plain_pair: Pair) -> None:
    """Conditionals that the specification of trees takes, at every round."""
    engine = plain_pair.load()
    recorder = Recorder(engine.drafter, PromptLookup())
    engine.generate(random_prompt(20), max_new_tokens=6, drafter=recorder)
    for tokens, (log_probs, token_ids, children) in recorder.kept:
        tree = tree_build(int(tokens[-1]), log_probs, token_ids, 32, children)
        assert tree.num_nodes == 33
