"""Rounds as a GPU runs them: steps that were recorded read the arrays of then, and write them again."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import build_drafter_beside, build_text_model

from kdtree_nb.bundle import Bundle
from kdtree_nb.engine import DFlash, Engine, PromptLookup, rounds
from kdtree_nb.engine.decode import decode
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import NO_DRAFTER
from kdtree_nb.engine.graph import Graph, bytes_of_graphs
from kdtree_nb.engine.rounds import Budget, Rounds
from kdtree_nb.kernels.choose_tokens import Sampling
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
    nbytes = 1

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments, self.result = function, arguments, None
        Recorded.made += 1

    def launch(self) -> Any:
        result = self.function(*self.arguments)
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


@pytest.mark.parametrize("kept", [0, 3, 5, 64])
def test_graphs_that_are_forgotten_change_no_token(
    on_a_gpu: Engine, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "GRAPH_BYTES", kept)
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


CUTS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9}]


def test_one_recording_serves_every_seed_and_temperature(on_a_gpu: Engine) -> None:
    """And gives each its own text, that of rounds which are not recorded."""
    engine = on_a_gpu
    with emulated():
        plain, drafting = Rounds(engine.model, NO_DRAFTER, 100), Rounds(engine.model, engine.drafter, 100)
        for of, decoder, budget in ((plain, "ar", Budget(0)), (drafting, "ddtree", Budget(3))):
            for _ in range(2):
                text_of(engine, of, decoder, budget, 0, Sampling())
        recorded, texts = Recorded.made, set()
        for seed in range(12):
            sampling = Sampling(0.5 + seed / 8, seed, **CUTS[seed % 4])
            text = text_of(engine, drafting, "ddtree", Budget(3), 0, sampling)
            assert text == text_of(engine, plain, "ar", Budget(0), 0, sampling)
            assert text == text_of(engine, Rounds(engine.model, NO_DRAFTER, 100), "chain", Budget(0), 0, sampling)
            texts.add(tuple(text))
    assert len(texts) > 10
    assert Recorded.made - recorded == 12  # of the third, whose rounds are new each time


def test_recorded_rounds_are_bounded_by_their_bytes(on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "GRAPH_BYTES", 6)
    with emulated():
        drafting = Rounds(on_a_gpu.model, on_a_gpu.drafter, 100)
        for budget in (*range(1, 9), *range(1, 9)):
            text_of(on_a_gpu, drafting, "ddtree", Budget(budget), 0, Sampling())
            assert sum(graph is not None for graph in drafting._graphs.values()) <= 6 + 3  # those of one text
    assert Recorded.made > 12


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("taps", [(), (0,)])
def test_what_the_host_does_in_a_round_is_never_recorded(on_a_gpu: Engine, budget: int, taps: tuple[int, ...]) -> None:
    """It drafts where there is a budget, and observes where it has taps: a recording would do neither."""

    class OnTheHost(PromptLookup):
        def observe(self, features: np.ndarray) -> None:
            pass

    drafter = OnTheHost()
    drafter.taps = taps
    with emulated():
        of = Rounds(on_a_gpu.model, drafter, 100)
        expected = text_of(on_a_gpu, Rounds(on_a_gpu.model, NO_DRAFTER, 100), "ar", Budget(0), 0, Sampling())
        Recorded.made = 0
        assert text_of(on_a_gpu, of, "ddtree", Budget(budget), 0, Sampling()) == expected
    recorded = [key for key, graph in of._graphs.items() if graph]
    assert recorded == ([] if taps or budget else [("verify", "ar", 1)])


# ---- memory ----------------------------------------------------------------------------------------------------------

GRAPH_BYTES = 1000


class FakeStream:
    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=lambda stream: None)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What :class:`Graph` takes of CuPy: its pools hold 1,000 bytes each, and its graphs do nothing."""

    @contextmanager
    def using_allocator(malloc: object) -> Iterator[None]:
        yield

    pool = SimpleNamespace(malloc=None, total_bytes=lambda: GRAPH_BYTES)
    cuda = SimpleNamespace(MemoryPool=lambda: pool, get_current_stream=FakeStream, using_allocator=using_allocator)
    fake = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: SimpleNamespace(used_bytes=lambda: 7))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_graph_keeps_its_arguments_and_not_what_keeps_it(cupy: SimpleNamespace, no_collector: None) -> None:
    class Owner:
        def step(self, of: np.ndarray) -> np.ndarray:
            return of + 1

    owner, of = Owner(), np.zeros(3)
    owner.graph = Graph(owner.step, of)  # type: ignore[attr-defined]
    array, alive = weakref.ref(of), weakref.ref(owner)
    del of
    assert array() is not None
    del owner
    assert alive() is None and array() is None


def test_bytes_held_are_those_of_arrays_and_of_graphs(cupy: SimpleNamespace, no_collector: None) -> None:
    device, before = Device("cuda", cupy), bytes_of_graphs()
    graphs = [Graph(np.zeros, 3) for _ in range(2)]
    assert device.bytes_held() - before == 7 + 2 * GRAPH_BYTES
    graphs.pop()
    assert device.bytes_held() - before == 7 + GRAPH_BYTES
    assert Device("cpu", np).bytes_held() == 0


def test_rounds_that_were_recorded_are_freed_without_the_collector(
    on_a_gpu: Engine, cupy: SimpleNamespace, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "Graph", Graph)
    before = bytes_of_graphs()
    with emulated():
        drafting = Rounds(on_a_gpu.model, on_a_gpu.drafter, 100)
        text_of(on_a_gpu, drafting, "ddtree", Budget(3), 0, Sampling())
    assert bytes_of_graphs() - before >= 2 * GRAPH_BYTES
    alive = weakref.ref(drafting)
    del drafting
    assert alive() is None
    assert bytes_of_graphs() == before
