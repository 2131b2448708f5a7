"""Where kernels run: in the emulator, and with the same tests on a GPU where there is one."""

import importlib.util
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.emulator.build import sanitizing
from kdtree_nb.kernels.launch import Array, emulated

GUARD = 0 if sanitizing() else 256
"""Bytes of poison before and after each array: read they show, written they are noticed.

None under the sanitizer, which notices every access outside of an array at once.
"""
SCHEDULES = ("reverse", "random:1", "random:2")


class Device:
    """Arrays of one place. Memory that nobody has written is poison: NaN as float, 0x7F7F7F7F as int.

    Were it −1, a kernel that forgets to write its padding would go unnoticed; :meth:`every_schedule` tries that too.
    """

    def __init__(self, xp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.xp = xp
        self.is_emulated = xp is np
        self._monkeypatch = monkeypatch
        self._plain_empty = xp.empty
        self._guarded: list[tuple[Array, int]] = []
        self._poison_ints = 0x7F
        monkeypatch.setattr(xp, "empty", self.empty)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = float, **options: Any) -> Array:
        """What ``xp.empty`` is during a test."""
        dtype, shape = np.dtype(dtype), tuple(int(n) for n in np.ravel(shape))
        if dtype.hasobject or options:
            return self._plain_empty(shape, dtype, **options)
        size = math.prod(shape) * dtype.itemsize
        poison = 0xFF if dtype.kind in "fV" else self._poison_ints
        memory = self.xp.full(size + 2 * GUARD, poison, np.uint8)
        self._guarded.append((memory, poison))
        return memory[GUARD : GUARD + size].view(dtype).reshape(shape)

    def put(self, array: Any, dtype: Any = None) -> Array:
        """A copy on the device; bfloat16 travels as its bits where the device has no such type."""
        array = np.asarray(array, dtype)
        if array.dtype == bfloat16 and not self.is_emulated:
            array = array.view(np.uint16)
        copy = self.empty(array.shape, array.dtype)
        copy[...] = self.xp.asarray(array)
        return copy

    def sparse(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Gigabytes of zeros, of which a page takes memory once it is written (on a GPU: all of it)."""
        if not self.is_emulated:
            return self.xp.zeros(shape, dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        pages = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize, flags=flags)
        return np.frombuffer(pages, dtype).reshape(shape)

    def host(self, array: Array) -> np.ndarray:
        """A copy in NumPy."""
        return np.array(array) if self.is_emulated else self.xp.asnumpy(array)

    def every_schedule(self, run: Callable[[], Sequence[Array]]) -> list[np.ndarray]:
        """Results that have the same bits in whatever order threads and blocks run, with every byte of poison 0xFF."""
        expected = [self.host(array) for array in run()]
        self._poison_ints = 0xFF
        for schedule in SCHEDULES:
            with self._monkeypatch.context() as environment:
                environment.setitem(os.environ, "KDTREE_SCHEDULE", schedule)
                for array, same in zip(run(), expected, strict=True):
                    assert_same_bits(self.host(array), same)
        return expected

    def check_guards(self) -> None:
        """Fail if something was written before the first or after the last element of an array."""
        for memory, poison in self._guarded:
            around = memory[:GUARD], memory[len(memory) - GUARD :]
            assert all((part == poison).all() for part in around), "written outside of an array"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What test_resources.py has found, as a table."""
    found: dict[str, dict[str, str]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "resources":
                kernel, arch, registers, spills, shared = value
                found.setdefault(kernel, {}).setdefault(arch, f"{registers:4} {spills:3} {shared / 1024:5.1f}")
    if found:
        archs = sorted({arch for row in found.values() for arch in row}, key=lambda arch: int(arch.strip("sm_a")))
        terminalreporter.section("registers, spilled bytes, KiB of shared memory")
        terminalreporter.write_line(" " * 16 + "".join(f"{arch:>16}" for arch in archs))
        for kernel, row in sorted(found.items()):
            terminalreporter.write_line(f"{kernel:16}" + "".join(f"{row.get(arch, ''):>16}" for arch in archs))


def _has_gpu() -> bool:
    if not importlib.util.find_spec("cupy"):
        return False
    import cupy

    return bool(cupy.cuda.is_available())


@pytest.fixture(params=["emulated", "cuda"] if _has_gpu() else ["emulated"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Each test with it runs in the emulator and, where there is one, on a GPU."""
    if request.param == "emulated":
        device = Device(np, monkeypatch)
        with emulated():
            yield device
    else:
        import cupy

        device = Device(cupy, monkeypatch)
        yield device
    device.check_guards()
