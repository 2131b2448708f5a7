"""The trained drafter: DFlash's block over a cache of keys and values, and the head that conditions its tree.

Its arithmetic is its target's: what enters a product, and what is cached, has the dtype of the target's weights.
Residuals, norms, queries, softmax, the transition head's tables and log-probabilities are float32.
"""

import numpy as np

from kdtree_nb.bundle import Bundle
from kdtree_nb.config import DrafterConfig
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import Drafter, Proposal
from kdtree_nb.engine.model import Model
from kdtree_nb.engine.weights import Weights
from kdtree_nb.kernels.block_attention import block_attention
from kdtree_nb.kernels.block_write import block_write
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.rms_norm import add_norm, rms_norm
from kdtree_nb.kernels.swiglu import swiglu
from kdtree_nb.kernels.top_k import top_k
from kdtree_nb.kernels.transition import condition
from kdtree_nb.reference.rope import Rope, rope_table


class DFlash(Drafter):
    """A drafter's weights beside its target's; :meth:`start` begins a text.

    Raises
    ------
    ValueError
        If the bundle holds no drafter, or one for another target, or in bfloat16 a weight that its kernels do not take.
    """

    greedy_gain = 1.15
    """Of 20 texts from outside kdt16m's training and its bench, 1.17 for code and 1.10 for prose; its probabilities are
    the target's, more or less, and greedy decoding takes the best. Samples at temperature 0.7 have 0.9."""

    def __init__(self, bundle: Bundle, target: Model, device: Device, capacity: int) -> None:
        config, of = bundle.config, target.config
        if not isinstance(config, DrafterConfig):
            raise ValueError(f"{bundle.path} holds a model, expected a drafter")
        for name, found, expected in (
            ("vocab_size", config.vocab_size, of.vocab_size),
            ("hidden_size", config.hidden_size, of.hidden_size),
        ):
            if found != expected:
                raise ValueError(f"{bundle.path}: the drafter has {name}={found}, its target {expected}")
        if config.target_layer_ids[-1] >= of.num_hidden_layers:
            raise ValueError(
                f"{bundle.path}: the drafter reads layers {list(config.target_layer_ids)}, "
                f"its target has {of.num_hidden_layers}"
            )
        self.bundle = bundle
        self.config = config
        self.taps = config.target_layer_ids
        self.weights = Weights(bundle, device, target.weights.dtype)
        self.weights.check(self._products())
        self.target = target
        self.device = device
        frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        table = rope_table(Rope(frequencies, 1.0), np.arange(capacity + config.block_size))
        self.rope_table = device.put(table[0]), device.put(table[1])

    def __repr__(self) -> str:
        return f"DFlash({self.config!r}, {self.weights.kinds()}, dtype={self.weights.dtype.name})"

    def norms(self) -> tuple[Array, Array]:
        """Of all layers' queries and keys: float32 [layers, head_dim] each."""
        at = [f"layers.{layer}.self_attn" for layer in range(self.config.num_hidden_layers)]
        query, key = (self.weights.vector(*(f"{layer}.{name}_norm" for layer in at)) for name in "qk")
        return query.reshape(len(at), -1), key.reshape(len(at), -1)

    def projections(self, layer: int, *which: str) -> list[str]:
        """Names of a layer's products of queries, keys and values: of those among ``q``, ``k`` and ``v``."""
        return [f"layers.{layer}.self_attn.{name}_proj" for name in which]

    def _products(self) -> list[str]:
        """Weights that multiply."""
        not_these = "transition.parent_table", "transition.child_table"
        return [
            name for name, shape in self.config.weight_shapes().items() if len(shape) == 2 and name not in not_these
        ]

    def start(self, cache: LatentCache) -> "Drafter":
        """A drafter of one text, whose committed tokens the target keeps in ``cache``."""
        return _Text(self, cache)


