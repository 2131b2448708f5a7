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
from kdtree_nb.engine import DFlash, Drafter, Engine, PromptLookup, Proposal, Round, rounds
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.decode import decode
from kdtree_nb.engine.device import Device, Mailbox
from kdtree_nb.engine.drafter import NO_DRAFTER
from kdtree_nb.engine.graph import Graph, bytes_of_graphs
from kdtree_nb.engine.model import Model
from kdtree_nb.engine.rounds import Budget, Outcome, Report, Rounds
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
        return arrays_of((result.tokens, result.parents, result.depths, result.scores, result.num_nodes, result.paying))
    return [array for part in result for array in arrays_of(part)] if isinstance(result, tuple) else []


class Recorded:
    """A CUDA graph without CUDA: what the function closed over stays, and results go to the arrays of the recording."""

    made = 0
    nbytes = 1

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments, self.result = function, arguments, None
        self.launches = 0
        Recorded.made += 1

    def launch(self) -> Any:
        self.launches += 1
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


def test_a_recorded_prompt_is_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 rows, the last one padded where it fits: cache, drafter and text are as without recording."""
    target = build_text_model(tmp_path, eos_token_ids=())
    drafter = build_drafter_beside(target)
    monkeypatch.setattr(rounds, "Graph", Recorded)
    engine = Engine(Bundle.open(target.path), Bundle.open(drafter.path), 200, Device("cuda", np))
    random, chunks = np.random.default_rng(0), 0
    with emulated():
        recorded = Rounds(engine.model, engine.drafter, 230)
        for length in (1, 2, 64, 65, 66, 129, 131, 192, 194, 3):
            prompt = random.integers(0, engine.config.vocab_size, length, np.int32)
            plain = Rounds(engine.model, engine.drafter, 230)
            monkeypatch.setattr(plain, "unattended", lambda drafts: False)
            for of in (recorded, plain):
                of.begin(prompt, 5, Sampling())
            assert recorded.cache.length[0] == plain.cache.length[0] == length - 1
            for found, expected in (
                (recorded.cache.rows, plain.cache.rows),
                (recorded.drafter._keys, plain.drafter._keys),  # type: ignore[attr-defined]
                (recorded.drafter._values, plain.drafter._values),  # type: ignore[attr-defined]
            ):
                np.testing.assert_array_equal(found[:, : length - 1], expected[:, : length - 1])
            texts = [decode(of, prompt, 5, "ddtree", Budget(3), Sampling()).tokens for of in (recorded, plain)]
            assert texts[0] == texts[1]
            chunks += 2 * min(-(-(length - 1) // 64), 3)  # a fourth would end behind the last position
    graph = recorded._graphs[("prompt",)]
    assert isinstance(graph, Recorded)
    assert graph.launches == chunks - 1


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


@pytest.mark.parametrize(("decoder", "nodes"), [("ar", 0), ("ddtree", 0), ("ddtree", 3)])
def test_a_text_of_the_kind_before_records_nothing(
    on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch, decoder: str, nodes: int
) -> None:
    """However few bytes recorded rounds may hold."""
    monkeypatch.setattr(rounds, "GRAPH_BYTES", 0)
    with emulated():
        of, made = Rounds(on_a_gpu.model, NO_DRAFTER if decoder == "ar" else on_a_gpu.drafter, 100), []
        for seed in range(4):
            text_of(on_a_gpu, of, decoder, Budget(nodes), seed, Sampling())
            made.append(Recorded.made)
    assert made[1] == made[2] == made[3] > 0


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("taps", [(), (0,)])
def test_what_the_host_does_in_a_round_is_never_recorded(on_a_gpu: Engine, budget: int, taps: tuple[int, ...]) -> None:
    """It drafts where there is a budget, and observes where it has taps: a recording would do neither.

    A pass that verifies what the host has drafted is recorded, and finds each round's tree in the same place.
    """

    class OnTheHost(PromptLookup):
        def observe(self, features: np.ndarray) -> None:
            pass

    drafter = OnTheHost()
    drafter.taps = taps
    prompt = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], np.int32)  # there is something to look up
    with emulated():
        of, plain = Rounds(on_a_gpu.model, drafter, 100), Rounds(on_a_gpu.model, NO_DRAFTER, 100)
        expected = decode(plain, prompt, 20, "ar", Budget(0), Sampling()).tokens
        for _ in range(3):
            assert decode(of, prompt, 20, "ddtree", Budget(budget), Sampling()).tokens == expected
    recorded = {key for key, graph in of._graphs.items() if graph}
    assert all(key[0] == "verify" for key in recorded)
    assert bool(recorded) == (not taps)
    assert budget == 0 or taps or max(rows for _, _, rows, _ in recorded) > 1


def test_a_budget_with_costs_is_recorded_before_the_text(on_a_gpu: Engine) -> None:
    budget = Budget(8, np.linspace(1, 2, 9).astype(np.float32))
    with emulated():
        drafting, plain = Rounds(on_a_gpu.model, on_a_gpu.drafter, 100), Rounds(on_a_gpu.model, NO_DRAFTER, 100)
        drafting.record("ddtree", budget)
        made = Recorded.made
        assert made > 1
        drafting.record("ddtree", budget)
        assert Recorded.made == made
        for seed in range(4):
            expected = text_of(on_a_gpu, plain, "ar", Budget(0), seed, Sampling())
            assert text_of(on_a_gpu, drafting, "ddtree", budget, seed, Sampling()) == expected


@pytest.mark.parametrize("nodes", [8, 10], ids=["9 rows, a pass", "11 rows, the last of a pass of 13"])
def test_a_text_records_nothing_that_was_recorded_before_it(
    on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """However many bytes that is, and the largest pass as well."""
    monkeypatch.setattr(rounds, "GRAPH_BYTES", 1)
    budget = Budget(nodes, np.linspace(1, 2, nodes + 1).astype(np.float32))
    with emulated():
        drafting = Rounds(on_a_gpu.model, on_a_gpu.drafter, 100)
        for seed in (0, 1):  # the last token's pass, which drafts nothing, is recorded in a text
            text_of(on_a_gpu, drafting, "ddtree", budget, seed, Sampling())
        made = Recorded.made
        monkeypatch.setattr(rounds, "FIRST_PASS", 65)  # the largest that there is
        text_of(on_a_gpu, drafting, "ddtree", budget, 2, Sampling())
    assert Recorded.made == made > 1


# ---- rounds that are launched before the last one was read -----------------------------------------------------------

PROMPT = np.arange(40, 49, dtype=np.int32)
LAUNCHED, READ = "launched", "read"


class Knowing(Drafter):
    """Drafts on the device, four tokens of a text that it knows, two of each; some are wrong."""

    on_device = True

    def __init__(self, answer: list[int]) -> None:
        self.answer = np.array([*answer, *range(5)], np.int32)

    def start(self, cache: LatentCache) -> Drafter:
        self.length = cache.length
        return self

    def propose_after(self, root: np.ndarray) -> Proposal:
        at = int(self.length[0]) + 1 + np.arange(4)
        right = self.answer[np.minimum(at, len(self.answer) - 1)] ^ (at % 7 == 0)
        return Proposal(np.full((4, 2), -0.7, np.float32), np.stack([right, right ^ 2], axis=1).astype(np.int32))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does, in order. Every pass is seen to stay within the cache and the model's table of positions."""
    seen: list[str] = []
    run, read, forward = Rounds.run, Rounds.read, Model.forward

    def launched(of: Rounds, *arguments: Any) -> Outcome:
        seen.append(LAUNCHED)
        return run(of, *arguments)

    def was_read(of: Rounds, outcome: Outcome) -> Report:
        seen.append(READ)
        return read(of, outcome)

    def bounded(
        model: Model, tokens: np.ndarray, parents: Any, depths: Any, cache: Any, *rest: Any, **more: Any
    ) -> Any:
        assert cache.length[0] + len(tokens) <= cache.rows.shape[1]
        assert cache.length[0] + max(0, depths.max()) < len(model._rope_table[0])
        return forward(model, tokens, parents, depths, cache, *rest, **more)

    monkeypatch.setattr(Rounds, "run", launched)
    monkeypatch.setattr(Rounds, "read", was_read)
    monkeypatch.setattr(Model, "forward", bounded)
    return seen


