"""The shape of a drafter: read from, and written to, the ``config.json`` of z-lab's checkpoints."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdtree_nb.config.checks import (
    fields_of,
    mapping,
    require,
    require_all,
    require_at_most,
    require_eps_and_theta,
    require_settings,
    require_whole_numbers,
    rope_of,
    swiglu_shapes,
)

MAX_HEAD_DIM = 256
MAX_TRANSITION_RANK = 256
MAX_CANDIDATES = 256
"""The largest that the kernels take, as their sources say."""
_SETTINGS = {"hidden_act": "silu", "attention_bias": False}
"""All that this engine runs; ``config.json`` may leave them out."""


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (arXiv 2602.06036): Qwen3 layers over a block, the target's hidden states as their context.

    Field names are those of z-lab's checkpoints, whose ``config.json`` is a ``Qwen3Config`` with a ``dflash_config``.
    Embedding and head are the target's. A transition head of rank ``transition_rank`` (0: none) re-weighs each
    position's ``num_candidates`` best tokens by the one drafted before them; checkpoints of z-lab have none.

    Parameters
    ----------
    block_size : int
        Rows of a block, the last committed token first; it drafts ``block_size − 1`` tokens.
    mask_token_id : int
        Stands in the block for each token that is to be drafted.
    target_layer_ids : tuple of int
        Layers of the target, from 0, whose outputs the drafter reads.
    sliding_window : int or None
        Committed tokens that a block sees, the latest; None: all.

    Raises
    ------
    ValueError
        If a value is out of range or two disagree; the message names the field, its value and what was expected.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    sliding_window: int | None = None
    transition_rank: int = 0
    num_candidates: int = 32

    def __post_init__(self) -> None:
        require_whole_numbers(self, may_be_zero={"mask_token_id", "transition_rank"}, may_be_none={"sliding_window"})
        require_at_most(
            self,
            {"head_dim": MAX_HEAD_DIM, "transition_rank": MAX_TRANSITION_RANK, "num_candidates": MAX_CANDIDATES},
        )
        require_eps_and_theta(self)
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        heads = self.num_attention_heads
        divides = heads % self.num_key_value_heads == 0
        require(divides, "num_key_value_heads", self.num_key_value_heads, f"a divisor of num_attention_heads={heads}")
        require(2 <= self.block_size <= 64, "block_size", self.block_size, "2 to 64")
        require(
            self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"an id below vocab_size={self.vocab_size}",
        )
        require(
            self.num_candidates <= self.vocab_size,
            "num_candidates",
            self.num_candidates,
            f"at most vocab_size={self.vocab_size}",
        )
        layers = self.target_layer_ids
        whole = type(layers) is tuple and len(layers) and all(type(layer) is int and layer >= 0 for layer in layers)
        ascending = whole and list(layers) == sorted(set(layers))
        require(bool(ascending), "target_layer_ids", layers, "one layer or more, from 0, in ascending order")

    def __str__(self) -> str:
        reads = f"reads layers {', '.join(map(str, self.target_layer_ids))} of a target"
        size = f"{self.num_hidden_layers} layers, hidden {self.hidden_size}, vocabulary {self.vocab_size}"
        return f"drafter of {self.block_size - 1} tokens, {size}, {reads}"

    def mlp_projections(self, layer: int) -> dict[str, tuple[int, int]]:
        """Names and shapes [out, in] of a layer's gate, up and down projections."""
        return swiglu_shapes(f"layers.{layer}.mlp", self.hidden_size, self.intermediate_size)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight and its shape, [out, in] for projections; names as in the checkpoint, without ``.weight``."""
        hidden, head = self.hidden_size, self.head_dim
        query, key = self.num_attention_heads * head, self.num_key_value_heads * head
        shapes: dict[str, tuple[int, ...]] = {
            "fc": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm": (hidden,),
        }
        for layer in range(self.num_hidden_layers):
            at = f"layers.{layer}"
            shapes[f"{at}.input_layernorm"] = (hidden,)
            shapes |= {f"{at}.self_attn.{name}": (out, hidden) for name, out in (("q_proj", query), ("k_proj", key))}
            shapes |= {f"{at}.self_attn.v_proj": (key, hidden), f"{at}.self_attn.o_proj": (hidden, query)}
            shapes |= {f"{at}.self_attn.q_norm": (head,), f"{at}.self_attn.k_norm": (head,)}
            shapes[f"{at}.post_attention_layernorm"] = (hidden,)
            shapes |= self.mlp_projections(layer)
        shapes["norm"] = (hidden,)
        if self.transition_rank:
            table = (self.vocab_size, self.transition_rank)
            shapes |= {"transition.parent_table": table, "transition.child_table": table}
            shapes["transition.gate"] = (self.transition_rank, hidden)
        return shapes

    @property
    def fewest_tensors(self) -> int:
        """Fewer tensors than any bundle of this config holds; known before their names are listed."""
        return 11 * self.num_hidden_layers

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DrafterConfig":
        """Read a drafter's ``config.json``, already parsed.

        Raises
        ------
        ValueError
            For a missing key, or a setting that would change the result if it were ignored.
        """
        require_settings(hf, _SETTINGS)
        theta, kind, _ = rope_of(hf)
        require(kind == "default", "rope_scaling.type", kind, "none")
        values = fields_of(cls, hf, mapping(hf, "dflash_config"))
        values["rope_theta"] = theta
        windowed = hf.get("use_sliding_window", False)
        require(type(windowed) is bool, "use_sliding_window", windowed, "true or false")
        if not windowed:
            values["sliding_window"] = None
        elif hf.get("layer_types") is None:  # else transformers takes no notice of it
            first = hf.get("max_window_layers", 0)
            require(first == 0, "max_window_layers", first, "0: a window in every layer")
        attention = "full_attention" if values.get("sliding_window") is None else "sliding_attention"
        kinds = hf.get("layer_types")
        alike = kinds is None or (isinstance(kinds, list | tuple) and all(kind == attention for kind in kinds))
        require(alike, "layer_types", kinds, f"{attention!r} in every layer")
        if "target_layer_ids" in values:
            ids = values["target_layer_ids"]
            require(isinstance(ids, list | tuple), "target_layer_ids", ids, "a list of layers")
            values["target_layer_ids"] = tuple(ids)
        require_all(cls, values)
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this drafter, as :meth:`from_hf` reads it."""
        hf = dataclasses.asdict(self)
        inner = ("mask_token_id", "target_layer_ids", "transition_rank", "num_candidates")
        dflash = {name: hf.pop(name) for name in inner}
        dflash["target_layer_ids"] = list(dflash["target_layer_ids"])
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **_SETTINGS,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,  # the first that has a window
            "dflash_config": dflash,
            **hf,
        }
