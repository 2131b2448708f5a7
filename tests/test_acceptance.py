"""Acceptance: statistics of rounds that were counted by hand, and a measurement of a whole random model."""

import dataclasses
import json
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders import Built, build_drafter_beside, build_text_model

from kdtree_nb import acceptance
from kdtree_nb.acceptance import BUDGETS, METHODS, Cell, Run, Walk, cells, first_children, measure, statistics
from kdtree_nb.engine import Engine, Generation, Oracle, Round
from kdtree_nb.engine.drafter import NO_DRAFTER
from kdtree_nb.reference.tree import DraftTree, tree_build


def drawn(parents: list[int], depths: list[int], probabilities: list[float]) -> DraftTree:
    """A tree by its parents; the probability of each node is that given its parent."""
    scores = [0.0]
    for parent, probability in zip(parents[1:], probabilities, strict=True):
        scores.append(scores[parent] + np.log(probability))
    columns = (np.array(parents, np.int32), np.array(depths, np.int32), np.array(scores, np.float32))
    return DraftTree(np.arange(len(parents), dtype=np.int32), *columns, len(parents), len(parents))


#     0 ─ 1 ─ 3 ─ 6          0 ─ 1          0
#       │   └ 5              │
#       └ 2 ─ 4              └ 2
#             └ 7
WIDE = drawn([-1, 0, 0, 1, 2, 1, 3, 4], [0, 1, 1, 2, 2, 2, 3, 3], [0.6, 0.3, 0.7, 0.5, 0.2, 0.9, 0.4])
SMALL = drawn([-1, 0, 0], [0, 1, 1], [0.5, 0.25])
BARE = drawn([-1], [0], [])


def run(tokens: list[int], seconds: float, *walks: tuple[DraftTree, list[int]], cut: int = 0) -> Run:
    """A generation of these rounds; ``cut`` tokens of the last were left out."""
    rounds = [Round(tree.num_nodes - 1, len(path) - 1) for tree, path in walks]
    rounds[-1] = dataclasses.replace(rounds[-1], accepted=rounds[-1].accepted - cut)
    assert len(tokens) == sum(round_.accepted + 1 for round_ in rounds)
    generation = Generation(tokens, rounds=rounds)
    return Run(generation, [Walk(tree, np.array(path)) for tree, path in walks], seconds)


def test_statistics_are_those_counted_by_hand() -> None:
    found = statistics(
        [
            run([5, 6, 5, 6, 5, 6], 0.5, (WIDE, [0, 2, 4]), (SMALL, [0, 1]), (BARE, [0])),
            run([1, 2, 3, 4, 5], 1.5, (WIDE, [0, 1, 3, 6]), (SMALL, [0])),
        ]
    )
    assert found["tau"] == 11 / 5
    assert found["target_forwards"] == 5
    assert found["tokens_per_second"] == 11 / 2
    assert found["drafted"] == (7 + 2 + 0 + 7 + 2) / 5
    assert found["distinct_bigrams"] == round((2 + 4) / (5 + 4), 4)
    assert found["rounds_by_accepted"] == [2, 1, 1, 1]
    assert found["rounds_by_depth"] == [4, 2, 2]
    assert found["acceptance_by_depth"] == [3 / 4, 2 / 2, 1 / 2]
    assert found["accepted_by_rank"] == [5, 1]  # 4, 1, 1, 3 and 6; 2


def test_first_children_are_those_counted_by_hand() -> None:
    walks = [(WIDE, [0, 2, 4]), (WIDE, [0, 1, 3, 6]), (WIDE, [0, 1, 5]), (WIDE, [0, 2]), (SMALL, [0, 1]), (BARE, [0])]
    found = first_children([Walk(tree, np.array(path)) for tree, path in walks])
    # The root's first child is 1: accepted in the second, the third and the fifth walk, not in the others.
    assert found["root"] == {"parents": 5, "right": 3 / 5, "drafted": round((4 * 0.6 + 0.5) / 5, 4)}
    # Node 1 twice, whose first child is 3, drafted at .7, and 3, whose child is 6, at .9; 6 and SMALL's 1 have none.
    assert found["spine"] == {"parents": 3, "right": round(2 / 3, 4), "drafted": round((2 * 0.7 + 0.9) / 3, 4)}
    # Node 2 twice, whose child is 4, drafted at .5; 5 has none.
    assert found["sibling"] == {"parents": 2, "right": 1 / 2, "drafted": 0.5}
    # Node 4 once, a first child, but of a sibling; its child 7 was not accepted.
    assert found["below"] == {"parents": 1, "right": 0.0, "drafted": 0.4}


