"""The numbers of kdt16m: its architecture, and how it is trained."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """A DeepSeek-V3 style model, small. Names as in Hugging Face's DeepseekV3Config."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 1024
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.0
    first_k_dense_replace: int = 1
    q_lora_rank: int = 128
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. A batch is `batch_size` random crops of context + 1 tokens."""

    steps: int = 9000
    batch_size: int = 128
    learning_rate: float = 3e-3  # after the warm-up; then a cosine down to 0
    warmup_steps: int = 300
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # on matrices only
    dropout: float = 0.1  # on the embedding and on each sublayer's output
    gradient_clip: float = 1.0
    balance_step: float = 1e-3  # of the router's bias, against each expert's load
    balance_until: float = 0.9  # share of the steps
    rounded_from: float = 0.8  # share of the steps after which the weights are used as they will ship
    evaluate_every: int = 1000
    seed: int = 16
    # How often a token of a source is drawn, relative to the others. Sources that only help a domain count less.
    source_weights: dict[str, float] = field(
        default_factory=lambda: {
            "cpython": 1.0, "cpython-tests": 0.4,
            "python-doc": 1.3, "sqlalchemy-doc": 0.8, "more-doc": 1.0, "systems-doc": 0.7, "pandas-doc": 0.6,
            "shakespeare": 0.9, "milton": 0.5,
            "sympy": 0.8, "sympy-tests": 0.3,
            "kjv": 1.0,
        }
    )  # fmt: skip


DRAFTER_TAPS = (1, 3, 5, 7)  # layers whose output the drafter reads
