"""What a round does besides the model: candidates, tree, accepted path, cache."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.inputs import random_tree
from kdtree_nb.bench.timing import cache_bytes, copies_of, microseconds, require_gpu
from kdtree_nb.engine.device import Device
from kdtree_nb.kernels.cache_commit import cache_commit
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.top_k import top_k
from kdtree_nb.kernels.tree_accept import tree_accept
from kdtree_nb.kernels.tree_build import tree_build

LENGTH, VOCAB, CANDIDATES = 15, 163_840, 64
"""Drafted positions of a block of 16, Kimi K2's vocabulary, and the tokens kept of each position."""
BUDGETS = (64, 256, 1024)
NODES, LAYERS, LATENT = 65, 61, 576
"""Rows of a verified tree, and Kimi K2's cache."""
STEPS = 2 + len(BUDGETS)
"""How many times :func:`measure` yields."""


def measure() -> Iterator[Measured]:
    """Time each step of a round; what is read from memory is another copy in every call of a graph.

    ``tree_accept + cache_commit`` takes a path as long as the tree is deep, and each of its rows to another place.
    Building and accepting read little: only their latency counts, and they have no floor.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    device, random, cache = Device.named("cuda"), np.random.default_rng(0), cache_bytes()
    put = device.put

    def timed(step: str, calls: Sequence[Callable[[], object]], moved: int = 0) -> Measured:
        return Measured("kdtree_nb", {"step": step}, microseconds(calls), moved)

    read = 4 * LENGTH * VOCAB
    logits = [put(3 * random.standard_normal((LENGTH, VOCAB), np.float32)) for _ in range(copies_of(read, cache))]
    yield timed(f"top_k, {LENGTH} x {VOCAB:,}, K = {CANDIDATES}", [partial(top_k, x, CANDIDATES) for x in logits], read)

    root, (log_probs, token_ids) = put(np.zeros(1, np.int32)), top_k(logits[0], CANDIDATES)
    for budget in BUDGETS:
        yield timed(f"tree_build, B = {budget}", [partial(tree_build, root, log_probs, token_ids, budget)])

    tokens, parents, targets, path = accepted_tree(random)
    moved = 2 * 4 * LAYERS * int((path != np.arange(len(path))).sum()) * LATENT
    places = copies_of(moved, cache)
    rows = device.xp.zeros((LAYERS, places * NODES, LATENT), np.float32)
    tree = put(tokens), put(parents), put(targets)
    prefixes = [put(np.array([place * NODES], np.int32)) for place in range(places)]
    calls = [partial(_accept, *tree, len(path), rows, prefix) for prefix in prefixes]
    yield timed(f"tree_accept + cache_commit, {LAYERS} layers, {len(path)} of {NODES} rows", calls, moved)


def accepted_tree(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A tree whose deepest node is accepted: tokens, parents and targets int32 [NODES], and the path to that node."""
    tree = random_tree(NODES, random)
    tokens, targets = np.arange(NODES, dtype=np.int32), np.full(NODES, NODES, np.int32)  # which is no node's token
    path = [int(tree.depths.argmax())]
    while path[0]:
        parent = int(tree.parents[path[0]])
        targets[parent] = tokens[path[0]]
        path.insert(0, parent)
    return tokens, tree.parents, targets, np.array(path, np.int32)


def _accept(tokens: Array, parents: Array, targets: Array, max_path: int, rows: Array, prefix: Array) -> None:
    accepted = tree_accept(tokens, parents, targets, max_path)
    cache_commit(rows, prefix, accepted.path, accepted.length)
