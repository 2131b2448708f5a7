"""The shape of a model: read from, and written to, a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdtree_nb.config.checks import (
    fields_of,
    is_number,
    require,
    require_all,
    require_at_most,
    require_eps_and_theta,
    require_settings,
    require_whole_numbers,
    rope_of,
    swiglu_shapes,
)

MAX_EXPERTS = 1024
MAX_KV_LORA = 1024
"""The largest that the kernels take, as their sources say."""
ARCHITECTURES = ("deepseek_v3", "kimi_k2")
_LEFT_OUT = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
"""What transformers takes for a key that ``config.json`` lacks, where it is not this module's default."""
_SETTINGS = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
"""All that this engine runs; ``config.json`` may leave them out."""


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
            require(
                is_number(value) and 1e-12 <= value <= 1e12, f"rope_scaling.{name}", value, "a number, 1e-12 to 1e12"
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, f"rope_scaling.{name}", value, "a finite number from 0")


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
        require_whole_numbers(
            self, may_be_zero={"n_shared_experts", "first_k_dense_replace"}, may_be_none={"q_lora_rank"}
        )
        require_at_most(self, {"n_routed_experts": MAX_EXPERTS, "kv_lora_rank": MAX_KV_LORA})
        require_eps_and_theta(self)
        factor = self.routed_scaling_factor
        require(is_number(factor) and factor > 0, "routed_scaling_factor", factor, "a finite number above 0")
        for name in ("norm_topk_prob", "tie_word_embeddings"):
            require(type(getattr(self, name)) is bool, name, getattr(self, name), "true or false")
        require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "an even number")
        require(
            self.n_routed_experts % self.n_group == 0,
            "n_group",
            self.n_group,
            f"a divisor of n_routed_experts={self.n_routed_experts}",
        )
        require(self.topk_group <= self.n_group, "topk_group", self.topk_group, f"at most n_group={self.n_group}")
        eligible = self.topk_group * (self.n_routed_experts // self.n_group)
        require(
            self.num_experts_per_tok <= eligible,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"at most the {eligible} experts of {self.topk_group} groups",
        )
        for token in self.eos_token_ids:
            require(
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
            return swiglu_shapes(prefix, self.hidden_size, self.intermediate_size)
        shapes: dict[str, tuple[int, int]] = {}
        for expert in range(self.n_routed_experts):
            shapes |= swiglu_shapes(f"{prefix}.experts.{expert}", self.hidden_size, self.moe_intermediate_size)
        if self.n_shared_experts:
            width = self.n_shared_experts * self.moe_intermediate_size
            shapes |= swiglu_shapes(f"{prefix}.shared_experts", self.hidden_size, width)
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
        require(model_type in ARCHITECTURES, "model_type", model_type, f"one of {', '.join(ARCHITECTURES)}")
        require_settings(hf, _SETTINGS)
        values: dict[str, Any] = _LEFT_OUT | fields_of(cls, hf)
        theta, kind, scaling = rope_of(hf)
        values["rope_theta"] = theta
        values["rope_scaling"] = _yarn(kind, scaling)
        eos = hf.get("eos_token_id")
        values["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        require_all(cls, values)
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
            **{name: _SETTINGS[name] for name in ("hidden_act", "scoring_func", "topk_method", "attention_bias")},
            "num_key_value_heads": self.num_attention_heads,  # transformers would assume 128
            **hf,
        }


def _yarn(kind: str, scaling: Mapping[str, Any]) -> YarnScaling | None:
    if kind == "default":
        return None
    require(kind == "yarn", "rope_scaling.type", kind, "'yarn' or none")
    for name, expected in {"attention_factor": None, "truncate": True}.items():
        require(scaling.get(name, expected) == expected, f"rope_scaling.{name}", scaling.get(name), repr(expected))
    known = {field.name for field in dataclasses.fields(YarnScaling)}
    values = {name: value for name, value in scaling.items() if name in known and value is not None}
    missing = {"factor", "original_max_position_embeddings"} - values.keys()
    if missing:
        raise ValueError(f"config: rope_scaling lacks {', '.join(sorted(missing))}")
    return YarnScaling(**values)
