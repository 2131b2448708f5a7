"""The soak, the record of a run, and speculation through the whole engine on the kernels."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import build_drafter_beside, build_text_model

from kdtree_nb.engine import DFlash, Engine, Oracle
from kdtree_nb.engine import rounds as decoding
from kdtree_nb.engine.device import Device
from kdtree_nb.golden import bundle_of, folder, load_cases
from kdtree_nb.kernels.emulator.build import find_compiler
from kdtree_nb.kernels.launch import KernelError
from kdtree_nb.record import record, recorded
from kdtree_nb.soak import soak

GOLDEN = folder() / "tiny" / "tiny-int4.golden.safetensors"


def has_compiler() -> bool:
    try:
        find_compiler()
    except KernelError:
        return False
    return True


def test_a_soak_finds_nothing_and_drafts_are_accepted() -> None:
    found = soak(Engine.load(bundle_of(GOLDEN), "cpu", capacity=40), 60, seed=3)
    assert found.rounds >= 60
    assert found.mismatches == 0
    assert found.shortened > 0


def test_a_soak_sees_an_engine_whose_rows_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = decoding.tree_accept

    def first_child(tokens, parents, targets, max_path):
        accepted = accept(tokens, parents, targets, max_path)
        return accepted if len(tokens) == 1 else accepted._replace(tokens=accepted.tokens[::-1].copy())

    monkeypatch.setattr(decoding, "tree_accept", first_child)
    assert soak(Engine.load(bundle_of(GOLDEN), "cpu", capacity=40), 60, seed=3).mismatches > 0


def test_a_soak_takes_the_trained_drafter_every_other_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_text_model(tmp_path, eos_token_ids=())
    build_drafter_beside(target)
    generate, drafters = Engine.generate, []

    def watched(engine: Engine, *arguments: object, **options: object) -> object:
        drafters.append(options.get("drafter"))
        return generate(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", watched)
    found = soak(Engine.load(target.path, "cpu", capacity=30), 1, seed=1)
    assert found.mismatches == 0
    assert sum(isinstance(drafter, DFlash) for drafter in drafters) == found.texts // 2 > 5


def test_what_is_kept_for_the_next_text_is_no_leak_and_what_stays_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read when nothing is kept, so that it tells a leak of one text from caches and graphs that may grow."""
    engine, leaked = Engine.load(bundle_of(GOLDEN), "cpu", capacity=40), [0]

    def bytes_held(device: Device) -> int:
        return leaked[0] + sum(kept.cache.rows.nbytes for kept in engine._kept)

    monkeypatch.setattr(Device, "bytes_held", bytes_held)
    found = soak(engine, 60, seed=3)
    assert (found.bytes_before, found.bytes_after) == (0, 0)
    monkeypatch.setattr(Engine, "token_ids", leaking(Engine.token_ids, leaked))
    found = soak(engine, 60, seed=3)
    assert 0 < found.bytes_before < found.bytes_after


def leaking(function: Callable, leaked: list[int]) -> Callable:
    def wrapper(*arguments: object) -> object:
        leaked[0] += 1
        return function(*arguments)

    return wrapper


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize(("decoder", "budget"), [("chain", 5), ("ddtree", 12), ("ddtree", 1)])
def test_trees_on_the_kernels_give_plain_decodings_bits(decoder: str, budget: int) -> None:
    """Padding rows, a node count that the host does not know, and the cache's end, on the emulated device."""
    case = load_cases(GOLDEN)[0]
    length = 10
    engine = Engine.load(bundle_of(GOLDEN), "emulated", capacity=len(case.prompt) + length)
    plain = engine.generate(case.prompt, "ar", max_new_tokens=50, keep_logits=True)
    assert plain.finish_reason == "capacity"
    assert plain.tokens == case.tokens[:length].tolist()
    drafter = Oracle(case.text, engine.config.vocab_size, hit_rate=0.6, seed=1)
    drafted = engine.generate(case.prompt, decoder, budget, 50, drafter=drafter, keep_logits=True)
    assert drafted.tokens == plain.tokens
    assert np.array_equal(drafted.logits, plain.logits)
    assert drafted.target_forwards < len(plain.tokens)
    assert sum(r.accepted + 1 for r in drafted.rounds) == len(drafted.tokens)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    record(tmp_path / "new" / "verify-here.json", "cpu", ["tiny.kdtr  PASS  bundle  fine"], passed=True)
    head, line = recorded(tmp_path / "new")
    assert head.startswith("verify-here.json: ")
    assert "cpu" in head
    assert "numpy" in head
    assert line == "tiny.kdtr  PASS  bundle  fine"


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no verify-\*.json in"):
        list(recorded(tmp_path))
