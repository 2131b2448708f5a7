"""The emulator against NumPy, and what it reports of what a GPU leaves undefined."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from kdtree_nb.kernels.emulator import KernelError, build
from kdtree_nb.kernels.emulator.sanitize import sanitizer_environment
from kdtree_nb.kernels.launch import Kernel
from kdtree_nb.kernels.source import read_source
from kdtree_nb.quantization import quantize

KERNELS = Path(__file__).parent / "emulator_kernels"
ALL = 0xFFFFFFFF
SCHEDULES = ["forward", "reverse", "random:1", "random:2", "random:3"]

bfloat16 = ml_dtypes.bfloat16
random = np.random.default_rng(0)


def kernel(file: str, name: str, **defines: int) -> Kernel:
    return Kernel(KERNELS / f"{file}.cu", name, defines)


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KDTREE_SCHEDULE", request.param)
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache other than the user's, the same for all tests of this file."""
    monkeypatch.setenv("KDTREE_CACHE", str(folder))
    return folder


class TestBlocks:
    @pytest.mark.parametrize(("grid", "block"), [((3,), (64,)), ((2, 3), (8, 5)), ((2, 3, 4), (2, 3, 5)), ((1,), (1,))])
    def test_every_thread_runs_once(self, schedule, grid, block):
        y = np.full((np.prod(grid), np.prod(block)), -1, np.int32)
        sizes = np.zeros(7, np.int32)
        kernel("block", "indices")(grid, block, (y, sizes))
        np.testing.assert_array_equal(y, np.arange(np.prod(block)) + 1000 * np.arange(np.prod(grid))[:, None])
        assert sizes.tolist() == [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block)), 32]

    @pytest.mark.parametrize("threads", [1, 2, 32, 64, 1024])
    @pytest.mark.parametrize("dynamic", [0, 1])
    def test_barriers_order_shared_memory(self, schedule, threads, dynamic):
        x = random.integers(-9, 9, (5, 300)).astype(np.float32)
        y = np.zeros(5, np.float32)
        kernel("block", "row_sum")(
            (5,), (threads,), (x, y, np.int32(300), np.int32(dynamic)), shared_bytes=4 * threads * dynamic
        )
        np.testing.assert_array_equal(y, x.sum(axis=1))

    def test_many_blocks_at_once(self):
        """Blocks that take long enough are spread over the processors; each has its own shared memory."""
        x = random.integers(-9, 9, (400, 5000)).astype(np.float32)
        y = np.zeros(400, np.float32)
        kernel("block", "row_sum")((400,), (256,), (x, y, np.int32(5000), np.int32(0)))
        np.testing.assert_array_equal(y, x.sum(axis=1))

    def test_barriers_that_count(self, schedule):
        for x in (np.ones(70), np.zeros(70), np.arange(70) % 3):
            x = x.astype(np.int32)
            y = np.zeros((3, 70), np.int32)
            kernel("block", "predicates")((1,), (70,), (x, y))
            expected = [np.count_nonzero(x), x.any(), x.all()]
            np.testing.assert_array_equal(y, np.repeat(expected, 70).reshape(3, 70))

    def test_shared_memory_starts_poisoned(self):
        y = np.zeros((3, 2, 40), np.uint32)
        kernel("block", "leftovers")((3,), (32,), (y, np.int32(40)), shared_bytes=160)
        assert (y[:, 1] == ALL).all()
        if sys.platform == "linux" and not os.environ.get("KDTREE_SANITIZE"):
            assert (y[:, 0] == ALL).all()

    def test_atomics(self, schedule):
        x = random.integers(0, 100, (8, 96)).astype(np.int32)
        ints = np.array([0, -1, 1000, 0, 0, 0], np.int32)
        words = np.array([0, ALL, 0, 0], np.uint32)
        floats, longs = np.zeros(1, np.float32), np.zeros(1, np.uint64)
        kernel("block", "atomics")((8,), (96,), (x, ints, words, floats, longs))
        assert ints.tolist() == [x.sum(), x.max(), x.min(), (x & 3).sum(), -1, 8]
        met = np.bitwise_or.reduce(np.uint32(1) << (x & 31).astype(np.uint32), axis=None)
        assert words.tolist() == [met, ALL ^ int(met), np.bitwise_xor.reduce(x, axis=None), x.size % 10]
        assert floats[0] == x.sum()
        assert longs[0] == int((x & 0xFF).sum()) << 32

    def test_nanosleep_lets_others_run(self, schedule):
        y = np.zeros(64, np.int32)
        kernel("block", "wait_for_flag")((1,), (64,), (y,))
        assert y.all()


