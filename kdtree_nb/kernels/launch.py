"""Compile and launch CUDA kernels: with CuPy on a GPU, with the emulator on this CPU."""

import ctypes
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from kdtree_nb.kernels.emulator import KernelError, Program
from kdtree_nb.kernels.gpu import GpuKernel, Processor, processor
from kdtree_nb.kernels.source import Parameter, Source, read_source

__all__ = [
    "Array",
    "Kernel",
    "KernelError",
    "address_of",
    "array_module",
    "c_type",
    "empty_beside",
    "emulated",
    "pointer",
    "processor_of",
    "runs_cuda",
    "stored_as",
]

Array: TypeAlias = np.ndarray
"""A NumPy array or a CuPy array: which of the two decides where a kernel runs."""

MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 227 * 1024

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SCALARS: dict[str, tuple[np.dtype, type[ctypes._SimpleCData]]] = {
    "bool": (np.dtype(np.bool_), ctypes.c_bool),
    "int": (np.dtype(np.int32), ctypes.c_int),
    "unsigned": (np.dtype(np.uint32), ctypes.c_uint),
    "long long": (np.dtype(np.int64), ctypes.c_longlong),
    "unsigned long long": (np.dtype(np.uint64), ctypes.c_ulonglong),
    "size_t": (np.dtype(np.uint64), ctypes.c_size_t),
    "float": (np.dtype(np.float32), ctypes.c_float),
    "double": (np.dtype(np.float64), ctypes.c_double),
}
# What an array may hold for a pointer to the type: integers of either sign, as packed words are read as unsigned.
_ELEMENTS: dict[str, tuple[np.dtype, ...]] = {
    name: tuple(map(np.dtype, dtypes))
    for name, dtypes in {
        "bool": (np.bool_,),
        "char": (np.int8, np.uint8),
        "signed char": (np.int8, np.uint8),
        "unsigned char": (np.uint8, np.int8, np.bool_),
        "short": (np.int16, np.uint16),
        "unsigned short": (np.uint16, np.int16, _BFLOAT16, np.float16),
        "int": (np.int32, np.uint32),
        "unsigned": (np.uint32, np.int32),
        "long long": (np.int64, np.uint64),
        "unsigned long long": (np.uint64, np.int64),
        "size_t": (np.uint64, np.int64),
        "float": (np.float32,),
        "double": (np.float64,),
        "__half": (np.float16,),
        "__nv_bfloat16": (_BFLOAT16, np.uint16),  # on a GPU the bits of bfloat16 may come as uint16
    }.items()
}
_VECTORS = {  # their elements, and how many
    "__half2": ("__half", 2),
    "__nv_bfloat162": ("__nv_bfloat16", 2),
    **{f"{name}{n}": (name, n) for name in ("int", "float") for n in (2, 4)},
    **{f"uint{n}": ("unsigned", n) for n in (2, 4)},
}
_C_TYPES = {dtypes[0]: name for name, dtypes in _ELEMENTS.items() if name != "size_t" and name != "signed char"}
_C_TYPES[np.dtype(np.uint16)] = "__nv_bfloat16"

_emulated: ContextVar[bool] = ContextVar("emulated", default=False)


@contextmanager
def emulated() -> Iterator[None]:
    """In this context operations on NumPy arrays run the CUDA sources, compiled for this CPU."""
    token = _emulated.set(True)
    try:
        yield
    finally:
        _emulated.reset(token)


def runs_cuda(x: Array) -> bool:
    """Whether an operation on x launches a kernel: on CuPy arrays always, on NumPy arrays if :func:`emulated`."""
    return _emulated.get() if isinstance(x, np.ndarray) else _on_gpu(x)


def array_module(x: Array) -> ModuleType:
    """NumPy or CuPy: what allocates beside x."""
    return sys.modules["cupy"] if _on_gpu(x) else np


def stored_as(xp: ModuleType, dtype: Any) -> np.dtype:
    """The dtype by which NumPy or CuPy holds another: CuPy has no bfloat16, there its bits are uint16."""
    return np.dtype(np.uint16 if xp is not np and dtype == _BFLOAT16 else dtype)


