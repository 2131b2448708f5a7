"""What Kernel accepts and refuses, what it hands to CuPy, and that all test kernels are CUDA for NVRTC."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from kdtree_nb.kernels import driver, gpu
from kdtree_nb.kernels.emulator.build import find_compiler
from kdtree_nb.kernels.launch import Kernel, array_module, c_type, emulated, pointer, processor_of, runs_cuda
from kdtree_nb.kernels.nvrtc import NvrtcError, compile_cubin, find_nvrtc
from kdtree_nb.kernels.source import Parameter, read_source

KERNELS = Path(__file__).parent / "emulator_kernels"
ARGUMENTS = Kernel(KERNELS / "arguments.cu", "arguments", {"BLOCK": 64, "TYPE": "__half"})


def fitting() -> dict[str, object]:
    """Arguments that fit."""
    return {
        "x": np.array([1.5], np.float32),
        "typed": np.array([2.5], np.float16),
        "words": np.array([7], np.int32),
        "vectors": np.arange(4, dtype=np.uint32),
        "anything": np.zeros(3, np.int64),
        "y": np.zeros(8),
        "i": np.int32(-5),
        "l": np.int64(2**40),
        "f": np.float32(0.25),
        "u": np.uint32(9),
        "b": np.bool_(True),
    }


def launch(kernel: Kernel = ARGUMENTS, **changes: object) -> np.ndarray:
    arguments = {**fitting(), **changes}
    kernel((1,), (1,), tuple(arguments.values()))
    return arguments["y"]


class TestSource:
    def test_parameters(self):
        source = read_source(KERNELS / "arguments.cu")
        assert list(source.kernels) == ["arguments", "last_row", "no_parameters"]
        assert source.kernels["arguments"] == (
            Parameter("x", "float", pointer=True, const=True),
            Parameter("typed", "TYPE", pointer=True, const=True),
            Parameter("words", "unsigned", pointer=True, const=True),
            Parameter("vectors", "uint4", pointer=True, const=True),
            Parameter("anything", "void", pointer=True, const=True),
            Parameter("y", "double", pointer=True, const=False),
            Parameter("i", "int", pointer=False, const=False),
            Parameter("l", "long long", pointer=False, const=False),
            Parameter("f", "float", pointer=False, const=False),
            Parameter("u", "unsigned", pointer=False, const=False),
            Parameter("b", "bool", pointer=False, const=False),
        )
        assert source.kernels["no_parameters"] == ()

    def test_headers_are_in_the_text_once(self):
        text = read_source(KERNELS / "tensor_core.cu").text
        assert text.count("lop3.b32") == 1
        assert '#include "ptx.cuh"' not in text
        assert "#include <cuda_bf16.h>" in text

    def test_lines_are_those_of_the_file(self):
        path = KERNELS / "tensor_core.cu"
        after = read_source(path).text.split(f'"{path}"\n')[-1]  # from the last #line directive on
        assert path.read_text().endswith(after)

    def test_no_kernel(self, tmp_path):
        (tmp_path / "empty.cu").write_text("__global__ void hidden(int x) {}\n")
        with pytest.raises(ValueError, match=r"empty\.cu: no kernel found"):
            read_source(tmp_path / "empty.cu")

    def test_a_name_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"arguments\.cu has no kernel 'other', only arguments, last_row"):
            Kernel(KERNELS / "arguments.cu", "other")((1,), (1,), ())


class TestArguments:
    def test_values_arrive(self):
        assert launch().tolist() == [1.5, 2.5, 7, 3, 1, -5 + 2.0**40, 0.25, 9.5]
        assert launch(x=None, anything=None)[[0, 4]].tolist() == [-1, 0]

    def test_types_can_be_defines(self):
        bfloats = np.array([3], ml_dtypes.bfloat16)
        kernel = ARGUMENTS.specialize(TYPE="__nv_bfloat16")
        assert launch(kernel, typed=bfloats)[1] == 3
        assert launch(kernel, typed=bfloats.view(np.uint16))[1] == 3
        assert launch(ARGUMENTS.specialize(TYPE="float"), typed=np.array([4], np.float32))[1] == 4
        assert ARGUMENTS.specialize(TYPE="float") is ARGUMENTS.specialize(TYPE="float")

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("x", np.zeros(2, np.int32), TypeError, "is int32 [2], expected float32 (float*)"),
            ("x", np.zeros(2), TypeError, "is float64 [2], expected float32 (float*)"),
            ("x", np.float32(1), TypeError, "is np.float32, expected an array of float"),
            ("x", [1.0], TypeError, "is list, expected an array of float"),
            ("x", np.zeros((4, 4), np.float32)[:, :2], ValueError, "float32 [4, 2] with strides (16, 4), expected C-c"),
            ("typed", np.zeros(1, np.float32), TypeError, "is float32 [1], expected float16 (__half*)"),
            ("words", np.zeros(1, np.int64), TypeError, "is int64 [1], expected uint32 (unsigned*)"),
            ("vectors", np.zeros(9, np.int32)[1:], ValueError, "is not aligned to 16 bytes, as uint4 has to be"),
            ("y", np.zeros(8, np.float32), TypeError, "is float32 [8], expected float64 (double*)"),
            ("i", np.int64(1), TypeError, "is np.int64, expected int"),
            ("i", 1, TypeError, "is int, expected int"),
            ("l", np.int32(1), TypeError, "is np.int32, expected long long"),
            ("f", np.float64(1), TypeError, "is np.float64, expected float"),
            ("u", None, TypeError, "is NoneType, expected unsigned"),
        ],
    )
    def test_misfits(self, name, value, error, message):
        with pytest.raises(error) as caught:
            launch(**{name: value})
        assert str(caught.value).startswith(f"arguments: argument {name!r} ")
        assert message in str(caught.value)

    def test_what_is_written_is_writeable(self):
        y = np.zeros(8)
        y.flags.writeable = False
        with pytest.raises(ValueError, match="arguments: argument 'y' is read-only"):
            launch(y=y)
        x = np.ones(1, np.float32)
        x.flags.writeable = False
        launch(x=x)

    def test_count(self):
        with pytest.raises(TypeError, match="arguments: 2 arguments, expected 11: x, typed, words"):
            ARGUMENTS((1,), (1,), (None, None))

    def test_pointer_takes_strides(self):
        wide = np.arange(60, dtype=np.float32).reshape(6, 10)
        y = np.zeros(4, np.float32)
        kernel = Kernel(KERNELS / "arguments.cu", "last_row", {"BLOCK": 64, "TYPE": "float"})
        kernel((1,), (4,), (pointer(wide[:, 3:7]), y, np.int64(10), np.int32(5)))
        np.testing.assert_array_equal(y, wide[5, 3:7])
        with pytest.raises(ValueError, match=r"last_row: argument 'x' .* \(or pointer\(array\)\)"):
            kernel((1,), (4,), (wide[:, 3:7], y, np.int64(10), np.int32(5)))

    @pytest.mark.parametrize(
        ("grid", "block", "shared_bytes", "message"),
        [
            ((0,), (1,), 0, r"grid \(0,\)"),
            ((1, 65536), (1,), 0, r"grid \(1, 65536\)"),
            ((2**31,), (1,), 0, "grid"),
            ((1, 1, 1, 1), (1,), 0, "grid"),
            ((1,), (0,), 0, r"block \(0,\)"),
            ((1,), (1025,), 0, "block"),
            ((1,), (1, 1, 65), 0, "block"),
            ((1,), (32, 33), 0, r"block \(32, 33, 1\) has more than 1024 threads"),
            ((1,), (1,), 227 * 1024 + 1, "shared_bytes=232449"),
            ((1,), (1,), -1, "shared_bytes=-1"),
        ],
    )
    def test_limits(self, grid, block, shared_bytes, message):
        kernel = Kernel(KERNELS / "arguments.cu", "no_parameters", {"BLOCK": 64, "TYPE": "float"})
        with pytest.raises(ValueError, match=f"no_parameters: {message}"):
            kernel(grid, block, (), shared_bytes)

    def test_limits_themselves_are_launched(self):
        kernel = Kernel(KERNELS / "arguments.cu", "no_parameters", {"BLOCK": 64, "TYPE": "float"})
        kernel((3, 2, 2), (16, 1, 64), (), 227 * 1024)

    def test_a_wrong_schedule(self, monkeypatch):
        monkeypatch.setenv("KDTREE_SCHEDULE", "sideways")
        with pytest.raises(ValueError, match="KDTREE_SCHEDULE='sideways', expected forward, reverse or random:SEED"):
            launch()


class TestWhere:
    def test_numpy_runs_cuda_only_when_emulated(self):
        x = np.zeros(1)
        assert not runs_cuda(x)
        with emulated():
            assert runs_cuda(x)
            with emulated():
                pass
            assert runs_cuda(x)
        assert not runs_cuda(x)
        assert array_module(x) is np

    def test_an_error_ends_it(self):
        def fail_inside():
            with emulated():
                raise KeyError

        with pytest.raises(KeyError):
            fail_inside()
        assert not runs_cuda(np.zeros(1))

    def test_other_threads_are_not_emulated(self):
        seen = []
        with emulated():
            thread = threading.Thread(target=lambda: seen.append(runs_cuda(np.zeros(1))))
            thread.start()
            thread.join()
        assert seen == [False]

    def test_c_types(self):
        dtypes = [np.float32, np.float16, ml_dtypes.bfloat16, np.uint16, np.int32, np.uint32, np.int64]
        names = ["float", "__half", "__nv_bfloat16", "__nv_bfloat16", "int", "unsigned", "long long"]
        assert [c_type(np.zeros(1, dtype)) for dtype in dtypes] == names
        with pytest.raises(TypeError, match="no CUDA type for an array of complex128"):
            c_type(np.zeros(1, complex))

    def test_import_is_light(self):
        script = (
            "import sys, kdtree_nb, kdtree_nb.kernels.launch\n"
            "assert not {'cupy', 'matplotlib', 'typer'} & set(sys.modules), sorted(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


class GpuArray:
    """As much of a CuPy array as a launch looks at."""

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        self.dtype, self.shape, self.strides, self.flags = array.dtype, array.shape, array.strides, array.flags
        self.itemsize = array.itemsize
        self.data = SimpleNamespace(ptr=array.ctypes.data)
        self.device = SimpleNamespace(id=device)
        self._interface = array.__array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self._interface


class TestCupy:
    """The launch on a GPU, with a CuPy that writes down what it is told."""

    @pytest.fixture
    def told(self, monkeypatch) -> list[tuple]:
        told: list[tuple] = []

        class RawModule:
            def __init__(self, *, code=None, options=(), backend=None, path=None):
                told.append(("load", Path(path).read_bytes()) if path else ("compile", code, options, backend))

            def get_function(self, name):
                return Function(name)

        class Function:
            def __init__(self, name):
                object.__setattr__(self, "name", name)

            @property
            def kernel(self):
                return SimpleNamespace(ptr=self.name)

            def __setattr__(self, name, value):
                told.append((name, value))

            shared_size_bytes = 1024

        class Device:
            def __init__(self, number):
                self.number = number

            def __enter__(self):
                told.append(("device", self.number))
                return self

            compute_capability = "90"
            attributes: ClassVar = {
                "MaxSharedMemoryPerBlockOptin": 160 * 1024,
                "MultiProcessorCount": 100,
                "MaxSharedMemoryPerMultiprocessor": 164 * 1024,
            }

            def __exit__(self, *error):
                pass

        cupy = ModuleType("cupy")
        stream = SimpleNamespace(ptr=7)
        cupy.RawModule = RawModule
        cupy.cuda = SimpleNamespace(Device=Device, get_current_stream=lambda: stream)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        asked = gpu.processor.__wrapped__  # not to be remembered
        for module in (gpu, sys.modules["kdtree_nb.kernels.launch"]):
            monkeypatch.setattr(module, "processor", asked)
        monkeypatch.setattr(gpu.driver, "launch", lambda *launched: told.append(launched))
        return told

    def arguments(self) -> list[object]:
        return [GpuArray(value) if isinstance(value, np.ndarray) else value for value in fitting().values()]

    def kernel(self) -> Kernel:
        return Kernel(KERNELS / "arguments.cu", defines={"BLOCK": 64, "TYPE": "__half"})

    def test_launch(self, told):
        kernel, arguments = self.kernel(), self.arguments()
        arguments[4] = None
        kernel((2, 3), (64,), arguments)
        device, (compiled, code, options, backend), (name, grid, block, shared, stream, args, early) = told
        assert (compiled, backend, device) == ("compile", "nvrtc", ("device", 0))
        assert code == read_source(KERNELS / "arguments.cu").text
        assert options == ("-std=c++17", "--fmad=false", "-DBLOCK=64", "-DTYPE=__half")
        assert (name, grid, block, shared, stream) == ("arguments", (2, 3, 1), (64, 1, 1), 0, 7)
        assert [type(value) for value in args[:6]] == [ctypes.c_void_p] * 6
        assert [value.value for value in args[:5]] == [*(array.data.ptr for array in arguments[:4]), None]
        assert [value.value for value in args[6:]] == list(fitting().values())[6:]
        assert not early

        told.clear()
        kernel((1,), (1,), arguments)
        assert [what[0] for what in told] == ["device", "arguments"]  # compiled once

    @pytest.mark.parametrize(("capability", "early"), [("80", False), ("90", True), ("120", True)])
    def test_a_recorded_kernel_begins_early(self, told, monkeypatch, tmp_path, capability, early):
        """Where its source waits for its turn, and the GPU can."""
        monkeypatch.setattr(sys.modules["cupy"].cuda.Device, "compute_capability", capability)
        body = 'extern "C" __global__ void one(int* y)\n{{\n    {}y[0] = 1;\n}}\n'
        (tmp_path / "waits.cu").write_text('#include "turn.cuh"\n\n' + body.format("take_turn();\n    "))
        (tmp_path / "rushes.cu").write_text(body.format(""))
        waits, rushes = (Kernel(tmp_path / f"{name}.cu", "one") for name in ("waits", "rushes"))
        y = GpuArray(np.zeros(1, np.int32))
        with gpu.recording():
            waits((1,), (1,), [y])
            rushes((1,), (1,), [y])
        waits((1,), (1,), [y])
        assert [what[-1] for what in told if what[0] == "one"] == [early, False, False]

    def test_much_shared_memory_is_asked_for_once(self, told):
        kernel, arguments = self.kernel(), self.arguments()
        for kilobytes in (47, 48, 100, 60, 100, 159):
            kernel((1,), (1,), arguments, kilobytes * 1024)
        asked = [what[1] for what in told if what[0] == "max_dynamic_shared_size_bytes"]
        assert asked == [48 * 1024, 100 * 1024, 159 * 1024]  # the kernel's own kilobyte counts
        with pytest.raises(ValueError, match="arguments: 164864 bytes of shared memory, GPU 0 has 163840 a block"):
            kernel((1,), (1,), arguments, 160 * 1024)

    @pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed")
    def test_a_kernel_for_one_architecture(self, told, monkeypatch, tmp_path):
        """Loaded as machine code for it, which is compiled once."""
        monkeypatch.setenv("KDTREE_CACHE", str(tmp_path))
        for _ in range(2):
            told.clear()
            Kernel(KERNELS / "warpgroup.cu", "multiply_columns", arch="sm_90a").specialize(ANY=1)(
                (1,), (128,), [GpuArray(np.zeros(4, dtype)) for dtype in (np.int32, np.int32, np.float32, np.float32)]
            )
            _, (loaded, code), (name, *_) = told
            assert (loaded, name) == ("load", "multiply_columns")
            assert code == compile_cubin(read_source(KERNELS / "warpgroup.cu"), "sm_90a", {"ANY": 1}).code
            (file,) = (tmp_path / "cubin").iterdir()
            assert file.name.startswith("warpgroup-sm_90a-")

    @pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed")
    @pytest.mark.parametrize("other", [{"OPTIONS": ("-std=c++17",)}, {"nvrtc_version": lambda: (1, 0)}])
    def test_machine_code_of_another_compiler_is_made_anew(self, told, monkeypatch, tmp_path, other):
        monkeypatch.setenv("KDTREE_CACHE", str(tmp_path))
        arguments = [GpuArray(np.zeros(4, dtype)) for dtype in (np.int32, np.int32, np.float32, np.float32)]
        for count, changes in enumerate(({}, other), 1):
            for name, value in changes.items():
                monkeypatch.setattr(gpu, name, value)
            kernel = Kernel(KERNELS / "warpgroup.cu", "multiply_columns", {"ANY": 1}, "sm_90a")
            kernel((1,), (128,), arguments)
            assert len(list((tmp_path / "cubin").iterdir())) == count

    def test_where_an_array_is(self, told):
        assert processor_of(GpuArray(np.zeros(1))) == gpu.Processor("90", 160 * 1024, 100, 164 * 1024)
        assert processor_of(np.zeros(1)) == gpu.Processor("", 227 * 1024)

    def test_mixed_devices(self, told):
        arguments = self.arguments()
        arguments[0] = np.zeros(1, np.float32)
        with pytest.raises(
            ValueError, match="arguments: arguments on different devices: 'x' on the CPU and 'y' on GPU 0"
        ):
            self.kernel()((1,), (1,), arguments)
        arguments[0] = GpuArray(np.zeros(1, np.float32), device=1)
        with pytest.raises(ValueError, match="'x' on GPU 1 and 'y' on GPU 0"):
            self.kernel()((1,), (1,), arguments)

    def test_misfits_are_the_same(self, told):
        arguments = self.arguments()
        arguments[0] = GpuArray(np.zeros(1))
        with pytest.raises(TypeError, match=r"argument 'x' is float64 \[1\], expected float32"):
            self.kernel()((1,), (1,), arguments)
        arguments[0] = GpuArray(np.zeros((4, 4), np.float32)[:, 1:])
        with pytest.raises(ValueError, match=r"argument 'x' .* expected C-contiguous"):
            self.kernel()((1,), (1,), arguments)
        assert not told

    def test_gpu_arrays_say_where(self, told):
        x = GpuArray(np.zeros(1))
        assert runs_cuda(x)
        assert array_module(x) is sys.modules["cupy"]


DRIVER = r"""
#include <cuda.h>
#include <cstdio>
#include <cstring>