class TestRaces:
    """A missing barrier changes the result under one schedule or another."""

    def run(self, monkeypatch: pytest.MonkeyPatch, name: str, barrier: bool) -> dict[str, bytes]:
        launch = kernel("block", name).specialize(BARRIER=1) if barrier else kernel("block", name)
        results = {}
        for schedule in SCHEDULES:
            monkeypatch.setenv("KDTREE_SCHEDULE", schedule)
            if name == "shift":
                y = np.zeros(128, np.int32)
                launch((1,), (128,), (y,))
            else:
                y = np.zeros(1, np.float32)
                launch((1,), (128,), (np.ones(128, np.float32), y, np.int32(128)), shared_bytes=512)
            results[schedule] = y.tobytes()
        return results

    @pytest.mark.parametrize("name", ["row_sum_race", "shift"])
    def test_a_barrier_makes_all_schedules_agree(self, monkeypatch, name):
        assert len(set(self.run(monkeypatch, name, barrier=True).values())) == 1

    @pytest.mark.parametrize("name", ["row_sum_race", "shift"])
    def test_without_it_results_are_wrong(self, monkeypatch, name):
        (right,) = set(self.run(monkeypatch, name, barrier=True).values())
        wrong = [schedule for schedule, y in self.run(monkeypatch, name, barrier=False).items() if y != right]
        assert set(wrong) >= {"random:1", "random:2", "random:3"}
        assert {"forward", "reverse"} & set(wrong)

    def test_a_schedule_repeats(self, monkeypatch):
        assert self.run(monkeypatch, "shift", barrier=False) == self.run(monkeypatch, "shift", barrier=False)


class TestWarps:
    @pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32, np.int64])
    @pytest.mark.parametrize("width", [1, 2, 8, 32])
    @pytest.mark.parametrize("argument", [0, 1, 3, 7, 16, 31])
    def test_shuffles(self, schedule, dtype, width, argument):
        name = {np.int32: "int", np.uint32: "unsigned", np.float32: "float", np.int64: "long"}[dtype]
        x = (
            (random.random(64) * 2**30).astype(dtype) << (20 if dtype == np.int64 else 0)
            if dtype != np.float32
            else (random.random(64, np.float32))
        )
        y = np.zeros((4, 64), dtype)
        kernel("warp", f"shuffle_{name}")((1,), (64,), (x, y, np.int32(argument), np.int32(width)))
        lane = np.arange(64)
        first, last = lane // width * width, lane // width * width + width - 1
        up, down, xor = lane - argument, lane + argument, lane ^ argument
        np.testing.assert_array_equal(y[0], x[first + argument % width])
        np.testing.assert_array_equal(y[1], x[np.where(up >= first, up, lane)])
        np.testing.assert_array_equal(y[2], x[np.where(down <= last, down, lane)])
        np.testing.assert_array_equal(y[3], x[np.where(xor <= last, xor, lane)])

    def test_a_source_for_each_lane(self, schedule):
        x, source = random.random(32, np.float32), random.integers(0, 32, 32).astype(np.int32)
        y = np.zeros(32, np.float32)
        kernel("warp", "gather")((1,), (32,), (x, source, y))
        np.testing.assert_array_equal(y, x[source])

    @pytest.mark.parametrize("mask", [ALL, 0x0000FFFF, 0x80000001, 0x00F0F000])
    def test_votes_and_reductions(self, schedule, mask):
        lanes = np.array([lane for lane in range(32) if mask >> lane & 1])
        for x in (random.integers(-3, 3, 32), np.zeros(32), np.ones(32)):
            x = x.astype(np.int32)
            mine, words = x[lanes], x[lanes].astype(np.uint32)
            y = np.zeros((4, 32), np.uint32)
            kernel("warp", "votes")((1,), (32,), (x, y, np.uint32(mask)))
            ballot = sum(1 << int(lane) for lane in lanes if x[lane])
            assert (y[0, lanes] == ballot).all()
            assert (y[1, lanes] == mine.any()).all()
            assert (y[2, lanes] == mine.all()).all()
            assert y[3, lanes].tolist() == [sum(1 << int(o) for o in lanes if x[o] == x[lane]) for lane in lanes]

            y = np.zeros((8, 32), np.int32)
            kernel("warp", "reductions")((1,), (32,), (x, y, np.uint32(mask)))
            operations = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
            expected = [words.sum(dtype=np.uint32), mine.min(), mine.max(), words.min(), words.max()]
            expected += [operation.reduce(words) for operation in operations]
            expected = np.array([int(value) & ALL for value in expected], np.uint32)
            np.testing.assert_array_equal(y.view(np.uint32)[:, lanes], np.repeat(expected[:, None], len(lanes), 1))

    def test_halves_of_a_warp_diverge(self, schedule):
        x = random.integers(0, 99, 64).astype(np.int32)
        y = np.zeros(64, np.int32)
        kernel("warp", "diverged")((1,), (64,), (x, y))
        halves = x.reshape(2, 2, 16)
        expected = np.stack([halves[:, 0].sum(axis=1), halves[:, 1].max(axis=1)], axis=1)
        np.testing.assert_array_equal(y.reshape(2, 2, 16), np.repeat(expected[:, :, None], 16, 2))


