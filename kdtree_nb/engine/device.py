"""Where arrays live, and how they get there."""

import functools
import math
import platform
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.engine.graph import bytes_of_graphs
from kdtree_nb.kernels.launch import Array, emulated, stored_as

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
        return self.xp.asarray(array.view(stored_as(self.xp, array.dtype)))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory on this device for an array that :meth:`put` would bring."""
        return self.xp.empty(shape, stored_as(self.xp, dtype))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """The same, filled with zeros."""
        return self.xp.zeros(shape, stored_as(self.xp, dtype))

    def wait(self) -> None:
        """Return when everything that was asked of the device is done."""
        if self.name == "cuda":
            self.xp.cuda.Device().synchronize()

    def host(self, array: Array) -> np.ndarray:
        """A device array on the host; waits for it."""
        return array if self.xp is np else self.xp.asnumpy(array)

    def float32(self, array: Array) -> Array:
        """A float array of :meth:`put` as float32; itself, if it is."""
        if array.dtype == np.uint16:
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32, copy=False)

    def bytes_free(self) -> float:
        """Bytes that a GPU has for new arrays; on a CPU the system's own affair, so infinitely many."""
        if self.xp is np:
            return math.inf
        return int(self.xp.cuda.Device().mem_info[0] + self.xp.get_default_memory_pool().free_bytes())

    def bytes_held(self) -> int:
        """Bytes that live arrays and recorded graphs hold on a GPU; 0 on a CPU."""
        return 0 if self.xp is np else int(self.xp.get_default_memory_pool().used_bytes()) + bytes_of_graphs()


class Mailbox:
    """Where a GPU leaves small arrays for the host without waiting for it: two places, which are used in turn.

    So an array has to be read before the second one after it is sent.

    Parameters
    ----------
    size : int
        Numbers that an array has at most; they are int32.
    """

    def __init__(self, device: Device, size: int) -> None:
        self._xp, self._sent = device.xp, 0
        if self._xp is not np:
            cuda = self._xp.cuda
            pinned = [cuda.alloc_pinned_memory(4 * size) for _ in range(2)]  # what a copy needs to be asynchronous
            self._places = [np.ndarray(size, np.int32, buffer=memory) for memory in pinned]
            self._arrivals = [cuda.Event(disable_timing=True) for _ in pinned]
            for arrival in self._arrivals:  # the pool gives a place to others, and a copy may be on its way there still
                weakref.finalize(self, arrival.synchronize)

    def send(self, array: Array) -> Callable[[], np.ndarray]:
        """Copy an array as it is now, behind all that the GPU has to do before; what is returned waits and reads it."""
        if self._xp is np:
            copy = array.copy()
            return lambda: copy
        place, arrival = self._places[self._sent % 2][: array.size], self._arrivals[self._sent % 2]
        self._sent += 1
        self._xp.asnumpy(array, out=place, blocking=False)
        arrival.record()

        def read() -> np.ndarray:
            arrival.synchronize()
            return place.copy()

        return read
