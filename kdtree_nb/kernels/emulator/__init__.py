"""The emulator: CUDA sources compiled as C++, every GPU thread a fibre of this CPU. README.md says what it models."""

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence

from kdtree_nb.kernels.emulator.build import KernelError, build_library, sanitizing
from kdtree_nb.kernels.source import Source

__all__ = ["KernelError", "Program"]

FORWARD, REVERSE, RANDOM = range(3)


class _Launch(ctypes.Structure):
    """``emulator::Launch`` of include/runtime.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("error", ctypes.c_char * 2048),
    )


class Program:
    """A CUDA source with its defines, compiled for this CPU.

    Raises
    ------
    KernelError
        If there is no compiler, or if it refuses the source.
    """

    def __init__(self, source: Source, defines: Mapping[str, str]) -> None:
        if sanitizing() and not hasattr(ctypes.CDLL(None), "__asan_init"):
            raise KernelError(
                "KDTREE_SANITIZE=1 needs a process that starts with the sanitizer's library: "
                "python -m kdtree_nb.kernels.emulator.sanitize SCRIPT, or … -m MODULE"
            )
        self._library = ctypes.CDLL(str(build_library(source, defines)))

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[ctypes._SimpleCData],
        shared_bytes: int,
    ) -> None:
        """Run a kernel to its end.

        Raises
        ------
        KernelError
            Where a GPU would be free to do anything; the message names kernel, block, thread and line.
        """
        schedule, seed = _schedule()
        launch = _Launch(grid, block, shared_bytes, workers(), schedule, seed)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        launch.arguments = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        if getattr(self._library, f"emulate_{kernel}")(ctypes.byref(launch)):
            raise KernelError(launch.error.decode(errors="replace"))


@functools.cache
def workers() -> int:
    """How many threads of this CPU are ours."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _schedule() -> tuple[int, int]:
    """``KDTREE_SCHEDULE``: forward (as if unset), reverse, or random:SEED."""
    text = os.environ.get("KDTREE_SCHEDULE") or "forward"
    name, _, seed = text.partition(":")
    if name == "random" and seed.isdigit():
        return RANDOM, int(seed)
    if text in ("forward", "reverse"):
        return (FORWARD if text == "forward" else REVERSE), 0
    raise ValueError(f"KDTREE_SCHEDULE={text!r}, expected forward, reverse or random:SEED")
