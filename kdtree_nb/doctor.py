"""What this machine has, what it lacks, and what to do about it: ``python -m kdtree_nb doctor``."""

import importlib
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

PACKAGES = ("ml_dtypes", "safetensors", "tokenizers", "typer", "rich", "matplotlib")
JUPYTER = ("jupyterlab", "jupytext", "nbconvert", "ipykernel")
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
GLYPHS = "τ·×−→≤"
CPP_PROBE = '#include <cmath>\nextern "C" float probe(float x) { return std::fma(x, x, 1.0f); }\n'
CUDA_PROBE = """\
#include <cuda_bf16.h>
extern "C" __global__ void probe(float* y) { y[0] = (float)__float2bfloat16(y[0]); }
"""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Parameters
    ----------
    ok
        True: there and working. None: optional and absent. False: required and absent, or there and broken.
    remedy
        What to do, or for something optional what it would give and how to get it; empty where ok is True.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def checks() -> list[Check]:
    """Look at this machine; a check that itself fails is reported like any other fault."""
    return [
        _guarded("Python", _python),
        _guarded("NumPy", _numpy),
        _guarded("packages", _packages),
        _guarded("BLAS", _blas),
        _guarded("C++ compiler", _compiler),
        _guarded("GPU", _gpu),
        _guarded("NVRTC", _nvrtc),
        _guarded("Jupyter", _jupyter),
        _guarded("fonts", _fonts),
    ]


def render(found: list[Check]) -> str:
    """The report as text: a line for each check, what to do below it, a summary at the end."""
    marks = {True: "[OK]", None: "[--]", False: "[FAIL]"}
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{marks[check.ok]:<6} {check.name:<{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':<{width + 9}}-> {check.remedy}")
    failed = [check.name for check in found if check.ok is False]
    lines.append("")
    lines.append(f"To be put right: {', '.join(failed)}" if failed else "All that is required is there.")
    return "\n".join(lines)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except ModuleNotFoundError as error:
        return Check(name, False, str(error), f"pip install {error.name}")
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}", "this check itself failed; please report it")


def _python() -> Check:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one may well run this file)
        return Check("Python", False, found, "make a new environment with Python 3.11 or newer")
    return Check("Python", True, found)


def _numpy() -> Check:
    import numpy as np

    if int(np.__version__.split(".")[0]) < 2:
        return Check("NumPy", False, np.__version__, "pip install --upgrade 'numpy>=2'")
    return Check("NumPy", True, np.__version__)


