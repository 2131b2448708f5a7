"""Make the golden files: the tiny bundles, and what the NumPy specification says of every bundle.

    python golden/make_golden.py

The tiny model is random and has every feature on: a dense first layer, grouped routing with a bias, a shared
expert, low-rank queries and YaRN. It is written twice, in FP32 and in INT4. Tokens and logits come from
``kdtree_nb.reference`` alone; the engine takes no part.
"""

import json
from pathlib import Path

import numpy as np

from kdtree_nb.bundle import Bundle, write_bundle
from kdtree_nb.config import ModelConfig, YarnScaling
from kdtree_nb.golden import SUFFIX, load_cases, make_cases, save_cases
from kdtree_nb.quantization import quantize_weights

GOLDEN = Path(__file__).parent
TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    first_k_dense_replace=1,
    max_position_embeddings=256,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    rope_scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.8),
    eos_token_ids=(511,),
)


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Projections of standard deviation 1/√in, norms around 1, router biases around 0."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 2:
            weights[name] = values / np.float32(np.sqrt(shape[1]))
        else:
            weights[name] = (0.0 if name.endswith("bias") else 1.0) + np.float32(0.1) * values
    weights["lm_head"] *= 2  # wider logits: no token hangs on the last bits
    return weights


def make_tiny(seed: int = 20260) -> None:
    """Write golden/tiny/: two bundles of one random model."""
    folder = GOLDEN / "tiny"
    folder.mkdir(exist_ok=True)
    weights = random_weights(TINY, seed)
    dequantized, packed = quantize_weights(weights, TINY)
    random = np.random.default_rng(seed + 1)
    prompts = [random.integers(0, TINY.vocab_size - 1, length) for length in (5, 33, 90) * 20]
    chosen: list[np.ndarray] = []
    for name, bundled, spec in (("tiny-fp32", weights, weights), ("tiny-int4", packed, dequantized)):
        write_bundle(folder / f"{name}.kdtr", TINY, bundled)
        cases = make_cases(spec, TINY, chosen or prompts, 3)
        chosen = chosen or [case.prompt for case in cases]
        save_cases(folder / f"{name}{SUFFIX}", cases)
    fp32, int4 = (load_cases(folder / f"tiny-{kind}{SUFFIX}") for kind in ("fp32", "int4"))
    if any(np.array_equal(a.tokens, b.tokens) for a, b in zip(fp32, int4, strict=True)):
        raise SystemExit("FP32 and INT4 give the same tokens: nothing shows that quantisation is there")


def make_trained() -> None:
    """Write what the specification says of the trained model: one held-out prompt of each domain."""
    bundle = Bundle.open(GOLDEN / "kdt16m" / "kdt16m-int4.kdtr")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(GOLDEN / "kdt16m" / "tokenizer.json"))
    weights, cases = bundle.weights(), []
    prompts = json.loads((GOLDEN / "kdt16m" / "prompts.json").read_text(encoding="utf-8"))
    for domain in dict.fromkeys(prompt["domain"] for prompt in prompts):
        own = [np.array(tokenizer.encode(prompt["text"]).ids) for prompt in prompts if prompt["domain"] == domain]
        cases += make_cases(weights, bundle.config, own, 1)
    save_cases(GOLDEN / "kdt16m" / f"kdt16m-int4{SUFFIX}", cases)


if __name__ == "__main__":
    make_tiny()
    make_trained()
