"""What a round costs on this machine, by the nodes of its tree: what a budget needs to know its price."""

import functools
import hashlib
import json
import os
import platform
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import Drafter, Proposal
from kdtree_nb.engine.model import Model
from kdtree_nb.engine.rounds import PASSES, UNRECORDED, Budget, Rounds
from kdtree_nb.kernels.choose_tokens import Sampling
from kdtree_nb.kernels.emulator import workers
from kdtree_nb.kernels.emulator.build import cache_folder

MOST_NODES = 64
MEASURED = tuple(rows - 1 for rows in PASSES)
"""Nodes whose rounds are timed; between them costs are taken to be straight."""
CONTEXT, DEEPEST, REPEATS = 64, 7, 7
UNTIMED = UNRECORDED + 1
"""Rounds of each size that load weights, compile kernels and record graphs."""
COMPUTE = ("engine", "kernels", "reference")
"""Folders of this package whose code a round runs."""
SOURCES = (".py", ".cu", ".cuh", ".h", ".cpp")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Of the environment: how many a matrix product takes on a CPU."""


def round_costs(model: Model, drafter: Drafter, capacity: int) -> np.ndarray:
    """Seconds of a round, drafting included, with 0 … 64 nodes besides the root; measured once and kept.

    A round with none costs what one with a single node does, since it has drafted before it knows.

    They are kept in the user's cache folder, for this machine, code, model and drafter, whose ``repr`` has to name what
    its time depends on. A calibration takes a few seconds.

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
    weights = [model.weights.kinds(), model.weights.dtype.name]
    described = json.dumps([machine(model.device), repr(model.config), *weights, repr(drafter), most])
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


def machine(device: Device) -> list[Any]:
    """All that a round's time depends on but for model and drafter: device, processor, threads, library and code."""
    threads = {name: os.environ[name] for name in THREADS if name in os.environ}
    return [device.description(), processor(), workers(), threads, device.xp.__version__, code()]


@functools.cache
def processor() -> str:
    """The CPU's name, where the system tells it: it runs the reference, the emulator, and a host's part of a round."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@functools.cache
def code() -> str:
    """A checksum of the sources that a round runs."""
    package = Path(__file__).parents[1]
    files = sorted(path for folder in COMPUTE for path in (package / folder).rglob("*") if path.suffix in SOURCES)
    digests = [(path.relative_to(package).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def most_nodes(capacity: int) -> int:
    """Of the largest tree that is measured, the root not counted."""
    return min(MOST_NODES, capacity - 2)


def measure(model: Model, drafter: Drafter, capacity: int) -> np.ndarray:
    """The medians of timed rounds behind a random prefix: float32 [nodes + 1]."""
    random, device, most = np.random.default_rng(0), model.device, most_nodes(capacity)
    context = min(CONTEXT, capacity - 2)
    left = min(DEEPEST + 1, capacity - context)  # no position may lie beyond the model's tables
    rounds = Rounds(model, drafter, context + most + left)
    if not rounds.drafter.on_device:
        rounds.drafter = _Full(rounds.drafter, model.config.vocab_size)
    tokens = random.integers(model.config.vocab_size, size=context + 1, dtype=np.int32)
    rounds.begin(tokens, left, Sampling())
    sizes = sorted({min(max(size, 1), most) for size in MEASURED})
    seconds = np.empty((UNTIMED + REPEATS, len(sizes)))
    for repeat in range(len(seconds)):
        for column, nodes in enumerate(sizes):
            rounds.cache.length[:], rounds.left[:], rounds.root[:] = (
                context,
                left,
                int(tokens[-1 - repeat % len(tokens)]),
            )
            device.host(rounds.left)
            started = time.perf_counter()
            rounds.run("ddtree", Budget(nodes), tokens.tolist())
            device.host(rounds.left)
            seconds[repeat, column] = time.perf_counter() - started
    medians = np.maximum.accumulate(np.median(seconds[UNTIMED:], axis=0))
    every = np.arange(most + 1)
    if device.name == "cuda":  # which has passes of these sizes and no others
        return np.asarray(medians)[np.searchsorted(sizes, every)].astype(np.float32)
    return np.interp(every, sizes, medians).astype(np.float32)


class _Full(Drafter):
    """Takes a drafter's time, and proposes enough for every tree, as the drafter may not."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._of, self.taps, self.observe = drafter, drafter.taps, drafter.observe  # type: ignore[method-assign]
        width = min(vocab_size, MOST_NODES)
        self._ids = np.tile(np.arange(width, dtype=np.int32), (DEEPEST, 1))
        self._log_probs = np.tile(-np.log(np.arange(2, width + 2, dtype=np.float32)), (DEEPEST, 1))

    def propose(self, tokens: np.ndarray) -> Proposal:
        self._of.propose(tokens)
        return Proposal(self._log_probs, self._ids)
