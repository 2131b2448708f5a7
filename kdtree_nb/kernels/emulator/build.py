"""From CUDA source to a shared library for this CPU, built once and kept."""

import errno
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kdtree_nb.kernels.source import Source

INCLUDE = Path(__file__).parent / "include"  # what a kernel sees
RUNTIME = Path(__file__).parent / "runtime"  # what runs it
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-strict-aliasing",  # kernels read words as other types, as CUDA's compilers let them
    "-ffp-contract=off",  # a * b + c is two roundings; fma() is one
    "-fno-math-errno",
    "-Wno-unknown-pragmas",
)
SANITIZERS = ("-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


class KernelError(RuntimeError):
    """A kernel that the emulator cannot compile, or that does what a GPU leaves undefined."""


def sanitizing() -> bool:
    """Whether ``KDTREE_SANITIZE=1`` asks for address and undefined-behaviour sanitizers."""
    return os.environ.get("KDTREE_SANITIZE", "0") not in ("", "0")


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, c++, g++, clang++, or the one that the ziglang wheel brings.

    Raises
    ------
    KernelError
        If there is none.
    """
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise KernelError(
        "the emulator needs a C++ compiler and found none of $CXX, c++, g++, clang++, ziglang; "
        "install g++ or clang, or: pip install 'kdtree_nb[emulator]'"
    )


def build_library(source: Source, defines: Mapping[str, str]) -> Path:
    """Compile a CUDA source to a library, or find it compiled.

    Processes may build the same source at the same time: each writes a file of its own and renames it.

    Raises
    ------
    KernelError
        With what the compiler says, in lines of the ``.cu``.
    """
    if sys.platform == "win32":
        raise KernelError("the emulator runs on Linux and macOS; on Windows, in WSL")
    text = source.text
    if sanitizing():  # emulator.h says why
        text = re.sub(r"\bextern\s+__shared__\b", "extern", text)
    entries = "".join(f"EMULATOR_ENTRY({kernel})\n" for kernel in source.kernels)
    unit = f'#include "emulator.h"\n{text}\n#line 1 "entries"\n{entries}'
    macros = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    runtime = _runtime()
    library = cache_folder() / f"{Path(source.name).stem}-{_hash(unit, *macros, runtime.name)}{_suffix()}"
    if not library.exists():
        _compile(unit, [*macros, "-shared", str(runtime), "-lpthread"], library, source.name)
    return library


def cache_folder(what: str = "emulator") -> Path:
    """Where ``what`` is kept: in ``$KDTREE_CACHE`` or in the user's cache folder, made if need be."""
    chosen = os.environ.get("KDTREE_CACHE")
    folder = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kdtree_nb"), what)
    folder = folder.absolute()  # the compiler runs elsewhere
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):  # made by another user, or on a disk that is read-only by now
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError:
        if chosen:
            raise
        folder = Path(tempfile.gettempdir(), f"kdtree_nb-{what}-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022 or not folder.is_dir() or folder.is_symlink():
            raise KernelError(f"{folder} is not this user's alone; name another folder in KDTREE_CACHE") from None
    return folder


def _runtime() -> Path:
    """The object file that all libraries share; its name stands for the compiler, its flags and the emulator."""
    compiler, flags = find_compiler(), _flags()
    headers = sorted(path for folder in (INCLUDE, RUNTIME) for path in folder.glob("*.*"))
    key = _hash(*(path.read_text(encoding="utf-8") for path in headers), *flags, *compiler, _version(tuple(compiler)))
    runtime = cache_folder() / f"runtime-{key}.o"
    if not runtime.exists():
        unit = "".join(f'#include "{path}"\n' for path in headers if path.suffix == ".cpp")
        _compile(unit, ["-c"], runtime, "runtime")
    return runtime


def _compile(unit: str, options: list[str], output: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="build-") as folder:
        Path(folder, "unit.cpp").write_text(unit, encoding="utf-8")
        command = [*find_compiler(), *_flags(), "unit.cpp", *options, "-o", output.name]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if result.returncode:
            raise KernelError(f"{name} does not compile for the emulator:\n{result.stderr.strip()}")
        os.replace(Path(folder, output.name), output)


def _flags() -> list[str]:
    return [*FLAGS, *(SANITIZERS if sanitizing() else _frame_flags()), *_processor_flags(), f"-I{INCLUDE}"]


def _frame_flags() -> tuple[str, ...]:
    """A thread's stack has 64 KiB: no function may take more than half of it."""
    if "clang" in _version(tuple(find_compiler())):
        return ("-Wframe-larger-than=32768", "-Werror=frame-larger-than")
    return ("-Werror=frame-larger-than=32768",)


@functools.cache
def _processor_flags() -> tuple[str, ...]:
    """For fma() as an instruction, where the processor has it: a call of the C library takes several times as long."""
    if platform.machine() not in ("x86_64", "AMD64") or not os.path.exists("/proc/cpuinfo"):
        return ()
    known = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return tuple(f"-m{name}" for name in ("fma", "avx2") if name in known)


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        raise KernelError(f"the C++ compiler {shlex.join(compiler)!r} does not start: {error.strerror}") from None


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"
