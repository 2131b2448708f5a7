"""How much of what is drafted the target accepts, by real verify passes over held-out prompts."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.engine import DFlash, Drafter, Engine, Generation, PromptLookup
from kdtree_nb.engine.budget import round_costs
from kdtree_nb.reference.tree import DraftTree

BUDGETS: tuple[int | str, ...] = (4, 8, 16, 32, 64, 128, 256, "auto")
EARLY = 32
"""Tokens after which a small model begins to repeat itself, and drafts become easy."""


class Method(NamedTuple):
    """A way to decode: the engine's decoder, what drafts for it, and the budgets it is measured at by default."""

    decoder: str
    drafter: Callable[[Engine], Drafter]
    budgets: tuple[int | str, ...]


class Cell(NamedTuple):
    """What is measured: one of :data:`METHODS`, at a budget."""

    decoder: str
    node_budget: int | str


class Walk(NamedTuple):
    """A round: its tree, on the host and without padding, and the nodes that the target's tokens lead to, root first.

    The path of a text's last round may go on where the text was cut.
    """

    tree: DraftTree
    path: np.ndarray


class Run(NamedTuple):
    """A continued prompt, its rounds, and how long they took without anybody watching."""

    generation: Generation
    walks: list[Walk]
    seconds: float


def trained(engine: Engine) -> Drafter:
    """The engine's own drafter."""
    return engine.drafter


def marginal(engine: Engine) -> Drafter:
    """The trained drafter without its transition head: a child is drafted as if it had no parent.

    Raises
    ------
    ValueError
        If the engine's drafter has none.
    """
    drafter = engine.drafter
    if not isinstance(drafter, DFlash) or not drafter.config.transition_rank:
        raise ValueError(
            f"bench acceptance: {drafter!r} has no transition head for the decoder 'marginal' to leave out"
        )
    headless = copy.copy(drafter)  # of the same weights
    headless.config = dataclasses.replace(drafter.config, transition_rank=0)
    return headless


METHODS = {
    "plain": Method("ar", trained, (0,)),
    "ngram": Method("ddtree", lambda _: PromptLookup(), (16,)),  # it has few guesses to spread
    "chain": Method("chain", trained, (4, 8, "auto")),  # the drafter's block is no longer
    "marginal": Method("ddtree", marginal, BUDGETS),
    "ddtree": Method("ddtree", trained, BUDGETS),
}


def cells(decoders: Sequence[str], node_budgets: Sequence[int | str]) -> list[Cell]:
    """Each decoder at each budget; where none are named, all, and the decoder's own. Plain decoding has no budget.

    Raises
    ------
    ValueError
        For an unknown decoder.
    """
    for name in decoders:
        if name not in METHODS:
            raise ValueError(f"bench acceptance: decoder={name!r}, expected one of {', '.join(METHODS)}")
    found = []
    for name in decoders or METHODS:
        own = METHODS[name].budgets
        found += [Cell(name, budget) for budget in (own if name == "plain" else node_budgets or own)]
    return list(dict.fromkeys(found))


