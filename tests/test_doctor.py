"""The doctor on this machine, on machines made ill on purpose, and the lists of packages that have to agree."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from kdtree_nb import doctor
from kdtree_nb.doctor import Check, checks, render
from kdtree_nb.kernels import nvrtc

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {normal(requirement.name): requirement for requirement in map(Requirement, lines)}


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_nothing_fails_where_the_tests_run() -> None:
    found = checks()
    assert [check for check in found if check.ok is False] == []
    assert [check for check in found if check.ok is None and not check.remedy] == []
    assert {"Python", "NumPy", "BLAS", "C++ compiler", "GPU", "NVRTC", "Jupyter", "fonts"} <= {c.name for c in found}


def test_import_is_light() -> None:
    program = (
        "import sys, kdtree_nb, kdtree_nb.doctor; print({'numpy', 'matplotlib', 'cupy', 'typer'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


# ---- ill machines ----------------------------------------------------------------------------------------------------


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    check = doctor._python()
    assert check.ok is False
    assert "3.11 or newer" in check.remedy


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert doctor._packages() == Check("packages", False, "cannot import ml_dtypes", "pip install ml_dtypes")


def test_blas_whose_rows_depend_on_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdtree_nb.reference import linear

    def positional(x, weight):  # type: ignore[no-untyped-def]
        y = sound(x, weight)
        y[3:] += abs(y[3:]) * 1e-6
        return y

    assert doctor._blas().ok
    sound = linear.linear
    monkeypatch.setattr(linear, "linear", positional)
    check = doctor._blas()
    assert check.ok is False
    assert "other bits" in check.detail


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    check = doctor._compiler()
    assert check.ok is None
    assert "[emulator]" in check.remedy


def test_compiler_from_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", SimpleNamespace(__spec__=object()))  # type: ignore[arg-type]
    check = doctor._compiler()
    assert check.ok
    assert "-m ziglang c++" in check.detail


@pytest.mark.parametrize("command", ["no-such-compiler --fast", f"{sys.executable} -c raise(SystemExit(3))"])
def test_broken_compiler(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CXX", command)
    check = doctor._compiler()
    assert check.ok is False
    assert command.split()[0] in check.detail
    assert "CXX" in check.remedy


def test_two_cupy_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cupy_wheels", lambda: ["cupy-cuda12x", "cupy-cuda13x"])
    check = doctor._gpu()
    assert check.ok is False
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in check.remedy


def test_cupy_wheels_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["numpy", "cupy-cuda12x", "CuPy", "cuda-pathfinder", "cupy-xarray"]
    monkeypatch.setattr(doctor, "distributions", lambda: [SimpleNamespace(metadata={"Name": name}) for name in names])
    assert doctor._cupy_wheels() == ["cupy", "cupy-cuda12x"]


def test_cupy_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    fake = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(is_available=is_available))
    monkeypatch.setattr(doctor, "_cupy_wheels", lambda: ["cupy-cuda13x"])
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    check = doctor._gpu()
    assert check.ok is None
    assert "driver version is insufficient" in check.detail
    assert "runs on the CPU" in check.detail
    assert "cupy-cuda13x" in check.remedy


def test_cupy_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cupy_wheels", lambda: ["cupy-cuda12x"])
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert doctor._gpu().ok is False


def test_wheel_only_cupy_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def raw_kernel(*_: object) -> None:
        raise RuntimeError("NVRTC_ERROR_COMPILATION\nask.cu(1): catastrophic error: cannot open cuda_bf16.h")

    properties = {"name": b"Some GPU", "major": 9, "minor": 0, "totalGlobalMem": 2**37}
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1, getDeviceProperties=lambda _: properties, driverGetVersion=lambda: 12080
    )
    fake = SimpleNamespace(
        __version__="14.2.0",
        cuda=SimpleNamespace(is_available=lambda: True, runtime=runtime),
        float32=float,
        ones=lambda *_: [1.0],
        RawKernel=raw_kernel,
    )
    monkeypatch.setattr(doctor, "_cupy_wheels", lambda: ["cupy-cuda12x"])
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    check = doctor._gpu()
    assert check.ok is False
    assert "Some GPU, sm_90, 128 GiB, driver for CUDA 12.8" in check.detail
    assert "cannot open cuda_bf16.h" in check.detail
    assert check.remedy == "pip install 'cupy-cuda12x[ctk]'"


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: None)
    check = doctor._nvrtc()
    assert check.ok is None
    assert "cuda-toolkit[cudart,nvrtc]" in check.remedy


def test_nvrtc_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: broken)
    assert doctor._nvrtc().ok is False


def test_nvrtc_too_old_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_cubin(source: object, architecture: str) -> None:
        if architecture == "sm_120":
            raise nvrtc.NvrtcError("probe.cu does not compile for sm_120\ninvalid value for --gpu-architecture")

    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: Path("libnvrtc.so.12"))
    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    check = doctor._nvrtc()
    assert check.ok is False
    assert "compiles for sm_80, sm_90a, sm_100 of" in check.detail
    assert "does not compile for sm_120 invalid value" in check.detail


def test_kernel_of_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(argv=["/elsewhere/bin/python3", "-m", "ipykernel_launcher"])
    monkeypatch.setattr("jupyter_client.kernelspec.KernelSpecManager.get_kernel_spec", lambda *_: kernel)
    check = doctor._jupyter()
    assert check.ok is False
    assert "not this Python" in check.detail


def test_a_check_that_fails_is_a_line_of_the_report() -> None:
    def check() -> Check:
        raise KeyError("blas")

    assert doctor._guarded("BLAS", check).ok is False


def test_report() -> None:
    text = render(
        [
            Check("a", True, "fine"),
            Check("long name", None, "absent", "would help"),
            Check("c", False, "broken", "mend it"),
        ]
    )
    assert text.splitlines() == [
        "[OK]   a          fine",
        "[--]   long name  absent",
        "                  -> would help",
        "[FAIL] c          broken",
        "                  -> mend it",
        "",
        "To be put right: c",
    ]
    assert render([Check("a", None, "absent", "would help")]).endswith("All that is required is there.")


# ---- lists of packages -----------------------------------------------------------------------------------------------


def test_environment_names_the_packages_of_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert environment["channels"] == ["conda-forge"]

    found = requirements(conda)
    assert str(found.pop("python").specifier) == PROJECT["requires-python"]
    del found["pip"]
    wanted = requirements(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["notebooks"])
    assert {name: str(found[name].specifier) for name in found} == {n: str(wanted[n].specifier) for n in wanted}

    cupy, project = pip
    assert project == "-e ."
    assert Requirement(cupy).name == Requirement(PROJECT["optional-dependencies"]["cuda12"][0]).name


@pytest.mark.parametrize(
    ("platform_system", "platform_machine", "wanted"),
    [
        ("Linux", "x86_64", True),
        ("Windows", "AMD64", True),
        ("Darwin", "arm64", False),
        ("Darwin", "x86_64", False),
        ("Windows", "ARM64", False),
    ],
)
def test_environment_asks_for_cupy_only_where_a_wheel_is(
    platform_system: str, platform_machine: str, wanted: bool
) -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    marker = Requirement(environment["dependencies"][-1]["pip"][0]).marker
    assert marker is not None
    assert marker.evaluate({"platform_system": platform_system, "platform_machine": platform_machine}) is wanted


def test_constraints_pin_every_package_of_ci_and_no_address() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = requirements([line for line in lines if not line.startswith("#")])
    for name, pin in pins.items():
        assert [part.operator for part in pin.specifier] == ["=="], name
        assert pin.url is None, name
    extras = PROJECT["optional-dependencies"]
    wanted = requirements(PROJECT["dependencies"] + extras["test"] + extras["notebooks"] + extras["parity"])
    for name, requirement in wanted.items():
        if name != "kdtree-nb":
            (pinned,) = pins[name].specifier
            assert requirement.specifier.contains(pinned.version), f"{name}: {pinned} is not in {requirement.specifier}"


def test_packages_of_the_doctor_are_those_of_pyproject() -> None:
    assert set(requirements(list(doctor.PACKAGES))) | {"numpy"} == set(requirements(PROJECT["dependencies"]))
    assert set(requirements(list(doctor.JUPYTER))) == set(requirements(PROJECT["optional-dependencies"]["notebooks"]))


def test_every_optional_extra_is_named_in_the_project() -> None:
    assert {"notebooks", "cuda12", "cuda13", "test", "train"} <= PROJECT["optional-dependencies"].keys()