def empty_beside(x: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """An array where x lies, to be written; of bfloat16 a GPU gets the bits."""
    xp = array_module(x)
    return xp.empty(shape, stored_as(xp, dtype))


def processor_of(x: Array) -> Processor:
    """The GPU that an array is on; of the emulator, which has none, no capability."""
    device = _device(x)
    return Processor("", MAX_SHARED_BYTES) if device is None else processor(device)


def c_type(x: Array) -> str:
    """The name in CUDA of an array's elements; uint16 is taken for the bits of bfloat16."""
    try:
        return _C_TYPES[x.dtype]
    except KeyError:
        names = ", ".join(dtype.name for dtype in _C_TYPES)
        raise TypeError(f"no CUDA type for an array of {x.dtype.name}, expected one of {names}") from None


class pointer(NamedTuple):
    """An argument whose memory need not be contiguous: the kernel is told its strides in other arguments."""

    array: Array


class Kernel:
    """A kernel in a CUDA source: compiled at its first call, launched on CuPy's current stream or emulated.

    Parameters
    ----------
    source
        A file beside this one, or a path.
    name
        Of the ``extern "C" __global__`` function; if None, the file's.
    defines
        Macros, constants or types: ``{"BLOCK": 256, "SCALE": "__half"}``.
    arch
        For a kernel with instructions of one GPU only, ``"sm_90a"``: CuPy itself compiles for what all of a kind have.
    """

    def __init__(
        self,
        source: str | Path,
        name: str | None = None,
        defines: Mapping[str, int | str] | None = None,
        arch: str | None = None,
    ) -> None:
        self.name = name or Path(source).stem
        self.defines = {key: str(value) for key, value in (defines or {}).items()}
        self.arch = arch
        self._file = source
        self._special: dict[frozenset[tuple[str, int | str]], Kernel] = {}

    def __repr__(self) -> str:
        return f"Kernel({self.source.name!r}, {self.name!r}, {self.defines})"

    @property
    def source(self) -> Source:
        """The CUDA source."""
        return read_source(self._file)

    def specialize(self, **defines: int | str) -> "Kernel":
        """The same kernel with more defines, for constants and types that are known at the call only."""
        key = frozenset(defines.items())
        if key not in self._special:
            self._special[key] = Kernel(self._file, self.name, {**self.defines, **defines}, self.arch)
        return self._special[key]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_bytes: int = 0
    ) -> None:
        """Launch; on a GPU this does not wait for the kernel to end.

        Parameters
        ----------
        grid, block
            One to three sizes each.
        args
            Arrays, all on one device; NumPy scalars; ``pointer(array)`` for an array with strides; None for a
            null pointer. Each is compared with the parameter that the source declares.
        shared_bytes
            Of dynamic shared memory: ``extern __shared__ unsigned char dynamic_shared[];``.

        Raises
        ------
        TypeError, ValueError
            For arguments or sizes that do not fit; the message names kernel and argument.
        KernelError
            From the emulator, for what a GPU leaves undefined.
        """
        grid = self._sizes("grid", grid, MAX_GRID)
        block = self._sizes("block", block, MAX_BLOCK)
        if block[0] * block[1] * block[2] > MAX_THREADS:
            raise ValueError(f"{self.name}: block {block} has more than {MAX_THREADS} threads")
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(f"{self.name}: shared_bytes={shared_bytes}, expected 0 to {MAX_SHARED_BYTES}")
        parameters = self._parameters
        if len(args) != len(parameters):
            names = ", ".join(parameter.name for parameter in parameters)
            raise TypeError(f"{self.name}: {len(args)} arguments, expected {len(parameters)}: {names}")
        addresses, devices = [], {}
        for parameter, value in zip(parameters, args, strict=True):
            array = self._check(parameter, value)
            addresses.append(None if array is None else address_of(array))
            if array is not None:
                devices[_device(array)] = parameter.name
        if len(devices) > 1:
            places = " and ".join(f"{name!r} on {_place(device)}" for device, name in devices.items())
            raise ValueError(f"{self.name}: arguments on different devices: {places}")

        values = [
            ctypes.c_void_p(address) if parameter.pointer else _SCALARS[parameter.type][1](value)
            for parameter, address, value in zip(parameters, addresses, args, strict=True)
        ]
        device = next(iter(devices), None)
        if device is None:
            self._program.launch(self.name, grid, block, values, shared_bytes)
        else:
            self._gpu_kernel.launch(device, grid, block, values, shared_bytes)

    def _sizes(self, what: str, sizes: tuple[int, ...], most: tuple[int, int, int]) -> tuple[int, int, int]:
        x, y, z = (*sizes, 1, 1, 1)[:3]
        if len(sizes) > 3 or not (1 <= x <= most[0] and 1 <= y <= most[1] and 1 <= z <= most[2]):
            raise ValueError(f"{self.name}: {what} {tuple(sizes)}, expected sizes from 1 to {most}")
        return x, y, z

    @functools.cached_property
    def _parameters(self) -> tuple[Parameter, ...]:
        """As the source declares them, types that are defines replaced."""
        kernels = self.source.kernels
        if self.name not in kernels:
            raise ValueError(f"{self.source.name} has no kernel {self.name!r}, only {', '.join(kernels)}")
        return tuple(
            parameter._replace(type=self.defines.get(parameter.type, parameter.type))
            for parameter in kernels[self.name]
        )

    def _check(self, parameter: Parameter, value: Any) -> Array | None:
        """The array of an argument that fits; None for a scalar and for a null pointer."""
        if not parameter.pointer:
            if parameter.type not in _SCALARS:
                raise self._misfit(TypeError, parameter, f"is a {parameter.type}, which cannot be passed by value")
            if not isinstance(value, np.generic) or value.dtype != _SCALARS[parameter.type][0]:
                raise self._misfit(TypeError, parameter, f"is {_describe(value)}, expected {parameter.type}")
            return None
        if value is None:
            return None
        array = value.array if isinstance(value, pointer) else value
        if not isinstance(array, np.ndarray) and not _on_gpu(array):
            raise self._misfit(TypeError, parameter, f"is {_describe(array)}, expected an array of {parameter.type}")
        element, count = _VECTORS.get(parameter.type, (parameter.type, 1))
        dtypes = _ELEMENTS.get(element)  # none for void and for classes: those take anything
        if dtypes and array.dtype not in dtypes:
            what = f"is {_describe(array)}, expected {dtypes[0].name} ({parameter.type}*)"
            raise self._misfit(TypeError, parameter, what)
        if array is value and not array.flags.c_contiguous:
            what = f"is {_describe(array)} with strides {array.strides}, expected C-contiguous (or pointer(array))"
            raise self._misfit(ValueError, parameter, what)
        if count > 1 and address_of(array) % (alignment := count * array.itemsize):
            raise self._misfit(
                ValueError, parameter, f"is not aligned to {alignment} bytes, as {parameter.type} has to be"
            )
        if not parameter.const and isinstance(array, np.ndarray) and not array.flags.writeable:
            raise self._misfit(ValueError, parameter, "is read-only, but not const to the kernel")
        return array

    def _misfit(self, kind: type[Exception], parameter: Parameter, what: str) -> Exception:
        return kind(f"{self.name}: argument {parameter.name!r} {what}")

    @property
    def _program(self) -> Program:
        return _program(self._file, tuple(self.defines.items()))

    @functools.cached_property
    def _gpu_kernel(self) -> GpuKernel:
        return GpuKernel(self.source, self.name, self.defines, self.arch)


@functools.cache
def _program(file: str | Path, defines: tuple[tuple[str, str], ...]) -> Program:
    """One library for all kernels of a source."""
    return Program(read_source(file), dict(defines))


def _on_gpu(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and hasattr(type(x), "__cuda_array_interface__")  # to read it takes long


def address_of(array: Any) -> int:
    """Where an array begins in the memory of its device."""
    return int(array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr)


def _device(array: Any) -> int | None:
    return None if isinstance(array, np.ndarray) else int(array.device.id)


def _place(device: int | None) -> str:
    return "the CPU" if device is None else f"GPU {device}"


def _describe(value: Any) -> str:
    if isinstance(value, np.generic):
        return f"np.{value.dtype.name}"
    return f"{value.dtype.name} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
