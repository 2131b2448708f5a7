"""bench without a GPU: floors, tables and records by hand, what is missing, and what the commands say then."""

import json
import os
import re

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kdtree_nb import golden
from kdtree_nb.bench import gemm, load, peers, timing
from kdtree_nb.bench.gemm import Product
from kdtree_nb.bench.resources import DEFINES
from kdtree_nb.cli import main
from kdtree_nb.kernels.source import read_source
from kdtree_nb.kernels.w4a16_mma import geometry_of, tile_weight

RECORD = golden.folder() / "measurements" / "gemm-h200.json"


def products(**times: float) -> list[Product]:
    """At one shape and number of rows."""
    return [Product(name.replace("_bf16", " bf16"), 2048, 7168, 8, time) for name, time in times.items()]


def test_floor() -> None:
    """2048 × 7168 weights are 7,340,032 bytes of codes and 917,504 of scales: 1.85 µs at 4,459 GB/s."""
    product = Product("w4a16_mma", 2048, 7168, 1, 3.7)
    assert product.weight_bytes == 7_340_032 + 917_504
    assert product.floor(4459) == pytest.approx(1.852, abs=1e-3)
    assert product.gb_per_s == pytest.approx(8_257_536 / 3.7e-6 / 1e9)


def test_floor_counts_the_bytes_that_the_kernel_reads() -> None:
    weight = tile_weight(np.zeros((2048, 896), np.int32), np.zeros((2048, 224), bfloat16))
    assert weight.codes.nbytes + weight.scales.nbytes == Product("", 2048, 7168, 1, 1.0).weight_bytes


def test_table() -> None:
    found = products(w4a16_mma=5.0, w4a16_gemm=50.0, torch_bf16=12.5, humming=8.0)
    other_rows = [product._replace(rows=1, microseconds=1.0) for product in found]
    row, other = gemm.table([*found, *other_rows], 4459)
    assert (row.shape, row.rows, row.microseconds) == ("2048x7168", 8, 5.0)
    assert row.of_floor == pytest.approx(5.0 / 1.852, abs=1e-3)
    assert row.ratios == {"w4a16_gemm": 0.1, "torch bf16": 0.4, "humming": 0.625}
    assert (row.best_peer, row.of_best_peer) == ("humming", 0.625)  # not our own exact kernel, were it the fastest
    assert set(other.ratios.values()) == {1.0}


def test_table_without_peers() -> None:
    (row,) = gemm.table(products(w4a16_mma=5.0, w4a16_gemm=4.0), 4459)
    assert (row.best_peer, row.of_best_peer) == (None, None)


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


@pytest.mark.parametrize("command", [["ceilings"], ["gemm", "--shape", "64x64", "--rows", "1"]])
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
    assert [loading.source for loading in found.loadings] == ["cache", *["disk"] * hasattr(os, "posix_fadvise")]
    for loading in found.loadings:
        assert loading.gb_per_s == found.bytes / 0.5 / 1e9
        assert loading.share == loading.gb_per_s / 1e-6
        assert loading.read_gb_per_s > 1e-6
    monkeypatch.setattr(load, "bus_rate", lambda: 1e6)
    for loading in load.measure(path).loadings:
        assert loading.share == loading.gb_per_s / loading.read_gb_per_s
    load.load_command(path)
    assert "from the cache in 0.50 s" in capsys.readouterr().out


def test_loading_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cuda_available", lambda: False)
    with pytest.raises(ValueError, match="bench: CuPy finds no GPU"):
        load.load_command(golden.folder() / "tiny" / "tiny-int4.kdtr")


def test_the_recorded_run() -> None:
    """What bench wrote on the H200: every kernel for every case once, and figures that are possible."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {"device", "versions", "commit", "date", "ceilings", "missing", "results"} <= set(found)
    results = [Product(**result) for result in found["results"]]
    names = {result.kernel for result in results}
    assert names == {*gemm.OURS, *(peer.name for peer in peers.PEERS)}
    cases = {(name, *shape, rows) for name in names for shape in gemm.SHAPES for rows in gemm.ROWS}
    assert len(results) == len(cases)
    assert {result[:4] for result in results} == cases
    limit = found["ceilings"]["read_gb_per_s"]
    rows = gemm.table(results, limit)
    assert len(rows) == len(gemm.SHAPES) * len(gemm.ROWS)
    assert all(row.of_floor > 1 for row in rows)


def test_resources_compile_a_geometry_that_is_used() -> None:
    given = DEFINES["w4a16_mma.cu"]
    geometry = geometry_of(16, 4096, int(given["IN_FEATURES"]))
    assert {"PARTS", "TILES", "ROWS", "STAGES"} <= set(given)
    assert geometry == tuple(int(given[name]) for name in ("PARTS", "TILES", "ROWS", "STAGES"))
    assert "IN_FEATURES" in read_source("w4a16_mma.cu").text