def measure(
    engine: Engine,
    prompts: Mapping[str, Sequence[str]],
    wanted: Sequence[Cell],
    max_new_tokens: int,
    temperature: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Continue every prompt in every way; all ways take turns at a prompt, so that a busy moment hits them alike.

    Parameters
    ----------
    prompts : mapping from domain to texts
    progress : callable, optional
        Called with what was run, after each run.

    Yields
    ------
    dict
        ``domain``, ``decoder``, ``node_budget`` and :func:`statistics`, a cell each, domain by domain.

    Raises
    ------
    ValueError
        If a text is not the one of plain decoding.
    """
    drafters = {cell.decoder: METHODS[cell.decoder].drafter(engine) for cell in wanted}
    for domain, texts in prompts.items():
        runs: dict[Cell, list[Run]] = {cell: [] for cell in wanted}
        for text in texts:
            # The first to run loads the experts that this text needs, at no decoder's cost.
            plain = engine.generate(text, "ar", 0, max_new_tokens, temperature)
            for cell, done in runs.items():
                run = _run(engine, text, cell, drafters[cell.decoder], max_new_tokens, temperature)
                if run.generation.tokens != plain.tokens:
                    raise ValueError(f"{cell} continues {text[:40]!r} of {domain} otherwise than plain decoding")
                done.append(run)
                if progress:
                    progress(f"{domain} {cell.decoder} {cell.node_budget}")
        for cell, done in runs.items():
            yield {"domain": domain, **cell._asdict(), **statistics(done)}


def automatic_costs(engine: Engine, wanted: Sequence[Cell]) -> list[float] | None:
    """Seconds of a round by its nodes, as the automatic budget took them for the engine's drafter; None without it."""
    if all(cell.node_budget != "auto" for cell in wanted):
        return None
    with engine.device.running():
        return [round(float(cost), 7) for cost in round_costs(engine.model, engine.drafter, engine.capacity)]


def _run(engine: Engine, text: str, cell: Cell, drafter: Drafter, max_new_tokens: int, temperature: float) -> Run:
    decoder, walks = METHODS[cell.decoder].decoder, []

    def once(**watching: Any) -> Generation:
        return engine.generate(
            text, decoder, cell.node_budget, max_new_tokens, temperature, drafter=drafter, **watching
        )

    watched = once(on_round=lambda tree, path: walks.append(Walk(tree, path)))
    # On a host a watched round is as fast as any; a GPU has to wait for what is watched, so there another run is timed.
    timed = watched if engine.device.xp is np else once()
    return Run(watched, walks, timed.decode_seconds)


def statistics(runs: Sequence[Run]) -> dict[str, Any]:
    """What became of the drafts, over all rounds of some texts.

    Returns
    -------
    dict
        - ``tau``: new tokens per target forward; ``tau_first_32`` of the rounds that begin within a text's first 32
          new tokens, ``tau_after_32`` of the others (None without one).
        - ``target_forwards``, ``tokens_per_second``, ``drafted``: nodes a round, on average.
        - ``distinct_bigrams``: share of the texts' pairs of neighbours that are new to their text.
        - ``rounds_by_accepted``: ``[i]`` counts rounds that accepted i drafts, and so committed i + 1 tokens.
        - ``rounds_by_depth``: ``[i]`` counts rounds that drafted to depth i + 1; ``acceptance_by_depth``: the
          share of them whose accepted path reaches it.
        - ``accepted_by_rank``: ``[r]`` counts accepted nodes with r more probable siblings.
        - ``children``: see :func:`first_children`.
    """
    generations = [run.generation for run in runs]
    committed = [np.array([round_.accepted + 1 for round_ in generation.rounds]) for generation in generations]
    every = np.concatenate(committed)
    early = np.concatenate([np.cumsum(own) - own < EARLY for own in committed])
    bigrams = [list(zip(generation.tokens, generation.tokens[1:], strict=False)) for generation in generations]
    walks = [walk for run in runs for walk in run.walks]
    drafted_to = np.array([walk.tree.depths.max() for walk in walks])
    accepted_to = np.array([len(walk.path) - 1 for walk in walks])
    depths = np.arange(1, drafted_to.max() + 1)
    rounds_by_depth = (drafted_to >= depths[:, None]).sum(axis=1)
    reached = (accepted_to >= depths[:, None]).sum(axis=1)
    ranks = [rank for walk in walks for rank in sibling_ranks(walk.tree)[walk.path[1:]]]
    return {
        "tau": _mean(every),
        f"tau_first_{EARLY}": _mean(every[early]),
        f"tau_after_{EARLY}": _mean(every[~early]),
        "target_forwards": len(every),
        "tokens_per_second": round(int(every.sum()) / sum(run.seconds for run in runs), 2),
        "drafted": _mean([round_.drafted for generation in generations for round_ in generation.rounds]),
        "distinct_bigrams": _share(sum(len(set(own)) for own in bigrams), sum(map(len, bigrams))),
        "rounds_by_accepted": np.bincount(every - 1).tolist(),
        "rounds_by_depth": rounds_by_depth.tolist(),
        "acceptance_by_depth": [_share(*counts) for counts in zip(reached, rounds_by_depth, strict=True)],
        "accepted_by_rank": np.bincount(np.array(ranks, int)).tolist(),
        "children": first_children(walks),
    }


def first_children(walks: Sequence[Walk]) -> dict[str, dict[str, float | int | None]]:
    """Is a drafted child right, given that its parent is? Asked of the most probable child of each accepted node.

    Returns
    -------
    dict
        By where the parent stands: the ``root``; on the ``spine``, the most probable of its siblings, as are all its
        ancestors; a ``sibling``, which is not the most probable; or ``below`` one, but the most probable itself.
        ``parents``: how many were accepted and have a child; ``right``: the share whose first child was accepted too;
        ``drafted``: the mean probability that it was drafted with, given its parent.
    """
    asked: dict[str, list[tuple[bool, float]]] = {"root": [], "spine": [], "sibling": [], "below": []}
    for tree, path in walks:
        ranks, accepted = sibling_ranks(tree), set(path.tolist())
        for depth, parent in enumerate(path.tolist()):
            children = np.flatnonzero(tree.parents == parent)
            if len(children):
                on_spine = not ranks[path[: depth + 1]].any()
                kind = "root" if not depth else "spine" if on_spine else "sibling" if ranks[parent] else "below"
                first = int(children[0])
                asked[kind].append((first in accepted, float(np.exp(tree.scores[first] - tree.scores[parent]))))
    answers: dict[str, dict[str, float | int | None]] = {}
    for kind, of_kind in asked.items():
        right, drafted = zip(*of_kind, strict=True) if of_kind else ((), ())
        answers[kind] = {"parents": len(of_kind), "right": _mean(right), "drafted": _mean(drafted)}
    return answers


def sibling_ranks(tree: DraftTree) -> np.ndarray:
    """Each node's rank among its siblings, int [N]: nodes come best first, so their order is that of their ranks."""
    seen: dict[int, int] = {}
    ranks = np.empty(len(tree.parents), int)
    for node, parent in enumerate(tree.parents.tolist()):
        ranks[node] = seen.get(parent, 0)
        seen[parent] = ranks[node] + 1
    return ranks


AVERAGED = ("tau", f"tau_first_{EARLY}", f"tau_after_{EARLY}", "tokens_per_second", "drafted", "distinct_bigrams")


def over_domains(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cell's means over its domains, which weigh alike; the target's forwards are summed."""
    by_cell: dict[Cell, list[dict[str, Any]]] = {}
    for result in results:
        by_cell.setdefault(Cell(result["decoder"], result["node_budget"]), []).append(result)
    means = []
    for cell, own in by_cell.items():
        averages = {name: _mean([r[name] for r in own if r[name] is not None]) for name in AVERAGED}
        forwards = sum(result["target_forwards"] for result in own)
        means.append({"domain": "mean", **cell._asdict(), **averages, "target_forwards": forwards})
    return means


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return round(float(np.mean(values)), 4) if len(values) else None


def _share(part: int, whole: int) -> float | None:
    return round(int(part) / int(whole), 4) if whole else None