def test_first_children_of_trees_that_were_built() -> None:
    """Every child that there is, looked for by the ranks of its path, in trees whose paths are drawn at random."""
    random = np.random.default_rng(5)
    walks, expected = [], {"root": [], "spine": [], "sibling": [], "below": []}
    for _ in range(40):
        log_probs = -np.sort(random.exponential(1, (4, 3)).astype(np.float32), axis=1)
        ids = np.stack([random.permutation(9)[:3] for _ in range(4)]).astype(np.int32)
        tree = tree_build(0, log_probs, ids, 20)
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, tree.num_nodes):
            rank = ids[tree.depths[node] - 1].tolist().index(tree.tokens[node])
            paths.append((*paths[tree.parents[node]], rank))
        chosen = paths[random.integers(tree.num_nodes)]
        accepted = [chosen[:depth] for depth in range(len(chosen) + 1)]
        walks.append(Walk(tree, np.array([paths.index(path) for path in accepted])))
        for path in accepted:
            if (*path, 0) in paths:
                off_spine = "sibling" if path and path[-1] else "below"
                kind = "root" if not path else off_spine if any(path) else "spine"
                expected[kind].append(((*path, 0) in accepted, np.exp(log_probs[len(path), 0])))
    for kind, found in first_children(walks).items():
        right, drafted = np.mean(expected[kind], axis=0)
        assert found["parents"] == len(expected[kind]) > 2
        assert found["right"] == pytest.approx(right, abs=1e-4)
        assert found["drafted"] == pytest.approx(drafted, abs=1e-4)


def test_a_round_is_early_if_it_begins_in_the_first_32_tokens() -> None:
    rounds = [(WIDE, [0, 1, 3, 6])] * 9 + [(SMALL, [0, 1])] * 3 + [(BARE, [0])]  # begin at 0, 4 … 32; 36, 38, 40; 42
    found = statistics([run(list(range(43)), 1.0, *rounds), run([1], 1.0, (BARE, [0]))])
    assert found["tau_first_32"] == round((8 * 4 + 1) / 9, 4)
    assert found["tau_after_32"] == round((4 + 3 * 2 + 1) / 5, 4)
    assert statistics([run([1, 2], 1.0, (SMALL, [0, 2]))])["tau_after_32"] is None


def test_a_text_cut_inside_a_path_counts_its_own_tokens_and_the_whole_walk() -> None:
    found = statistics([run([1, 2], 1.0, (WIDE, [0, 1, 3, 6]), cut=2)])
    assert (found["tau"], found["rounds_by_accepted"]) == (2, [0, 1])
    assert found["acceptance_by_depth"] == [1, 1, 1]


def test_cells() -> None:
    every = cells([], [])
    assert [cell.node_budget for cell in every if cell.decoder == "ddtree"] == list(BUDGETS)
    assert {cell.decoder for cell in every} == set(METHODS)
    assert cells(["plain", "ddtree", "ddtree"], [3, "auto"]) == [
        Cell("plain", 0),
        Cell("ddtree", 3),
        Cell("ddtree", "auto"),
    ]
    with pytest.raises(ValueError, match="decoder='magic', expected one of plain, ngram, chain, marginal, ddtree"):
        cells(["plain", "magic"], [])


# ---- a whole random model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Built:
    built = build_text_model(tmp_path_factory.mktemp("drafted"), eos_token_ids=())
    build_drafter_beside(built)
    return built


def _keep(walks: list[Walk], *walk: np.ndarray) -> None:
    walks.append(Walk(*walk))


def test_marginals_are_what_the_conditionals_are_made_of(drafted: Built) -> None:
    engine = Engine.load(drafted.path, "cpu")
    headless = acceptance.marginal(engine)
    spread = []
    for drafter in (headless, engine.drafter):
        walks: list[Walk] = []
        keep = partial(_keep, walks)
        engine.generate("a", node_budget=200, max_new_tokens=9, drafter=drafter, on_round=keep)
        tree = walks[0].tree
        steps = tree.scores - tree.scores[tree.parents]
        of_token: dict[tuple[int, int], set[float]] = {}
        for depth, token, step in zip(tree.depths[1:], tree.tokens[1:], steps[1:], strict=True):
            of_token.setdefault((int(depth), int(token)), set()).add(round(float(step), 3))
        spread.append({where: len(found) for where, found in of_token.items() if where[0] > 1})
    assert max(spread[0].values()) == 1  # a token at a depth has one probability, whatever its parent
    assert max(spread[1].values()) > 1