@pytest.mark.parametrize("decoder", ["ar", "chain", "ddtree"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 4)], ids=["greedy", "sampled"])
def test_the_next_round_is_launched_before_a_round_is_read(
    on_a_gpu: Engine, events: list[str], decoder: str, sampling: Sampling
) -> None:
    """Not where somebody watches. Text and rounds are the same; one round more may run, and is not counted."""
    beyond = 0
    budget = Budget(0 if decoder == "ar" else 5)
    with emulated():
        of = Rounds(on_a_gpu.model, NO_DRAFTER, 100)
        expected = decode(of, PROMPT, 14, "ar", Budget(0), sampling).tokens
        drafter = NO_DRAFTER if decoder == "ar" else Knowing([*PROMPT, *expected])
        for limit in (1, 2, 3, 8, 14):
            engine = Engine(on_a_gpu.bundle, None, len(PROMPT) + limit, on_a_gpu.device)  # no position to spare
            of = Rounds(engine.model, drafter, len(PROMPT) + limit + budget.nodes)  # and no row
            rounds_of: list[list[Round]] = []
            for watch in (lambda tree, path: None, None, None, None):
                events.clear()
                text = decode(of, PROMPT, limit, decoder, budget, sampling, on_round=watch)
                assert text.tokens == expected[:limit]
                rounds_of.append(text.rounds)
                launched, count = events.count(LAUNCHED), len(text.rounds)
                assert events.count(READ) == count
                if watch:
                    assert events == [LAUNCHED, READ] * count
                else:
                    in_turn = [LAUNCHED] + [LAUNCHED, READ] * (launched - 1) + [READ] * (count - launched + 1)
                    assert events == in_turn and 0 <= launched - count <= 1
                beyond += launched - count
            assert rounds_of == [rounds_of[0]] * 4
            assert of.cache.length[0] <= of.rows
    accepted = max(round_.accepted for round_ in rounds_of[0])
    assert accepted == {"ar": 0, "chain": 4, "ddtree": 2}[decoder]
    assert (beyond > 0) == (decoder != "ar")


