"""DeepSeek-V3's forward pass as its paper writes it (arXiv 2412.19437): full heads, no cache, float weights.

The second, independent way to the logits: the engine shares none of this file's attention and products.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.moe import moe, moe_route, swiglu
from kdtree_nb.reference.norm import LATENT_EPS, rms_norm
from kdtree_nb.reference.rope import apply_rope, rope, softmax_scale

Weights = Mapping[str, np.ndarray]


class Continuation(NamedTuple):
    """Greedy text: ``tokens`` int32 [n] and the ``logits`` [n, vocab] that chose them."""

    tokens: np.ndarray
    logits: np.ndarray


def forward(weights: Weights, config: ModelConfig, token_ids: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Logits after every token of a sequence.

    Parameters
    ----------
    weights : mapping of float arrays
        By checkpoint name without ``.weight``; quantised ones dequantised.
    token_ids : int [tokens]
    dtype : float32 or float64
        Of all arithmetic.

    Returns
    -------
    dtype [tokens, vocab]
    """
    *_, hidden = hidden_states(weights, config, token_ids, dtype)
    norm: np.ndarray = weights["model.norm"].astype(dtype, copy=False)
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    head: np.ndarray = weights[name].astype(dtype, copy=False)
    return rms_norm(hidden, norm, config.rms_norm_eps) @ head.T


def hidden_states(
    weights: Weights, config: ModelConfig, token_ids: np.ndarray, dtype: type = np.float32
) -> Iterator[np.ndarray]:
    """The embedding, then each layer's output: arrays [tokens, hidden]."""
    hidden = weights["model.embed_tokens"][token_ids].astype(dtype)
    yield hidden
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        own: dict[str, np.ndarray] = {
            name.removeprefix(f"{at}."): weight.astype(dtype, copy=False)
            for name, weight in weights.items()
            if name.startswith(f"{at}.")
        }
        hidden = hidden + attention(own, config, rms_norm(hidden, own["input_layernorm"], config.rms_norm_eps))
        normed = rms_norm(hidden, own["post_attention_layernorm"], config.rms_norm_eps)
        hidden = hidden + (mlp(own, "mlp", normed) if config.is_dense(layer) else experts(own, config, normed))
        yield hidden


def attention(own: Weights, config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Causal multi-head latent attention, every head's keys and values written out. ``own``: one layer's weights."""
    tokens, heads = len(x), config.num_attention_heads
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    positions, rotation = np.arange(tokens), rope(config)

    if config.q_lora_rank is None:
        queries = x @ own["self_attn.q_proj"].T
    else:
        compressed = rms_norm(x @ own["self_attn.q_a_proj"].T, own["self_attn.q_a_layernorm"], LATENT_EPS)
        queries = compressed @ own["self_attn.q_b_proj"].T
    queries = queries.reshape(tokens, heads, config.qk_head_dim)
    q_rope = apply_rope(queries[..., nope:], positions, rotation)

    compressed = x @ own["self_attn.kv_a_proj_with_mqa"].T  # [tokens, kv_lora + rope]
    latent = rms_norm(compressed[:, : config.kv_lora_rank], own["self_attn.kv_a_layernorm"], LATENT_EPS)
    k_rope = apply_rope(compressed[:, config.kv_lora_rank :], positions, rotation)  # one head, shared by all
    keys_values = (latent @ own["self_attn.kv_b_proj"].T).reshape(tokens, heads, nope + value)

    scores = np.einsum("qhd,khd->hqk", queries[..., :nope], keys_values[..., :nope])
    scores = (scores + np.einsum("qhd,kd->hqk", q_rope, k_rope)) * x.dtype.type(softmax_scale(config))
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, keys_values[..., nope:])
    return mixed.reshape(tokens, -1) @ own["self_attn.o_proj"].T


def experts(own: Weights, config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Routed experts, and the shared one unscaled."""
    expert_ids, weights = moe_route(x @ own["mlp.gate"].T, own["mlp.gate.e_score_correction_bias"], config)
    output = moe(x, expert_ids, weights, lambda expert, rows: mlp(own, f"mlp.experts.{expert}", rows))
    return output + mlp(own, "mlp.shared_experts", x) if config.n_shared_experts else output


def mlp(own: Weights, at: str, x: np.ndarray) -> np.ndarray:
    """SwiGLU between an up and a down projection."""
    return swiglu(x @ own[f"{at}.gate_proj"].T, x @ own[f"{at}.up_proj"].T) @ own[f"{at}.down_proj"].T


def greedy(weights: Weights, config: ModelConfig, prompt: np.ndarray, max_new_tokens: int) -> Continuation:
    """Extend a prompt by the most probable token, the whole sequence computed anew for each."""
    token_ids, rows = np.asarray(prompt), []
    for _ in range(max_new_tokens):
        rows.append(forward(weights, config, token_ids)[-1])
        token_ids = np.append(token_ids, rows[-1].argmax())
    logits = np.array(rows, np.float32).reshape(-1, config.vocab_size)  # [0, vocab] where nothing was asked for
    return Continuation(token_ids[len(prompt) :].astype(np.int32), logits)
