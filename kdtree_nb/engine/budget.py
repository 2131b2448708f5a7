"""What a round costs on this machine, by the nodes of its tree: what a budget needs to know its price."""

import hashlib
import json
import os
import secrets
import time

import numpy as np

from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.decode import Budget, Sampling, build, draft, prefill, verify
from kdtree_nb.engine.drafter import Drafter
from kdtree_nb.engine.model import Model
from kdtree_nb.kernels.emulator.build import cache_folder
from kdtree_nb.reference.tree import DraftTree

MOST_NODES = 64
MEASURED = (0, 1, 3, 5, 7, 11, 15, 23, 31, 47, MOST_NODES)
"""Nodes whose rounds are timed; between them costs are taken to be straight."""
CONTEXT, DEEPEST, REPEATS = 64, 7, 7


def round_costs(model: Model, drafter: Drafter, capacity: int) -> np.ndarray:
    """Seconds of a round, drafting included, with 0 … 64 nodes besides the root; measured once and kept.

    They are kept in the user's cache folder, for this device, model and drafter. A calibration takes a few seconds.

    Parameters
    ----------
    capacity : int
        Of the engine; a model with less room than the largest tree is measured as far as it goes.

    Returns
    -------
    float32 [nodes + 1]
        Never descending.
    """
    most = most_nodes(capacity)
    described = json.dumps([model.device.description(), repr(model.config), model.weights.kinds(), repr(drafter), most])
    file = cache_folder("costs") / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        costs = np.array(found["seconds"], np.float32)
        usable = costs.shape == (most + 1,) and np.isfinite(costs).all() and costs[0] > 0
        if usable and found["of"] == described and (costs[1:] >= costs[:-1]).all():
            return costs
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass  # not measured yet, or not by us
    costs = measure(model, drafter, capacity)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps({"of": described, "seconds": costs.tolist()}), encoding="utf-8")
    os.replace(temporary, file)
    return costs


def most_nodes(capacity: int) -> int:
    """Of the largest tree that is measured, the root not counted."""
    return min(MOST_NODES, capacity - 2)


def measure(model: Model, drafter: Drafter, capacity: int) -> np.ndarray:
    """The medians of timed rounds over random trees behind a random prefix: float32 [nodes + 1]."""
    random, device, most = np.random.default_rng(0), model.device, most_nodes(capacity)
    context = min(CONTEXT, capacity - 2)
    deepest = min(DEEPEST, capacity - 1 - context)  # no position may lie beyond the model's tables
    cache = LatentCache(model.config, context + most + 2, device)
    tokens = random.integers(model.config.vocab_size, size=context + 1, dtype=np.int32)
    of_text = drafter.start(cache)
    prefill(model, cache, of_text, tokens[:-1])
    committed = tokens.tolist()
    sizes = sorted({min(size, most) for size in MEASURED})
    seconds = np.empty((REPEATS + 1, len(sizes)))
    for repeat in range(REPEATS + 1):  # the first meets weights and kernels that are not loaded yet
        for column, nodes in enumerate(sizes):
            tree = _random_tree(random, nodes, deepest, model)
            device.host(cache.length)
            started = time.perf_counter()
            proposal = draft(of_text, committed, False, most, model.config.vocab_size)
            build(model, committed[-1], proposal, Budget(nodes))
            verify(model, cache, of_text, tree, 1 + len(proposal.token_ids), Sampling())
            device.host(cache.length)
            seconds[repeat, column] = time.perf_counter() - started
            cache.length[:] = context
    medians = np.maximum.accumulate(np.median(seconds[1:], axis=0))
    return np.interp(np.arange(most + 1), sizes, medians).astype(np.float32)


def _random_tree(random: np.random.Generator, nodes: int, deepest: int, model: Model) -> DraftTree:
    """Random tokens, each below any earlier node that is not too deep."""
    parents, depths = np.full(nodes + 1, -1, np.int32), np.zeros(nodes + 1, np.int32)
    for node in range(1, nodes + 1):
        parents[node] = random.choice(np.flatnonzero(depths[:node] < deepest))
        depths[node] = depths[parents[node]] + 1
    tokens = random.integers(model.config.vocab_size, size=nodes + 1, dtype=np.int32)
    put, scores = model.device.put, np.zeros(nodes + 1, np.float32)
    return DraftTree(put(tokens), put(parents), put(depths), put(scores), nodes + 1)
