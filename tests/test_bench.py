"""bench without a GPU: floors, tables and records by hand, what is missing, and what the commands say then."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kdtree_nb import golden
from kdtree_nb.bench import attention, ceilings, floors, gemm, inputs, load, moe, peers, timing, tree
from kdtree_nb.bench.ceilings import Ceilings
from kdtree_nb.bench.commands import bench
from kdtree_nb.bench.engine_commands import bench_load
from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.resources import DEFINES
from kdtree_nb.bench.shown import missing, show
from kdtree_nb.cli import main
from kdtree_nb.engine.device import Device
from kdtree_nb.kernels.source import read_source
from kdtree_nb.kernels.w4a16_mma import geometry_of, tile_weight
from kdtree_nb.quantization import QuantizedWeight, unpack
from kdtree_nb.reference.tree import tree_accept

RECORD = golden.folder() / "measurements" / "gemm-h200.json"


def test_floor_of_a_product() -> None:
    """2048 × 7168 weights are 7,340,032 bytes of codes and 917,504 of scales: 1.85 µs at 4,459 GB/s."""
    one = gemm.product("w4a16_mma", 2048, 7168, 1, 3.7)
    assert one.case == {"shape": "2048x7168", "rows": 1}
    assert one.bytes == 7_340_032 + 917_504
    assert one.operations == 29_360_128
    assert one.floor(Ceilings(4459, 800)) == pytest.approx(1.852, abs=1e-3)
    assert gemm.product("", 2048, 7168, 64, 3.7).floor(Ceilings(4459, 800)) == pytest.approx(2.349, abs=1e-3)


def test_floor_counts_the_bytes_that_the_kernel_reads() -> None:
    weight = tile_weight(np.zeros((2048, 896), np.int32), np.zeros((2048, 224), bfloat16))
    assert weight.codes.nbytes + weight.scales.nbytes == gemm.product("", 2048, 7168, 1, 1.0).bytes


@pytest.mark.parametrize(("nbytes", "copies"), [(8_257_536, 31), (1_622_016, 156), (10**9, 2)])
def test_copies_exceed_the_cache(nbytes: int, copies: int) -> None:
    assert timing.copies_of(nbytes, 62_914_560) == copies


def test_parse_shape() -> None:
    assert gemm.parse_shape("2048x7168") == (2048, 7168)
    for text in ("2048", "ax32", "1x2x3", "0x32", "-1x32", "8x40"):
        with pytest.raises(ValueError, match=re.escape(f"bench gemm: --shape {text!r}, expected")):
            gemm.parse_shape(text)


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "humming" else object())
    found, missing = peers.installed()
    assert [peer.name for peer in found] == ["torch bf16", "tinygemm"]
    assert missing == ["humming: humming is not installed"]
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "torch" else object())
    assert peers.installed()[0] == []  # humming needs torch


@pytest.mark.parametrize(
    "command",
    [
        ["ceilings"],
        ["gemm", "--shape", "64x64", "--rows", "1"],
        ["moe", "--shape", "moonlight"],
        ["attention"],
        ["tree"],
        ["step"],
        ["model", "--layer", "kimi-k2"],
        ["load", "--bundle", str(golden.folder() / "tiny" / "tiny-int4.kdtr")],
    ],
)
def test_without_a_gpu_it_says_so(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "cuda_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["kdtree_nb", "bench", *command])
    with pytest.raises(SystemExit, match="1"):
        main()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"error bench: CuPy finds no GPU, [^\n]*\n", shown.err)


def test_loading_is_held_against_the_slower_of_bus_and_reading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "require_gpu", lambda: None)
    monkeypatch.setattr(load, "_load", lambda path: (0.5, 1234))
    path = golden.folder() / "tiny" / "tiny-int4.kdtr"
    monkeypatch.setattr(load, "bus_rate", lambda: 1e-6)  # slower than any disk
    found = load.measure(path)
    assert [loading.source for loading in found.loadings] == [
        "first",
        "cache",
        *["disk"] * hasattr(os, "posix_fadvise"),
    ]
    for loading in found.loadings:
        assert loading.gb_per_s == found.bytes / 0.5 / 1e9
        assert loading.share == loading.gb_per_s / 1e-6
        assert loading.read_gb_per_s > 1e-6
    monkeypatch.setattr(load, "bus_rate", lambda: 1e6)
    for loading in load.measure(path).loadings:
        assert loading.share == loading.gb_per_s / loading.read_gb_per_s
    bench_load(path)
    assert re.search(
        r"^cache  0\.00 GB in 0\.50 s, .* of the slower of bus \(1000000\.0\) and", capsys.readouterr().out, re.M
    )


def test_the_recorded_run() -> None:
    """What bench wrote on the H200: every kernel for every case once, and figures that are possible."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {"device", "versions", "commit", "date", "ceilings", "missing", "results"} <= set(found)
    results = [Measured(**result) for result in found["results"]]
    names = [*gemm.OURS, *(peer.name for peer in peers.PEERS)]
    cases = [(name, *shape, rows) for name in names for shape in gemm.SHAPES for rows in gemm.ROWS]
    expected = {case: gemm.product(*case, 0.0) for case in cases}
    assert len(results) == len(cases)
    for result in results:
        out_features, in_features = gemm.parse_shape(result.case["shape"])
        of_case = expected.pop((result.kernel, out_features, in_features, result.case["rows"]))
        assert result._replace(microseconds=0.0) == of_case
    rows = floors.table(results, Ceilings(**found["ceilings"]), names[2:])
    assert len(rows) == len(gemm.SHAPES) * len(gemm.ROWS)
    assert all(row.of_floor > 1 for row in rows)


