"""Bundles to Hugging Face folders, and what inspect says of either; transformers loads them in tests/parity."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import Built, build, build_text_model, random_weights, tiny_config
from checkpoints import COMPRESSED, float_tensors, packed_tensors, write_folder
from helpers import assert_same_bits
from ml_dtypes import bfloat16
from safetensors import safe_open
from typer.testing import CliRunner

from kdtree_nb.bundle import Bundle, BundleError, write_bundle
from kdtree_nb.checkpoint import convert, export
from kdtree_nb.checkpoint.exporting import exported_config
from kdtree_nb.checkpoint.needs import CONTEXT, WORKSPACE, Needs, needs
from kdtree_nb.cli import app
from kdtree_nb.config import ModelConfig
from kdtree_nb.quantization import routed_experts

CONFIG = tiny_config()
WEIGHTS = {name: weight.astype(bfloat16) for name, weight in random_weights(CONFIG, 0).items()}
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "m.kdtr", CONFIG)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}  # transformers asks for it
            tensors |= {name: file.get_tensor(name) for name in file.offset_keys()}
    return tensors


def test_bytes_come_back_as_they_went(tmp_path: Path) -> None:
    tensors = packed_tensors(WEIGHTS, CONFIG)
    settings = CONFIG.to_hf() | {"quantization_config": COMPRESSED}
    folder = write_folder(tmp_path / "hf", settings, tensors)
    exported = export(convert(folder, tmp_path / "bundle"), tmp_path / "exported", max_shard_bytes=9000)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(tensors)
    found = tensors_of(exported)
    assert sorted(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor)
    once, again = convert(folder, tmp_path / "once"), convert(exported, tmp_path / "again")
    assert again.read_bytes() == once.read_bytes()


@pytest.mark.parametrize("storage", ["int4", "bfloat16", "float32"])
def test_export_then_convert_is_the_same_bundle(tmp_path: Path, storage: str) -> None:
    bundle = build(tmp_path / "model.kdtr", CONFIG, storage=storage).path
    again = convert(export(bundle, tmp_path / "exported"), tmp_path / "again", select="none")
    assert again.read_bytes() == bundle.read_bytes()


def test_config_of_an_export(built: Built, tmp_path: Path) -> None:
    settings = json.loads((export(built.path, tmp_path / "exported") / "config.json").read_text())
    assert ModelConfig.from_hf(settings) == CONFIG
    quantisation = settings["quantization_config"]
    assert quantisation["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    }
    assert "quantization_config" not in exported_config(
        Bundle.open(build(tmp_path / "f.kdtr", CONFIG, storage="float32").path)
    )


def test_exactly_what_is_not_packed_is_ignored(tmp_path: Path) -> None:
    """As compressed-tensors and vLLM match it: a whole name, or an expression from the name's begin."""

    def some(name: str) -> bool:
        return routed_experts(name) and ".experts.2." not in name

    for select in (None, routed_experts, some):
        bundle = Bundle.open(build(tmp_path / "m.kdtr", CONFIG, select=select).path)
        rules = exported_config(bundle)["quantization_config"]["ignore"]
        for name, shape in CONFIG.weight_shapes().items():
            if len(shape) == 2 and name != "model.embed_tokens":
                ignored = any(re.match(rule[3:], name) if rule.startswith("re:") else rule == name for rule in rules)
                assert ignored == (name in bundle), name


def test_an_export_takes_the_tokenizer_along(tmp_path: Path) -> None:
    built = build_text_model(tmp_path / "text")
    exported = export(built.path, tmp_path / "exported")
    assert (exported / "tokenizer.json").read_bytes() == (tmp_path / "text" / "tokenizer.json").read_bytes()