@pytest.mark.parametrize("decoder", ["ar", "ddtree"])
def test_a_round_that_runs_beyond_an_end_of_text_is_dropped(
    on_a_gpu: Engine, events: list[str], decoder: str, tmp_path: Path
) -> None:
    with emulated():
        endless = decode(Rounds(on_a_gpu.model, NO_DRAFTER, 100), PROMPT, 14, "ar", Budget(0), Sampling()).tokens
        last = next(i for i in range(5, 14) if endless[i] not in endless[:i])
        ending = build_text_model(tmp_path / "ending", eos_token_ids=(endless[last],))
        engine = Engine(Bundle.open(ending.path), None, 60, Device("cuda", np))
        drafter = NO_DRAFTER if decoder == "ar" else Knowing([*PROMPT, *endless])
        of = Rounds(engine.model, drafter, 100)
        for _ in range(3):
            events.clear()
            seen: list[int] = []
            text = decode(of, PROMPT, 30, decoder, Budget(5), Sampling(), seen.append)
            assert (text.tokens, text.finish_reason) == (endless[: last + 1], "stop")
            assert seen == text.tokens
            assert sum(round_.accepted + 1 for round_ in text.rounds) == last + 1
            assert events.count(LAUNCHED) == len(text.rounds) + 1


def test_an_automatic_budget_s_text_is_the_same_launched_ahead(on_a_gpu: Engine, events: list[str]) -> None:
    costs = np.linspace(1, 1.5, 33).astype(np.float32)
    with emulated():
        expected = text_of(on_a_gpu, Rounds(on_a_gpu.model, NO_DRAFTER, 100), "ar", Budget(0), 3, Sampling())
        for drafter in (on_a_gpu.drafter, Knowing(expected)):
            of = Rounds(on_a_gpu.model, drafter, 5 + 3 + 10 + 32)
            for _ in range(4):
                assert text_of(on_a_gpu, of, "ddtree", Budget(32, costs), 3, Sampling()) == expected