def test_resources_compile_a_geometry_that_is_used() -> None:
    given = DEFINES["w4a16_mma.cu"]
    geometry = geometry_of(16, 4096, int(given["IN_FEATURES"]))
    assert {name: str(value) for name, value in geometry.defines.items()}.items() <= given.items()
    assert "IN_FEATURES" in read_source("w4a16_mma.cu").text


# ---- floors and tables -----------------------------------------------------------------------------------------------


LIMITS = Ceilings(4000.0, 800.0)


def test_floor_is_of_bytes_or_of_operations() -> None:
    """8 MB at 4,000 GB/s are 2 µs, 4 GFLOP at 800 TFLOP/s are 5."""
    assert Measured("ours", {}, 9.0, 8e6, 8e8).floor(LIMITS) == pytest.approx(2)
    assert Measured("ours", {}, 9.0, 8e6, 4e9).floor(LIMITS) == pytest.approx(5)
    assert Measured("ours", {}, 9.0, 8e6, 4e9).floor(Ceilings(4000.0, None)) == pytest.approx(2)


def test_table_of_cases() -> None:
    found = [
        Measured("fast", {"rows": 1}, 4.0, 8e6),
        Measured("fast", {"rows": 64}, 50.0),
        Measured("exact", {"rows": 1}, 3.0, 8e6),
        Measured("torch", {"rows": 1}, 8.0, 8e6),
        Measured("humming", {"rows": 1}, 5.0, 8e6),
        Measured("humming", {"rows": 64}, 25.0),
    ]
    first, second = floors.table(found, LIMITS, ["torch", "humming"])
    assert first.microseconds == {"fast": 4.0, "exact": 3.0, "torch": 8.0, "humming": 5.0}
    assert (first.floor, first.of_floor) == (2.0, 2.0)
    assert (first.best_peer, first.of_best_peer) == ("humming", 0.8)  # not our exact kernel
    assert (second.case, second.of_floor, second.of_best_peer) == ({"rows": 64}, None, 2.0)
    assert floors.table(found, LIMITS)[0].best_peer is None


def test_the_table_on_the_screen_and_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "named", lambda name: Device("cpu", np))  # which is what record describes
    case, file = {"layer": "tiny", "rows": 8}, tmp_path / "moe.json"
    found = [
        Measured("ours", case, 4.0, 8e6),
        Measured("torch", case, 1234.0, 8e6),
        Measured("ours", case | {"rows": 1}, 2.0),
    ]
    show("experts", found, LIMITS, file, ["torch"], ["humming: humming is not installed"])
    text = capsys.readouterr().out
    assert "experts, in µs; floor: bytes at 4,000 GB/s or operations at 800 TFLOP/s" in " ".join(text.split())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows[0] == ["tiny", "8", "4.00", "1,234", "2.00", "2.00", "0.00 torch"]
    assert rows[1] == ["tiny", "1", "2.00", "", "", "", ""]
    told = json.loads(file.read_text(encoding="utf-8"))
    assert [Measured(**result) for result in told["results"]] == found
    assert told["ceilings"] == LIMITS._asdict()
    assert told["missing"] == ["humming: humming is not installed"]


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_random_trees_are_trees() -> None:
    for nodes in (1, 2, 17, 65):
        parents, depths = inputs.random_tree(nodes, np.random.default_rng(nodes))
        assert (parents[0], depths[0]) == (-1, 0)
        assert all(0 <= parents[node] < node for node in range(1, nodes))
        assert all(depths[node] == depths[parents[node]] + 1 for node in range(1, nodes))
        assert depths.max() <= inputs.MAX_DEPTH
    again = inputs.random_tree(65, np.random.default_rng(65))
    assert np.array_equal(parents, again.parents)


