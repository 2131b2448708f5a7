"""A budget that knows its price: the cut against every other one, and costs that are measured once."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import Built, build, tiny_config, tiny_drafter_config
from helpers import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st

from kdtree_nb.engine import Engine, Oracle, PromptLookup, budget
from kdtree_nb.engine.budget import MOST_NODES, most_nodes, round_costs
from kdtree_nb.kernels.launch import emulated
from kdtree_nb.kernels.tree_build import tree_build as tree_kernel
from kdtree_nb.reference.transition import condition
from kdtree_nb.reference.tree import DraftTree, expected_rate, tree_build

# ---- the cut ---------------------------------------------------------------------------------------------------------


def random_marginals(rng: np.random.Generator, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    probabilities = -np.sort(-rng.dirichlet(np.full(width + 1, 0.4), length)[:, :width], axis=1)
    token_ids = rng.permuted(np.tile(np.arange(100, 100 + width, dtype=np.int32), (length, 1)), axis=1)
    return np.log(np.maximum(probabilities, 1e-30)).astype(np.float32), token_ids


def expected_tokens(tree: DraftTree, log_probs: np.ndarray, token_ids: np.ndarray, draws: list[tuple]) -> float:
    """Of a round with this tree: the mean over every text that the marginals can draw, each with its probability."""
    children = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
        if node
    }
    total = 0.0
    for ranks in draws:
        probability, node, accepted = 1.0, 0, 0
        for depth, rank in enumerate(ranks):
            known = rank < log_probs.shape[1]
            given_up = 1 - np.exp(log_probs[depth].astype(np.float64)).sum()  # on what is no candidate
            probability *= np.exp(float(log_probs[depth, rank])) if known else given_up
            if node >= 0:
                node = children.get((node, int(token_ids[depth, rank])), -1) if known else -1
                accepted += node >= 0
        total += probability * (1 + accepted)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_the_rate_is_what_rounds_bring(seed: int) -> None:
    """For each number of nodes: all texts drawn, walked, counted, over what the round costs; what pays is the best."""
    rng = np.random.default_rng(seed)
    length, width, nodes = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 14
    log_probs, token_ids = random_marginals(rng, length, width)
    draws = list(itertools.product(range(width + 1), repeat=length))
    costs = (1 + np.sort(rng.uniform(0, 1.5, nodes + 1))).astype(np.float32)
    full = tree_build(7, log_probs, token_ids, nodes)
    count = full.num_nodes
    tokens = [expected_tokens(full.first(n), log_probs, token_ids, draws) for n in range(1, count + 1)]
    rates = np.array(tokens) / costs[:count]
    np.testing.assert_allclose(expected_rate(full.scores[:count], costs), rates, rtol=1e-6)
    gained = (1 + 1.3 * (np.array(tokens) - 1)) / costs[:count]  # of what was drafted, not of the token that is certain
    np.testing.assert_allclose(expected_rate(full.scores[:count], costs, 1.3), gained, rtol=1e-6)
    assert tree_build(7, log_probs, token_ids, nodes, costs=costs, gain=1.3).paying == 1 + int(gained.argmax())
    priced = tree_build(7, log_probs, token_ids, nodes, costs=costs)
    assert (priced.num_nodes, priced.paying) == (count, 1 + int(rates.argmax()))
    assert full.paying == count
    for name in ("tokens", "parents", "depths", "scores"):
        assert_same_bits(getattr(priced, name), getattr(full, name))


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_what_pays_is_one_of_0_to_the_budget_and_none_is_better(seed: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    draft = random_marginals(rng, int(rng.integers(1, 6)), int(rng.integers(1, 6)))
    costs = rng.choice([1.0, 1.25, 1.5, 3.0], nodes + 1).astype(np.float32)  # not ascending: that is no condition
    full = tree_build(7, *draft, nodes, costs=costs)
    expected, best, pays = 0.0, 0.0, 0
    for node in range(full.num_nodes):
        expected += np.exp(float(full.scores[node]))
        if expected / float(costs[node]) > best:
            best, pays = expected / float(costs[node]), node
    assert 0 <= full.paying - 1 == pays <= nodes


def test_with_flat_costs_all_nodes_pay_and_with_steep_ones_the_root() -> None:
    draft = random_marginals(np.random.default_rng(0), 5, 6)
    whole = tree_build(7, *draft, 30)
    assert tree_build(7, *draft, 30, costs=np.full(31, 0.02, np.float32)).paying == whole.num_nodes == 31
    steep = (1 + np.arange(31)).astype(np.float32)  # a node costs a whole round, and is right at most once
    assert tree_build(7, *draft, 30, costs=steep).paying == 1


def test_a_certain_drafter_is_worth_its_price() -> None:
    """Depth 4, always right: 5 tokens a round, unless the fifth makes it dearer than that."""
    log_probs, token_ids = np.zeros((4, 1), np.float32), np.array([[1], [2], [3], [4]])
    for last, nodes in ((1.2, 4), (1.26, 3)):
        costs = np.array([1, 1, 1, 1, last], np.float32)
        assert tree_build(0, log_probs, token_ids, 4, costs=costs).paying == 1 + nodes


def test_equal_rates_take_the_smaller_tree() -> None:
    """In the kernel, too: 1 to 4 tokens for as many seconds."""
    log_probs, token_ids = np.zeros((3, 1), np.float32), np.zeros((3, 1), np.int32)
    costs = np.array([1, 2, 3, 4], np.float32)
    assert tree_build(0, log_probs, token_ids, 3, costs=costs).paying == 1
    with emulated():
        assert tree_kernel(np.array([0], np.int32), log_probs, token_ids, 3, costs=costs).paying[0] == 1


@pytest.mark.parametrize("conditioned", [False, True])
def test_the_same_nodes_pay_in_the_kernel(conditioned: bool) -> None:
    rng = np.random.default_rng(3)
    sizes = set()
    for _ in range(120):
        length, width, nodes = rng.integers(1, [8, 9, 65])
        log_probs, token_ids = random_marginals(rng, length, width)
        children = None
        if conditioned:
            tables = rng.standard_normal((3, 110, 4)).astype(np.float32)
            log_probs, children = condition(log_probs, token_ids, tables[0, :length], *tables[1:])
        costs = (1 + np.sort(rng.uniform(0, rng.choice([0.1, 1, 9]), nodes + 1))).astype(np.float32)
        expected = tree_build(7, log_probs, token_ids, nodes, children, costs)
        with emulated():
            tree = tree_kernel(np.array([7], np.int32), log_probs, token_ids, nodes, children, costs)
        found = int(tree.num_nodes[0])
        assert tree.paying[0] == expected.paying <= found <= expected.num_nodes
        sizes.add(expected.paying)
        for name in ("tokens", "parents", "depths", "scores"):
            assert_same_bits(getattr(tree, name)[:found], getattr(expected, name)[:found])
    assert len(sizes) > 20 and {1, 2} < sizes


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1), ()])
def test_costs_of_another_budget_are_named(shape: tuple[int, ...]) -> None:
    draft = random_marginals(np.random.default_rng(0), 3, 2)
    message = rf"tree_build: costs \[{', '.join(map(str, shape))}\], expected \[5\]"
    with pytest.raises(ValueError, match=message):
        tree_build(7, *draft, 4, costs=np.ones(shape, np.float32))
    with emulated(), pytest.raises(ValueError, match=message):
        tree_kernel(np.array([7], np.int32), *draft, 4, costs=np.ones(shape, np.float32))


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A target, and a drafter beside it."""
    folder, config = tmp_path_factory.mktemp("model"), tiny_config()
    build(folder / "tiny.drafter.kdtr", tiny_drafter_config(config), 2, "float32")
    return build(folder / "tiny.kdtr", config, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for costs; compiled kernels stay where they are."""
    find = budget.cache_folder
    monkeypatch.setattr(budget, "REPEATS", 2)

    def folder(what: str) -> Path:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("KDTREE_CACHE", str(tmp_path))
            return find(what)

    monkeypatch.setattr(budget, "cache_folder", folder)
    return tmp_path / "costs"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every calibration."""
    calls, measure = [], budget.measure

    def counting(model, drafter, capacity):
        calls.append(capacity)
        return measure(model, drafter, capacity)

    monkeypatch.setattr(budget, "measure", counting)
    return calls


def costs_of(engine: Engine, **changes) -> np.ndarray:
    return round_costs(engine.model, changes.get("drafter", engine.drafter), changes.get("capacity", engine.capacity))


def test_costs_are_measured_once_and_never_descend(built: Built, cache: Path, measured: list[int]) -> None:
    engine = Engine.load(built.path)
    costs = costs_of(engine)
    assert (costs.dtype, costs.shape) == (np.float32, (MOST_NODES + 1,))
    assert (costs > 0).all() and (np.diff(costs) >= 0).all()
    assert costs[-1] < 5
    (file,) = cache.iterdir()
    assert_same_bits(costs_of(engine), costs)
    assert_same_bits(costs_of(Engine.load(built.path)), costs)
    assert measured == [1024]
    assert [*cache.iterdir()] == [file]

    stored = json.loads(file.read_text())
    stored["seconds"] = [float(n + 1) for n in range(65)]
    file.write_text(json.dumps(stored))
    np.testing.assert_array_equal(costs_of(engine), np.arange(1, 66))


def stored(changes: Callable[[dict], object]) -> Callable[[str], bytes]:
    def make(text: str) -> bytes:
        return json.dumps(changes(json.loads(text))).encode()

    return make


DAMAGE: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2].encode(),
    "no text": lambda text: b"\xff\xfe\x00",
    "a list": lambda text: b"[1, 2]",
    "a number": lambda text: b"3",
    "nothing": lambda text: b"null",
    "deep": lambda text: b"[" * 100_000,
    "no seconds": stored(lambda found: {"of": found["of"]}),
    "seconds null": stored(lambda found: found | {"seconds": None}),
    "an object": stored(lambda found: found | {"seconds": {"0": 1}}),
    "words": stored(lambda found: found | {"seconds": ["fast"] * 9}),
    "ragged": stored(lambda found: found | {"seconds": [[1], [1, 2]]}),
    "one short": stored(lambda found: found | {"seconds": found["seconds"][:-1]}),
    "a column": stored(lambda found: found | {"seconds": [[s] for s in found["seconds"]]}),
    "zero": stored(lambda found: found | {"seconds": [0.0, *found["seconds"][1:]]}),
    "negative": stored(lambda found: found | {"seconds": [-1.0] * 9}),
    "NaN": stored(lambda found: found | {"seconds": [*found["seconds"][:-1], float("nan")]}),
    "infinite": stored(lambda found: found | {"seconds": [*found["seconds"][:-1], float("inf")]}),
    "too large": stored(lambda found: found | {"seconds": [*found["seconds"][:-1], 10**400]}),
    "descending": stored(lambda found: found | {"seconds": [float(9 - n) for n in range(9)]}),
    "another's": stored(lambda found: found | {"of": found["of"].replace("hidden_size", "hidden")}),
    "nobody's": stored(lambda found: {"seconds": found["seconds"]}),
}