static char told[256];

extern "C" CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** arguments, void** extra)
{
    int at = snprintf(told, sizeof told, "%u %u %u, %u %u %u, %u, %zu %zu, %d %lld, %d", c->gridDimX, c->gridDimY,
                      c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, size_t(c->hStream),
                      size_t(f), *(int*)arguments[0], *(long long*)arguments[1], extra == nullptr);
    for (unsigned i = 0; i < c->numAttrs; ++i)
        at += snprintf(told + at, sizeof told - at, ", %d",
                       c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                           ? c->attrs[i].value.programmaticStreamSerializationAllowed : -1);
    return c->gridDimX == 13 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

extern "C" CUresult cuGetErrorName(CUresult error, const char** name)
{
    *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "?";
    return CUDA_SUCCESS;
}

extern "C" const char* what_was_told() { return told; }
"""


def header_folder() -> Path | None:
    """Where cuda.h is, of a wheel or a toolkit."""
    library = find_nvrtc()
    roots = [library.parent.parent, library.parent.parent.parent / "cuda_runtime"] if library else []
    return next((root / "include" for root in roots if (root / "include" / "cuda.h").exists()), None)


@pytest.mark.skipif(header_folder() is None, reason="cuda.h is not installed")
class TestDriver:
    """The launch's structs, read by C++ that has them from NVIDIA's header."""

    @pytest.fixture
    def told(self, monkeypatch, tmp_path) -> Callable[[], str]:
        (tmp_path / "driver.cpp").write_text(DRIVER)
        library = tmp_path / "driver.so"
        compiler = [*find_compiler(), "-shared", "-fPIC", f"-I{header_folder()}"]
        subprocess.run([*compiler, str(tmp_path / "driver.cpp"), "-o", str(library)], check=True)
        built = ctypes.CDLL(str(library))
        built.what_was_told.restype = ctypes.c_char_p
        monkeypatch.setattr(driver, "_driver", lambda: built)
        return lambda: built.what_was_told().decode()

    @pytest.mark.parametrize(("early", "attributes"), [(False, ""), (True, ", 1")])
    def test_what_it_reads(self, told, early, attributes):
        arguments = [ctypes.c_int(-3), ctypes.c_longlong(2**40)]
        driver.launch(2**40 + 1, (1, 2, 3), (4, 5, 6), 7, 2**41 + 2, arguments, early)
        assert told() == f"1 2 3, 4 5 6, 7, {2**41 + 2} {2**40 + 1}, -3 {2**40}, 1{attributes}"

    def test_an_error_has_the_drivers_name(self, told):
        with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(1\)"):
            driver.launch(1, (13, 1, 1), (1, 1, 1), 0, 0, [ctypes.c_int(0), ctypes.c_longlong(0)], early=False)


@pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed")
class TestNvrtc:
    @pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
    @pytest.mark.parametrize("file", sorted(path.name for path in KERNELS.glob("*.cu")))
    def test_test_kernels_are_cuda(self, file, arch):
        if file == "warpgroup.cu" and arch != "sm_90a":
            pytest.skip("Hopper's instructions")
        source = read_source(KERNELS / file)
        cubin = compile_cubin(source, arch, {"BLOCK": 64, "TYPE": "float"})
        assert cubin.code.startswith(b"\x7fELF")
        assert set(cubin.resources) == set(source.kernels)

    def test_resources(self):
        resources = compile_cubin(read_source(KERNELS / "tensor_core.cu"), "sm_80").resources
        assert resources["load_matrices"].shared == 512
        assert all(10 <= kernel.registers <= 255 for kernel in resources.values())
        assert all(kernel.spills == 0 for kernel in resources.values())

    def test_an_error_names_the_line(self, tmp_path):
        (tmp_path / "broken.cu").write_text(
            '#include "ptx.cuh"\n\nextern "C" __global__ void broken(int* y)\n{\n    y[0] = nothing;\n}\n'
        )
        with pytest.raises(NvrtcError, match=r"(?s)broken\.cu does not compile for sm_80.*broken\.cu\(5\): error"):
            compile_cubin(read_source(tmp_path / "broken.cu"), "sm_80")
