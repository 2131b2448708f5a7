"""The forward pass over a latent cache, for any set of new tokens that form a tree."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.weights import Weights
from kdtree_nb.kernels.dense_mma import VECTOR
from kdtree_nb.kernels.launch import Array, empty_beside, processor_of, runs_cuda
from kdtree_nb.kernels.mla_inputs import mla_inputs
from kdtree_nb.kernels.moe_route import moe_route, routing
from kdtree_nb.kernels.rms_norm import add_norm, rms_norm
from kdtree_nb.kernels.swiglu import swiglu
from kdtree_nb.kernels.tree_attention import tree_attention
from kdtree_nb.kernels.tree_attention_mma import CHUNK, geometry_of, tree_attention_mma
from kdtree_nb.reference.linear import Tiles
from kdtree_nb.reference.moe import moe_by_blocks
from kdtree_nb.reference.norm import LATENT_EPS
from kdtree_nb.reference.rope import rope as rotation_of
from kdtree_nb.reference.rope import rope_table, softmax_scale


class ForwardPass(NamedTuple):
    """``logits`` float32 [rows asked for, vocab]; ``features`` float32 [N, taps, hidden], tapped layers' outputs."""

    logits: Array
    features: Array


class Model:
    """DeepSeek-V3 with absorbed attention: the key and value halves of ``kv_b_proj`` act on queries and outputs.

    What enters a product has the weights' dtype; residuals, norms, softmax, router and logits are float32. No token may
    lie beyond the first ``capacity`` positions.

    Raises
    ------
    ValueError
        If the kernels of that dtype do not take the model's sizes.
    """

    def __init__(self, config: ModelConfig, weights: Weights, device: Device, capacity: int) -> None:
        self.config = config
        self.weights = weights
        self.device = device
        self.capacity = capacity
        self._scale = softmax_scale(config)
        cosines, sines = rope_table(rotation_of(config), np.arange(capacity))
        self._rope_table = device.put(cosines), device.put(sines)
        self._absorbed: dict[int, tuple[Array | Tiles, Array | Tiles]] = {}
        self._check()

    def _check(self) -> None:
        """Refuse what :meth:`forward` could not run."""
        config = self.config
        sizes = {"qk_nope_head_dim": (config.qk_nope_head_dim, VECTOR)}
        sizes |= {name: (getattr(config, name), CHUNK) for name in ("kv_lora_rank", "qk_rope_head_dim")}
        self.weights.check((name for names in self._products() for name in names), sizes)
        if self.weights.on_tensor_cores:
            geometry_of(1, config.num_attention_heads, config.latent_dim, processor_of(self._rope_table[0]))

    def preload(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Bring to a GPU now whatever :meth:`forward` would load at its first call; for kernels alone.

        ``progress`` is called with the bytes sent so far and the bytes of all.
        """
        config = self.config
        absorbed = {f"model.layers.{layer}.self_attn.kv_b_proj" for layer in self._absorbed}  # not kept as it is stored
        products = [("model.embed_tokens",), *(names for names in self._products() if names[0] not in absorbed)]
        mlps = [f"model.layers.{layer}.mlp" for layer in range(config.num_hidden_layers) if not config.is_dense(layer)]
        experts = [(mlp, config) for mlp in mlps]
        self.weights.preload(products, experts, progress)
        for layer in range(config.num_hidden_layers):
            self._absorbed_weights(layer)
        for name, shape in config.weight_shapes().items():
            if len(shape) == 1:
                self.weights.vector(name)

    def _products(self) -> Iterator[tuple[str, ...]]:
        """Weights of products, those of one product together; no expert that :meth:`Weights.experts` has."""
        config, mlps = self.config, []
        for layer in range(config.num_hidden_layers):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
            yield f"{attention}.{first}", f"{attention}.kv_a_proj_with_mqa"
            for name in ("o_proj", *["q_b_proj"] * (config.q_lora_rank is not None), "kv_b_proj"):
                yield (f"{attention}.{name}",)
            if config.is_dense(layer):
                mlps.append(mlp)
                continue
            yield self._beside_experts(mlp)
            if config.n_shared_experts and not self.weights.shared_behind(mlp, config):
                yield (f"{mlp}.shared_experts.down_proj",)
        for at in mlps:
            yield f"{at}.gate_proj", f"{at}.up_proj"
            yield (f"{at}.down_proj",)
        yield (self._head,)

    def forward(
        self,
        tokens: Array,
        parents: Array,
        depths: Array,
        cache: LatentCache,
        taps: Sequence[int] = (),
        logits_of: slice = slice(None),
    ) -> ForwardPass:
        """Run a tree's nodes behind the cache's committed tokens; their latents are left in the cache.

        Parameters
        ----------
        tokens, parents, depths : int32 [N]
            As in :class:`~kdtree_nb.reference.tree.DraftTree`. A prompt is a chain, plain decoding a single root.
        taps : layers
            Whose outputs are returned as features, for a drafter.
        logits_of : slice
            Rows whose logits are wanted; a prompt's are not.
        """
        layers, rounded = self.config.num_hidden_layers, (self.config.rms_norm_eps, self.weights.dtype)
        before_mlp = [f"model.layers.{layer}.post_attention_layernorm" for layer in range(layers)]
        before_attention = [*(f"model.layers.{layer}.input_layernorm" for layer in range(layers)), "model.norm"]
        norm = self.weights.vector

        hidden = self.weights.embed(tokens)
        features = self.device.xp.empty((len(hidden), len(taps), self.config.hidden_size), np.float32)
        x = rms_norm(hidden, norm(before_attention[0]), *rounded)
        for layer in range(layers):
            mixed = self._attention(layer, x, parents, depths, cache)
            hidden, x = add_norm(hidden, mixed, norm(before_mlp[layer]), *rounded)
            tapped = features[:, taps.index(layer)] if layer in taps else None
            hidden, x = add_norm(hidden, self._mlp(layer, x), norm(before_attention[layer + 1]), *rounded, out=tapped)
        return ForwardPass(self.logits(x[logits_of]), features)

    def logits(self, final: Array) -> Array:
        """What the head gives for normed rows [rows, hidden]: float32 [rows, vocab]."""
        return self.weights.linear(final, self._head)

    @property
    def _head(self) -> str:
        return "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"

    def _attention(self, layer: int, x: Array, parents: Array, depths: Array, cache: LatentCache) -> Array:
        config, weights, at = self.config, self.weights, f"model.layers.{layer}.self_attn"
        absorb_key, expand_value = self._absorbed_weights(layer)

        first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        compressed = weights.linear(x, f"{at}.{first}", f"{at}.kv_a_proj_with_mqa")
        queries, compressed = compressed[:, : -config.latent_dim], compressed[:, -config.latent_dim :]
        if config.q_lora_rank is not None:
            queries = rms_norm(queries, weights.vector(f"{at}.q_a_layernorm"), LATENT_EPS, weights.dtype)
            queries = weights.linear(queries, f"{at}.q_b_proj")
        queries = queries.reshape(len(x), config.num_attention_heads, config.qk_head_dim)
        norm, rows = weights.vector(f"{at}.kv_a_layernorm"), cache.rows[layer]
        plain, queries = mla_inputs(queries, compressed, norm, self._rope_table, cache.length, depths, rows)
        weights.heads(plain, absorb_key, out=queries[..., : config.kv_lora_rank])

        attend = tree_attention if weights.dtype == np.float32 else tree_attention_mma
        mixed = attend(queries, rows, cache.length, parents, depths, config.kv_lora_rank, self._scale)
        values = empty_beside(mixed, (*mixed.shape[:2], config.v_head_dim), weights.dtype)
        weights.heads(mixed, expand_value, out=values)
        return weights.linear(values.reshape(len(x), -1), f"{at}.o_proj")

    def _absorbed_weights(self, layer: int) -> tuple[Array | Tiles, Array | Tiles]:
        """``kv_b_proj`` head by head: the key half [kv_lora, nope] for queries, the value half [v, kv_lora]."""
        if layer not in self._absorbed:
            nope = self.config.qk_nope_head_dim
            weight = self.weights.matrix(f"model.layers.{layer}.self_attn.kv_b_proj")
            by_head = weight.reshape(self.config.num_attention_heads, -1, self.config.kv_lora_rank)
            halves = by_head[:, :nope].swapaxes(1, 2), by_head[:, nope:]
            self._absorbed[layer] = self.weights.stack(halves[0]), self.weights.stack(halves[1])
        return self._absorbed[layer]

    def _mlp(self, layer: int, x: Array) -> Array:
        config, at = self.config, f"model.layers.{layer}.mlp"
        if config.is_dense(layer):
            gate_up = self.weights.linear(x, f"{at}.gate_proj", f"{at}.up_proj")
            return self.weights.linear(swiglu(gate_up, self.weights.dtype), f"{at}.down_proj")
        bias = self.weights.vector(f"{at}.gate.e_score_correction_bias")
        if not runs_cuda(x):
            expert_ids, weights = moe_route(self.weights.linear(x, f"{at}.gate"), bias, config)
            shared = range(config.n_routed_experts, config.n_routed_experts + config.n_shared_experts)
            tiles_of = self.weights.expert_tiles(at, config)
            return moe_by_blocks(self.device.float32(x), expert_ids, weights, shared, tiles_of, self.weights.dtype)
        product = self.weights.linear(x, *self._beside_experts(at))
        expert_ids, weights, blocks, activations = routing(
            product, bias, config, self.weights.shared_behind(at, config), self.weights.dtype
        )
        beside = None if activations is None else self.weights.linear(activations, f"{at}.shared_experts.down_proj")
        return self.weights.moe(x, expert_ids, weights, at, config, beside, blocks)

    def _beside_experts(self, at: str) -> tuple[str, ...]:
        """Weights of one product: the router's, and those of shared experts that are not among the routed ones."""
        if not self.config.n_shared_experts or self.weights.shared_behind(at, self.config):
            return (f"{at}.gate",)
        return f"{at}.gate", f"{at}.shared_experts.gate_proj", f"{at}.shared_experts.up_proj"