def test_a_host_s_drafter_is_never_ahead_of_the_text(on_a_gpu: Engine, events: list[str]) -> None:
    with emulated():
        of = Rounds(on_a_gpu.model, PromptLookup(), 100)
        text = decode(of, PROMPT, 9, "ddtree", Budget(3), Sampling())
    assert events == [LAUNCHED, READ] * len(text.rounds)


def test_a_pass_has_the_size_that_pays_on_average(on_a_gpu: Engine) -> None:
    of = Rounds(on_a_gpu.model, NO_DRAFTER, 100)
    columns = [np.zeros(65, np.int32)] * 3
    tree = DraftTree(*columns, np.zeros(65, np.float32), np.array([65], np.int32), np.array([65], np.int32))

    def size_after(*paid: int) -> int:
        of._paid = 0.0
        for nodes in paid:
            assert of.read(Outcome(tree, tree.scores, lambda nodes=nodes: np.array([65, nodes, 1, 7, 0]))) == (
                65,
                nodes,
                [7],
                [0],
            )
        return len(of._cut(tree, Budget(64, np.ones(65, np.float32)), fixed=True).tokens)

    assert size_after() == 25
    assert [size_after(nodes) for nodes in (1, 2, 5, 7, 8, 20, 64, 65)] == [1, 2, 5, 9, 9, 17, 65, 65]
    assert size_after(*[8] * 9, 65) == 25  # not 65
    assert size_after(*[8] * 9, 65, 8, 8) == 9
    assert size_after(*[8] * 9, 65, 65, 65) == 49


class Late:
    """A GPU that copies nothing until somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.cuda = SimpleNamespace(alloc_pinned_memory=bytearray, Event=self.event)

    def event(self, disable_timing: bool) -> SimpleNamespace:
        assert disable_timing
        return SimpleNamespace(record=lambda: None, synchronize=self.catch_up)

    def asnumpy(self, array: np.ndarray, out: np.ndarray, blocking: bool) -> None:
        assert not blocking
        then = array.copy()
        self.waiting.append(lambda: np.copyto(out, then))

    def catch_up(self) -> None:
        for copy in self.waiting:
            copy()
        self.waiting.clear()


def test_a_mailbox_holds_what_was_sent_until_the_second_one_after_it() -> None:
    gpu = Late()
    mailbox, array = Mailbox(Device("cuda", gpu), 9), np.arange(4, dtype=np.int32)
    first = mailbox.send(array)
    array += 10
    second = mailbox.send(array)
    array[:] = 0
    assert gpu.waiting
    assert first().tolist() == [0, 1, 2, 3]
    third = mailbox.send(array[:2])
    assert second().tolist() == [10, 11, 12, 13]
    assert third().tolist() == [0, 0]
    on_a_cpu = Mailbox(Device("cpu", np), 9).send(array)
    array += 1
    assert on_a_cpu().tolist() == [0] * 4


def test_a_mailbox_waits_for_what_is_on_its_way_before_its_memory_goes_to_others() -> None:
    gpu = Late()
    mailbox = Mailbox(Device("cuda", gpu), 9)
    mailbox.send(np.zeros(3, np.int32))
    assert gpu.waiting
    del mailbox
    assert not gpu.waiting


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