def test_a_damaged_or_foreign_file_is_measured_anew(built: Built, cache: Path, measured: list[int]) -> None:
    engine = Engine.load(built.path, capacity=10)
    costs_of(engine)
    (file,) = cache.iterdir()
    whole = file.read_text()
    for name, damage in DAMAGE.items():
        before = len(measured)
        file.write_bytes(damage(whole))
        costs = costs_of(engine)
        assert len(measured) == before + 1, name
        assert_same_bits(np.array(json.loads(file.read_text())["seconds"], np.float32), costs)
    assert [*cache.iterdir()] == [file]


def test_a_folder_in_the_file_s_place_is_an_error_that_names_it(built: Built, cache: Path) -> None:
    engine = Engine.load(built.path, capacity=4)
    costs_of(engine)
    (file,) = cache.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match=file.name):
        costs_of(engine)


def test_each_device_model_and_drafter_has_its_own(
    built: Built, cache: Path, measured: list[int], tmp_path: Path
) -> None:
    engine = Engine.load(built.path, capacity=6)
    other_model = build(tmp_path / "other.kdtr", tiny_config(hidden_size=64), 1)
    other_storage = build(tmp_path / "float.kdtr", tiny_config(), 1, "float32")
    emulator = Engine.load(built.path, "emulated", capacity=6)
    cases: list[Callable[[], object]] = [
        lambda: costs_of(engine),
        lambda: costs_of(engine, capacity=5),
        lambda: costs_of(engine, drafter=Oracle(np.arange(9), 67)),
        lambda: costs_of(engine, drafter=Oracle(np.arange(9), 67, width=3)),
        lambda: costs_of(engine, drafter=PromptLookup(length=5)),
        lambda: costs_of(engine, drafter=PromptLookup(width=5)),
        lambda: costs_of(engine, drafter=PromptLookup(longest_match=5)),
        lambda: costs_of(Engine.load(built.path, drafter=with_window(tmp_path), capacity=6)),
        lambda: costs_of(Engine.load(other_model.path, capacity=6)),
        lambda: costs_of(Engine.load(other_storage.path, capacity=6)),
        lambda: emulator.generate([1, 2], node_budget="auto", max_new_tokens=1),
    ]
    for count, case in enumerate(cases, 1):
        case()
        assert len(measured) == len([*cache.iterdir()]) == count
    for case in cases:
        case()
    assert len(measured) == len(cases)