def _packages() -> Check:
    missing = []
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        return Check("packages", False, f"cannot import {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("packages", True, _versions(PACKAGES))


def _blas() -> Check:
    """The CPU engine's exactness rests on this: in the one shape it uses, a row's bits are its own."""
    import numpy as np

    from kdtree_nb.reference.linear import ROWS, linear, tile

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    name = f"{blas['name']} {blas.get('version', '')}".strip()
    random = np.random.default_rng(0)
    for in_features in (32, 256, 7168):
        weight = tile(random.standard_normal((64, in_features), np.float32))
        row = random.standard_normal(in_features, np.float32)
        results = {linear(row[None], weight)[0].tobytes()}
        for position in range(ROWS):
            x = random.standard_normal((ROWS, in_features), np.float32)
            x[position] = row
            results.add(linear(x, weight)[position].tobytes())
        if len(results) > 1:
            return Check(
                "BLAS",
                False,
                f"{name}: [{ROWS}, {in_features}] x [{in_features}, 64] gives a row other bits at other positions",
                "speculative text may differ from plain text: install NumPy from PyPI or conda-forge, with OpenBLAS",
            )
    return Check("BLAS", True, f"{name}: a row's bits do not depend on its neighbours")


def _compiler() -> Check:
    from kdtree_nb.kernels.emulator.build import FLAGS, KernelError, find_compiler

    try:
        command = find_compiler()
    except KernelError:
        remedy = "with one, the CUDA sources run on this CPU: install g++ or clang, or pip install -e '.[emulator]'"
        return Check("C++ compiler", None, "none", remedy)
    shown = shlex.join(command)
    if "ziglang" in command:  # it builds its C++ library when first used, which takes minutes
        return Check("C++ compiler", True, f"{shown} {_version('ziglang')}")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(CPP_PROBE, encoding="utf-8")
        build = [*command, *FLAGS, "-shared", "-o", str(library), str(source)]
        try:
            built = subprocess.run(build, capture_output=True, text=True)
        except OSError as error:
            return Check("C++ compiler", False, f"{shown}: {error.strerror}", "set CXX to a C++ compiler, or unset it")
        if built.returncode or not library.exists():
            said = (built.stderr.strip().splitlines() or [f"exit status {built.returncode}"])[0]
            remedy = "set CXX to g++ or clang++, complete with its headers (Debian: apt-get install g++)"
            return Check(
                "C++ compiler", False, f"{shown} does not build the emulator's kind of library: {said}", remedy
            )
    said = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    return Check("C++ compiler", True, f"{shown}: {(said.splitlines() or ['builds a library'])[0]}")


def _cupy_wheels() -> list[str]:
    names = {(wheel.metadata["Name"] or "").lower() for wheel in distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")))


def _gpu() -> Check:
    wheels = _cupy_wheels()
    if not wheels:
        return Check(
            "GPU",
            None,
            "CuPy is not installed: the engine runs on the CPU",
            "with an NVIDIA GPU: pip install -e '.[cuda13]', or '.[cuda12]' if nvidia-smi prints CUDA Version 12",
        )
    if len(wheels) > 1:
        remedy = f"they overwrite each other: pip uninstall -y {' '.join(wheels)}, then install one of them"
        return Check("GPU", False, f"{len(wheels)} CuPy wheels at once: {', '.join(wheels)}", remedy)
    try:
        import cupy
    except Exception as error:  # a CuPy without its libraries fails in more ways than ImportError
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Check(
            "GPU", False, f"{wheels[0]} does not import: {first}", f"pip install --force-reinstall {wheels[0]}"
        )
    found = f"{wheels[0]} {cupy.__version__}"
    try:
        count = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
        reason = "no device"
    except Exception as error:
        count, reason = 0, str(error)
    if not count:
        return Check(
            "GPU",
            None,
            f"{found}, but no GPU that it can use ({reason}): the engine runs on the CPU",
            f"if there is one: does nvidia-smi see it, and is its CUDA version at least that of {wheels[0]}?",
        )
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    driver = cupy.cuda.runtime.driverGetVersion()
    device = (
        f"{properties['name'].decode()}, sm_{properties['major']}{properties['minor']}, "
        f"{properties['totalGlobalMem'] / 2**30:.0f} GiB, driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    )
    try:
        _run_on_gpu(cupy)
    except Exception as error:
        said = next((line for line in str(error).splitlines() if "error:" in line), str(error))
        return Check("GPU", False, f"{found} on {device}: {said}", f"pip install '{wheels[0]}[ctk]'")
    return Check("GPU", True, f"{found} on {device}" + (f", and {count - 1} more" if count > 1 else ""))


def _run_on_gpu(cupy: Any) -> None:
    """Compile and run one kernel that needs NVRTC and the CUDA headers."""
    answer = cupy.ones(1, cupy.float32)
    cupy.RawKernel(CUDA_PROBE, "probe")((1,), (1,), (answer,))
    if float(answer[0]) != 1.0:
        raise RuntimeError(f"a kernel returned {float(answer[0])}, expected 1.0")


def _nvrtc() -> Check:
    from kdtree_nb.kernels.nvrtc import NvrtcError, compile_cubin, find_nvrtc
    from kdtree_nb.kernels.source import Source

    install = "pip install --upgrade 'cuda-toolkit[cudart,nvrtc]'"
    library = find_nvrtc()
    if library is None:
        return Check("NVRTC", None, "none", f"with it, the kernels compile for GPUs that are not here: {install}")
    compiled = []
    said = ""
    for architecture in ARCHITECTURES:
        try:
            compile_cubin(Source("probe.cu", CUDA_PROBE, {}), architecture)
            compiled.append(architecture)
        except (NvrtcError, OSError) as error:  # OSError: a library that does not load
            said = said or " ".join(str(error).split())
    detail = f"{library.name} compiles for {', '.join(compiled) or 'none'} of {', '.join(ARCHITECTURES)}"
    if said:
        return Check("NVRTC", False, f"{detail}: {said}", install)
    return Check("NVRTC", True, f"{library.name} compiles for {', '.join(ARCHITECTURES)}")


def _jupyter() -> Check:
    missing = [package for package in JUPYTER if _version(package) is None]
    if missing:
        remedy = "to run the notebooks: pip install -e '.[notebooks]', or make lab"
        return Check("Jupyter", None, f"lacks {', '.join(missing)}", remedy)
    from jupyter_client.kernelspec import KernelSpecManager

    started = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])
    # Folders are compared, not files: the python of every environment links to the same file.
    if started.is_absolute() and started.parent.resolve() != Path(sys.executable).parent.resolve():
        return Check(
            "Jupyter",
            False,
            f"the kernel python3 starts {started}, not this Python",
            f"{sys.executable} -m ipykernel install --sys-prefix, and remove the other: jupyter kernelspec list",
        )
    return Check("Jupyter", True, _versions(JUPYTER))


def _fonts() -> Check:
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    try:
        path = font_manager.findfont("DejaVu Sans", fallback_to_default=False)
    except ValueError:
        return Check("fonts", False, "no DejaVu Sans", "pip install --force-reinstall matplotlib, which brings it")
    missing = [glyph for glyph in GLYPHS if ord(glyph) not in FT2Font(path).get_charmap()]
    if missing:
        remedy = "figures would show boxes: pip install --force-reinstall matplotlib"
        return Check("fonts", False, f"{path} lacks {' '.join(missing)}", remedy)
    return Check("fonts", True, "DejaVu Sans, with all that the figures write")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions(packages: tuple[str, ...]) -> str:
    return ", ".join(f"{package} {_version(package) or '(no metadata)'}" for package in packages)