class _Text(Drafter):
    """Keys and values of the committed tokens in rows 0 … length − 1; behind them those of the block."""

    on_device = True

    def __init__(self, drafter: DFlash, cache: LatentCache) -> None:
        self._of, self._config, self._device = drafter, drafter.config, drafter.device
        self.taps = drafter.taps
        self._length = cache.length  # the target's own count, which moves when it commits
        config = self._config
        rows = cache.rows.shape[1] + config.block_size
        layers = range(config.num_hidden_layers)
        shape = (len(layers), rows, config.num_key_value_heads, config.head_dim)
        self._keys, self._values = (self._device.zeros(shape, drafter.weights.dtype) for _ in range(2))
        self._context = [name for layer in layers for name in drafter.projections(layer, "k", "v")]

    def observe(self, features: Array) -> None:
        """Write keys and values of tokens that are about to be committed; features [tokens, taps, hidden]."""
        config, weights = self._config, self._of.weights
        compressed = weights.linear(features.reshape(len(features), -1), "fc")
        context = rms_norm(compressed, weights.vector("hidden_norm"), config.rms_norm_eps, weights.dtype)
        self._write(slice(None), weights.linear(context, *self._context))

    def propose(self, tokens: np.ndarray) -> Proposal:
        """As :meth:`Drafter.propose`."""
        return self.propose_after(self._device.put(np.array(tokens[-1:], np.int32)))

    def propose_after(self, root: Array) -> Proposal:
        """As :meth:`Drafter.propose_after`: block_size − 1 tokens, each ranked anew for every token before it."""
        rows = self.rows(root)
        marginals = self.marginals(rows)
        return self.conditioned(marginals, rows) if self._config.transition_rank else marginals

    def marginals(self, rows: Array) -> Proposal:
        """The best candidates of each of :meth:`rows`, whatever came before."""
        return Proposal(*top_k(self._of.target.logits(rows), self._config.num_candidates))

    def conditioned(self, marginals: Proposal, rows: Array) -> Proposal:
        """The same candidates as the transition head ranks them for each token before."""
        (log_probs, token_ids, _), weights = marginals, self._of.weights
        gates = weights.linear(rows, "transition.gate")
        tables = weights.vector("transition.parent_table"), weights.vector("transition.child_table")
        conditionals, children = condition(log_probs, token_ids, gates, *tables)
        return Proposal(conditionals, token_ids, children)

    def rows(self, root: Array) -> Array:
        """What the target's head reads, one row a drafted token: the weights' dtype [block_size − 1, hidden]."""
        config, of, weights = self._config, self._of, self._of.weights
        rounded = config.rms_norm_eps, weights.dtype
        after = [*(f"layers.{layer}.input_layernorm" for layer in range(1, config.num_hidden_layers)), "norm"]
        x = of.target.weights.embed(root, config.block_size, config.mask_token_id)
        normed = rms_norm(x, weights.vector("layers.0.input_layernorm"), *rounded)
        for layer in range(config.num_hidden_layers):
            at = f"layers.{layer}"
            projected = weights.linear(normed, *of.projections(layer, "q", "k", "v"))
            queries = self._write(slice(layer, layer + 1), projected)[:, 0]
            cached = self._keys[layer], self._values[layer], self._length
            mixed = block_attention(queries, *cached, config.sliding_window, weights.dtype)
            delta = weights.linear(mixed.reshape(len(x), -1), f"{at}.self_attn.o_proj")
            x, normed = add_norm(x, delta, weights.vector(f"{at}.post_attention_layernorm"), *rounded)
            gate_up = weights.linear(normed, f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
            delta = weights.linear(swiglu(gate_up, weights.dtype), f"{at}.mlp.down_proj")
            x, normed = add_norm(x, delta, weights.vector(after[layer]), *rounded)
        return normed[1:]

    def _write(self, layers: slice, projected: Array) -> Array:
        """Cache keys and values of tokens from position ``length`` on; their queries, where they have some."""
        query_norm, key_norm = self._of.norms()
        return block_write(
            projected,
            (query_norm[layers], key_norm[layers]),
            self._config.rms_norm_eps,
            self._of.rope_table,
            self._length,
            self._keys[layers],
            self._values[layers],
        )