OTHER_MACHINES: dict[str, object] = {
    "processor": lambda: "another one",
    "workers": lambda: 1000,
    "code": lambda: "changed",
}


@pytest.mark.parametrize("what", OTHER_MACHINES)
def test_another_machine_and_other_code_measure_anew(
    built: Built, measured: list[int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(built.path, capacity=6)
    costs_of(engine)
    costs_of(engine)
    assert len(measured) == 1
    monkeypatch.setattr(budget, what, OTHER_MACHINES[what])
    costs_of(engine)
    assert len(measured) == 2


def test_other_threads_measure_anew(built: Built, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(built.path, capacity=6)
    for threads in ("1", "3"):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
        costs_of(engine)
    assert len(measured) == 2


def test_the_code_is_that_of_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a copy of the package: a byte more in any of these is other code, in a notebook's plots it is none."""
    package = Path(budget.__file__).parents[1]
    copy = shutil.copytree(package, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(budget, "__file__", str(copy / "engine" / "budget.py"))
    read = budget.code.__wrapped__
    seen = [read()]
    for file in ("moe.cu", "include/order.cuh", "emulator/include/emulator.h", "../engine/model.py"):
        with (copy / "kernels" / file).open("a") as more:
            more.write("\n")
        seen.append(read())
    assert len(set(seen)) == 5
    (copy / "plotting" / "basic.py").write_text("")
    assert read() == seen[-1]


def with_window(folder: Path) -> Path:
    return build(folder / "w.kdtr", tiny_drafter_config(tiny_config(), sliding_window=3), 2, "float32").path


@pytest.mark.parametrize("capacity", [2, 3, 4, 9, 66, 67, 72])
def test_a_model_with_little_room_is_measured_as_far_as_it_goes(built: Built, capacity: int) -> None:
    engine = Engine.load(built.path, capacity=capacity)
    costs = costs_of(engine)
    assert costs.shape == (min(64, capacity - 2) + 1,) == (most_nodes(capacity) + 1,)
    assert (costs > 0).all() and (np.diff(costs) >= 0).all()
    prompt = [5] * (capacity - 1)
    assert engine.generate(prompt, node_budget="auto").tokens == engine.generate(prompt, "ar").tokens


def test_more_work_costs_more(built: Built) -> None:
    """A clock that counts rows: what is measured is the round with that many nodes, and between them a line."""
    engine = Engine.load(built.path)
    rows = [0]
    forward = engine.model.forward

    def counting(tokens, *rest, **options):
        rows[0] += len(tokens)
        return forward(tokens, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model, "forward", counting)
        patch.setattr(budget.time, "perf_counter", lambda: rows[0])
        np.testing.assert_array_equal(costs_of(engine), [2, *range(2, 66)])  # none costs what one does


# ---- node_budget="auto" ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("slope", [0.0, 0.1, 50.0])
def test_auto_gives_plain_decoding_s_tokens(built: Built, monkeypatch, device: str, slope: float) -> None:
    """Whatever rounds cost: with the trained drafter, and with one that is right."""
    costs = (1 + slope * np.arange(31)).astype(np.float32)
    monkeypatch.setattr(budget, "measure", lambda model, drafter, capacity: costs)
    engine = Engine.load(built.path, device, capacity=32)
    prompt = np.arange(3, 12)
    plain = engine.generate(prompt, "ar", max_new_tokens=10, keep_logits=True)
    oracle = Oracle(np.concatenate([prompt, plain.tokens]), 67, hit_rate=0.9)
    for decoder, drafter in (("ddtree", None), ("ddtree", oracle), ("chain", oracle)):
        run = engine.generate(prompt, decoder, "auto", 10, drafter=drafter, keep_logits=True)
        assert run.tokens == plain.tokens
        assert_same_bits(run.logits, plain.logits)
        drafted = [round.drafted for round in run.rounds]
        if slope == 50:
            assert set(drafted) == {0}
        if slope == 0:
            assert drafted[0] == (7 if decoder == "chain" else 30)
        if slope == 0.1 and drafter is oracle:
            assert 0 < drafted[0] < 30


def test_plain_decoding_measures_nothing(built: Built, measured: list[int]) -> None:
    Engine.load(built.path).generate([1, 2], "ar", "auto", 3)
    assert not measured


@pytest.mark.parametrize("value", ["best", "Auto", "", "16", None, 2.0])
def test_another_budget_is_refused_by_name(built: Built, value: object) -> None:
    message = rf"generate: node_budget={value!r}, expected a whole number from 0 to 1024, or 'auto'"
    with pytest.raises(ValueError, match=message):
        Engine.load(built.path).generate([1, 2], node_budget=value)
