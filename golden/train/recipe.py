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
    initial_std: float = 0.02  # of matrices; √(2 · layers) times less where they add to the residual stream
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


@dataclass(frozen=True)
class DrafterArchitecture:
    """A DFlash drafter (arXiv 2602.06036) with a transition head. Names as in z-lab's drafter checkpoints."""

    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    block_size: int = 8  # the last committed token, and the seven after it
    mask_token_id: int = 0  # <|endoftext|>: no text goes on after it, so a block has no other use for it
    target_layer_ids: tuple[int, ...] = DRAFTER_TAPS
    sliding_window: int = 256  # committed tokens that a block sees
    transition_rank: int = 64
    num_candidates: int = 32  # of each position; the transition head knows no others


@dataclass(frozen=True)
class DrafterRecipe:
    """How the drafter is trained: on text that the shipped target writes after prompts from its training corpus."""

    texts: int = 327_680
    text_length: int = 256
    prompt_lengths: tuple[int, ...] = (32, 64, 96, 160)  # of real text, in equal parts; the target writes the rest
    sampled_share: float = 0.5  # of the texts, at this temperature; the others are greedy
    sampling_temperature: float = 0.7
    generation_batch: int = 16_384
    seconds: float = 300.0  # of training; the cosine runs over time
    batch_size: int = 96  # texts
    anchors: int = 48  # blocks drafted in each text
    anchor_span: int = 160  # new tokens of a text, its first ones, that blocks begin in
    initial_std: float = 0.02  # of the drafter's matrices
    parent_std: float = 0.5  # of the transition heads' tables, at first
    child_std: float = 0.02
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    gradient_clip: float = 1.0
    decay: float = 4.0  # γ: position k of a block weighs exp(−(k − 1) / γ)
    transition_from: float = 0.4  # share of the time after which the transition heads are trained
    rounded_from: float = 0.8  # as of the target
    seed: int = 61
    # Prompts come from each domain in equal parts, and within it mostly from the source that prompts are held out of.
    source_shares: dict[str, float] = field(
        default_factory=lambda: {
            "cpython": 0.16, "cpython-tests": 0.04,
            "python-doc": 0.14, "sqlalchemy-doc": 0.01, "more-doc": 0.02, "systems-doc": 0.02, "pandas-doc": 0.01,
            "shakespeare": 0.18, "milton": 0.02,
            "sympy": 0.17, "sympy-tests": 0.03,
            "kjv": 0.2,
        }
    )  # fmt: skip
