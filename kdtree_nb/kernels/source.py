"""CUDA sources of this package: their text, and what their kernels take."""

import functools
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

OPTIONS = ("-std=c++17", "--fmad=false")
"""For NVRTC. Without fused multiply-adds that a source does not write, results are the emulator's, but for subnormals,
which CuPy flushes to zero (it always compiles with ``-ftz=true``)."""

_PACKAGE = files("kdtree_nb.kernels")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)".*$', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)")
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)')
_PREAMBLE = """\
#ifdef __CUDACC_RTC__  // NVRTC has no <cmath>
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif
"""
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__restrict", "struct", "__grid_constant__"})


class Parameter(NamedTuple):
    """A parameter of a kernel: ``const float* __restrict__ x`` has ``type`` float, ``pointer`` and ``const`` set."""

    name: str
    type: str
    pointer: bool
    const: bool


@dataclass(frozen=True)
class Source:
    """A CUDA source with the headers of ``include/`` in it, so that it compiles without any search path.

    name
        Of the file.
    text
        With ``#line`` directives: compilers name the lines of the files that people edit.
    kernels
        Of each ``extern "C" __global__`` function, its parameters.
    """

    name: str
    text: str
    kernels: dict[str, tuple[Parameter, ...]]


@functools.cache
def read_source(file: str | Path) -> Source:
    """Read a source: a name is that of a file beside this one, a path can be any file.

    Raises
    ------
    ValueError
        If it holds no kernel that can be launched.
    """
    path = file if isinstance(file, Path) else _PACKAGE / file
    text = _expand(path, set())
    plain = _LAUNCH_BOUNDS.sub(" ", _COMMENT.sub(" ", text))
    kernels = {match[1]: _parameters(plain, match.end()) for match in _KERNEL.finditer(plain)}
    if not kernels:
        raise ValueError(f'{path.name}: no kernel found, expected: extern "C" __global__ void name(...)')
    return Source(path.name, _PREAMBLE + text, kernels)


def _expand(path: Traversable, seen: set[str]) -> str:
    """The text of a file with each header of ``include/`` in the place where it is first included."""

    def header(match: re.Match[str]) -> str:
        name, line = match[1], text.count("\n", 0, match.start()) + 2
        included = _PACKAGE / "include" / name
        if not included.is_file():
            return match[0]  # the emulator's own
        if name in seen:
            return ""
        seen.add(name)
        return f'{_expand(included, seen)}\n#line {line} "{path}"'

    text = path.read_text(encoding="utf-8")
    once = text.replace("#pragma once", "")
    return f'#line 1 "{path}"\n{_INCLUDE.sub(header, once)}'


def _parameters(text: str, start: int) -> tuple[Parameter, ...]:
    opened = text.index("(", start)
    inside = text[opened + 1 : text.index(")", opened)]
    return tuple(_parameter(part) for part in inside.split(",") if part.strip())


def _parameter(declaration: str) -> Parameter:
    words = re.findall(r"\w+|\*", declaration)
    name = words.pop()
    pointer = "*" in words
    pointee = words[: words.index("*")] if pointer else words
    type_words = [word for word in pointee if word not in _QUALIFIERS]
    return Parameter(name, _canonical(type_words), pointer, "const" in pointee)


def _canonical(words: list[str]) -> str:
    """One spelling of C's integers: ``unsigned int`` is ``unsigned``, ``long long int`` is ``long long``."""
    if len(words) > 1 and "int" in words:
        words = [word for word in words if word != "int"]
    return " ".join(words)
