"""Hugging Face folders to bundles: every way to store a weight, and what is refused before work starts."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from builders import byte_tokenizer, random_weights, tiny_config
from checkpoints import COMPRESSED, FP8, float_tensors, fp8_tensors, fused_tensors, packed_tensors, write_folder
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from golden import make_parity
from kdtree_nb.bundle import Bundle, BundleError
from kdtree_nb.checkpoint import convert, open_folder, read_checkpoint
from kdtree_nb.config import ModelConfig
from kdtree_nb.engine import Engine
from kdtree_nb.quantization import quantize, quantize_weights, routed_experts

CONFIG = tiny_config()
HF = CONFIG.to_hf()
WEIGHTS = {name: weight.astype(bfloat16) for name, weight in random_weights(CONFIG, 0).items()}
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
PACKED = {**HF, "quantization_config": COMPRESSED}


def assert_same_tensors(bundle: Bundle, expected: dict[str, np.ndarray]) -> None:
    bundle.verify()
    assert sorted(bundle) == sorted(expected)
    for name, tensor in expected.items():
        assert_same_bits(bundle[name], tensor)


# --- Every way to store a weight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_float_weights_are_quantised_as_in_memory(tmp_path: Path, shards: int, dtype: type) -> None:
    weights = {name: weight.astype(dtype) for name, weight in WEIGHTS.items()}
    folder = write_folder(tmp_path / "hf", HF, float_tensors(weights), shards)
    path = convert(folder, tmp_path / "out", rule="amax7")
    bundle = Bundle.open(path)
    assert bundle.config == CONFIG
    assert_same_tensors(bundle, quantize_weights(weights, CONFIG, "amax7")[1])


def test_float16_is_quantised_in_float32(tmp_path: Path) -> None:
    halves = {name: weight.astype(np.float16) for name, weight in WEIGHTS.items()}
    bundle = Bundle.open(convert(write_folder(tmp_path / "hf", HF, float_tensors(halves)), tmp_path / "out"))
    expected = quantize(halves[EXPERT].astype(np.float32))
    assert_same_bits(bundle[f"{EXPERT}.qw"], expected.qweight)
    assert_same_bits(bundle[f"{EXPERT}.sc"], expected.scales)
    assert_same_bits(bundle["model.norm"], halves["model.norm"])


@pytest.mark.parametrize(("select", "chosen"), [("routed", routed_experts), ("none", lambda name: False)])
def test_select(tmp_path: Path, select: str, chosen: Callable[[str], bool]) -> None:
    folder = write_folder(tmp_path / "hf", HF, float_tensors(WEIGHTS))
    bundle = Bundle.open(convert(folder, tmp_path / "out", select=select))
    assert_same_tensors(bundle, quantize_weights(WEIGHTS, CONFIG, select=chosen)[1])


def test_fused_experts_are_the_same_bundle(tmp_path: Path) -> None:
    fused = fused_tensors(WEIGHTS, CONFIG)
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    one = convert(write_folder(tmp_path / "fused", HF, fused), tmp_path / "a")
    two = convert(write_folder(tmp_path / "apart", HF, float_tensors(WEIGHTS)), tmp_path / "b")
    assert one.read_bytes() == two.read_bytes()


def test_packed_weights_are_taken_over_byte_for_byte(tmp_path: Path) -> None:
    tensors = packed_tensors(WEIGHTS, CONFIG)
    bundle = Bundle.open(convert(write_folder(tmp_path / "hf", PACKED, tensors, shards=4), tmp_path / "out"))
    assert_same_bits(bundle[f"{EXPERT}.qw"], tensors[f"{EXPERT}.weight_packed"])
    assert_same_bits(bundle[f"{EXPERT}.sc"], tensors[f"{EXPERT}.weight_scale"])
    packed = {name.removesuffix(".qw") for name in bundle if name.endswith(".qw")}
    assert packed == {name for name in CONFIG.weight_shapes() if routed_experts(name)}  # the rest stays as it came
    again = Bundle.open(convert(tmp_path / "hf", tmp_path / "more", select="mlp"))
    assert_same_bits(again[f"{EXPERT}.qw"], tensors[f"{EXPERT}.weight_packed"])
    assert_same_bits(again["model.layers.0.mlp.up_proj.qw"], quantize(WEIGHTS["model.layers.0.mlp.up_proj"]).qweight)


def test_blocks_of_fp8(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=160, intermediate_size=288, moe_intermediate_size=96)  # blocks are cut off
    weights = random_weights(config, 1)
    tensors, meant = fp8_tensors(weights)
    folder = write_folder(tmp_path / "hf", {**config.to_hf(), "quantization_config": FP8}, tensors, shards=2)
    floats = Bundle.open(convert(folder, tmp_path / "floats", select="none")).weights()
    for name, expected in meant.items():
        np.testing.assert_array_equal(floats[name], expected, err_msg=name)
    packed = Bundle.open(convert(folder, tmp_path / "packed"))
    assert_same_bits(packed[f"{EXPERT}.qw"], quantize(meant[EXPERT].astype(bfloat16)).qweight)


def test_blocks_of_rows_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(vocab_size=1000, intermediate_size=416)
    weights = random_weights(config, 1)
    folder = write_folder(tmp_path / "hf", config.to_hf(), float_tensors(weights))
    whole = convert(folder, tmp_path / "whole").read_bytes()
    monkeypatch.setattr("kdtree_nb.checkpoint.conversion.BLOCK_BYTES", 1)  # 128 rows at a time
    assert convert(folder, tmp_path / "blocks").read_bytes() == whole
    tensors, _ = fp8_tensors(weights)
    folder = write_folder(tmp_path / "hf8", {**config.to_hf(), "quantization_config": FP8}, tensors)
    blocks = convert(folder, tmp_path / "blocks8").read_bytes()
    monkeypatch.undo()
    assert convert(folder, tmp_path / "whole8").read_bytes() == blocks


def kimi_folder(folder: Path, shards: int = 3) -> Path:
    """As Kimi K2.5 has it: a prefix, text_config with the quantisation in it, and eyes."""
    tensors = {f"language_model.{name}": tensor for name, tensor in packed_tensors(WEIGHTS, CONFIG).items()}
    eyes = {"vision_tower.patch_embed.proj.weight": np.ones((4, 3, 2, 2), np.float16)}
    eyes["mm_projector.proj.0.bias"] = np.ones(3, np.float32)
    text = {**PACKED, "model_type": "kimi_k2", "num_nextn_predict_layers": 0}
    return write_folder(folder, {"model_type": "kimi_k25", "text_config": text}, tensors | eyes, shards)


def test_kimi_prefix_and_text_config(tmp_path: Path) -> None:
    kimi = kimi_folder(tmp_path / "kimi")
    skipped = read_checkpoint(open_folder(kimi)).skipped
    assert set(skipped) == {"mm_projector.proj.0.bias", "vision_tower.patch_embed.proj.weight"}
    plain = write_folder(tmp_path / "plain", PACKED, packed_tensors(WEIGHTS, CONFIG))
    assert convert(kimi, tmp_path / "a").read_bytes() == convert(plain, tmp_path / "b").read_bytes()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    tensors = float_tensors(WEIGHTS)
    tensors["model.layers.2.eh_proj.weight"] = np.ones((32, 64), bfloat16)
    tensors["model.layers.2.mlp.experts.0.gate_proj.weight"] = np.ones((32, 32), bfloat16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    folder = write_folder(tmp_path / "hf", {**HF, "num_nextn_predict_layers": 1}, tensors)
    assert_same_tensors(Bundle.open(convert(folder, tmp_path / "out")), quantize_weights(WEIGHTS, CONFIG)[1])
    write_folder(tmp_path / "hf", HF, tensors)
    with pytest.raises(BundleError, match=r"tensor 'model.layers.2.* is no weight of the config"):
        convert(tmp_path / "hf", tmp_path / "more")


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    weights = {name: weight for name, weight in WEIGHTS.items() if name != "lm_head"}
    tensors = float_tensors(weights) | {"lm_head.weight": WEIGHTS["lm_head"]}
    bundle = Bundle.open(convert(write_folder(tmp_path / "hf", config.to_hf(), tensors), tmp_path / "out"))
    assert_same_tensors(bundle, quantize_weights(weights, config)[1])


def test_the_tokenizer_and_the_end_of_text_come_along(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", HF | {"eos_token_id": 1}, float_tensors(WEIGHTS))
    byte_tokenizer(folder / "tokenizer.json")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    bundle = Bundle.open(convert(folder, tmp_path / "out"))
    assert bundle.tokenizer == "tokenizer.json"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert bundle.config.eos_token_ids == (5, 6)  # those that transformers' generate obeys


def test_a_link_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs = write_folder(tmp_path / "blobs", HF, float_tensors(WEIGHTS), shards=2)
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert convert(tmp_path / "snapshot", tmp_path / "a").read_bytes() == convert(blobs, tmp_path / "b").read_bytes()


# --- Against transformers' stored logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", make_parity.MODELS)
def test_logits_of_a_converted_checkpoint(tmp_path: Path, name: str, device: str) -> None:
    parity = make_parity.load(name)
    settings = {"model_type": "kimi_k25", "text_config": parity.config.to_hf()}
    tensors = fused_tensors(parity.weights, parity.config)
    folder = write_folder(tmp_path / "hf", settings, tensors, shards=2, prefix="language_model.")
    engine = Engine.load(convert(folder, tmp_path / "out", select="none"), device)
    ids, expected = parity.ids[make_parity.GREEDY_PROMPT], parity.logits[make_parity.GREEDY_PROMPT]
    count = make_parity.GREEDY_TOKENS if device == "cpu" else 4
    begin = len(ids) - make_parity.GREEDY_TOKENS
    run = engine.generate(ids[:begin], "ar", max_new_tokens=count, keep_logits=True)
    assert run.tokens == ids[begin : begin + count].tolist()
    assert run.logits is not None
    np.testing.assert_allclose(run.logits, expected[begin - 1 : begin - 1 + count], rtol=0, atol=1e-4)


# --- What is refused, before work starts -----------------------------------------------------------------------------


def without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def quantization(**changes: object) -> dict[str, Any]:
    weights = COMPRESSED["config_groups"]["group_0"]["weights"] | changes
    return {**HF, "quantization_config": COMPRESSED | {"config_groups": {"g": {"weights": weights}}}}


FLOATS, INT4 = float_tensors(WEIGHTS), packed_tensors(WEIGHTS, CONFIG)
FP8_TENSORS = fp8_tensors(WEIGHTS)[0]
NORM = "model.norm.weight"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "another architecture": (HF | {"model_type": "llama"}, FLOATS, "model_type='llama', expected one of deepseek_v3"),
    "softmax scoring": (HF | {"scoring_func": "softmax"}, FLOATS, "scoring_func='softmax', expected 'sigmoid'"),
    "a missing tensor": (HF, without(FLOATS, NORM), "tensor 'model.norm.weight' [32] is missing"),
    "a missing expert": (HF, without(FLOATS, f"{EXPERT}.weight"), f"tensor '{EXPERT}.weight' [32, 32] is missing"),
    "a surplus tensor": (
        HF,
        FLOATS | {"model.extra.weight": WEIGHTS["model.norm"]},
        "'model.extra.weight' is no weight",
    ),
    "a bias": (HF, FLOATS | {"lm_head.bias": WEIGHTS["model.norm"]}, "tensor 'lm_head.bias' is no weight"),
    "a wrong shape": (HF, FLOATS | {NORM: np.ones(31, bfloat16)}, "'model.norm.weight' is BF16 [31], expected"),
    "a wrong type": (HF, FLOATS | {NORM: np.ones(32, np.float64)}, "is F64 [32], expected F32 or BF16 or F16 [32]"),
    "fp8 without a scale": (
        {**HF, "quantization_config": FP8},
        FLOATS | {"lm_head.weight": WEIGHTS["lm_head"].astype(ml_dtypes.float8_e4m3fn)},
        "'lm_head.weight' is F8_E4M3 [67, 32], expected F32 or BF16 or F16",
    ),
    "fp8 that config.json does not announce": (HF, FP8_TENSORS, "is fp8, which config.json does not say"),
    "INT4 that config.json does not announce": (HF, INT4, "weight_packed' is int4, which config.json does not say"),
    "other blocks": (
        {**HF, "quantization_config": FP8 | {"weight_block_size": [1, 128]}},
        FP8_TENSORS,
        "quantization_config.weight_block_size=[1, 128], expected [128, 128]",
    ),
    "GPTQ": ({**HF, "quantization_config": {"quant_method": "gptq"}}, INT4, "quant_method='gptq', expected"),
    "another format": (
        {**HF, "quantization_config": COMPRESSED | {"format": "marlin-24"}},
        INT4,
        "config_groups.group_0.format='marlin-24', expected 'pack-quantized'",
    ),
    "groups of 128": (quantization(group_size=128), INT4, "config_groups.g.weights.group_size=128, expected 32"),
    "8 bits": (quantization(num_bits=8), INT4, "config_groups.g.weights.num_bits=8, expected 4"),
    "asymmetric": (quantization(symmetric=False), INT4, "config_groups.g.weights.symmetric=False, expected True"),
    "act-order": (quantization(actorder="group"), INT4, "config_groups.g.weights.actorder='group', expected None"),
    "no groups": ({**HF, "quantization_config": COMPRESSED | {"config_groups": []}}, INT4, "config_groups is []"),
    "a zero point": (
        PACKED,
        INT4 | {f"{EXPERT}.weight_zero_point": np.zeros((4, 1), np.int32)},
        f"tensor '{EXPERT}.weight_zero_point': asymmetric quantisation",
    ),
    "a table of act-order": (
        PACKED,
        INT4 | {f"{EXPERT}.weight_g_idx": np.zeros(32, np.int32)},
        f"tensor '{EXPERT}.weight_g_idx': act-order",
    ),
    "scales of other groups": (
        PACKED,
        INT4 | {f"{EXPERT}.weight_scale": np.ones((32, 2), bfloat16)},
        f"tensor '{EXPERT}.weight_scale' is BF16 [32, 2], expected F32 or BF16 or F16 [32, 1]",
    ),
    "no scales": (PACKED, without(INT4, f"{EXPERT}.weight_scale"), "comes as weight_packed, weight_shape, expected"),
    "another shape written": (
        PACKED,
        INT4 | {f"{EXPERT}.weight_shape": np.array([32, 64], np.int64)},
        f"tensor '{EXPERT}.weight_shape' holds [32, 64], expected [32, 32]",
    ),
    "packed attention": (
        PACKED,
        without(INT4, "model.layers.0.self_attn.o_proj.weight")
        | {
            "model.layers.0.self_attn.o_proj.weight_packed": np.zeros((32, 4), np.int32),
            "model.layers.0.self_attn.o_proj.weight_scale": np.ones((32, 1), bfloat16),
            "model.layers.0.self_attn.o_proj.weight_shape": np.array([32, 20], np.int64),
        },
        "in_features=20, expected a multiple of 32",
    ),
    "a weight twice": (
        HF,
        fused_tensors(WEIGHTS, CONFIG) | {f"{EXPERT}.weight": WEIGHTS[EXPERT]},
        "is in ",
    ),
    "fused experts of two dimensions": (
        HF,
        FLOATS | {"model.layers.1.mlp.experts.down_proj": np.ones((6, 32), bfloat16)},
        "expected [experts, out, in]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_work_starts(tmp_path: Path, case: str) -> None:
    settings, tensors, message = REFUSED[case]
    folder = write_folder(tmp_path / "hf", settings, tensors)
    with pytest.raises(BundleError) as caught:
        convert(folder, tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_no_multiple_of_a_group(tmp_path: Path) -> None:
    config = tiny_config(moe_intermediate_size=24)
    folder = write_folder(tmp_path / "hf", config.to_hf(), float_tensors(random_weights(config, 0)))
    with pytest.raises(BundleError, match=r"down_proj.weight': in_features=24, expected a multiple of group_size=32"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert(folder, tmp_path / "out", select="none")


def test_unknown_choices(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", HF, FLOATS)
    with pytest.raises(ValueError, match="rule='best', expected one of minmax, amax7, mse"):
        convert(folder, tmp_path / "out", rule="best")
    with pytest.raises(ValueError, match="select='all', expected one of mlp, routed, none"):
        convert(folder, tmp_path / "out", select="all")
    for target in (folder, folder / "config.json"):
        with pytest.raises(BundleError, match="is a file or the checkpoint itself, expected another folder or nothing"):
            convert(folder, target)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(
        BundleError, match=r"pytorch_model\.bin is a pickle, which can run code: save it as safetensors"
    ):
        convert(folder, tmp_path / "out")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(BundleError, match="does not fit into a file of"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "c.bin", 7])
def test_an_index_that_leads_elsewhere(tmp_path: Path, file: object) -> None:
    folder = write_folder(tmp_path / "hf", HF, FLOATS, shards=2)
    write_folder(tmp_path, HF, FLOATS)
    (tmp_path / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][NORM] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BundleError, match=r"tensor 'model.norm.weight': shard .*, expected|is not a plain file name"):
        convert(folder, tmp_path / "out")


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", HF, FLOATS, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][NORM])
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {NORM: other}}))
    with pytest.raises(
        BundleError, match=r"'model.norm.weight' is here, the index model\.safetensors\.index\.json has it in"
    ):
        convert(folder, tmp_path / "out")
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"ghost": other}}))
    with pytest.raises(BundleError, match=r"'ghost' is missing, the index model\.safetensors\.index\.json has it here"):
        convert(folder, tmp_path / "out")


def test_files_that_lie_about_their_size(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", HF, FLOATS)
    path = folder / "model.safetensors"
    genuine = path.read_bytes()
    for raw, message in {
        genuine[:-1]: "data_offsets",
        (2**40).to_bytes(8, "little") + genuine[8:]: "does not fit into a file",
        (200_000_000).to_bytes(8, "little") + bytes(200_000_000): "model.safetensors: .",
        b"": "model.safetensors: .",
    }.items():
        path.write_bytes(raw)
        with pytest.raises(BundleError, match=message):
            convert(folder, tmp_path / "out")


def test_a_config_that_asks_for_billions(tmp_path: Path) -> None:
    huge = {"num_hidden_layers": 2**30, "n_routed_experts": 2**10, "n_group": 1, "topk_group": 1}
    folder = write_folder(tmp_path / "hf", HF | huge, FLOATS)
    with pytest.raises(BundleError, match=r"expected \d+ weights and more"):
        convert(folder, tmp_path / "out")


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "hf", HF, FLOATS)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(BundleError, match=r"the disk has 1,000 bytes left, expected \d+,\d+ and more"):
        convert(folder, tmp_path / "out")


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", HF, FLOATS)
    checkpoint = read_checkpoint(open_folder(folder))
    os.truncate(folder / "model.safetensors", 20_000)
    last = max((weight.data for weight in checkpoint.weights.values()), key=lambda rows: rows.offset)
    with pytest.raises(BundleError, match="ends early: the file has changed since it was opened"):
        last.read()


# --- Stopped and started again ---------------------------------------------------------------------------------------


SLOW = textwrap.dedent("""
    import os, sys, time
    from kdtree_nb.checkpoint import convert
    def wait(done, total):
        if done > total // 2:
            os.write(1, b"halfway\\n")  # whole, though each thread comes here
            time.sleep(60)
    convert(sys.argv[1], sys.argv[2], max_shard_bytes=8000, progress=wait)
