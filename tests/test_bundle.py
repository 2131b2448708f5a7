"""KDTR bundles: what is written comes back, lazily, and a writer that dies leaves nothing half done."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16
from safetensors import safe_open

from kdtree_nb.bundle import Bundle, BundleError, write_bundle
from kdtree_nb.config import ModelConfig
from kdtree_nb.quantization import quantize_weights, routed_experts

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    max_position_embeddings=64,
    eos_token_ids=(1,),
)
GATE = "model.layers.0.mlp.gate_proj"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def random_weights(dtype: type = bfloat16, config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in config.weight_shapes().items()}


def packed_weights() -> dict[str, np.ndarray]:
    return quantize_weights(random_weights(), CONFIG)[1]


def assert_holds(bundle: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray]) -> None:
    assert sorted(bundle) == sorted(tensors)
    for name, tensor in tensors.items():
        assert_same_bits(bundle[name], tensor)


def files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# --- What is written comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_float_weights_come_back(tmp_path: Path, dtype: type) -> None:
    weights = random_weights(dtype)
    written = write_bundle(tmp_path / "m.kdtr", CONFIG, weights, tokenizer="tokenizer.json")
    assert written == tmp_path / "m.kdtr"
    with Bundle.open(written) as bundle:
        assert (bundle.config, bundle.tokenizer, bundle.path) == (CONFIG, "tokenizer.json", written)
        assert_holds(bundle, weights)
        bundle.verify()


@pytest.mark.parametrize("select", [None, routed_experts])
def test_packed_weights_come_back(tmp_path: Path, select: Callable[[str], bool] | None) -> None:
    dequantized, packed = quantize_weights(random_weights(), CONFIG, select=select)
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed))
    assert_holds(bundle, packed)
    weights = bundle.weights()
    assert list(weights) == list(CONFIG.weight_shapes())
    for name, expected in dequantized.items():
        assert_same_bits(weights[name], expected.astype(np.float32))
    assert_same_bits(bundle.quantized(EXPERT).qweight, packed[f"{EXPERT}.qw"])
    assert bundle.quantized(EXPERT).name == EXPERT
    assert bundle.weight("lm_head").dtype == bfloat16
    assert bundle.weight(EXPERT).dtype == np.float32
    assert bundle.tokenizer is None


def test_not_a_number_is_no_fault(tmp_path: Path) -> None:
    weights = random_weights(np.float32)
    weights["lm_head"][0] = np.nan
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, weights))
    bundle.verify()
    assert np.isnan(bundle["lm_head"][0]).all()


def test_strided_arrays_are_written_in_their_order(tmp_path: Path) -> None:
    weights = random_weights(np.float32)
    strided = {name: np.asfortranarray(weight) for name, weight in weights.items()}
    strided["lm_head"] = np.repeat(weights["lm_head"], 2, axis=1)[:, ::2]
    assert_holds(Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, strided)), weights)


def test_a_bundle_is_a_valid_safetensors_file(tmp_path: Path) -> None:
    packed = packed_weights()
    path = write_bundle(tmp_path / "m.kdtr", CONFIG, packed, tokenizer="t.json")
    with safe_open(path, framework="numpy") as file:
        assert_holds({name: file.get_tensor(name) for name in file.keys()}, packed)  # noqa: SIM118 (no mapping)
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"], metadata["tokenizer"]) == ("kdtr", "1", "t.json")
    assert ModelConfig.from_hf(json.loads(metadata["config"])) == CONFIG
    checksums = json.loads(metadata["checksums"])
    assert checksums[f"{GATE}.qw"] == "sha256:" + hashlib.sha256(packed[f"{GATE}.qw"].tobytes()).hexdigest()


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    packed = packed_weights()
    backwards = dict(reversed(packed.items()))
    for limit in (None, 6000):
        for name, tensors in (("a", packed), ("b", backwards)):
            (tmp_path / f"{name}{limit}").mkdir()
            write_bundle(tmp_path / f"{name}{limit}" / "m.kdtr", CONFIG, tensors, max_shard_bytes=limit)
        first, second = tmp_path / f"a{limit}", tmp_path / f"b{limit}"
        assert files_in(first) == files_in(second)
        for name in files_in(first):
            assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_tensors_start_on_their_own_alignment(tmp_path: Path) -> None:
    raw = write_bundle(tmp_path / "m.kdtr", CONFIG, packed_weights()).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    for info in header.values():
        assert info["data_offsets"][0] % {"I32": 4, "BF16": 2}[info["dtype"]] == 0


# --- Shards ----------------------------------------------------------------------------------------------------------


def test_shards_have_an_index_as_on_the_hub(tmp_path: Path) -> None:
    packed = packed_weights()
    total = sum(tensor.nbytes for tensor in packed.values())
    written = write_bundle(tmp_path / "m.kdtr", CONFIG, packed, max_shard_bytes=6000)
    assert written == tmp_path / "m.kdtr.index.json"
    index = json.loads(written.read_text())
    assert index["metadata"]["total_size"] == total
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards == [f"m-{i:05d}-of-{len(shards):05d}.kdtr" for i in range(1, len(shards) + 1)]
    assert files_in(tmp_path) == [*shards, written.name]
    for shard in shards:
        names = [name for name, file in index["weight_map"].items() if file == shard]
        assert sum(packed[name].nbytes for name in names) <= 6000
    assert index["weight_map"][f"{EXPERT}.qw"] == index["weight_map"][f"{EXPERT}.sc"]

    for path in (written, tmp_path, tmp_path / "m.kdtr"):
        with Bundle.open(path) as bundle:
            assert bundle.path == written
            assert_holds(bundle, packed)
            bundle.verify()
            assert {entry.file.name for entry in bundle.entries.values()} == set(shards)


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    packed = packed_weights()
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed, max_shard_bytes=1))
    assert_holds(bundle, packed)
    assert len({entry.file for entry in bundle.entries.values()}) == len(CONFIG.weight_shapes())


def test_no_shards_where_one_file_is_enough(tmp_path: Path) -> None:
    packed = packed_weights()
    total = sum(tensor.nbytes for tensor in packed.values())
    write_bundle(tmp_path / "m.kdtr", CONFIG, packed, max_shard_bytes=total)
    assert files_in(tmp_path) == ["m.kdtr"]


def test_a_new_bundle_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.kdtr"
    write_bundle(tmp_path / "other.kdtr", CONFIG, packed_weights())
    for limit in (6000, None, 8000, 3000, None):
        weights = random_weights(np.float32 if limit == 8000 else bfloat16)
        write_bundle(path, CONFIG, weights, max_shard_bytes=limit)
        assert_holds(Bundle.open(path), weights)
        shards = [name for name in files_in(tmp_path) if "-of-" in name]
        assert all(name.endswith(f"-of-{len(shards):05d}.kdtr") for name in shards)
    assert files_in(tmp_path) == ["m.kdtr", "other.kdtr"]


def test_a_bundle_can_be_written_over_itself(tmp_path: Path) -> None:
    packed = packed_weights()
    path = write_bundle(tmp_path / "m.kdtr", CONFIG, packed)
    write_bundle(path, CONFIG, Bundle.open(path))
    assert_holds(Bundle.open(path), packed)


def test_a_folder_opens_when_it_holds_one_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"holds 0 bundles \(none\)"):
        Bundle.open(tmp_path)
    write_bundle(tmp_path / "a.kdtr", CONFIG, packed_weights())
    assert Bundle.open(str(tmp_path)).path == tmp_path / "a.kdtr"
    write_bundle(tmp_path / "b.kdtr", CONFIG, packed_weights(), max_shard_bytes=6000)
    with pytest.raises(BundleError, match=r"holds 2 bundles \(b.kdtr.index.json, a.kdtr\), expected one"):
        Bundle.open(tmp_path)
    (tmp_path / "a.kdtr").unlink()
    assert Bundle.open(tmp_path).path == tmp_path / "b.kdtr.index.json"
    (tmp_path / "b.kdtr.index.json").unlink()
    with pytest.raises(BundleError, match=r"holds 0 bundles .* shards need their index"):
        Bundle.open(tmp_path)


# --- Laziness --------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_a_bundle_of_many_gigabytes_opens_at_once_and_small(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=2**26)  # two tables of 4 GB each
    metadata = {"format": "kdtr", "version": "1", "config": json.dumps(config.to_hf())}
    sealed = hashlib.sha256(json.dumps([metadata["config"], None]).encode()).hexdigest()
    checksums = dict.fromkeys(["__metadata__", *config.weight_shapes()], f"sha256:{sealed}")
    header: dict[str, dict[str, Any]] = {"__metadata__": {**metadata, "checksums": json.dumps(checksums)}}
    end = 0
    for name, shape in config.weight_shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path / "huge.kdtr"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with open(path, "r+b") as file:
        file.truncate(8 + len(text) + end)  # a hole: no disk is used
        file.seek(8 + len(text) + header["model.norm"]["data_offsets"][0])  # beyond 2**32
        file.write(np.arange(32).astype(bfloat16).tobytes())

    before, started = resident_bytes(), time.perf_counter()
    bundle = Bundle.open(path)
    assert bundle.nbytes == end > 8e9
    assert bundle.entries["lm_head"].nbytes == 2**26 * 32 * 2
    assert bundle["model.norm"].tolist() == list(range(32))
    assert "8," in bundle._repr_html_()
    assert time.perf_counter() - started < 5
    assert resident_bytes() - before < 64e6


def test_entries_and_tables_read_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_weights()
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed))
    monkeypatch.setattr(Bundle, "__getitem__", lambda self, name: pytest.fail(f"{name} was read"))
    entry = bundle.entries[f"{GATE}.qw"]
    assert (entry.shape, entry.dtype, entry.nbytes, entry.file) == ((64, 4), "I32", 1024, bundle.path)
    assert f"{GATE}.qw" in bundle
    assert GATE not in bundle
    assert len(bundle) == len(packed)
    assert bundle == bundle
    assert bundle != Bundle.open(bundle.path)
    assert str(bundle.path) in repr(bundle)
    bundle.rows()


def test_a_closed_bundle_says_so(tmp_path: Path) -> None:
    with Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed_weights())) as bundle:
        norm = bundle["model.norm"]
    assert norm.shape == (32,)
    with pytest.raises(ValueError, match=r"m.kdtr: the bundle is closed \(tensor 'lm_head' was asked for\)"):
        bundle["lm_head"]
    with pytest.raises(ValueError, match=r"m.kdtr: the bundle is closed \(m.kdtr was asked for\)"):
        bundle.read_into(np.empty(8, np.uint8), *bundle.place("model.norm"))


def test_an_unknown_name_is_a_key_error(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed_weights()))
    with pytest.raises(KeyError, match=r"m.kdtr: no tensor 'lm_head.qw'"):
        bundle.quantized("lm_head")
    assert bundle.get("nothing") is None


# --- Tables ----------------------------------------------------------------------------------------------------------


def test_rows_account_for_every_byte(tmp_path: Path) -> None:
    packed = packed_weights()
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed))
    rows = {row.name: row for row in bundle.rows()}
    assert list(rows) == list(CONFIG.weight_shapes())
    assert sum(row.bytes for row in rows.values()) == bundle.nbytes == sum(tensor.nbytes for tensor in packed.values())
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert rows[GATE][:5] == (GATE, "int4", (64, 32), "I32 + BF16", 64 * 32 // 2 + 64 * 2)
    assert rows["lm_head"][:5] == ("lm_head", "float", (48, 32), "BF16", 48 * 32 * 2)


def test_the_summary_draws_layers_and_experts_together(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed_weights()))
    summary = {row.name: row for row in bundle.summary()}
    experts = summary["model.layers.*.mlp.experts.*.up_proj (4 weights)"]
    assert experts.shape == (32, 32)
    assert experts.bytes == sum(row.bytes for row in bundle.rows() if ".experts." in row.name and "up" in row.name)
    assert sum(row.bytes for row in summary.values()) == bundle.nbytes
    assert "model.layers.1.mlp.shared_experts.up_proj" in summary


def test_a_bundle_shows_itself_as_a_table_and_escapes_its_name(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "<img src=x>&.kdtr", CONFIG, packed_weights())
    shown = Bundle.open(path)._repr_html_()
    assert "<img" not in shown
    assert "&lt;img src=x&gt;&amp;.kdtr" in shown
    assert "model.layers.*.mlp.experts.*.up_proj (4 weights)" in shown
    assert shown.count("<tr>") == shown.count("</tr>") == 1 + len(Bundle.open(path).summary())


# --- Verification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 6000])
def test_verify_names_the_file_and_the_tensor_of_one_flipped_bit(tmp_path: Path, limit: int | None) -> None:
    written = write_bundle(tmp_path / "m.kdtr", CONFIG, packed_weights(), max_shard_bytes=limit)
    file = Bundle.open(written).entries[f"{EXPERT}.sc"].file
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = 8 + int.from_bytes(raw[:8], "little") + header[f"{EXPERT}.sc"]["data_offsets"][0]
    raw[begin + 3] ^= 0x10
    file.write_bytes(raw)

    bundle = Bundle.open(written)
    seen: list[str] = []
    with pytest.raises(BundleError, match=rf"{file.name}: tensor '{EXPERT}.sc': checksum sha256:\w+, expected 'sha256"):
        bundle.verify(seen.append)
    assert seen[-1] == f"{EXPERT}.sc"
    assert seen == list(bundle)[: len(seen)]


# --- The writer refuses, and dies, cleanly ---------------------------------------------------------------------------


def test_the_writer_refuses_what_no_one_could_open(tmp_path: Path) -> None:
    good = packed_weights()
    refused: list[tuple[str, dict[str, np.ndarray], dict[str, object], str]] = [
        ("m.safetensors", good, {}, r"suffix '.safetensors', expected '.kdtr'"),
        ("m.kdtr", {**good, "lm_head": np.zeros((48, 32))}, {}, "tensor 'lm_head' is float64, expected float32"),
        ("m.kdtr", {**good, "lm_head": np.zeros((48, 32), ">f4")}, {}, "tensor 'lm_head' is >f4, expected float32"),
        ("m.kdtr", {**good, "lm_head": good["lm_head"].T}, {}, r"'lm_head' is BF16 \[32, 48\], expected .* \[48, 32\]"),
        ("m.kdtr", {**good, "extra": good["lm_head"]}, {}, "tensor 'extra' is no weight of the config"),
        ("m.kdtr", {**good, GATE: np.zeros((64, 32), np.float32)}, {}, f"tensor '{GATE}' and '{GATE}.qw' and"),
        ("m.kdtr", {k: v for k, v in good.items() if k != "lm_head"}, {}, "tensor 'lm_head' is missing"),
        ("m.kdtr", good, {"tokenizer": "../tokenizer.json"}, "tokenizer '../tokenizer.json' is not a plain file name"),
    ]
    for name, tensors, options, message in refused:
        with pytest.raises(BundleError, match=message):
            write_bundle(tmp_path / name, CONFIG, tensors, **options)  # type: ignore[arg-type]
    assert files_in(tmp_path) == []


class Lazy(Mapping[str, np.ndarray]):
    """Weights made when asked for; ``hook`` sees each request after the writer's first look at all of them."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        self.weights = random_weights()
        self.hook = hook
        self.requests = 0

    def __getitem__(self, name: str) -> np.ndarray:
        self.requests += 1
        if self.requests > len(self.weights) + 10:
            self.hook(name)
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_writer_that_fails_leaves_everything_as_it_was(tmp_path: Path, limit: int | None) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"no {name} today")

    path = tmp_path / "m.kdtr"
    packed = packed_weights()
    write_bundle(path, CONFIG, packed, max_shard_bytes=limit)
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    with pytest.raises(RuntimeError, match="today"):
        write_bundle(path, CONFIG, Lazy(fail), max_shard_bytes=limit)
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before
    assert_holds(Bundle.open(path), packed)


