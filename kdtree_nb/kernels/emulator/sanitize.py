"""Run Python with address and undefined-behaviour sanitizers in the emulated kernels.

``python -m kdtree_nb.kernels.emulator.sanitize -m pytest tests/test_emulator.py`` runs ``python -m pytest …`` so. A
sanitizer's library has to be in a process from its start: this is what starts it.
"""

import os
import subprocess
import sys

from kdtree_nb.kernels.emulator.build import find_compiler


def sanitizer_environment() -> dict[str, str] | None:
    """The environment for a process with sanitizers; None if the compiler has none."""
    # The C++ library is in it because AddressSanitizer looks for its functions when it starts.
    libraries = [path for name in ("libasan.so", "libstdc++.so.6") if (path := _library_of_compiler(name))]
    if len(libraries) < 2:
        return None
    options = "detect_leaks=0:detect_stack_use_after_return=0"  # Python frees little when it ends
    return {
        **os.environ,
        "KDTREE_SANITIZE": "1",
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


def _library_of_compiler(name: str) -> str | None:
    found = subprocess.run(
        [*find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout.strip()
    return os.path.realpath(found) if os.path.isabs(found) else None


def main() -> None:
    """Become a Python with sanitizers."""
    environment = sanitizer_environment()
    if environment is None:
        sys.exit(f"{' '.join(find_compiler())} has no libasan: install g++, and set CXX=g++ if there are others")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
