"""A round of the engine: its recorded pass beside the cost model, and what else the round spends its time on."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kdtree_nb.bench.engines import pass_bytes, prompt_of
from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.inputs import MAX_DEPTH, random_tree
from kdtree_nb.bench.timing import microseconds, require_gpu
from kdtree_nb.engine import Engine
from kdtree_nb.engine.drafter import NO_DRAFTER
from kdtree_nb.engine.rounds import Rounds, prefill
from kdtree_nb.kernels.cache_commit import cache_commit
from kdtree_nb.kernels.choose_tokens import choose_tokens
from kdtree_nb.kernels.close_round import close_round
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.tree_accept import tree_accept
from kdtree_nb.kernels.tree_build import tree_build

ROWS = (1, 9, 17, 33, 65)
ROUNDS, SECONDS = 500, 5.0
"""Of a text after another that are timed: so many, or as many as so much time holds."""
PROMPT, NEW_TOKENS = 64, 256
KERNEL = "recorded pass"


class Step(NamedTuple):
    """Microseconds of a round with so many rows, the root included, and of its parts when each runs alone.

    Attributes
    ----------
    rows, context : int
        Of the pass, and committed tokens before it.
    bytes : float
        That the pass cannot do without: the cost model.
    verify : float
        The pass over a random tree, and the target's choice after each row.
    commit : float
        Accepting, showing the drafter the accepted rows, and moving them in the cache.
    draft, build : float
        0 in plain decoding, and drafting also where the drafter works on the host: then it is part of ``idle``.
    round : float
        Wall-clock time of a round of :meth:`Engine.generate`, the mean of 500, or of 5 s of them.
    """

    rows: int
    context: int
    bytes: float
    verify: float
    draft: float
    build: float
    commit: float
    round: float

    @property
    def idle(self) -> float:
        """What no part accounts for: the host, its wait for the GPU, and the GPU's for it. Overlap makes it less."""
        return self.round - self.draft - self.build - self.verify - self.commit

    @property
    def measured(self) -> Measured:
        """The pass beside its floor."""
        return Measured(KERNEL, {"rows": self.rows}, self.verify, self.bytes)


def measure(engine: Engine, rows: Sequence[int]) -> Iterator[Step]:
    """Time the parts of a round, each as a graph of its own, and whole rounds.

    A model of a few megabytes stays in the L2 cache from pass to pass, as it does when it decodes. So its floor, which
    is of memory, may be passed.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    for count in rows:
        yield _step(engine, count)


def _step(engine: Engine, count: int) -> Step:
    model, device, xp = engine.model, engine.device, engine.device.xp
    plain = count == 1
    new_tokens = min(NEW_TOKENS, engine.capacity - PROMPT)
    context = PROMPT + new_tokens // 2
    rounds = Rounds(model, NO_DRAFTER if plain else engine.drafter, context + count + MAX_DEPTH)
    cache, drafter, root = rounds.cache, rounds.drafter, rounds.root
    with device.running():
        prefill(model, cache, prompt_of(engine, context), drafter)

    draft = build = 0.0
    if not plain and drafter.on_device:
        draft = microseconds([partial(drafter.propose_after, root)])
        proposal = drafter.propose_after(root)
        tree_of = (root, proposal.log_probs, proposal.token_ids, count - 1, proposal.children)
        build = microseconds([partial(tree_build, *tree_of)])

    tree = random_tree(count, np.random.default_rng(count))
    tokens = device.put(prompt_of(engine, count))
    parents, depths = device.put(tree.parents), device.put(tree.depths)

    def verify() -> tuple[Array, Array]:
        logits, features = model.forward(tokens, parents, depths, cache, drafter.taps)
        return features, choose_tokens(logits, cache.length, depths, rounds.sampling)

    pass_time = microseconds([verify])
    features, targets = verify()
    last, left = xp.zeros(1, np.int32), xp.zeros(1, np.int32)

    def commit() -> None:
        """As a round does it, but the committed length stays: the next replay finds what this one did."""
        accepted = tree_accept(tokens, parents, targets, MAX_DEPTH + 1)
        if drafter.taps:
            drafter.observe(features[accepted.path])
        cache_commit(cache.rows, cache.length, accepted.path, accepted.length)
        close_round(accepted, count, count, last, left)

    needed = pass_bytes(engine.config, engine.bundle.entries, count, context, cache.rows.itemsize)
    parts = pass_time, draft, build, microseconds([commit])
    return Step(count, context, needed, *parts, _round(engine, count, new_tokens))


def _round(engine: Engine, count: int, new_tokens: int) -> float:
    """Mean microseconds of a round, over as many texts as it takes."""
    prompt = prompt_of(engine, PROMPT)
    decoder, nodes = ("ar", 0) if count == 1 else ("ddtree", count - 1)
    engine.generate(prompt, decoder, nodes, new_tokens)  # records the graphs
    seconds, done = 0.0, 0
    while done < ROUNDS and seconds < SECONDS:
        run = engine.generate(prompt, decoder, nodes, new_tokens)
        seconds, done = seconds + run.decode_seconds, done + run.target_forwards
    return 1e6 * seconds / done