class TestArithmetic:
    def test_bits(self):
        n = 1000
        x, y, z = (random.integers(0, 2**32, n, np.uint32) for _ in range(3))
        x[:40] = [0, 1, ALL, 0x80000000, *(1 << i for i in range(32)), 7, 8, 9, 10]
        out = np.zeros((17, n), np.uint32)
        kernel("arithmetic", "bits")((-(-n // 128),), (128,), (x, y, z, out, np.int32(n)))
        for i in range(n):
            a, b, c = int(x[i]), int(y[i]), int(z[i])
            signed_a, signed_b = int(np.int32(x[i : i + 1].view(np.int32)[0])), int(y[i : i + 1].view(np.int32)[0])
            wide = b << 32 | a
            selected = [wide >> (8 * (c >> (4 * k) & 7)) & 0xFF for k in range(4)]
            expected = [
                a.bit_count(),
                (a & -a).bit_length(),
                32 - a.bit_length(),
                int(f"{a:032b}"[::-1], 2),
                (wide << (c & 31) >> 32) & ALL,
                (wide >> (c & 31)) & ALL,
                sum(s << (8 * k) for k, s in enumerate(selected)),
                a * b >> 32,
                (signed_a * signed_b >> 32) & ALL,
                (a & b) | c,
                # 0x1b, row by row: a b c = 000, 001, 011, 100
                (~a & ~b & ~c | ~a & ~b & c | ~a & b & c | a & ~b & ~c) & ALL,
                a.bit_count() + b.bit_count(),
                64 - (a << 32 | b).bit_length(),
                min(signed_a, signed_b) & ALL,
                max(a, b),
                abs(signed_a >> 1),
                (2, 3, 5, 7)[a % 4],
            ]
            assert out[:, i].tolist() == expected

    def test_floats(self):
        n = 2000
        x, y, z = (
            random.standard_normal(n, np.float32) * 10 ** random.uniform(-3, 1, n).astype(np.float32) for _ in range(3)
        )
        out = np.zeros((20, n), np.float32)
        kernel("arithmetic", "floats")((-(-n // 128),), (128,), (x, y, z, out, np.int32(n)))
        fused = (x.astype(np.float64) * y + z).astype(np.float32)  # 48 bits of product: the double sum rounds rarely
        exact = {
            0: x * y + z,
            4: x * y + z,
            5: x / y,
            6: np.sqrt(np.abs(x)),
            7: 1 / np.sqrt(np.abs(x)),
            10: np.minimum(x, y),
            11: np.maximum(x, y),
            12: np.rint(x),
            13: np.floor(x),
            14: x,
            15: np.rint(x),
            16: np.trunc(x),
            18: x / y,
        }
        for row, expected in exact.items():
            np.testing.assert_array_equal(out[row], expected, err_msg=str(row))
        assert (out[1] == out[2]).all()
        assert (out[1] == out[3]).all()
        assert (out[1] != out[0]).any()
        assert np.count_nonzero(out[1] != fused) <= 2
        for row, expected in {8: np.exp(x), 9: np.log(np.abs(x)), 17: np.exp(x), 19: np.tanh(x)}.items():
            np.testing.assert_allclose(out[row], expected, rtol=1e-6)

    def test_constants(self):
        out = np.zeros(5, np.float32)
        kernel("arithmetic", "constants")((1,), (1,), (out,))
        np.testing.assert_array_equal(out, [np.inf, -np.inf, np.nan, 0, 2147483648])

    @pytest.mark.parametrize(("dtype", "name"), [(np.float16, "halves"), (bfloat16, "bfloats")])
    def test_narrow_floats(self, dtype, name):
        """Conversions of all 65,536 numbers, and arithmetic in one rounding."""
        n = 65536
        x = np.arange(n, dtype=np.uint16).view(dtype)
        y, z = (random.permutation(n).astype(np.uint16).view(dtype) for _ in range(2))
        one_up = np.nextafter(dtype(1), dtype(2))
        x[-3:], y[-3:] = one_up, one_up  # a product on a tie, and a third term that decides it
        z[-3:] = [0, dtype(2.0**-14), dtype(-(2.0**-14))]
        wide = random.integers(0, 2**32, n, np.uint32).view(np.float32)
        halfway = x.astype(np.float32).view(np.uint32) + (1 << (12 if dtype == np.float16 else 15))
        wide[::2] = halfway.view(np.float32)[::2]
        with np.errstate(all="ignore"):
            expected = wide.astype(dtype).astype(np.float32)
        out, back = np.zeros((6, n), dtype), np.zeros(n, np.float32)
        kernel("arithmetic", name)((n // 256,), (256,), (x, y, z, wide, out, back, np.int32(n)))
        np.testing.assert_array_equal(back, x.astype(np.float32))
        np.testing.assert_array_equal(out[0].astype(np.float32), expected)
        np.testing.assert_array_equal(out[5].astype(np.float32), -back)
        chosen = np.concatenate([random.choice(n, 3000), np.arange(n - 3, n)])
        for i in chosen:
            a, b, c = (float(values[i]) for values in (x, y, z))
            expected = [
                one_rounding(dtype, lambda a, b: a + b, a, b),
                one_rounding(dtype, lambda a, b: a - b, a, b),
                one_rounding(dtype, lambda a, b: a * b, a, b),
                one_rounding(dtype, lambda a, b, c: a * b + c, a, b, c),
            ]
            np.testing.assert_array_equal(out[1:5, i].astype(np.float64), expected, err_msg=f"{a}, {b}, {c}")

    def test_codes_unpack_through_lop3(self):
        codes = np.arange(32, dtype=np.uint32) % 16 | (np.arange(32, dtype=np.uint32) * 7 % 16) << 16
        out = np.zeros((32, 2), np.float32)
        kernel("arithmetic", "unpack_pairs")((1,), (32,), (codes, out))
        np.testing.assert_array_equal(out, np.stack([codes & 15, codes >> 16], axis=1).astype(np.float32) - 8)

    def test_vector_types(self):
        x = random.integers(0, 2**32, (8, 4), np.uint32)
        y, sizes = np.zeros_like(x), np.zeros(16, np.int32)
        kernel("arithmetic", "vectors")((1,), (8,), (x, y, sizes))
        np.testing.assert_array_equal(y, np.roll(x, 1, axis=1))
        assert sizes.tolist() == [8, 8, 12, 4, 16, 16, 8, 8, 8, 8, 4, 4, 16, 4, 4, 4]


def one_rounding(dtype: type, operation: Callable, *values: float) -> float:
    """An operation, its exact result rounded to the nearest number of a 16-bit format, half to even."""
    if not np.isfinite(values).all():
        with np.errstate(invalid="ignore"):
            return float(operation(*map(np.float64, values)))
    exact = operation(*map(Fraction, values))
    if not exact:
        return 0.0
    mantissa, bias = (10, 15) if dtype == np.float16 else (7, 127)
    magnitude = abs(exact)
    exponent = math.floor(math.log2(magnitude.numerator) - math.log2(magnitude.denominator))
    exponent += (magnitude >= Fraction(2) ** (exponent + 1)) - (magnitude < Fraction(2) ** exponent)
    ulp = Fraction(2) ** (max(exponent, 1 - bias) - mantissa)
    rounded = round(magnitude / ulp) * ulp
    return math.copysign(math.inf if rounded >= Fraction(2) ** (bias + 1) else float(rounded), exact)


class TestTensorCores:
    @pytest.mark.parametrize(("dtype", "name"), [(bfloat16, "multiply_bf16"), (np.float16, "multiply_fp16")])
    def test_mma(self, schedule, dtype, name):
        a, b = random.standard_normal((16, 16)).astype(dtype), random.standard_normal((8, 16)).astype(dtype)
        c = random.standard_normal((16, 8)).astype(np.float32)
        d = np.zeros((16, 8), np.float32)
        kernel("tensor_core", name)((1,), (32,), (a, b, c, d))
        exact = a.astype(np.float64) @ b.astype(np.float64).T + c
        np.testing.assert_allclose(d, exact, rtol=1e-6, atol=1e-6)

    def test_ldmatrix(self, schedule):
        x = random.integers(0, 2**16, (4, 8, 8), np.uint16)
        y = np.zeros((4, 4, 32), np.uint32)
        kernel("tensor_core", "load_matrices")((1,), (32,), (x, y))
        pairs = x.reshape(4, 32, 2).astype(np.uint32)
        transposed = x.swapaxes(1, 2).reshape(4, 32, 2).astype(np.uint32)
        for form, (expected, count) in enumerate([(pairs, 4), (transposed, 4), (pairs, 2), (transposed, 2)]):
            registers = expected[..., 0] | expected[..., 1] << 16
            np.testing.assert_array_equal(y[form, :count], registers[:count])

    def test_copies_arrive_with_the_wait(self, schedule):
        x = np.arange(1, 129, dtype=np.int32)
        y = np.zeros(224, np.int32)
        kernel("tensor_core", "copy_groups")((1,), (32,), (x, y))
        copied = np.arange(32) < 24
        assert (y[:32] == -1).all()
        np.testing.assert_array_equal(y[32:64], np.where(copied, x[:32], 0))
        assert (y[64:96] == -1).all()
        np.testing.assert_array_equal(y[96:], np.where(np.repeat(copied, 4), x, 0))

    @pytest.mark.parametrize("mistake", [0, 1])
    def test_wgmma_of_rows(self, schedule, mistake):
        a, b = random.standard_normal((64, 64)).astype(bfloat16), random.standard_normal((32, 64)).astype(bfloat16)
        d, early = np.zeros((64, 32), np.float32), np.zeros(128, np.float32)
        args = (a.view(np.int32), b.view(np.int32), d, early, np.int32(mistake))
        if mistake:
            with pytest.raises(KernelError, match=r"wgmma_m64n32k16 at warpgroup\.cu:\d+: .* changed before the wait"):
                kernel("warpgroup", "multiply_rows")((1,), (128,), args, 96 * 128)
            return
        kernel("warpgroup", "multiply_rows")((1,), (128,), args, 96 * 128)
        exact = 2 * a.astype(np.float64) @ b.astype(np.float64).T
        np.testing.assert_allclose(d, exact, rtol=1e-5, atol=1e-5)
        assert np.isnan(early).all()

    def test_wgmma_of_columns(self, schedule):
        a, b = random.standard_normal((64, 32)).astype(bfloat16), random.standard_normal((32, 64)).astype(bfloat16)
        d, early = np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)
        args = (a.view(np.int32), b.view(np.int32), d, early)
        kernel("warpgroup", "multiply_columns")((1,), (128,), args, 32 * 128)
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(d, a @ b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(early, a[:, :16] @ b[:16], rtol=1e-5, atol=1e-5)

    @pytest.mark.skipif(bool(os.environ.get("KDTREE_SANITIZE")), reason="sanitizers end the process")
    def test_wgmma_beyond_shared_memory(self):
        a, b = np.zeros((64, 32), np.int32), np.zeros((32, 32), np.int32)
        args = (a, b, np.zeros((64, 32), np.float32), np.zeros(128, np.float32), np.int32(0))
        with pytest.raises(KernelError, match=r"wgmma_m64n32k16 at .* reads bytes .* the block has 12000"):
            kernel("warpgroup", "multiply_rows")((1,), (128,), args, 12000)


class TestUndefined:
    """What a GPU leaves undefined is an exception that says where."""

    REPORTS: ClassVar = {
        "barrier_after_return": (64, r"__syncthreads at undefined\.cu:\d+ is not reached by all threads"),
        "barrier_in_a_branch": (64, r"barriers in diverging branches.*undefined\.cu:\d+.*undefined\.cu:\d+"),
        "shuffle_from_returned": (32, r"__shfl_xor_sync.*lane 6 reads lane 7, which has returned or was never there"),
        "shuffle_from_absent": (
            48,
            r"block \(0, 0, 0\), .*lane 0 reads lane 16, which has returned or was never there",
        ),
        "shuffle_in_a_branch": (32, r"deadlock.*16 of 32 threads wait in __syncthreads.*0x0000ffff wait in __shfl_xor"),
        "shuffle_outside_mask": (32, r"lane 0 reads lane 20, which its mask does not name"),
        "mask_without_caller": (32, r"mask 0x0000ffff does not name lane \d+"),
        "masks_differ": (32, r"__ballot_sync.*passes mask 0x0000000f"),
        "functions_differ": (32, r"is in __shfl_sync.*lane 3 in __ballot_sync|lane 3 is in __ballot_sync"),
        "bad_width": (32, r"width 12 is not a power of two"),
        "half_a_warp_multiplies": (16, r"takes a whole warp, these lanes are here: 0x0000ffff"),
        "misaligned_copy": (32, r"cp\.async of 16 bytes"),
        "misaligned_matrix": (32, r"ldmatrix_x4.*row is not aligned to 16 bytes"),
        "failing_assertion": (32, r"thread \(9, 0, 0\): assertion failed at .*: threadIdx\.x != 9"),
        "trap": (32, r"thread \(9, 0, 0\): __trap at undefined\.cu:\d+"),
    }

    @pytest.mark.parametrize("name", REPORTS)
    def test_report(self, schedule, name):
        threads, report = self.REPORTS[name]
        if name in ("masks_differ", "functions_differ") and schedule != "forward":
            report = "undefined"  # which lane is found first depends on the schedule
        y = np.zeros(64, np.int32)
        with pytest.raises(KernelError, match=report) as caught:
            kernel("undefined", name)((1,), (threads,), (y,))
        assert str(caught.value).startswith(f"{name}, block (0, 0, 0), thread (")

    def test_waiting_for_nobody(self):
        with pytest.raises(KernelError, match="threads wait in __nanosleep for what nobody does"):
            kernel("undefined", "wait_for_nobody")((1,), (2,), (np.zeros(64, np.int32),))

    def test_the_next_launch_is_well(self):
        y = np.zeros(64, np.int32)
        for _ in range(50):
            with pytest.raises(KernelError):
                kernel("undefined", "barrier_after_return")((1,), (64,), (y,))
        kernel("block", "wait_for_flag")((1,), (64,), (y,))
        assert y.all()

    @pytest.mark.skipif(bool(os.environ.get("KDTREE_SANITIZE")), reason="sanitizers end the process")
    def test_faults(self):
        y = np.zeros(64, np.int32)
        with pytest.raises(KernelError, match=r"null_pointer.*access to address 0x0, which is not there"):
            kernel("undefined", "null_pointer")((1,), (64,), (None,))
        with pytest.raises(KernelError, match="division of an integer by zero"):
            kernel("undefined", "divide")((1,), (64,), (y, np.int32(0)))
        for words in (16, 17, 79):
            with pytest.raises(KernelError, match="beyond the dynamic shared memory"):
                kernel("undefined", "beyond_dynamic_shared")((1,), (1,), (y, np.int32(words)), shared_bytes=64)
        kernel("undefined", "beyond_dynamic_shared")((1,), (1,), (y, np.int32(15)), shared_bytes=64)

    def test_no_thread_of_a_failed_launch_stays(self):
        before = threading.active_count()
        with pytest.raises(KernelError):
            kernel("undefined", "trap")((1000,), (64,), (np.zeros(64, np.int32),))
        assert threading.active_count() == before
        if Path("/proc/self/task").exists():
            assert len(list(Path("/proc/self/task").iterdir())) < 64


@pytest.mark.skipif(bool(os.environ.get("KDTREE_SANITIZE")), reason="nothing to sanitize")
class TestBuild:
    def test_processes_build_at_once(self, tmp_path):
        """Four of them with an empty cache: one library each, or one and the same, and no file of theirs is left."""
        script = (
            "import numpy as np; from pathlib import Path; from kdtree_nb.kernels.launch import Kernel\n"
            f"kernel = Kernel(Path({str(KERNELS / 'block.cu')!r}), 'wait_for_flag')\n"
            "y = np.zeros(64, np.int32); kernel((1,), (64,), (y,))\n"
            "assert y.all()"
        )
        environment = {**os.environ, "KDTREE_CACHE": str(tmp_path)}
        processes = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(4)]
        assert [process.wait() for process in processes] == [0] * 4
        left = sorted(path.name.split("-")[0] for path in (tmp_path / "emulator").iterdir())
        assert left == ["block", "runtime"]

    def test_a_library_is_built_once(self, cache):
        source = read_source(KERNELS / "gemv.cu")
        library = build.build_library(source, {})
        stamp = library.stat().st_mtime_ns
        assert build.build_library(source, {}) == library
        assert library.stat().st_mtime_ns == stamp
        assert build.build_library(source, {"OTHER": "1"}) != library

    def test_an_error_names_the_line(self, cache, tmp_path):
        (tmp_path / "broken.cu").write_text(
            '#include "ptx.cuh"\n\nextern "C" __global__ void broken(int* y)\n{\n    y[0] = nothing;\n}\n'
        )
        with pytest.raises(KernelError, match=r"(?s)broken\.cu does not compile.*broken\.cu:5.*nothing"):
            Kernel(tmp_path / "broken.cu")((1,), (1,), (np.zeros(1, np.int32),))

    def test_a_frame_that_would_not_fit_is_refused(self, cache, tmp_path):
        (tmp_path / "large.cu").write_text(
            'extern "C" __global__ void large(int* y)\n'
            "{\n    volatile int local[20000];\n    for (int i = 0; i < 20000; ++i)\n        local[i] = i;\n"
            "    y[0] = local[y[0]];\n}\n"
        )
        with pytest.raises(KernelError, match=r"large\.cu.*frame size"):
            build.build_library(read_source(tmp_path / "large.cu"), {})

    def test_no_compiler(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KDTREE_CACHE", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(KernelError, match=r"no.*\$CXX, c\+\+, g\+\+, clang\+\+, ziglang.*pip install"):
            build.build_library(read_source(KERNELS / "gemv.cu"), {})

    def test_a_compiler_that_is_not_there(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KDTREE_CACHE", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler --option")
        with pytest.raises(KernelError, match="'no-such-compiler --option' does not start"):
            build.build_library(read_source(KERNELS / "gemv.cu"), {})

    def test_a_cache_that_nobody_may_write_to(self, tmp_path, monkeypatch):
        """Made by root, say. Another is taken for it, but not for one that was asked for."""
        allowed, kept, temporary = os.access, tmp_path / "kdtree_nb", tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(temporary))
        monkeypatch.setattr(os, "access", lambda path, mode: kept not in Path(path).parents and allowed(path, mode))
        monkeypatch.delenv("KDTREE_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert build.cache_folder("costs") == temporary / f"kdtree_nb-costs-{os.getuid()}"
        monkeypatch.setenv("KDTREE_CACHE", str(kept))
        with pytest.raises(PermissionError, match="kdtree_nb/costs"):
            build.cache_folder("costs")

    @pytest.mark.parametrize("compiler", ["clang++", "g++"])
    def test_compilers(self, tmp_path, monkeypatch, compiler):
        if not shutil.which(compiler):
            pytest.skip(f"no {compiler}")
        self.check_in_new_process(tmp_path, CXX=compiler)

    def test_ucontext(self, tmp_path):
        """The switch for processors that have none of their own."""
        compiler = " ".join(build.find_compiler())
        self.check_in_new_process(tmp_path, CXX=f"{compiler} -DEMULATOR_UCONTEXT")

    def check_in_new_process(self, cache: Path, **environment: str) -> None:
        script = (
            "import numpy as np; from pathlib import Path; from kdtree_nb.kernels.launch import Kernel\n"
            "x = np.arange(3000, dtype=np.float32).reshape(10, 300); y = np.zeros(10, np.float32)\n"
            f"kernel = Kernel(Path({str(KERNELS / 'block.cu')!r}), 'row_sum')\n"
            "kernel((10,), (256,), (x, y, np.int32(300), np.int32(1)), shared_bytes=1024)\n"
            "assert (y == x.sum(axis=1)).all()"
        )
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "KDTREE_CACHE": str(cache), **environment}, check=True
        )

    def test_threads_of_python_launch_at_once(self):
        x = random.integers(-9, 9, (20, 300)).astype(np.float32)

        def launch(_: int) -> bool:
            y = np.zeros(20, np.float32)
            kernel("block", "row_sum")((20,), (128,), (x, y, np.int32(300), np.int32(0)))
            return bool((y == x.sum(axis=1)).all())

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(launch, range(64)))


class TestSanitizers:
    """With KDTREE_SANITIZE=1, in a process that starts with the sanitizer's library."""

    def run(self, name: str, arguments: str) -> subprocess.CompletedProcess[str]:
        environment = sanitizer_environment()
        if environment is None:
            pytest.skip("this compiler has no AddressSanitizer")
        script = (
            "import numpy as np; from pathlib import Path; from kdtree_nb.kernels.launch import Kernel\n"
            f"y = np.zeros(64, np.int32); Kernel(Path({str(KERNELS / 'undefined.cu')!r}), {name!r})({arguments})\n"
        )
        environment.pop("KDTREE_SCHEDULE", None)
        return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)

    @pytest.mark.parametrize(
        ("name", "arguments", "report"),
        [
            ("beyond_global", "(1,), (1,), (y, np.int32(64))", "heap-buffer-overflow"),
            ("beyond_static_shared", "(1,), (1,), (y, np.int32(32))", "insufficient space for an object"),
            ("beyond_dynamic_shared", "(1,), (1,), (y, np.int32(16)), 64", "use-after-poison"),
            ("signed_overflow", "(1,), (1,), (y, np.int32(1))", "signed integer overflow"),
        ],
    )
    def test_planted_fault(self, name, arguments, report):
        result = self.run(name, arguments)
        assert result.returncode
        assert report in result.stderr
        assert "undefined.cu:" in result.stderr

    @pytest.mark.parametrize("name", ["trap", "shuffle_in_a_branch"])
    def test_reports_stay_exceptions(self, name):
        result = self.run(name, "(1,), (32,), (y,)")
        assert "KernelError" in result.stderr
        assert "AddressSanitizer" not in result.stderr

    def test_right_kernels_pass(self):
        result = self.run("signed_overflow", "(4,), (64,), (y, np.int32(-1))")
        assert (result.returncode, result.stderr) == (0, "")

    @pytest.mark.skipif(bool(os.environ.get("KDTREE_SANITIZE")), reason="they are there")
    def test_without_the_library_there_is_a_message(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KDTREE_SANITIZE", "1")
        with pytest.raises(KernelError, match=r"kdtree_nb\.kernels\.emulator.sanitize"):
            kernel("gemv", "gemv", OTHER=1)((1,), (32,), (None, None, None, None, np.int32(0)))


def has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


@pytest.mark.skipif(not has_gpu(), reason="no GPU")
class TestAgainstGpu:
    """What README.md calls exact is what a GPU computes."""

    def both(self, launch: Kernel, grid: int, block: int, args: list) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each array after the launch on a GPU and after the launch here; bfloat16 as its bits."""
        import cupy

        bits = [arg.view(np.uint16) if getattr(arg, "dtype", None) == bfloat16 else arg for arg in args]
        here = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in bits]
        there = [cupy.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in bits]
        launch((grid,), (block,), here)
        launch((grid,), (block,), there)
        return [(cupy.asnumpy(gpu), cpu) for gpu, cpu in zip(there, here, strict=True) if isinstance(cpu, np.ndarray)]

    def test_bits(self):
        x, y, z = (random.integers(0, 2**32, 1024, np.uint32) for _ in range(3))
        args = [x, y, z, np.zeros((17, 1024), np.uint32), np.int32(1024)]
        for gpu, cpu in self.both(kernel("arithmetic", "bits"), 8, 128, args):
            np.testing.assert_array_equal(gpu, cpu)

    def test_floats(self):
        x, y, z = (random.standard_normal(1024, np.float32) for _ in range(3))
        args = [x, y, z, np.zeros((20, 1024), np.float32), np.int32(1024)]
        gpu, cpu = self.both(kernel("arithmetic", "floats"), 8, 128, args)[3]
        same = [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15, 16]
        np.testing.assert_array_equal(gpu[same], cpu[same])
        np.testing.assert_allclose(gpu, cpu, rtol=1e-5)

    @pytest.mark.parametrize(("dtype", "name"), [(np.float16, "halves"), (bfloat16, "bfloats")])
    def test_narrow_floats(self, dtype, name):
        x, y, z = (random.standard_normal(4096).astype(dtype) for _ in range(3))
        wide = random.standard_normal(4096, np.float32)
        args = [x, y, z, wide, np.zeros((6, 4096), dtype), np.zeros(4096, np.float32), np.int32(4096)]
        for gpu, cpu in self.both(kernel("arithmetic", name), 16, 256, args):
            np.testing.assert_array_equal(gpu, cpu)

    @pytest.mark.parametrize(("name", "outputs", "arguments"), [("votes", 4, [0x00F0F000]), ("reductions", 8, [ALL])])
    def test_warps(self, name, outputs, arguments):
        x = random.integers(-3, 3, 32).astype(np.int32)
        y = np.zeros((outputs, 32), np.uint32 if name == "votes" else np.int32)
        for gpu, cpu in self.both(kernel("warp", name), 1, 32, [x, y, *map(np.uint32, arguments)]):
            np.testing.assert_array_equal(gpu, cpu)

    @pytest.mark.parametrize("width", [8, 32])
    def test_shuffles(self, width):
        args = [random.random(64, np.float32), np.zeros((4, 64), np.float32), np.int32(3), np.int32(width)]
        for gpu, cpu in self.both(kernel("warp", "shuffle_float"), 1, 64, args):
            np.testing.assert_array_equal(gpu, cpu)

    def test_ldmatrix(self):
        args = [random.integers(0, 2**16, 256, np.uint16), np.zeros((4, 4, 32), np.uint32)]
        for gpu, cpu in self.both(kernel("tensor_core", "load_matrices"), 1, 32, args):
            np.testing.assert_array_equal(gpu, cpu)

    @pytest.mark.parametrize(("dtype", "name"), [(bfloat16, "multiply_bf16"), (np.float16, "multiply_fp16")])
    def test_mma(self, dtype, name):
        a, b = random.standard_normal((16, 16)).astype(dtype), random.standard_normal((8, 16)).astype(dtype)
        args = [a, b, random.standard_normal((16, 8)).astype(np.float32), np.zeros((16, 8), np.float32)]
        gpu, cpu = self.both(kernel("tensor_core", name), 1, 32, args)[3]
        np.testing.assert_allclose(gpu, cpu, rtol=1e-5, atol=1e-5)


def test_speed_of_a_gemv(record_property):
    """Reported, not asserted: a machine may be busy."""
    weight = random.standard_normal((1024, 512), np.float32)
    packed = quantize(weight)
    x, y = random.standard_normal(512, np.float32), np.zeros(1024, np.float32)
    times = []
    for _ in range(20):
        start = time.process_time()
        kernel("gemv", "gemv")((128,), (256,), (packed.qweight, packed.scales, x, y, np.int32(512)))
        times.append(time.process_time() - start)
    np.testing.assert_allclose(y, packed.dequantized @ x, rtol=1e-4, atol=1e-4)
    record_property("gemv_1024x512_ms", round(min(times) * 1e3, 2))
    print(f"1024 x 512 INT4 GEMV, 32,768 threads: {min(times) * 1e3:.1f} ms of processor time")
