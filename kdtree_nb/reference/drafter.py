"""The DFlash drafter (arXiv 2602.06036): a block of masked tokens, filled in one pass over the target's hidden states.

A block is the last committed token, and MASK for every token to be drafted. Its rows see each other in both directions,
and every token committed before the block: the target's hidden states of it, from several layers, are projected to one
row ``context = norm(fc(features))``, from which each layer takes keys and values as it does from its own rows.
"""

from collections.abc import Mapping

import numpy as np

from kdtree_nb.config import DrafterConfig
from kdtree_nb.reference.moe import swiglu
from kdtree_nb.reference.norm import rms_norm

Weights = Mapping[str, np.ndarray]


def draft_rows(
    weights: Weights, config: DrafterConfig, features: np.ndarray, block: np.ndarray, dtype: type = np.float32
) -> np.ndarray:
    """The rows that the target's head reads, one a drafted token; written out in full, no cache.

    Parameters
    ----------
    weights : mapping of float arrays
        By checkpoint name without ``.weight``; quantised ones dequantised.
    features : float [tokens, taps · hidden]
        Outputs of the target's layers ``target_layer_ids`` for every token before the block, side by side.
    block : float [block_size, hidden]
        The target's embedding of the last committed token and of the masks after it.
    dtype : float32 or float64
        Of all arithmetic.

    Returns
    -------
    dtype [block_size − 1, hidden]
    """
    own: dict[str, np.ndarray] = {name: weight.astype(dtype, copy=False) for name, weight in weights.items()}
    context = rms_norm(features.astype(dtype) @ own["fc"].T, own["hidden_norm"], config.rms_norm_eps)
    x: np.ndarray = block.astype(dtype)
    first_key = 0 if config.sliding_window is None else max(0, len(context) - config.sliding_window)
    key_positions = np.arange(first_key, len(context) + len(x))
    query_positions = np.arange(len(context), len(context) + len(x))
    group = config.num_attention_heads // config.num_key_value_heads

    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"

        def heads(rows: np.ndarray, name: str, at: str = at) -> np.ndarray:
            return (rows @ own[f"{at}.self_attn.{name}_proj"].T).reshape(len(rows), -1, config.head_dim)

        normed = rms_norm(x, own[f"{at}.input_layernorm"], config.rms_norm_eps)
        seen = np.concatenate([context[first_key:], normed])
        queries = rms_norm(heads(normed, "q"), own[f"{at}.self_attn.q_norm"], config.rms_norm_eps)
        keys = rms_norm(heads(seen, "k"), own[f"{at}.self_attn.k_norm"], config.rms_norm_eps)
        queries = rotate_halves(queries, query_positions, config.rope_theta)
        keys = rotate_halves(keys, key_positions, config.rope_theta).repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * dtype(config.head_dim**-0.5)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, heads(seen, "v").repeat(group, axis=1))
        x = x + mixed.reshape(len(x), -1) @ own[f"{at}.self_attn.o_proj"].T

        normed = rms_norm(x, own[f"{at}.post_attention_layernorm"], config.rms_norm_eps)
        gate, up = (normed @ own[f"{at}.mlp.{name}_proj"].T for name in ("gate", "up"))
        x = x + swiglu(gate, up) @ own[f"{at}.mlp.down_proj"].T
    return rms_norm(x[1:], own["norm"], config.rms_norm_eps)


def rotate_halves(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions as Qwen3 has them: element i of a head is paired with element i + size / 2.

    Parameters
    ----------
    x : float [tokens, heads, size]
    positions : int [tokens]
    """
    half = x.shape[2] // 2
    angles = (positions[:, None] * theta ** (-np.arange(half) / half))[:, None]
    cosines, sines = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def block_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, end: int) -> np.ndarray:
    """Attention of a block's rows to a range of cached ones, the block's own among them, in both directions.

    Parameters
    ----------
    queries : float [rows, heads, size]
    keys, values : float [capacity, kv_heads, size]
        Each serves ``heads / kv_heads`` heads that follow one another.
    first, end : int
        The cached rows that are seen.

    Returns
    -------
    float [rows, heads, size]
    """
    rows, heads, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, -1, size).transpose(1, 2, 0, 3).reshape(kv_heads, -1, size)
    seen_keys, seen_values = (cached[first:end].swapaxes(0, 1) for cached in (keys, values))  # [kv_heads, seen, size]
    scores = grouped @ seen_keys.swapaxes(1, 2) * queries.dtype.type(size**-0.5)
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed = shares @ seen_values / shares.sum(axis=2, keepdims=True)
    return mixed.reshape(kv_heads, -1, rows, size).transpose(2, 0, 1, 3).reshape(rows, heads, size)
