"""What verify says of a trained drafter, and that it sees one that strays from its specification."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import Built, build_drafter_beside, build_text_model

from kdtree_nb.engine import Engine, Oracle, dflash, weights
from kdtree_nb.golden import GoldenCase
from kdtree_nb.kernels.emulator.build import find_compiler
from kdtree_nb.kernels.launch import KernelError
from kdtree_nb.reference.model import greedy
from kdtree_nb.verify import Check, check_drafter, check_trained, verify_bundle

TEXTS = {"code": ["for i in range(9):", "x"], "prose": ["It was"]}


@pytest.fixture(scope="module", params=[0, 5], ids=["marginals", "transition head"])
def built(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Built:
    """A random target with a random drafter beside it, and held-out prompts of two domains in turn."""
    built = build_text_model(tmp_path_factory.mktemp("drafted"), eos_token_ids=(), seed=4)
    build_drafter_beside(built, transition_rank=request.param)
    prompts = [{"domain": domain, "text": text} for domain, texts in TEXTS.items() for text in texts]
    (built.path.parent / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return built


@pytest.fixture(scope="module")
def case(built: Built) -> GoldenCase:
    prompt = np.array([5, 9, 1, 44, 7], np.int32)
    return GoldenCase(prompt, *greedy(built.weights, built.config, prompt, 10))


def drafter_check(built: Built, case: GoldenCase, device: str = "cpu", dtype: str = "float32") -> Check:
    engine = Engine.load(built.path, device, dtype=dtype)
    return check_drafter(engine, engine.drafter, [case])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_drafter_is_its_specification(built: Built, case: GoldenCase, device: str) -> None:
    if device == "emulated":
        try:
            find_compiler()
        except KernelError:
            pytest.skip("no C++ compiler")
    line = str(drafter_check(built, case, device))
    pattern = r"PASS  drafter       best tokens of (\d+)/\1 rounds exact  max_abs_log_prob_diff=(\S+)  prompts=1"
    rounds, difference = re.fullmatch(pattern, line).groups()
    assert int(rounds) > 3
    assert 0 <= float(difference) < 1e-4


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_drafter_in_bfloat16_is_near_it(case: GoldenCase, tmp_path: Path, device: str) -> None:
    sizes = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    narrow = build_text_model(tmp_path, eos_token_ids=(), seed=4, **sizes)
    build_drafter_beside(narrow, head_dim=8)
    shorter = case._replace(tokens=case.tokens[:5], logits=case.logits[:5]) if device == "emulated" else case
    line = str(drafter_check(narrow, shorter, device, "bfloat16"))
    pattern = (
        r"PASS  drafter_bf16  near=(\d+)/(\d+) rounds within 0\.25 nats of float32's drafts  largest=(\S+)  "
        r"best tokens of (\d+)/\2 rounds equal  prompts=1"
    )
    near, rounds, largest, _ = re.fullmatch(pattern, line).groups()
    assert int(rounds) >= 3 and int(near) == int(rounds)
    assert 1e-3 < float(largest) <= 0.25


def test_verify_adds_a_line_for_the_drafter_and_one_for_each_domain(built: Built, case: GoldenCase) -> None:
    doing: list[str] = []
    names = [check.name for check in verify_bundle(built.path, [case], "cpu", 20, doing.append)]
    assert names == ["bundle", "model_ar", "model_chain", "model_ddtree", "drafter", "model_ddtree", "model_ddtree"]
    assert [step for step in doing if "tokens by" in step] == [
        f"{domain}: 20 tokens by {decoder}" for domain in TEXTS for decoder in ("ar", "chain", "ddtree")
    ]


class Texts:
    """An engine whose drafter knows what it will say of a text's first twelve tokens."""

    def __init__(self, built: Built, text: str, hit_rate: float) -> None:
        self.engine, self.text = Engine.load(built.path, "cpu"), text
        prompt = self.engine.tokenizer.encode(text).ids[:12]
        answer = prompt + self.engine.generate(prompt, "ar", max_new_tokens=30).tokens
        vocab_size = self.engine.config.vocab_size
        self.engine.drafter = Oracle(np.array(answer), vocab_size, length=4, width=3, hit_rate=hit_rate)

    def check(self) -> str:
        return str(check_trained(self.engine, "code", self.text, 30, lambda _: None))


def test_a_held_out_text(built: Built) -> None:
    assert Texts(built, "for i in range(9):", hit_rate=1.0).check() == (
        "PASS  model_ddtree  AR==CHAIN==DDTREE (30 tokens), greedy-exact, target_forwards: chain 6, ddtree 6  "
        "drafter=trained domain=code"
    )


def test_drafts_that_are_never_right_are_seen(built: Built) -> None:
    texts = Texts(built, "for i in range(9):", hit_rate=1.0)
    texts.engine.drafter.answer = texts.engine.drafter.answer + 1
    assert "does not hold: fewer target forwards than tokens  drafter=trained domain=code" in texts.check()


