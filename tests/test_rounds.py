"""Rounds as a GPU runs them: steps that were recorded read the arrays of then, and write them again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import build_drafter_beside, build_text_model

from kdtree_nb.bundle import Bundle
from kdtree_nb.engine import DFlash, Engine, rounds
from kdtree_nb.engine.decode import decode
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import NO_DRAFTER
from kdtree_nb.engine.rounds import Budget, Rounds, Sampling
from kdtree_nb.kernels.emulator.build import find_compiler
from kdtree_nb.kernels.launch import KernelError, emulated
from kdtree_nb.reference.tree import DraftTree


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except KernelError:
        return False


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


def arrays_of(result: Any) -> list[np.ndarray]:
    if isinstance(result, np.ndarray):
        return [result]
    if isinstance(result, DraftTree):
        return arrays_of((result.tokens, result.parents, result.depths, result.scores, result.num_nodes))
    return [array for part in result for array in arrays_of(part)] if isinstance(result, tuple) else []


class Recorded:
    """A CUDA graph without CUDA: what the function closed over stays, and results go to the arrays of the recording."""

    made = 0

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.result = function, None
        Recorded.made += 1

    def launch(self) -> Any:
        result = self.function()
        if self.result is None:
            self.result = result
        for kept, new in zip(arrays_of(self.result), arrays_of(result), strict=True):
            kept[...] = new
        return self.result


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose device says that it is a GPU; its kernels are emulated, its graphs are :class:`Recorded`."""
    target = build_text_model(tmp_path, eos_token_ids=())
    drafter = build_drafter_beside(target)
    monkeypatch.setattr(rounds, "Graph", Recorded)
    monkeypatch.setattr(Recorded, "made", 0)
    return Engine(Bundle.open(target.path), Bundle.open(drafter.path), 60, Device("cuda", np))


def text_of(engine: Engine, of: Rounds, decoder: str, budget: Budget, seed: int, sampling: Sampling) -> list[int]:
    prompt = np.random.default_rng(seed).integers(0, engine.config.vocab_size, 5 + seed % 7, np.int32)
    return decode(of, prompt, 10, decoder, budget, sampling).tokens


@pytest.mark.parametrize("kept", [3, 5, 64])
def test_graphs_that_are_forgotten_change_no_token(
    on_a_gpu: Engine, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_GRAPHS", kept)
    engine, random = on_a_gpu, np.random.default_rng(kept)
    assert isinstance(engine.drafter, DFlash)
    with emulated():
        plain = Rounds(engine.model, NO_DRAFTER, 100)
        drafting = Rounds(engine.model, engine.drafter, 100)
        costs = np.linspace(1, 2, 9).astype(np.float32)
        for seed in range(6):
            sampling = Sampling(*[(0.0, 0), (0.9, int(random.integers(3)))][seed % 2])
            budget = [Budget(int(random.integers(1, 6))), Budget(8, costs)][seed % 3 == 0]
            decoder = "chain" if seed % 4 == 1 else "ddtree"
            expected = text_of(engine, plain, "ar", Budget(0), seed, sampling)
            assert text_of(engine, drafting, decoder, budget, seed, sampling) == expected
    assert Recorded.made > 5
