"""How long a kernel takes on a GPU: replays of a CUDA graph over rotating copies of what it reads."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kdtree_nb.engine.device import cuda_available
from kdtree_nb.kernels.gpu import recording

REPLAYS = 20
CACHES = 4
"""The copies of a weight hold this many times what the L2 cache does, so that each call reads memory."""


def require_gpu() -> None:
    """Raise a ValueError where there is no GPU to measure."""
    if not cuda_available():
        raise ValueError("bench: CuPy finds no GPU, and only a GPU can be measured; `doctor` says what is missing")


def copies_of(nbytes: int, cache_bytes: int) -> int:
    """How many copies of so many bytes keep a cache from holding the next one."""
    return max(2, -(-CACHES * cache_bytes // nbytes))


def cache_bytes() -> int:
    """The L2 cache of the current GPU."""
    import cupy

    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of these calls: as one graph, replayed, as an engine's round is.

    There a kernel of ours begins while the one before it ends.
    """
    with _stream() as stream:
        _warm_up(calls, stream)
        stream.begin_capture()
        with recording():
            for call in calls:
                call()
        graph = stream.end_capture()
        return _median(lambda: graph.launch(stream), stream) / len(calls)


def torch_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The same for calls into torch, between the same events."""
    import torch

    with _stream() as stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        _warm_up(calls, stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return _median(graph.replay, stream) / len(calls)


def _stream() -> Any:
    """A stream of its own, once all that was asked for before is there."""
    import cupy

    cupy.cuda.Device().synchronize()
    return cupy.cuda.Stream(non_blocking=True)


def _warm_up(calls: Sequence[Callable[[], object]], stream: Any) -> None:
    """Compile, and fill the memory pool: neither may happen in a capture."""
    for call in calls[:2]:
        call()
    stream.synchronize()


def _median(replay: Callable[[], object], stream: Any) -> float:
    import cupy

    replay()
    times = []
    for _ in range(REPLAYS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)