def test_random_routings_choose_no_expert_twice() -> None:
    expert_ids, weights = inputs.random_routing(50, 16, 4, np.random.default_rng(0))
    assert (expert_ids.dtype, weights.dtype) == (np.int32, np.float32)
    assert all(len(set(row)) == 4 for row in expert_ids.tolist())
    assert set(expert_ids.ravel().tolist()) == set(range(16))
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


def test_bfloat16_bits() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    cut = inputs.bfloat16_bits(x).view(bfloat16).astype(np.float32)
    assert (np.abs(cut) <= np.abs(x)).all()
    np.testing.assert_allclose(cut, x, rtol=2**-7)
    assert np.array_equal(inputs.bfloat16_bits(cut).view(bfloat16).astype(np.float32), cut)


def test_random_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy in CuPy's place: codes of every value alike, outputs of deviation 1."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    codes, scales = inputs.random_int4((3, 16, 512), seed=5)
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((3, 16, 64), np.int32, (3, 16, 16), np.uint16)
    weight = QuantizedWeight(codes[1], scales[1].view(bfloat16)).dequantized
    assert weight.std() * np.sqrt(512) == pytest.approx(1, rel=0.1)
    counts = np.bincount(unpack(codes.reshape(48, 64), 512).ravel() + 8, minlength=16)
    assert counts.min() > 0.9 * counts.mean()
    assert not np.array_equal(codes, inputs.random_int4((3, 16, 512), seed=6)[0])


