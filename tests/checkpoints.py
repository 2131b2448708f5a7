"""Small checkpoints as Hugging Face folders, written with the safetensors library alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from kdtree_nb.config import ModelConfig
from kdtree_nb.quantization import quantize, quantized_names, routed_experts

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "actorder": None,
            },
        }
    },
    "kv_cache_scheme": None,
}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def stored_name(weight: str) -> str:
    """The name of a float weight in a checkpoint."""
    return weight if weight.endswith("_bias") else f"{weight}.weight"


def float_tensors(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor a weight, as DeepSeek and Moonlight store them."""
    return {stored_name(name): weight for name, weight in weights.items()}


def fused_tensors(weights: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """A layer's experts in two stacks, gate before up, as transformers 5 has them in memory."""
    tensors = {name: w for name, w in float_tensors(weights).items() if not routed_experts(name)}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        at = f"model.layers.{layer}.mlp.experts"
        halves = [
            [
                np.concatenate([weights[f"{at}.{e}.gate_proj"], weights[f"{at}.{e}.up_proj"]]),
                weights[f"{at}.{e}.down_proj"],
            ]
            for e in range(config.n_routed_experts)
        ]
        tensors[f"{at}.gate_up_proj"] = np.stack([gate_up for gate_up, _ in halves])
        tensors[f"{at}.down_proj"] = np.stack([down for _, down in halves])
    return tensors


def packed_tensors(weights: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """The routed experts in compressed-tensors' layout, everything else in floats, as Kimi K2 has it."""
    tensors = {}
    chosen = quantized_names(config, routed_experts)
    for name, weight in weights.items():
        if name not in chosen:
            tensors[stored_name(name)] = weight
            continue
        quantized = quantize(weight, "amax7", name)
        tensors[f"{name}.weight_packed"] = quantized.qweight
        tensors[f"{name}.weight_scale"] = quantized.scales
        tensors[f"{name}.weight_shape"] = np.array(weight.shape, np.int32)
    return tensors


def fp8_tensors(weights: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """DeepSeek's blocks of 128 × 128 for all projections, and what they mean as float32, computed block by block."""
    tensors, meant = {}, {}
    for name, weight in weights.items():
        if not name.endswith("_proj") and not name.endswith("with_mqa"):
            tensors[stored_name(name)] = meant[name] = weight
            continue
        values = weight.astype(np.float32)
        scales = np.empty([-(-size // 128) for size in values.shape], np.float32)
        stored = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
        meant[name] = np.empty_like(values)
        for i, j in np.ndindex(scales.shape):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scales[i, j] = np.abs(values[block]).max() / 448
            stored[block] = (values[block] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            meant[name][block] = (stored[block].astype(np.float32) * scales[i, j]).astype(bfloat16).astype(np.float32)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = stored, scales
    return tensors, meant


def write_folder(
    folder: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shards: int = 1,
    prefix: str = "",
) -> Path:
    """Write config.json and the tensors, dealt out to shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {f"{prefix}{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == number}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