def test_an_export_overwrites_nothing(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "full"
    target.mkdir()
    export(built.path, target)
    before = {file: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(BundleError, match="full: is in use, expected an empty folder or none"):
        export(built.path, target)
    assert {file: file.read_bytes() for file in target.iterdir()} == before


def test_config_comes_last(built: Built, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(built.path, tmp_path / "exported", progress=stop)
    assert not (tmp_path / "exported" / "config.json").exists()


# --- What it takes ---------------------------------------------------------------------------------------------------


def test_needs_by_hand(tmp_path: Path) -> None:
    found = needs(CONFIG, Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, WEIGHTS)).entries)
    elements = {name: int(np.prod(shape)) for name, shape in CONFIG.weight_shapes().items()}
    kv_b = sum(count for name, count in elements.items() if name.endswith("kv_b_proj"))
    assert found.gpu == 2 * (sum(elements.values()) - kv_b) + 4 * kv_b
    assert found.cpu == 4 * sum(elements.values())
    assert found.cache == 2 * CONTEXT * (24 + 8) * 4


def test_number_of_gpus() -> None:
    assert Needs(gpu=10**9, cpu=0, cache=0).gpus(24) == 1
    assert Needs(gpu=22 * 10**9, cpu=0, cache=0).gpus(24) == 1
    assert Needs(gpu=22 * 10**9, cpu=0, cache=1).gpus(24) == 2
    assert Needs(gpu=600 * 10**9, cpu=0, cache=0).gpus(80) == 8
    assert WORKSPACE == 2 * 10**9


# --- The command line ------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    ran = CliRunner().invoke(app, [str(argument) for argument in arguments], terminal_width=200)
    return ran.exit_code, ran.output + str(ran.exception or "")


def test_convert_generate_export_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_text_model(tmp_path / "text")
    folder = export(source.path, tmp_path / "hf")
    monkeypatch.setenv("COLUMNS", "200")
    code, shown = run("convert", folder, tmp_path / "bundle", "--rule", "mse", "--select", "routed")
    assert code == 0, shown
    assert shown.splitlines()[-1] == str(tmp_path / "bundle" / "model.kdtr")
    assert Bundle.open(tmp_path / "bundle")[f"{EXPERT}.qw"].shape == (32, 4)
    code, text = run("generate", "--bundle", tmp_path / "bundle", "--prompt", "hello", "--max-new-tokens", 4, "--json")
    assert code == 0, text
    code, shown = run("export", tmp_path / "bundle", tmp_path / "out")
    assert code == 0, shown
    assert (tmp_path / "out" / "config.json").exists()


def test_inspect_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdtree_nb.checkpoint.needs.gpu_memory", lambda: 10**9)
    monkeypatch.setattr("kdtree_nb.checkpoint.needs.main_memory", lambda: 10**11)
    tensors = float_tensors(WEIGHTS) | {"model.layers.2.eh_proj.weight": np.ones((2, 2), bfloat16)}
    folder = write_folder(tmp_path / "hf", CONFIG.to_hf() | {"num_nextn_predict_layers": 1}, tensors)
    monkeypatch.chdir(tmp_path)  # a short path
    code, shown = run("inspect", "hf")
    assert code == 0, shown
    size = Bundle.open(convert(folder, tmp_path / "bundle")).nbytes
    assert f"convert makes a bundle of {size:,} bytes with 24 weights in INT4, and leaves out 1 tensors" in shown
    assert "GPUs that hold it: 1 × 24 GB" in shown
    assert "this machine: GPU of 1.0 GB is too small, 2.0 GB are needed" in shown
    assert "this machine: memory of 100.0 GB runs it" in shown
    code, shown = run("inspect", "hf", "--verify")
    assert code == 1
    assert "a checkpoint has no checksums" in shown


# --- Memory ----------------------------------------------------------------------------------------------------------

PEAK = r"""
import re, sys
from pathlib import Path
from kdtree_nb.checkpoint import conversion, convert
conversion.THREADS = 8
convert(sys.argv[1], sys.argv[2])
print(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the largest memory in use from /proc")
def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    """300 MB of float32, no tensor above 8 MB: the bound is 3 tensors and 200 MB, the interpreter included."""
    config = tiny_config(hidden_size=1024, intermediate_size=2048, num_hidden_layers=13, first_k_dense_replace=13)
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in config.weight_shapes().items()}
    assert sum(weight.nbytes for weight in weights.values()) > 300e6
    largest = max(weight.nbytes for weight in weights.values())
    folder = write_folder(tmp_path / "hf", config.to_hf(), float_tensors(weights), shards=3)
    del weights
    command = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "out")]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    peak = 1024 * int(subprocess.run(command, check=True, capture_output=True, cwd=root, env=environment).stdout)
    print(f"peak {peak / 1e6:.0f} MB")
    assert peak <= 3 * largest + 200e6
