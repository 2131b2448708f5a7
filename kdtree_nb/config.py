"""The shapes of a model and of its drafter: read from, and written to, a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("deepseek_v3", "kimi_k2")
_LEFT_OUT = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
"""What transformers takes for a key that ``config.json`` lacks, where it is not this module's default."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's two extra factors.

    ``mscale`` and ``mscale_all_dim`` are 0 where the checkpoint leaves them out.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            _require(
                _is_number(value) and 1e-12 <= value <= 1e12, f"rope_scaling.{name}", value, "a number, 1e-12 to 1e12"
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            _require(_is_number(value) and value >= 0, f"rope_scaling.{name}", value, "a finite number from 0")


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3 style model: MLA attention, leading dense layers, then mixture-of-experts layers.

    Field names are those of Hugging Face's ``DeepseekV3Config``; sizes are in elements. A plain
    ``q_proj`` replaces the low-rank pair where ``q_lora_rank`` is None.

    Raises
    ------
    ValueError
        If a value is out of range or two disagree; the message names the field, its value and
        what was expected.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    max_position_embeddings: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        optional = {"q_lora_rank"}
        may_be_zero = {"n_shared_experts", "first_k_dense_replace"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", int) or (field.name in optional and value is not None):
                lowest = 0 if field.name in may_be_zero else 1
                _require(
                    type(value) is int and lowest <= value < 2**31, field.name, value, f"a whole number from {lowest}"
                )
        for name in ("routed_scaling_factor", "rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, name, value, "a finite number above 0")
        _require(self.rope_theta > 1, "rope_theta", self.rope_theta, "a number above 1")
        _require(
            self.rms_norm_eps >= 1e-30, "rms_norm_eps", self.rms_norm_eps, "a number that float32 can add, from 1e-30"
        )
        for name in ("norm_topk_prob", "tie_word_embeddings"):
            _require(type(getattr(self, name)) is bool, name, getattr(self, name), "true or false")
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "an even number")
        _require(
            self.n_routed_experts % self.n_group == 0,
            "n_group",
            self.n_group,
            f"a divisor of n_routed_experts={self.n_routed_experts}",
        )
        _require(self.topk_group <= self.n_group, "topk_group", self.topk_group, f"at most n_group={self.n_group}")
        eligible = self.topk_group * (self.n_routed_experts // self.n_group)
        _require(
            self.num_experts_per_tok <= eligible,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"at most the {eligible} experts of {self.topk_group} groups",
        )
        for token in self.eos_token_ids:
            _require(
                type(token) is int and 0 <= token < self.vocab_size,
                "eos_token_ids",
                token,
                f"an id below vocab_size={self.vocab_size}",
            )

    def __str__(self) -> str:
        experts = f"{self.n_routed_experts} experts (top {self.num_experts_per_tok})"
        return f"{self.num_hidden_layers} layers, hidden {self.hidden_size}, {experts}, vocabulary {self.vocab_size}"

    @property
    def qk_head_dim(self) -> int:
        """Elements of one head's query: the part without position, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements the latent cache holds for a token and layer: kv_lora + rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        """True for the leading layers, which have one dense MLP and no experts."""
        return layer < self.first_k_dense_replace

    def mlp_projections(self, layer: int) -> dict[str, tuple[int, int]]:
        """Names and shapes [out, in] of a layer's gate, up and down projections, experts included."""
        prefix = f"model.layers.{layer}.mlp"
        if self.is_dense(layer):
            return _swiglu(prefix, self.hidden_size, self.intermediate_size)
        shapes: dict[str, tuple[int, int]] = {}
        for expert in range(self.n_routed_experts):
            shapes |= _swiglu(f"{prefix}.experts.{expert}", self.hidden_size, self.moe_intermediate_size)
        if self.n_shared_experts:
            width = self.n_shared_experts * self.moe_intermediate_size
            shapes |= _swiglu(f"{prefix}.shared_experts", self.hidden_size, width)
        return shapes

    @property
    def fewest_tensors(self) -> int:
        """Fewer tensors than any bundle of this config holds; known before their names, which may be billions."""
        sparse_layers = max(0, self.num_hidden_layers - self.first_k_dense_replace)
        return 5 * self.num_hidden_layers + 3 * self.n_routed_experts * sparse_layers

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model and its shape, [out, in] for projections, in the order of the forward pass.

        Names are those of a Hugging Face checkpoint without the trailing ``.weight``.
        """
        hidden, heads = self.hidden_size, self.num_attention_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            at = f"model.layers.{layer}"
            shapes[f"{at}.input_layernorm"] = (hidden,)
            if self.q_lora_rank is None:
                shapes[f"{at}.self_attn.q_proj"] = (heads * self.qk_head_dim, hidden)
            else:
                shapes[f"{at}.self_attn.q_a_proj"] = (self.q_lora_rank, hidden)
                shapes[f"{at}.self_attn.q_a_layernorm"] = (self.q_lora_rank,)
                shapes[f"{at}.self_attn.q_b_proj"] = (heads * self.qk_head_dim, self.q_lora_rank)
            shapes[f"{at}.self_attn.kv_a_proj_with_mqa"] = (self.latent_dim, hidden)
            shapes[f"{at}.self_attn.kv_a_layernorm"] = (self.kv_lora_rank,)
            shapes[f"{at}.self_attn.kv_b_proj"] = (
                heads * (self.qk_nope_head_dim + self.v_head_dim),
                self.kv_lora_rank,
            )
            shapes[f"{at}.self_attn.o_proj"] = (hidden, heads * self.v_head_dim)
            shapes[f"{at}.post_attention_layernorm"] = (hidden,)
            if not self.is_dense(layer):
                shapes[f"{at}.mlp.gate"] = (self.n_routed_experts, hidden)
                shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (self.n_routed_experts,)
            shapes |= self.mlp_projections(layer)
        shapes["model.norm"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        return shapes

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face ``config.json``, already parsed.

        Raises
        ------
        ValueError
            For an architecture this engine does not run, a missing key, or a setting that would
            change the result if it were ignored.
        """
        model_type = hf.get("model_type")
        _require(model_type in ARCHITECTURES, "model_type", model_type, f"one of {', '.join(ARCHITECTURES)}")
        for name, expected in {
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            "rope_interleave": True,
            "moe_layer_freq": 1,
        }.items():
            _require(hf.get(name, expected) == expected, name, hf.get(name), repr(expected))
        rope = _mapping(hf, "rope_parameters")  # transformers 5 moved theta and scaling in here
        values: dict[str, Any] = dict(_LEFT_OUT)
        for field in dataclasses.fields(cls):
            if field.name in hf:
                values[field.name] = hf[field.name]
        theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
        values["rope_theta"] = float(theta) if _is_number(theta) else theta
        values["rope_scaling"] = _yarn(_mapping(hf, "rope_scaling") or rope)
        eos = hf.get("eos_token_id")
        values["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        _require_all(cls, values)
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model, as :meth:`from_hf` and transformers read it."""
        hf = dataclasses.asdict(self)
        eos = hf.pop("eos_token_ids")
        scaling = hf.pop("rope_scaling")
        hf["eos_token_id"] = list(eos) if len(eos) != 1 else eos[0]
        hf["rope_scaling"] = None if scaling is None else {"type": "yarn", **scaling}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            "num_key_value_heads": self.num_attention_heads,  # transformers would assume 128
            **hf,
        }


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
        may_be_zero = {"mask_token_id", "transition_rank"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", int) or (field.name == "sliding_window" and value is not None):
                lowest = 0 if field.name in may_be_zero else 1
                _require(
                    type(value) is int and lowest <= value < 2**31, field.name, value, f"a whole number from {lowest}"
                )
        eps, theta = self.rms_norm_eps, self.rope_theta
        _require(_is_number(eps) and eps >= 1e-30, "rms_norm_eps", eps, "a number that float32 can add, from 1e-30")
        _require(_is_number(theta) and theta > 1, "rope_theta", theta, "a finite number above 1")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        heads = self.num_attention_heads
        divides = heads % self.num_key_value_heads == 0
        _require(divides, "num_key_value_heads", self.num_key_value_heads, f"a divisor of num_attention_heads={heads}")
        _require(2 <= self.block_size <= 64, "block_size", self.block_size, "2 to 64")
        _require(
            self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"an id below vocab_size={self.vocab_size}",
        )
        _require(
            self.num_candidates <= min(256, self.vocab_size),
            "num_candidates",
            self.num_candidates,
            f"at most 256 and vocab_size={self.vocab_size}",
        )
        layers = self.target_layer_ids
        whole = type(layers) is tuple and len(layers) and all(type(layer) is int and layer >= 0 for layer in layers)
        ascending = whole and list(layers) == sorted(set(layers))
        _require(bool(ascending), "target_layer_ids", layers, "one layer or more, from 0, in ascending order")

    def __str__(self) -> str:
        reads = f"reads layers {', '.join(map(str, self.target_layer_ids))} of a target"
        size = f"{self.num_hidden_layers} layers, hidden {self.hidden_size}, vocabulary {self.vocab_size}"
        return f"drafter of {self.block_size - 1} tokens, {size}, {reads}"

    def mlp_projections(self, layer: int) -> dict[str, tuple[int, int]]:
        """Names and shapes [out, in] of a layer's gate, up and down projections."""
        return _swiglu(f"layers.{layer}.mlp", self.hidden_size, self.intermediate_size)

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
        dflash, rope = _mapping(hf, "dflash_config"), _mapping(hf, "rope_parameters")
        for name, expected in {"hidden_act": "silu", "attention_bias": False}.items():
            _require(hf.get(name, expected) == expected, name, hf.get(name), repr(expected))
        scaling = _mapping(hf, "rope_scaling") or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        _require(kind == "default", "rope_scaling.type", kind, "none")
        values = {
            field.name: source[field.name]
            for source in (hf, dflash)
            for field in dataclasses.fields(cls)
            if field.name in source
        }
        windowed = hf.get("use_sliding_window", False)
        _require(type(windowed) is bool, "use_sliding_window", windowed, "true or false")
        if not windowed:
            values["sliding_window"] = None
        elif hf.get("layer_types") is None:  # else transformers takes no notice of it
            first = hf.get("max_window_layers", 0)
            _require(first == 0, "max_window_layers", first, "0: a window in every layer")
        attention = "full_attention" if values.get("sliding_window") is None else "sliding_attention"
        kinds = hf.get("layer_types")
        alike = kinds is None or (isinstance(kinds, list | tuple) and all(kind == attention for kind in kinds))
        _require(alike, "layer_types", kinds, f"{attention!r} in every layer")
        theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
        values["rope_theta"] = float(theta) if _is_number(theta) else theta
        if "target_layer_ids" in values:
            ids = values["target_layer_ids"]
            _require(isinstance(ids, list | tuple), "target_layer_ids", ids, "a list of layers")
            values["target_layer_ids"] = tuple(ids)
        _require_all(cls, values)
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
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,  # the first that has a window
            "dflash_config": dflash,
            **hf,
        }


Config = ModelConfig | DrafterConfig
"""Of what a bundle can hold."""


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """A model's or a drafter's config: a drafter's has a ``dflash_config``.

    Raises
    ------
    ValueError
        As ``from_hf`` of the two classes.
    """
    return DrafterConfig.from_hf(hf) if "dflash_config" in hf else ModelConfig.from_hf(hf)


def _swiglu(prefix: str, hidden_size: int, width: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}.gate_proj": (width, hidden_size),
        f"{prefix}.up_proj": (width, hidden_size),
        f"{prefix}.down_proj": (hidden_size, width),
    }


def _require_all(cls: type, values: Mapping[str, Any]) -> None:
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ValueError(f"config: missing {', '.join(missing)}")


def _yarn(scaling: Mapping[str, Any]) -> YarnScaling | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    _require(kind == "yarn", "rope_scaling.type", kind, "'yarn' or none")
    for name, expected in {"attention_factor": None, "truncate": True}.items():
        _require(scaling.get(name, expected) == expected, f"rope_scaling.{name}", scaling.get(name), repr(expected))
    known = {field.name for field in dataclasses.fields(YarnScaling)}
    values = {name: value for name, value in scaling.items() if name in known and value is not None}
    missing = {"factor", "original_max_position_embeddings"} - values.keys()
    if missing:
        raise ValueError(f"config: rope_scaling lacks {', '.join(sorted(missing))}")
    return YarnScaling(**values)


def _mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = hf.get(name) or {}
    _require(isinstance(value, Mapping), name, value, "an object or null")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**63


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"config: {name}={value!r}, expected {expected}")
