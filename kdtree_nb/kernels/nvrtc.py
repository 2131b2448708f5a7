"""Compile the CUDA sources for GPUs that are not here, and see what their kernels will use."""

import ctypes
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from kdtree_nb.kernels.source import OPTIONS, Source

_ENTRY = re.compile(r"(?:Compiling entry function|Function properties for) '?(\w+)'?")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class NvrtcError(RuntimeError):
    """A source that NVRTC does not compile, or no NVRTC."""


@dataclass(frozen=True)
class Resources:
    """What a kernel uses: registers, bytes of stack and of spills a thread, bytes of static shared memory a block."""

    registers: int
    stack: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and the resources of each kernel in it."""

    code: bytes
    resources: dict[str, Resources]


def find_nvrtc() -> Path | None:
    """NVIDIA's compiler library: of a wheel in this environment, else of a toolkit on this machine."""
    site = Path(sysconfig.get_path("purelib"), "nvidia")
    pattern = "*/bin/**/nvrtc64_*.dll" if sys.platform == "win32" else "*/lib/libnvrtc.so.*"
    wheels = sorted(path for path in site.glob(pattern) if ".alt" not in path.name)
    if wheels:
        return wheels[-1]
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root and (toolkit := Path(root, "lib64", "libnvrtc.so")).exists():
            return toolkit
    found = find_library("nvrtc")
    return Path(found) if found else None


def nvrtc_version() -> tuple[int, int]:
    """Of the library that :func:`compile_cubin` compiles with; an :class:`NvrtcError` if there is none."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _load(_required()).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_cubin(source: Source, arch: str, defines: Mapping[str, int | str] | None = None) -> Cubin:
    """Compile a source as CuPy does on a GPU of this architecture; no GPU is needed.

    Parameters
    ----------
    arch
        Such as ``sm_90a``.

    Raises
    ------
    NvrtcError
        With the compiler's log, in lines of the ``.cu``.
    """
    code, log = _compile(source, arch, defines, "CUBIN")
    return Cubin(code, _resources(log))


def compile_ptx(source: Source, arch: str, defines: Mapping[str, int | str] | None = None) -> str:
    """The same down to PTX, for a virtual architecture such as ``compute_90a``."""
    return _compile(source, arch, defines, "PTX")[0].decode().rstrip("\0")


def _compile(source: Source, arch: str, defines: Mapping[str, int | str] | None, what: str) -> tuple[bytes, str]:
    """What was asked for, and the compiler's log."""
    library = _required()
    nvrtc = _load(library)
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.text.encode(), source.name.encode(), 0, None, None)
    macros = [f"-D{key}={value}" for key, value in (defines or {}).items()]
    includes = [f"-I{folder}" for folder in _header_folders(library)]
    flags = [*OPTIONS, "-ftz=true", f"-arch={arch}", "--ptxas-options=-v", *includes, *macros]
    given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), given)
        log = _output(nvrtc, program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if failed:
            raise NvrtcError(f"{source.name} does not compile for {arch}\n{log.strip()}")
        return _output(nvrtc, program, what), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _required() -> Path:
    library = find_nvrtc()
    if library is None:
        raise NvrtcError("NVRTC is not here; install it: pip install 'cuda-toolkit[cudart,nvrtc]'")
    return library


@functools.cache
def _load(library: Path) -> ctypes.CDLL:
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))  # NVRTC asks for it by name, which finds it in memory; under a sanitizer only there
    return ctypes.CDLL(str(library))


def _header_folders(library: Path) -> list[Path]:
    """Where cuda_bf16.h may be, seen from the library: in the same wheel, in that of the runtime, in a toolkit."""
    root = library.parent.parent
    folders = (root / "include", root.parent / "cuda_runtime" / "include")
    return [folder for folder in folders if (folder / "cuda_bf16.h").exists()]


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{what}"](program, buffer)
    return buffer.raw


def _resources(log: str) -> dict[str, Resources]:
    """From what ptxas -v prints: for each entry function two or three lines."""
    found: dict[str, Resources] = {}
    kernel, stack, spills = "", 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel = entry[1]
        if frame := _SPILLS.search(line):
            stack, spills = int(frame[1]), int(frame[2]) + int(frame[3])
        if used := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            found[kernel] = Resources(int(used[1]), stack, spills, int(shared[1]) if shared else 0)
    return found