def test_a_tensor_that_changes_between_the_looks_is_refused(tmp_path: Path) -> None:
    weights = Lazy(lambda name: weights.weights.__setitem__(name, np.zeros((1, 1), np.float32)))
    with pytest.raises(BundleError, match=r"tensor '.*' now has 4 bytes, had"):
        write_bundle(tmp_path / "m.kdtr", CONFIG, weights)
    assert files_in(tmp_path) == []


def test_a_failure_between_two_renames_leaves_no_bundle_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.kdtr"
    write_bundle(path, CONFIG, packed_weights(), max_shard_bytes=6000)
    renamed: list[object] = []
    replace = os.replace

    def second_fails(source: Path, target: Path) -> None:
        if not target.name.startswith("."):  # not yet the name by which it is found
            if renamed:
                raise OSError("the disk is gone")
            renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(OSError, match="the disk is gone"):
        write_bundle(path, CONFIG, random_weights(), max_shard_bytes=6000)
    for attempt in (tmp_path, path):
        with pytest.raises(BundleError):
            Bundle.open(attempt)
    assert not [name for name in files_in(tmp_path) if name.endswith((".tmp", ".done", ".json"))]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX only")
@pytest.mark.parametrize("limit", [None, 1000])
def test_a_killed_writer_leaves_no_half_bundle(tmp_path: Path, limit: int | None) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_bundle import CONFIG, Lazy, write_bundle
        def hang(name):
            print("midway", flush=True)
            time.sleep(600)
        write_bundle(sys.argv[1], CONFIG, Lazy(hang), max_shard_bytes={limit})
    """)
    root = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "m.kdtr")], stdout=subprocess.PIPE, text=True, cwd=root
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "midway\n"
        assert files_in(tmp_path), "the writer was to be killed while it writes"
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
    assert list(tmp_path.glob("*.kdtr")) == []
    assert list(tmp_path.glob("*.json")) == []
    with pytest.raises(BundleError, match="holds 0 bundles"):
        Bundle.open(tmp_path)
    packed = packed_weights()
    assert_holds(Bundle.open(write_bundle(tmp_path / "m.kdtr", CONFIG, packed, max_shard_bytes=limit)), packed)
