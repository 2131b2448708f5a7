"""Checkpoints in and out against transformers and compressed-tensors, live: ``make parity``."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FP8, float_tensors, fp8_tensors, write_folder
from helpers import assert_same_bits
from ml_dtypes import bfloat16

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config  # noqa: E402
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp  # noqa: E402
from transformers import AutoModelForCausalLM, FineGrainedFP8Config  # noqa: E402

from golden.make_parity import COMMON, MODELS, random_weights  # noqa: E402
from kdtree_nb.bundle import Bundle  # noqa: E402
from kdtree_nb.checkpoint import convert, export  # noqa: E402
from kdtree_nb.config import ModelConfig  # noqa: E402
from kdtree_nb.engine import Engine  # noqa: E402

TOLERANCE = 1e-3
NEW_TOKENS = 12


def settings_of(name: str) -> dict[str, Any]:
    """config.json as transformers writes it; every input is a multiple of a group here."""
    config = transformers.DeepseekV3Config(**{**COMMON, **MODELS[name]})
    return json.loads(config.to_json_string())


def source(folder: Path, name: str, dtype: type = np.float32) -> tuple[Path, ModelConfig]:
    settings = settings_of(name)
    config = ModelConfig.from_hf(settings)
    weights = {key: weight.astype(dtype) for key, weight in random_weights(config, 7).items()}
    return write_folder(folder, settings, float_tensors(weights), shards=2), config


def load(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the checkpoint has a quantization_config too: that is meant
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
        )
    assert {kind: names for kind, names in info.items() if names} == {}
    return model.eval()


def assert_same_text(model: Any, bundle: Path, tolerance: float = TOLERANCE) -> None:
    """Greedy tokens equal, and the logits that chose them within the tolerance."""
    engine = Engine.load(bundle, "cpu")
    prompt = np.random.default_rng(3).integers(engine.config.vocab_size, size=30)
    run = engine.generate(prompt, "ar", max_new_tokens=NEW_TOKENS, keep_logits=True)
    with torch.no_grad():
        ids = torch.from_numpy(prompt)[None]
        mask = torch.ones_like(ids)
        text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        logits = model(text[:, :-1]).logits[0, len(prompt) - 1 :].numpy()
    assert run.tokens == text[0, len(prompt) :].tolist()
    assert run.logits is not None
    assert 0.5 < logits.std() < 3
    error = np.abs(run.logits - logits).max()
    print(f"largest error {error:.1e}")
    assert error <= tolerance


@pytest.mark.parametrize("select", ["mlp", "routed", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_an_export(tmp_path: Path, name: str, select: str) -> None:
    folder, _ = source(tmp_path / "hf", name)
    bundle = convert(folder, tmp_path / "bundle", select=select)
    exported = export(bundle, tmp_path / "exported", max_shard_bytes=50_000)
    assert len(list(exported.glob("*.safetensors"))) > 1
    assert_same_text(load(exported), bundle)


@pytest.mark.parametrize("select", ["mlp", "routed"])
def test_transformers_dequantises_bfloat16_scales_as_the_format_says(tmp_path: Path, select: str) -> None:
    """compressed-tensors rounds code · scale to bfloat16, the engine does not; on the same weights they agree."""
    folder, config = source(tmp_path / "hf", "q_lora_yarn", bfloat16)
    bundle = convert(folder, tmp_path / "bundle", select=select)
    reading = transformers.CompressedTensorsConfig(dequantize=True)
    model = load(export(bundle, tmp_path / "exported"), quantization_config=reading).float()  # its experts are bfloat16
    ours = Bundle.open(bundle).weights()
    rounded = {name: weight.astype(bfloat16).astype(np.float32) for name, weight in ours.items()}
    rounded |= {name: weight for name, weight in ours.items() if name.endswith(("mlp.gate", "_bias"))}
    same = convert(
        write_folder(tmp_path / "rounded", config.to_hf(), float_tensors(rounded)), tmp_path / "same", select="none"
    )
    assert_same_text(model, same, 1e-4)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("name", ["plain", "q_lora_yarn_groups"])
def test_what_transformers_saves_quantised(tmp_path: Path, name: str, dtype: type) -> None:
    """Dense and shared projections packed by compressed-tensors; transformers keeps its fused experts as floats."""
    folder, config = source(tmp_path / "hf", name, dtype)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype={np.float32: torch.float32, bfloat16: torch.bfloat16}[dtype], attn_implementation="eager"
    )
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    ignore = ["lm_head", "re:.*self_attn.*"]
    quantisation = QuantizationConfig.model_validate(
        {"config_groups": {"group_0": group}, "ignore": ignore, "format": "pack-quantized"}
    )
    apply_quantization_config(model, quantisation)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            scale, zero_point = compute_dynamic_scales_and_zp(
                module.weight.detach(), module.quantization_scheme.weights, module=None
            )
            module.weight_scale.data, module.weight_zero_point.data = scale, zero_point
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    compressor.update_config(str(saved))

    bundle = convert(saved, tmp_path / "bundle")
    packed = Bundle.open(bundle)
    quantised = {key.removesuffix(".qw") for key in packed if key.endswith(".qw")}
    assert quantised
    assert quantised == {key for key in config.weight_shapes() if key.endswith("_proj") and ".mlp." in key} - {
        key for key in config.weight_shapes() if ".experts." in key
    }
    # Our own quantiser and packing, from the same floats, give the same words.
    own = Bundle.open(convert(folder, tmp_path / "own"))
    for key in quantised:
        assert_same_bits(packed[f"{key}.qw"], own[f"{key}.qw"])
        assert_same_bits(packed[f"{key}.sc"], own[f"{key}.sc"])
    if dtype is np.float32:
        assert_same_text(model.eval(), bundle)  # transformers cannot load floats where it expects packed experts


@pytest.mark.parametrize("name", ["plain", "q_lora_yarn"])
def test_fp8_means_what_transformers_reads_in_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    larger = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}  # several blocks, all whole
    settings = json.loads(transformers.DeepseekV3Config(**{**COMMON, **MODELS[name], **larger}).to_json_string())
    config = ModelConfig.from_hf(settings)
    tensors, _ = fp8_tensors(random_weights(config, 7))
    folder = write_folder(tmp_path / "hf", settings | {"quantization_config": FP8}, tensors)
    bundle = convert(folder, tmp_path / "bundle", select="none")
    # It asks for accelerate, which dequantising on a CPU never calls.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    reading = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    # In bfloat16, as DeepSeek's conversion and ours store it; then all arithmetic is in float32.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager", quantization_config=reading
    )
    assert_same_text(model.float().eval(), bundle, 1e-4)


@pytest.mark.parametrize("name", ["plain", "q_lora_yarn_groups"])
def test_what_transformers_saves_from_its_fused_experts(tmp_path: Path, name: str) -> None:
    folder, _ = source(tmp_path / "hf", name, bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    ours = Bundle.open(convert(folder, tmp_path / "a"))
    theirs = Bundle.open(convert(tmp_path / "saved", tmp_path / "b"))
    assert sorted(ours) == sorted(theirs)
    for key in ours:
        if not key.endswith((".gate", "_bias")):  # those two are float32 in one and bfloat16 in the other
            assert_same_bits(theirs[key], ours[key])