def test_a_measurement_keeps_its_caches_and_many_keep_no_more(drafted: Built) -> None:
    """Plain decoding's, the drafter's and its headless twin's: none is made twice, and old twins are let go."""
    engine = Engine.load(drafted.path, "cpu")
    alive: list[weakref.ref] = []
    for _ in range(4):
        prompts = {"prose": ["It", "a"]}
        made = {id(rounds) for rounds in engine._kept}
        list(measure(engine, prompts, cells(["marginal", "ddtree"], [5]), 6))
        plain, twin, own = engine._kept
        assert (plain.of, own.of) == (NO_DRAFTER, engine.drafter)
        assert not made or {id(plain), id(own)} < made
        alive.append(weakref.ref(twin))
    del plain, twin, own
    assert [rounds() is not None for rounds in alive] == [False, False, False, True]


def test_without_a_transition_head_there_is_nothing_to_leave_out(tmp_path: Path) -> None:
    engine = Engine.load(build_text_model(tmp_path).path, "cpu")
    with pytest.raises(ValueError, match=r"PromptLookup\(.*\) has no transition head for the decoder 'marginal'"):
        list(measure(engine, {"code": ["a"]}, [Cell("marginal", 4)], 3))


def test_a_measurement(drafted: Built) -> None:
    engine = Engine.load(drafted.path, "cpu")
    prompts = {"code": ["for i in", "if x"], "prose": ["It was"]}
    wanted = cells([], [5])
    done: list[str] = []
    results = list(measure(engine, prompts, wanted, 12, progress=done.append))
    assert [(r["domain"], r["decoder"], r["node_budget"]) for r in results] == [
        (domain, *cell) for domain in prompts for cell in wanted
    ]
    assert len(done) == len(wanted) * 3
    for result in results:
        texts = len(prompts[result["domain"]])
        tokens = sum((i + 1) * count for i, count in enumerate(result["rounds_by_accepted"]))
        assert tokens == 12 * texts
        assert sum(result["rounds_by_accepted"]) == result["target_forwards"]
        assert result["tau"] == round(tokens / result["target_forwards"], 4)
        assert result["drafted"] <= 5
        assert len(result["rounds_by_depth"]) == len(result["acceptance_by_depth"])
    plain = [r for r in results if r["decoder"] == "plain"]
    assert [r["target_forwards"] for r in plain] == [24, 12]
    json.dumps(results)


def test_an_oracle_is_measured_as_it_errs(drafted: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Always right: every round but the last accepts all it drafts."""
    engine = Engine.load(drafted.path, "cpu")
    prompt = engine.tokenizer.encode("It was").ids
    answer = np.array(prompt + engine.generate("It was", "ar", max_new_tokens=20).tokens)
    oracle = Oracle(answer, engine.config.vocab_size, length=4, hit_rate=1.0)
    monkeypatch.setitem(METHODS, "ddtree", METHODS["ddtree"]._replace(drafter=lambda _: oracle))
    (found,) = measure(engine, {"prose": ["It was"]}, [Cell("ddtree", 4)], 20)
    assert found["tau"] == 5
    assert found["acceptance_by_depth"] == [1, 1, 1, 1]
    assert found["accepted_by_rank"] == [16]


def test_a_text_that_differs_is_an_error(drafted: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(drafted.path, "cpu")
    generate = engine.generate

    def one_token_off(text: str, decoder: str, *rest: object, **more: object) -> Generation:
        generation = generate(text, decoder, *rest, **more)
        generation.tokens[-1] ^= decoder == "chain"
        return generation

    monkeypatch.setattr(engine, "generate", one_token_off)
    with pytest.raises(
        ValueError, match=r"decoder='chain', node_budget=4.* continues 'a' of code otherwise than plain"
    ):
        list(measure(engine, {"code": ["a"]}, cells(["plain", "chain"], [4]), 5))


def test_means_over_domains() -> None:
    base = statistics([run([1, 2, 3], 1.0, (SMALL, [0, 1]), (BARE, [0]))])
    one = {"domain": "a", "decoder": "ddtree", "node_budget": 4, **base}
    other = one | {"domain": "b", "tau": 2.5, "tau_after_32": 3.0, "tokens_per_second": 9.0}
    (mean,) = acceptance.over_domains([one, other])
    assert (mean["domain"], mean["decoder"], mean["node_budget"]) == ("mean", "ddtree", 4)
    assert (mean["tau"], mean["tokens_per_second"], mean["target_forwards"]) == (2.0, 6.0, 4)
    assert mean["tau_after_32"] == 3.0  # of the domains that have one
