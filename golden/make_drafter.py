"""What two other implementations of the DFlash drafter give: one of transformers' Qwen3 layers, and its training's.

    pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6 safetensors ml_dtypes
    python -m golden.make_drafter

writes, on one machine with the same bytes every time,

- ``fixtures/drafter/NAME.safetensors`` for each of ``DRAFTERS``, tiny and random: its weights in bfloat16, by
  checkpoint name without ``.weight``; float32 ``features`` [tokens, taps · hidden] and ``block`` [block_size, hidden];
  float64 ``rows`` [block_size − 1, hidden], computed in float64; metadata ``drafter``: JSON with ``config``, seed and
  versions;
- ``fixtures/drafter/kdt16m.safetensors``, the shipped drafter behind its target, both in the torch that trained them:
  ``ids`` int32 [tokens], ``anchors`` int32 [blocks] and ``rows`` float32 [blocks, block_size − 1, hidden].

Only :func:`load` runs where torch is missing.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kdtree_nb.bundle import Bundle
from kdtree_nb.config import DrafterConfig

GOLDEN = Path(__file__).parent
FOLDER, SHIPPED = GOLDEN / "fixtures" / "drafter", GOLDEN / "kdt16m"
SHIPPED_ROWS = FOLDER / "kdt16m.safetensors"
TOKENS, ANCHORS = 272, (0, 1, 40, 257, 271)  # its window is 256

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "block_size": 5,
    "mask_token_id": 3,
    "target_layer_ids": (0, 2),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"tokens": 20},
    "no_context": {"tokens": 0},
    "grouped": {"tokens": 33, "num_key_value_heads": 2, "head_dim": 10, "rope_theta": 300.0, "target_layer_ids": (1,)},
    "windowed": {"tokens": 40, "sliding_window": 7, "num_key_value_heads": 1, "block_size": 8, "rms_norm_eps": 1e-3},
    "window_longer": {"tokens": 9, "sliding_window": 10, "block_size": 2, "target_layer_ids": (0, 1, 5)},
}


class Case(NamedTuple):
    """A drafter and what it is given: see the module's docstring."""

    config: DrafterConfig
    weights: dict[str, np.ndarray]
    features: np.ndarray
    block: np.ndarray