""")


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and the folder of a conversion that was killed halfway."""
    folder, out = write_folder(tmp_path / "hf", HF, FLOATS, shards=3), tmp_path / "out"
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", SLOW, str(folder), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        assert writer.stdout is not None
        line = writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
    assert line == "halfway\n"
    return folder, out


def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that are quantised from now on."""
    names: list[str] = []

    def watched(weight: np.ndarray, rule: str, name: str) -> object:
        names.append(name)
        return quantize(weight, rule, name)

    monkeypatch.setattr("kdtree_nb.checkpoint.conversion.quantize", watched)
    return names


needs_sigkill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX only")


@needs_sigkill
def test_a_killed_conversion_goes_on(
    killed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = killed
    finished, begun = list(out.glob(".*.done")), list(out.glob(".*.tmp"))
    assert len(finished) >= 2
    assert begun
    with pytest.raises(BundleError, match="holds 0 bundles"):
        Bundle.open(out)
    names, progress = made(monkeypatch), []
    path = convert(folder, out, max_shard_bytes=8000, progress=lambda *state: progress.append(state))
    resumed = set(names)
    whole = convert(folder, tmp_path / "whole", max_shard_bytes=8000)
    every = set(names)
    assert resumed < every, "finished shards are not made again"
    assert progress[-1][0] == progress[-1][1]
    assert_same_tensors(Bundle.open(path), quantize_weights(WEIGHTS, CONFIG)[1])
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in whole.parent.iterdir())
    for file in out.iterdir():
        assert file.read_bytes() == (whole.parent / file.name).read_bytes()


@needs_sigkill
@pytest.mark.parametrize("change", ["rule", "weights", "config"])
def test_shards_of_another_conversion_are_not_kept(
    killed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder, out = killed
    weights, settings = dict(WEIGHTS), dict(HF)
    if change == "weights":
        weights = {name: -weight for name, weight in weights.items()}
    if change == "config":
        settings["rms_norm_eps"] = 1e-3
    write_folder(folder, settings, float_tensors(weights), shards=3)
    rule = "mse" if change == "rule" else "minmax"
    path = convert(folder, out, rule, max_shard_bytes=8000)
    assert_same_tensors(Bundle.open(path), quantize_weights(weights, ModelConfig.from_hf(settings), rule)[1])
    assert not list(out.glob(".*"))


@needs_sigkill
def test_a_half_written_shard_is_not_taken_for_whole(killed: tuple[Path, Path]) -> None:
    folder, out = killed
    for begun in out.glob(".*.tmp"):
        assert begun.read_bytes()[8:9] in (b"", b"\0"), "the header comes last"
    path = convert(folder, out, max_shard_bytes=8000)
    assert_same_tensors(Bundle.open(path), quantize_weights(WEIGHTS, CONFIG)[1])
