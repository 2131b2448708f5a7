"""How fast a bundle gets to the GPU, beside what its files and the bus give at most."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdtree_nb.bench.timing import require_gpu
from kdtree_nb.bundle import Bundle
from kdtree_nb.engine import Engine
from kdtree_nb.engine.upload import BUFFER_BYTES, THREADS, Piece, reads

BUS_BYTES, BUS_COPIES = 256 * 2**20, 8


class Loading(NamedTuple):
    """All of a bundle, into an engine that has nothing yet.

    Attributes
    ----------
    source : ``cache``, where the system has the files in memory, or ``disk``, where it was told to forget them;
        ``first``, before these: from the cache in a process that has to compile CuPy's kernels and pin its buffers
    read_gb_per_s : the files, from there into ordinary memory, in the same reads and threads
    share : of the slower of bus and reading that loading reached
    """

    source: str
    seconds: float
    gb_per_s: float
    read_gb_per_s: float
    share: float


class Measured(NamedTuple):
    """Bytes of the bundle's tensors and those then held on the GPU; headers read and checked; bus; and loading."""

    bytes: int
    gpu_bytes: int
    open_seconds: float
    bus_gb_per_s: float
    loadings: list[Loading]


def measure(path: Path) -> Measured:
    """Load a bundle from the system's cache of files and, on systems that can be told to forget a file, from the disk.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    bus, open_seconds = bus_rate(), _seconds(lambda: Bundle.open(path))
    bundle, loadings, gpu_bytes = Bundle.open(path), [], 0
    read_seconds(bundle)  # and now the system has it in memory
    for source in ["first", "cache", *["disk"] * hasattr(os, "posix_fadvise")]:
        if source == "disk":
            _forget(bundle)
        reading = bundle.nbytes / read_seconds(bundle) / 1e9
        if source == "disk":
            _forget(bundle)
        seconds, gpu_bytes = _load(path)
        rate = bundle.nbytes / seconds / 1e9
        loadings.append(Loading(source, seconds, rate, reading, rate / min(bus, reading)))
    return Measured(bundle.nbytes, gpu_bytes, open_seconds, bus, loadings)


def bus_rate() -> float:
    """Gigabytes a second from pinned memory to the GPU."""
    import cupy

    host = cupy.cuda.alloc_pinned_memory(BUS_BYTES)
    target, stream = cupy.empty(BUS_BYTES, cupy.uint8), cupy.cuda.Stream(non_blocking=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for copies in (1, BUS_COPIES):  # the first time, memory is only now found
        start.record(stream)
        for _ in range(copies):
            target.data.copy_from_host_async(host.ptr, BUS_BYTES, stream)
        end.record(stream)
        end.synchronize()
    return float(BUS_COPIES * BUS_BYTES / cupy.cuda.get_elapsed_time(start, end) / 1e6)


def read_seconds(bundle: Bundle) -> float:
    """What it takes to read all tensors of a bundle into ordinary memory, in the reads and threads of an upload."""
    places = [(*bundle.place(name), entry.nbytes) for name, entry in bundle.entries.items()]
    plan = reads([Piece(file, begin, begin + size, 0) for file, begin, size in places], BUFFER_BYTES)
    buffers = np.ones((THREADS, BUFFER_BYTES), np.uint8)

    def read(number: int) -> None:
        for pieces in plan[number::THREADS]:
            size = pieces[-1].end - pieces[0].begin
            bundle.read_into(buffers[number, :size], pieces[0].file, pieces[0].begin)

    with ThreadPoolExecutor(THREADS) as pool:
        return _seconds(lambda: list(pool.map(read, range(THREADS))))


def _forget(bundle: Bundle) -> None:
    """Ask the system to drop a bundle's files from its memory."""
    for file in {entry.file for entry in bundle.entries.values()}:
        with open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load(path: Path) -> tuple[float, int]:
    """Seconds that a fresh engine takes for all of its weights, and the bytes that it then holds."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    engine = Engine.load(path, "cuda")
    before = engine.device.bytes_held()

    def load() -> None:
        engine.preload()
        engine.device.wait()

    return _seconds(load), engine.device.bytes_held() - before


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
