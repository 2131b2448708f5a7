"""Small random models and drafters as bundles, each with the weights that the reference takes."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kdtree_nb.bundle import write_bundle
from kdtree_nb.config import Config, DrafterConfig, ModelConfig, YarnScaling
from kdtree_nb.quantization import quantize_weights

YARN = YarnScaling(4.0, 32, mscale=1.0, mscale_all_dim=0.8)
STORAGE = ("float32", "bfloat16", "int4")


class Built(NamedTuple):
    """A bundle on the disk, and its weights in float32, dequantised."""

    path: Path
    config: Config
    weights: dict[str, np.ndarray]


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers, the first dense, with every feature that costs little."""
    values: dict = dict(
        vocab_size=67,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        max_position_embeddings=1024,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-5,
        rope_scaling=YARN,
    )
    return ModelConfig(**(values | changes))


def tiny_drafter_config(target: ModelConfig, **changes: object) -> DrafterConfig:
    """Two layers of grouped heads over the first and the last of the target's, with a transition head."""
    values: dict = dict(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=64,
        max_position_embeddings=target.max_position_embeddings,
        block_size=6,
        mask_token_id=2,
        target_layer_ids=(0, target.num_hidden_layers - 1),
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        transition_rank=5,
        num_candidates=9,
    )
    return DrafterConfig(**(values | changes))


def random_weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Projections of standard deviation 1/√in, norms around 1, router biases around 0, logits of deviation 2."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 2:
            weights[name] = values / np.float32(np.sqrt(shape[1]))
        else:
            weights[name] = (0.0 if name.endswith("bias") else 1.0) + np.float32(0.2) * values
    if isinstance(config, DrafterConfig):
        weights["norm"] *= 2
    else:
        weights["model.embed_tokens"] *= 4  # else a text soon repeats one token
        weights["model.norm"] *= 2
    return weights


def build(
    path: Path,
    config: Config,
    seed: int = 0,
    storage: str = "int4",
    select: Callable[[str], bool] | None = None,
    tokenizer: str | None = None,
) -> Built:
    """Write a random model. ``bfloat16`` stores every float, and the scales of what is packed, in that type."""
    weights = random_weights(config, seed)
    if storage == "bfloat16":
        weights = {name: weight.astype(bfloat16) for name, weight in weights.items()}
    packed = dict(weights)
    if storage == "int4" or select is not None:
        weights, packed = quantize_weights(weights, config, select=select)
    write_bundle(path, config, packed, tokenizer=tokenizer)
    return Built(path, config, {name: weight.astype(np.float32) for name, weight in weights.items()})


def byte_tokenizer(path: Path) -> int:
    """Write a tokenizer of single bytes and an end-of-text token; returns its number of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


def build_text_model(folder: Path, seed: int = 0, name: str = "text.kdtr", **changes: object) -> Built:
    """A model that reads and writes bytes, with its tokenizer beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = byte_tokenizer(folder / "tokenizer.json")
    config = tiny_config(**({"vocab_size": vocab_size, "eos_token_ids": (vocab_size - 1,)} | changes))
    return build(folder / name, config, seed, tokenizer="tokenizer.json")