def test_rows_that_depend_on_their_number_are_seen(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, linear = Texts(built, "for i in range(9):", hit_rate=0.8), weights.linear
    monkeypatch.setattr(weights, "linear", lambda x, weight: linear(x, weight) * np.float32(1 + 1e-6 * (len(x) > 1)))
    assert texts.check().startswith("FAIL  model_ddtree  does not hold: greedy-exact  ")


def test_a_text_that_a_decoder_changes_is_seen(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(built, "for i in range(9):", hit_rate=0.8)
    generate = texts.engine.generate

    def one_token_off(prompt: list[int], decoder: str, *rest: object, **more: object) -> object:
        generation = generate(prompt, decoder, *rest, **more)
        generation.tokens[-1] ^= decoder == "ddtree"
        return generation

    monkeypatch.setattr(texts.engine, "generate", one_token_off)
    assert texts.check().startswith("FAIL  model_ddtree  does not hold: AR==CHAIN==DDTREE  ")


def test_a_flipped_byte_of_the_drafter_is_seen(built: Built, case: GoldenCase, tmp_path: Path) -> None:
    shutil.copytree(built.path.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "text.drafter.kdtr"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    check = drafter_check(built._replace(path=tmp_path / "text.kdtr"), case)
    assert not check.passed
    assert re.search(r"text\.drafter\.kdtr: tensor '.*': checksum sha256:", check.detail)


observe, block_attention, top_k = dflash._Text.observe, dflash.block_attention, dflash.top_k
rms_norm, swiglu, condition, block_write = dflash.rms_norm, dflash.swiglu, dflash.condition, dflash.block_write


def features_one_row_on(self, features):
    observe(self, np.roll(features, 1, axis=0))


def layers_swapped(self, features):
    observe(self, features[:, ::-1])


def not_rotated(projected, norms, eps, table, *cache):
    return block_write(projected, norms, eps, (table[0] * 0 + 1, table[1] * 0), *cache)


def last_of_the_block_unseen(queries, *cached):
    return block_attention(queries[:-1], *cached)[np.minimum(np.arange(len(queries)), len(queries) - 2)]


def gates_of_another_depth(log_probs, token_ids, gates, *tables):
    return condition(log_probs, token_ids, np.roll(gates, 1, axis=0), *tables)


def a_little_less_probable(logits, k):
    log_probs, token_ids = top_k(logits, k)
    return log_probs - np.float32(2e-3), token_ids


def the_second_best_first(logits, k):
    log_probs, token_ids = top_k(logits, k)
    return log_probs, token_ids[:, [1, 0, *range(2, k)]]


def the_next_best(logits, k):
    """The least of the candidates is none of the best."""
    log_probs, token_ids = top_k(logits, k + 5)
    return np.delete(log_probs, range(k - 1, k + 4), axis=1), np.delete(token_ids, range(k - 1, k + 4), axis=1)


def the_best_twice(logits, k):
    """Candidates that are as probable as any, but one of them is there twice and the last best one is not."""
    log_probs, token_ids = top_k(logits, k)
    twice = [0, *range(k - 1)]
    return log_probs[:, twice], token_ids[:, twice]


def the_last_twice(logits, k):
    log_probs, token_ids = top_k(logits, k)
    return log_probs, token_ids[:, [*range(k - 2), k - 1, k - 1]]


MUTATIONS: dict[str, tuple[object, str, Callable]] = {
    "features one row on": (dflash._Text, "observe", features_one_row_on),
    "layers swapped": (dflash._Text, "observe", layers_swapped),
    "nothing observed": (dflash._Text, "observe", lambda self, features: None),
    "the block's last row elsewhere": (dflash, "block_attention", last_of_the_block_unseen),
    "norms a little off": (dflash, "rms_norm", lambda x, weight, eps, dtype: rms_norm(x, weight, eps + 1e-2, dtype)),
    "gate and up swapped": (dflash, "swiglu", lambda x, dtype: swiglu(np.roll(x, x.shape[1] // 2, axis=1), dtype)),
    "not rotated": (dflash, "block_write", not_rotated),
    "log-probabilities off": (dflash, "top_k", a_little_less_probable),
    "the second best first": (dflash, "top_k", the_second_best_first),
    "not the best candidates": (dflash, "top_k", the_next_best),
    "the best candidate twice": (dflash, "top_k", the_best_twice),
    "the last candidate twice": (dflash, "top_k", the_last_twice),
    "gates of another depth": (dflash, "condition", gates_of_another_depth),
}


@pytest.mark.parametrize(("where", "name", "mutant"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutated_drafter_is_caught(
    built: Built, case: GoldenCase, where: object, name: str, mutant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "condition" and not Engine.load(built.path).drafter.config.transition_rank:
        pytest.skip("no transition head")
    assert hasattr(where, name)
    monkeypatch.setattr(where, name, mutant)
    assert not drafter_check(built, case).passed


UNSEEN_IN_BF16 = {"norms a little off", "log-probabilities off"}
"""Less than its roundings."""


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [pytest.param(*mutation, id=name) for name, mutation in MUTATIONS.items() if name not in UNSEEN_IN_BF16],
)
def test_a_mutated_drafter_is_caught_in_bfloat16(
    built: Built, case: GoldenCase, where: object, name: str, mutant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "condition" and not Engine.load(built.path).drafter.config.transition_rank:
        pytest.skip("no transition head")
    assert drafter_check(built, case, dtype="bfloat16").passed
    monkeypatch.setattr(where, name, mutant)
    assert not drafter_check(built, case, dtype="bfloat16").passed
