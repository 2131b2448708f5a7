"""From a bundle's files into a GPU's memory, at the rate of the slower of the two roads.

A copy from ordinary memory goes through the driver's own small buffer, and waits there. A copy from *pinned* memory,
which cannot be moved, runs by itself. So several threads each have a pinned buffer: one fills its buffer from the file
while the buffers of others are on their way. A buffer takes what lies side by side in the file, in one read,
and its tensors go from there to wherever in the GPU's memory they belong: a stack of experts needs no copy of its own.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from kdtree_nb.bundle import Bundle

BUFFER_BYTES = 8 * 2**20
THREADS = min(16, os.cpu_count() or 1)


class Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, and the address on the GPU where they go."""

    file: Path
    begin: int
    end: int
    address: int


class PinnedBuffer:
    """``memory``, uint8 [BUFFER_BYTES], which the GPU fetches by itself, and the stream on which it does."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._allocation = cupy.cuda.alloc_pinned_memory(BUFFER_BYTES)
        self.memory: np.ndarray = np.frombuffer(self._allocation, np.uint8, BUFFER_BYTES)

    def send(self, at: int, size: int, address: int) -> None:
        """Begin to copy bytes from ``at`` on."""
        runtime = self._cuda.runtime
        runtime.memcpyAsync(address, self._allocation.ptr + at, size, runtime.memcpyHostToDevice, self._stream.ptr)

    def wait(self) -> None:
        """Return when all that was sent has arrived."""
        self._stream.synchronize()


def reads(pieces: Iterable[Piece], most: int) -> list[list[Piece]]:
    """Pieces in the order of their files, cut and put together so that each list is one read of at most ``most``."""
    of_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        of_file.setdefault(piece.file, []).append(piece)
    found: list[list[Piece]] = []
    for file in sorted(of_file):
        after, room = -1, 0
        for _, begin, end, address in sorted(of_file[file], key=attrgetter("begin")):
            while begin < end:
                if begin != after or not room:
                    found.append([])
                    room = most
                cut = min(end, begin + room)
                found[-1].append(Piece(file, begin, cut, address))
                address += cut - begin
                room -= cut - begin
                begin = after = cut
    return found


def upload(bundle: Bundle, pieces: Iterable[Piece], progress: Callable[[int], None] | None = None) -> None:
    """Copy pieces of a bundle's files to the GPU, and wait until all are there.

    The memory they go to must not be in use any more by what was asked of the GPU before.

    Parameters
    ----------
    progress : callable, optional
        Called with a number of bytes when that many have been sent.

    Raises
    ------
    BundleError
        If a file has changed since the bundle was opened.
    """
    plan = reads(pieces, BUFFER_BYTES)
    buffers = [PinnedBuffer() for _ in range(min(THREADS, len(plan)))]
    free: SimpleQueue[PinnedBuffer] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def send(read: list[Piece]) -> int:
        buffer, begin, size = free.get(), read[0].begin, read[-1].end - read[0].begin
        try:
            buffer.wait()
            bundle.read_into(buffer.memory[:size], read[0].file, begin)
            for piece in read:
                buffer.send(piece.begin - begin, piece.end - piece.begin, piece.address)
        finally:
            free.put(buffer)
        return size

    try:
        with ThreadPoolExecutor(max(1, len(buffers))) as pool:
            for size in pool.map(send, plan):  # a failure, or Ctrl-C, cancels those that have not begun
                if progress is not None:
                    progress(size)
    finally:
        for buffer in buffers:
            buffer.wait()