# ---- what is timed, run on the CPU instead ---------------------------------------------------------------------------


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """NumPy in CuPy's place, 2 copies or few more; what would be timed runs once. Gives the calls of each timing."""
    timed: list[int] = []

    def microseconds(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        timed.append(len(calls))
        return 1.0

    def random_int4(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = inputs.random_int4(shape, seed)
        return codes, scales.view(bfloat16)  # which NumPy has

    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(Device, "named", lambda name: Device("cpu", np))
    monkeypatch.setattr(moe, "random_int4", random_int4)
    for module in (moe, attention, tree):
        monkeypatch.setattr(module, "require_gpu", lambda: None)
        monkeypatch.setattr(module, "cache_bytes", lambda: 1000)
        monkeypatch.setattr(module, "microseconds", microseconds)
    return timed


def test_tree_times_every_step(on_the_cpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "VOCAB", 1000)
    monkeypatch.setattr(tree, "BUDGETS", (4, 9, 30))
    found = list(tree.measure())
    assert len(found) == tree.STEPS
    steps = [one.case["step"] for one in found]
    assert steps[:2] == ["top_k, 15 x 1,000, K = 64", "tree_build, B = 4"]
    assert steps[-1].startswith("tree_accept + cache_commit, 61 layers, ")
    assert on_the_cpu == [2, 1, 1, 1, 2]
    assert [one.bytes for one in found[:4]] == [4 * 15 * 1000, 0, 0, 0]
    assert found[-1].bytes % (2 * 4 * 61 * 576) == 0 < found[-1].bytes


def test_the_whole_path_is_accepted() -> None:
    tokens, parents, targets, path = tree.accepted_tree(np.random.default_rng(0))
    accepted, bonus = tree_accept(tokens, parents, targets)
    assert np.array_equal(accepted, path)
    assert bonus == tree.NODES
    assert len(path) == inputs.MAX_DEPTH + 1


def test_moe_times_the_exact_kernel_on_the_experts_that_it_counts(on_the_cpu: list[int]) -> None:
    shape = moe.Shape(6, 2, 64, 32)
    packed = [(moe.random_int4(shape.gate_up, copy), moe.random_int4(shape.down, copy)) for copy in range(3)]
    routing = [inputs.random_routing(4, 6, 2, np.random.default_rng(copy)) for copy in range(3)]
    assert list(moe._exact(shape, packed, {4: routing})) == [(4, 1.0)]
    assert on_the_cpu == [3]


def test_moe_measures_each_kernel_for_its_rows(on_the_cpu: list[int]) -> None:
    shapes, rows = {"tiny": moe.Shape(6, 2, 64, 32)}, (1, 8, 16)
    found = list(moe.measure(shapes, rows, with_peer=False))
    assert len(found) == moe.steps(shapes, rows, with_peer=False)
    assert [(one.kernel, one.case["rows"]) for one in found] == [("moe_mma", m) for m in rows] + [
        ("moe", m) for m in (1, 8)
    ]
    assert found[0].bytes == 2 * 3 * 64 * 32 * 0.5625  # one row: two experts
    assert found[2].bytes == 6 * 3 * 64 * 32 * 0.5625  # 16 rows: all of them
    assert found[2].operations == 2 * 16 * 2 * 3 * 64 * 32


def test_moe_bytes_of_kimi_k2() -> None:
    """24.8 MB an expert, 9.5 GB a layer."""
    shape = moe.SHAPES["kimi-k2"]
    assert shape.expert_bytes == 3 * 7168 * 2048 * 0.5625 == 24_772_608
    with pytest.raises(ValueError, match="bench moe: --shape 'llama', expected one of kimi-k2, moonlight"):
        moe.chosen(["llama"])
    assert list(moe.chosen([])) == ["kimi-k2", "moonlight"]


def test_attention_times_a_tree(on_the_cpu: list[int]) -> None:
    (one,) = attention.measure((5,), (3,), with_peer=False)
    assert (one.kernel, one.case) == ("tree_attention_mma", {"prefix": 5, "rows": 3})
    assert on_the_cpu == [2]


@pytest.mark.parametrize(
    ("prefix", "rows", "by_bytes", "by_operations"),
    [(1024, 65, 2.3, 11.7), (4096, 17, 1.6, 12.3), (32768, 1, 8.7, 5.8)],
)
def test_attention_floors(prefix: int, rows: int, by_bytes: float, by_operations: float) -> None:
    """As others' kernels were held against, worked out apart: at 4,459 GB/s and 790 TFLOP/s, to 3 %."""
    assert attention.bytes_moved(prefix, rows) / 4459e3 == pytest.approx(by_bytes, rel=0.03)
    depths = np.full(rows, -1)  # neither ancestors nor itself
    assert attention.operations(prefix, depths) / 790e6 == pytest.approx(by_operations, rel=0.03)


# ---- the commands ----------------------------------------------------------------------------------------------------


COMMANDS = [command.name for command in bench.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_and_a_line_in_the_readme(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kdtree_nb", "bench", command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    text = capsys.readouterr().out
    assert f"bench {command}" in text
    assert "--json" in text
    readme = (golden.folder().parent / "README.md").read_text(encoding="utf-8")
    assert f"python -m kdtree_nb bench {command}" in readme


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert missing(False, "humming", "torch") == []
    assert missing(True, "humming", "torch", "humming") == [
        "humming: torch is not installed",
        "humming: humming is not installed",
    ]
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "humming: torch is not installed\nhumming: humming is not installed\n")


@pytest.mark.parametrize(
    ("command", "cells"),
    [
        (["moe", "--shape", "moonlight"], [["moonlight", "1", "1.00", "1.00"], ["moonlight", "16", "1.00", ""]]),
        (["attention"], [["5", "3", "1.00", "0.11"]]),
        (["tree"], [["top_k, 15 x 100, K = 64", "1.00", "0.00"], ["tree_build, B = 4", "1.00", ""]]),
    ],
)
def test_the_table_of_a_command(
    command: list[str],
    cells: list[list[str]],
    on_the_cpu: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ceilings, "ceilings", lambda: LIMITS)
    for module, name, value in (
        (moe, "SHAPES", {"moonlight": moe.Shape(6, 2, 64, 32)}),
        (moe, "ROWS", (1, 16)),
        (attention, "PREFIXES", (5,)),
        (attention, "ROWS", (3,)),
        (tree, "VOCAB", 100),
        (tree, "BUDGETS", (4,)),
    ):
        monkeypatch.setattr(module, name, value)
    file = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["kdtree_nb", "bench", *command, "--json", str(file)])
    with pytest.raises(SystemExit, match="0"):
        main()
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert [row[: len(cell)] for row, cell in zip(rows, cells, strict=False)] == cells
    record = json.loads(file.read_text(encoding="utf-8"))
    assert len(record["results"]) == len(on_the_cpu)
    assert record["ceilings"] == LIMITS._asdict()
