"""A kernel on a GPU: compiled and loaded by CuPy, or compiled for one architecture, and launched."""

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from kdtree_nb.kernels import driver
from kdtree_nb.kernels.emulator.build import cache_folder
from kdtree_nb.kernels.nvrtc import compile_cubin, nvrtc_version
from kdtree_nb.kernels.source import OPTIONS, Source

__all__ = ["GpuKernel", "Processor", "processor", "recording"]

FREE_SHARED_BYTES = 48 * 1024
"""Shared memory that a kernel may have without asking for more."""
TURNS = "void wait_for_turn()"
"""In a source whose kernels wait for their turn: ``include/turn.cuh``."""

_recording: ContextVar[bool] = ContextVar("recording", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """In this context kernels begin while the one before them ends, where source and GPU can: see ``turn.cuh``.

    For what is recorded in a graph, when all its weights have long been on the GPU. Elsewhere a kernel's weight may be
    what the one before it writes.
    """
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


class Processor(NamedTuple):
    """Where kernels beside an array run: compute capability, and the shared memory that a block may have."""

    capability: str
    shared_bytes: int


@functools.cache
def processor(device: int) -> Processor:
    """Of a GPU, by CuPy's number for it."""
    gpu = sys.modules["cupy"].cuda.Device(device)
    return Processor(gpu.compute_capability, gpu.attributes["MaxSharedMemoryPerBlockOptin"])


class GpuKernel:
    """A kernel with its defines; for one architecture, or for what all GPUs of a kind have."""

    def __init__(self, source: Source, name: str, defines: Mapping[str, str], arch: str | None) -> None:
        self.source, self.name, self.defines, self.arch = source, name, defines, arch
        self._takes_turns = TURNS in source.text
        self._loaded: dict[int, tuple[int, int]] = {}  # by device: its handle there, its own shared memory
        self._opted_in: dict[int, int] = {}  # by device: the shared memory that has been asked for

    @functools.cached_property
    def _function(self) -> Any:
        """CuPy's kernel: compiled for each device, and kept by CuPy."""
        import cupy

        if self.arch:
            return cupy.RawModule(path=str(_cubin_file(self.source, self.arch, self.defines))).get_function(self.name)
        macros = [f"-D{key}={value}" for key, value in self.defines.items()]
        options = (*OPTIONS, *macros)
        return cupy.RawModule(code=self.source.text, options=options, backend="nvrtc").get_function(self.name)

    def launch(
        self,
        device: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        shared_bytes: int,
    ) -> None:
        """Launch on CuPy's current stream; the arguments are ctypes values.

        Raises
        ------
        ValueError
            If the GPU has not as much shared memory.
        """
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device):
            if device not in self._loaded:
                self._loaded[device] = self._function.kernel.ptr, self._function.shared_size_bytes
            function, own_bytes = self._loaded[device]
            needed = shared_bytes + own_bytes
            capability, most = processor(device)
            if needed > self._opted_in.get(device, FREE_SHARED_BYTES):
                if needed > most:
                    raise ValueError(f"{self.name}: {needed} bytes of shared memory, GPU {device} has {most} a block")
                self._function.max_dynamic_shared_size_bytes = shared_bytes
                self._opted_in[device] = needed
            early = self._takes_turns and _recording.get() and int(capability) >= 90
            driver.launch(function, grid, block, shared_bytes, cuda.get_current_stream().ptr, arguments, early)


def _cubin_file(source: Source, arch: str, defines: Mapping[str, str]) -> Path:
    """Machine code for one architecture in the cache, compiled if it is not there by this compiler."""
    made_of = source.text, arch, sorted(defines.items()), OPTIONS, nvrtc_version()
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:20]
    file = cache_folder("cubin") / f"{Path(source.name).stem}-{arch}-{key}.cubin"
    if not file.exists():
        code = compile_cubin(source, arch, defines).code
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as own:  # others may write it at the same time
            own.write(code)
        os.replace(own.name, file)
    return file
