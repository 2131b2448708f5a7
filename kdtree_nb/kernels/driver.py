"""The CUDA driver's launch, for what CuPy's does not offer: a kernel that begins before the one before it has ended."""

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["launch"]

_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_EARLY = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    stream: int,
    arguments: Sequence[Any],
    early: bool,
) -> None:
    """Launch a kernel in the current context.

    Parameters
    ----------
    function, stream : int
        Handles, as CuPy has them.
    arguments
        ctypes values.
    early : bool
        Whether it may begin as soon as the kernel before it in the stream lets it; from compute capability 9.0 on.

    Raises
    ------
    RuntimeError
        With the driver's name for what is wrong.
    """
    config = _Config(grid, block, shared_bytes, stream, ctypes.pointer(_EARLY), int(early))
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    driver = _driver()
    status = driver.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), addresses, None)
    if status:
        name = ctypes.c_char_p(b"unknown")
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"cuLaunchKernelEx: {(name.value or b'').decode()} ({status})")
