"""The shape of a model: read from, and written to, a Hugging Face ``config.json``."""

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
            return self._swiglu(prefix, self.intermediate_size)
        shapes: dict[str, tuple[int, int]] = {}
        for expert in range(self.n_routed_experts):
            shapes |= self._swiglu(f"{prefix}.experts.{expert}", self.moe_intermediate_size)
        if self.n_shared_experts:
            shapes |= self._swiglu(f"{prefix}.shared_experts", self.n_shared_experts * self.moe_intermediate_size)
        return shapes

    def _swiglu(self, prefix: str, width: int) -> dict[str, tuple[int, int]]:
        return {
            f"{prefix}.gate_proj": (width, self.hidden_size),
            f"{prefix}.up_proj": (width, self.hidden_size),
            f"{prefix}.down_proj": (self.hidden_size, width),
        }

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
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ValueError(f"config: missing {', '.join(missing)}")
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
