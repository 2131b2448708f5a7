"""The forward pass over a latent cache, for any set of new tokens that form a tree."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.weights import Weights
from kdtree_nb.reference.attention import tree_attention
from kdtree_nb.reference.linear import Tiles, linear, tile
from kdtree_nb.reference.moe import moe, moe_route, swiglu
from kdtree_nb.reference.norm import LATENT_EPS, rms_norm
from kdtree_nb.reference.rope import apply_rope, rope, softmax_scale


class ForwardPass(NamedTuple):
    """``logits`` float32 [rows asked for, vocab]; ``features`` float32 [taps, N, hidden], tapped layers' outputs."""

    logits: np.ndarray
    features: np.ndarray


class Model:
    """DeepSeek-V3 with absorbed attention: the key and value halves of ``kv_b_proj`` act on queries and outputs."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._rotation = rope(config)
        self._scale = softmax_scale(config)
        self._absorbed: dict[int, tuple[Tiles, Tiles]] = {}

    def forward(
        self,
        tokens: np.ndarray,
        parents: np.ndarray,
        depths: np.ndarray,
        cache: LatentCache,
        taps: Sequence[int] = (),
        logits_of: slice = slice(None),
    ) -> ForwardPass:
        """Run a tree's nodes behind the cache's committed tokens; their latents are left in the cache.

        Parameters
        ----------
        tokens, parents, depths : int [N]
            As in :class:`~kdtree_nb.reference.tree.DraftTree`, without padding. A prompt is a chain,
            plain decoding a single root.
        taps : layers
            Whose outputs are returned as features, for a drafter.
        logits_of : slice
            Rows whose logits are wanted; a prompt's are not.
        """
        positions = cache.length + depths
        hidden = self.weights.embed(tokens)
        features = []
        for layer in range(self.config.num_hidden_layers):
            hidden = hidden + self._attention(layer, self._norm(hidden, layer, "input"), positions, parents, cache)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer, "post_attention"))
            if layer in taps:
                features.append(hidden)
        final = rms_norm(hidden[logits_of], self.weights.vector("model.norm"), self.config.rms_norm_eps)
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return ForwardPass(self.weights.linear(final, head), np.array(features, np.float32))

    def _norm(self, hidden: np.ndarray, layer: int, which: str) -> np.ndarray:
        weight = self.weights.vector(f"model.layers.{layer}.{which}_layernorm")
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

    def _attention(
        self, layer: int, x: np.ndarray, positions: np.ndarray, parents: np.ndarray, cache: LatentCache
    ) -> np.ndarray:
        config, weights, at = self.config, self.weights, f"model.layers.{layer}.self_attn"
        absorb_key, expand_value = self._absorbed_weights(layer)

        if config.q_lora_rank is None:
            queries, compressed = weights.linears(x, f"{at}.q_proj", f"{at}.kv_a_proj_with_mqa")
        else:
            q_latent, compressed = weights.linears(x, f"{at}.q_a_proj", f"{at}.kv_a_proj_with_mqa")
            q_latent = rms_norm(q_latent, weights.vector(f"{at}.q_a_layernorm"), LATENT_EPS)
            queries = weights.linear(q_latent, f"{at}.q_b_proj")
        queries = queries.reshape(len(x), config.num_attention_heads, config.qk_head_dim)
        q_nope, q_rope = np.split(queries, [config.qk_nope_head_dim], axis=2)
        q_nope = linear(q_nope.swapaxes(0, 1), absorb_key).swapaxes(0, 1)  # [N, heads, kv_lora]
        q_rope = apply_rope(q_rope, positions, self._rotation)

        latent, k_rope = np.split(compressed, [config.kv_lora_rank], axis=1)
        latent = rms_norm(latent, weights.vector(f"{at}.kv_a_layernorm"), LATENT_EPS)
        k_rope = apply_rope(k_rope, positions, self._rotation)
        cache.write(layer, np.concatenate([latent, k_rope], axis=1))

        mixed = tree_attention(
            np.concatenate([q_nope, q_rope], axis=2),
            cache.rows[layer],
            cache.length,
            parents,
            config.kv_lora_rank,
            self._scale,
        )
        values = linear(mixed.swapaxes(0, 1), expand_value).swapaxes(0, 1)  # [N, heads, v]
        return weights.linear(values.reshape(len(x), -1), f"{at}.o_proj")

    def _absorbed_weights(self, layer: int) -> tuple[Tiles, Tiles]:
        """``kv_b_proj`` head by head: the key half [kv_lora, nope] for queries, the value half [v, kv_lora]."""
        if layer not in self._absorbed:
            nope = self.config.qk_nope_head_dim
            weight = self.weights.matrix(f"model.layers.{layer}.self_attn.kv_b_proj")
            by_head = weight.reshape(self.config.num_attention_heads, -1, self.config.kv_lora_rank)
            self._absorbed[layer] = tile(by_head[:, :nope].swapaxes(1, 2)), tile(by_head[:, nope:])
        return self._absorbed[layer]

    def _mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        at = f"model.layers.{layer}.mlp"
        if self.config.is_dense(layer):
            return self._swiglu(x, at)
        bias = self.weights.vector(f"{at}.gate.e_score_correction_bias")
        expert_ids, weights = moe_route(self.weights.linear(x, f"{at}.gate"), bias, self.config)
        output = moe(x, expert_ids, weights, lambda expert, rows: self._swiglu(rows, f"{at}.experts.{expert}"))
        return output + self._swiglu(x, f"{at}.shared_experts") if self.config.n_shared_experts else output

    def _swiglu(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = self.weights.linears(x, f"{at}.gate_proj", f"{at}.up_proj")
        return self.weights.linear(swiglu(gate, up), f"{at}.down_proj")
