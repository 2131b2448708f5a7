"""Where arrays live, and how they get there."""

import functools
import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels.launch import Array, emulated

DEVICES = ("auto", "cuda", "cpu", "emulated")


@functools.cache
def _stream() -> Any:
    """Where kernels go: graphs cannot be recorded on the default stream. It waits for that one, and is waited for."""
    import cupy

    return cupy.cuda.Stream()


def cuda_available() -> bool:
    """Whether CuPy is installed and finds a GPU."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


class Device(NamedTuple):
    """``cpu`` runs the NumPy specification, ``cuda`` the kernels, ``emulated`` the kernels' source on the CPU.

    ``xp`` is the module of its arrays, numpy or cupy.
    """

    name: str
    xp: Any

    @classmethod
    def named(cls, name: str) -> "Device":
        """The device of that name; ``auto`` is ``cuda`` where a GPU is there, else ``cpu``.

        Raises
        ------
        ValueError
            For another name, or for ``cuda`` without a GPU.
        """
        if name not in DEVICES:
            raise ValueError(f"Engine.load: device={name!r}, expected one of {', '.join(DEVICES)}")
        if name == "cuda" or (name == "auto" and cuda_available()):
            if not cuda_available():
                raise ValueError("Engine.load: device='cuda', but CuPy finds no GPU; `doctor` says what is missing")
            import cupy

            return cls("cuda", cupy)
        return cls("cpu" if name == "auto" else name, np)

    def description(self) -> str:
        """The GPU's name where the device is one, else the processor's kind."""
        if self.name == "cuda":
            name: bytes = self.xp.cuda.runtime.getDeviceProperties(self.xp.cuda.Device().id)["name"]
            return name.decode()
        return f"{platform.machine()} CPU, {self.name}"

    def running(self) -> AbstractContextManager[None]:
        """Within it, operations on this device's arrays run where they should."""
        if self.name == "cuda":
            return _stream()
        return emulated() if self.name == "emulated" else nullcontext()

    def put(self, array: np.ndarray) -> Array:
        """A host array on this device; CuPy has no bfloat16, there its bits travel as uint16."""
        if self.xp is np:
            return array if array.ctypes.data % 16 == 0 else array.copy()  # kernels load 16 bytes at a time
        return self.xp.asarray(array.view(np.uint16) if array.dtype == bfloat16 else array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Memory on this device for an array that :meth:`put` would bring."""
        return self.xp.empty(shape, np.uint16 if dtype == bfloat16 else dtype)

    def wait(self) -> None:
        """Return when everything that was asked of the device is done."""
        if self.name == "cuda":
            self.xp.cuda.Device().synchronize()

    def host(self, array: Array) -> np.ndarray:
        """A device array on the host; waits for it."""
        return array if self.xp is np else self.xp.asnumpy(array)

    def float32(self, array: Array) -> Array:
        """A float array of :meth:`put` as float32."""
        if array.dtype == np.uint16:
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32)

    def bytes_held(self) -> int:
        """Bytes that live arrays hold on a GPU; 0 on a CPU."""
        return 0 if self.xp is np else int(self.xp.get_default_memory_pool().used_bytes())