def load(name: str) -> tuple[Case, np.ndarray]:
    """One of the stored ``DRAFTERS``, and its rows."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.offset_keys()}
        config = DrafterConfig.from_hf(json.loads(file.metadata()["drafter"])["config"])
    features, block, rows = (tensors.pop(key) for key in ("features", "block", "rows"))
    return Case(config, tensors, features, block), rows


def load_shipped() -> dict[str, np.ndarray]:
    """``ids``, ``anchors`` and ``rows`` of the shipped drafter."""
    return load_file(SHIPPED_ROWS)


def make_case(name: str, seed: int) -> Case:
    """Random weights that make every part of a drafter felt in its rows."""
    settings = dict(DRAFTERS[name])
    tokens, random = settings.pop("tokens"), np.random.default_rng(seed)
    config = DrafterConfig(**{**COMMON, **settings})
    weights = {}
    for key, shape in config.weight_shapes().items():
        noise = random.standard_normal(shape)
        weights[key] = (1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 / shape[1] ** 0.5).astype(bfloat16)
    features = 3 * random.standard_normal((tokens, len(config.target_layer_ids) * config.hidden_size), np.float32)
    return Case(config, weights, features, random.standard_normal((config.block_size, config.hidden_size), np.float32))


def qwen3_rows(case: Case, dtype: str) -> np.ndarray:
    """The rows [block_size − 1, hidden] of layers of transformers' Qwen3 modules, wired as DFlash's paper has them.

    In float64 its norm and its rotary angles, which transformers computes in float32, are torch's own.
    """
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    config, real = case.config, getattr(torch, dtype)
    theirs = Qwen3Config(**{name: value for name, value in config.to_hf().items() if name != "dflash_config"})
    group = config.num_attention_heads // config.num_key_value_heads
    own = {name: torch.from_numpy(weight.astype(dtype)) for name, weight in case.weights.items()}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        kind = nn.RMSNorm if real == torch.float64 else qwen3.Qwen3RMSNorm
        module = kind(x.shape[-1], eps=config.rms_norm_eps)
        module.load_state_dict({"weight": own[name]})
        return module.to(real)(x)

    def heads(name: str, x: torch.Tensor) -> torch.Tensor:  # [1, heads, tokens, size]
        return functional.linear(x, own[name]).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)[None]

    features, x = (torch.from_numpy(array.astype(dtype)) for array in (case.features, case.block))
    context = norm("hidden_norm", functional.linear(features, own["fc"]))
    positions = torch.arange(len(context) + len(x))
    if real == torch.float64:
        steps = torch.arange(0, config.head_dim, 2, dtype=real) / config.head_dim
        angles = torch.outer(positions.to(real), 1 / config.rope_theta**steps).repeat(1, 2)[None]
        cos, sin = angles.cos(), angles.sin()
    else:
        cos, sin = qwen3.Qwen3RotaryEmbedding(theirs)(x, positions[None])
    seen = torch.ones(len(positions), dtype=torch.bool)
    if config.sliding_window is not None:
        seen = positions >= len(context) - config.sliding_window

    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        normed = norm(f"{at}.input_layernorm", x)
        both = torch.cat((context, normed))
        q = norm(f"{at}.self_attn.q_norm", heads(f"{at}.self_attn.q_proj", normed))
        k = norm(f"{at}.self_attn.k_norm", heads(f"{at}.self_attn.k_proj", both))
        v = heads(f"{at}.self_attn.v_proj", both)
        q, _ = qwen3.apply_rotary_pos_emb(q, q, cos[:, -len(x) :], sin[:, -len(x) :])
        k, _ = qwen3.apply_rotary_pos_emb(k, k, cos, sin)
        k, v = qwen3.repeat_kv(k, group), qwen3.repeat_kv(v, group)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, :].expand(len(x), -1))
        x = x + functional.linear(mixed[0].transpose(0, 1).flatten(1), own[f"{at}.self_attn.o_proj"])
        mlp = qwen3.Qwen3MLP(theirs).to(real)
        mlp.load_state_dict({f"{which}_proj.weight": own[f"{at}.mlp.{which}_proj"] for which in ("gate", "up", "down")})
        x = x + mlp(norm(f"{at}.post_attention_layernorm", x))
    return norm("norm", x)[1:].detach().numpy()


def write(name: str) -> Path:
    """Make one tiny drafter, run it and store everything."""
    import torch
    import transformers

    seed = 700 + list(DRAFTERS).index(name)
    case = make_case(name, seed)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    # One key: the library writes several in an order that differs from run to run.
    metadata = {"drafter": json.dumps({"config": case.config.to_hf(), "seed": seed, **versions})}
    path = FOLDER / f"{name}.safetensors"
    given = {"features": case.features, "block": case.block, "rows": qwen3_rows(case, "float64")}
    save_file(case.weights | given, path, metadata)
    return path


def training_rows(ids: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Rows [blocks, block_size − 1, hidden] of the shipped drafter and target in golden/train's torch modules."""
    sys.path.insert(0, str(GOLDEN / "train"))
    import export
    import quantize
    import torch
    from drafter import Drafter
    from model import Transformer, load_named_tensors
    from recipe import Architecture, DrafterArchitecture

    def floats(path: Path) -> dict[str, Any]:
        with Bundle.open(path) as bundle:
            return quantize.float_tensors({name: export.to_torch(bundle[name]) for name in bundle})

    target, drafter = Transformer(Architecture()), Drafter(DrafterArchitecture())
    load_named_tensors(target, floats(SHIPPED / "kdt16m-int4.kdtr"))
    shipped = floats(SHIPPED / "kdt16m-int4.drafter.kdtr")
    drafter.load_state_dict({name: shipped[name.removesuffix(".weight")] for name in drafter.state_dict()})
    text = torch.from_numpy(ids)[None].long()
    with torch.no_grad():
        _, tapped = target.eval().hidden(text, drafter.a.target_layer_ids)
        rows = drafter.eval()(target, torch.cat(tapped, -1), text, torch.from_numpy(anchors)[None].long())
    return np.ascontiguousarray(rows[0])  # safetensors takes a strided array for a dense one


def write_shipped() -> Path:
    """Run the shipped drafter over the start of a held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text = (SHIPPED / "heldout" / "stdlib.txt").read_text(encoding="utf-8")
    ids, anchors = np.array(tokenizer.encode(text).ids[:TOKENS], np.int32), np.array(ANCHORS, np.int32)
    save_file({"ids": ids, "anchors": anchors, "rows": training_rows(ids, anchors)}, SHIPPED_ROWS)
    return SHIPPED_ROWS


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for written in [*map(write, DRAFTERS), write_shipped()]:
        print(f"{written.name}: {written.stat().st_size:,} bytes")
