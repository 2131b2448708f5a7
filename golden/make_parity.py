"""Tiny random DeepSeek-V3 models with the logits that Hugging Face transformers gives for them.

    pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6 safetensors ml_dtypes
    python -m golden.make_parity

writes ``fixtures/parity/NAME.safetensors`` for each of ``MODELS``, on one machine with the same bytes every time. A
file holds

- every weight under its checkpoint name without ``.weight``: bfloat16, the router float32, as in checkpoints;
- ``ids.N`` int32 [tokens] and ``logits.N`` float32 [tokens, vocab] of each prompt N, all computed in float32;
  prompt 2 ends with 16 tokens that transformers' own greedy ``generate`` chose;
- ``hidden`` float32 [layers, tokens, hidden]: the embedding and the output of every layer but the last, of prompt 1;
- metadata ``parity``: JSON with ``config``, which is what transformers itself writes as config.json, seed and versions.

A model reaches transformers as a checkpoint folder, so the reading of names, layouts and settings is transformers' own.
Only :func:`load` runs where torch is missing.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import save_file

from kdtree_nb.config import ModelConfig

FOLDER = Path(__file__).parent / "fixtures" / "parity"
PROMPT_LENGTHS = (2, 9, 33, 96)
HIDDEN_PROMPT = 1
GREEDY_PROMPT, GREEDY_TOKENS = 2, 16
MARGIN = 1e-3  # between a row's two highest logits: ten times what the tests tolerate, so no argmax is a coin toss

COMMON: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
ONE_DENSE = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
THREE_DENSE = {"num_hidden_layers": 4, "first_k_dense_replace": 3}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
FOUR_GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 12, "num_experts_per_tok": 4}


def yarn(factor: float, mscale: float, mscale_all_dim: float, theta: float = 10000.0, **betas: float) -> dict[str, Any]:
    """YaRN over 32 positions, so that prompts of 96 tokens go far beyond them."""
    scaling = {"factor": factor, "original_max_position_embeddings": 32, "mscale": mscale, **betas}
    scaling |= {"rope_type": "yarn", "rope_theta": theta, "mscale_all_dim": mscale_all_dim}
    return {"rope_parameters": scaling, "max_position_embeddings": int(32 * factor)}


# q_lora, YaRN, expert groups and dense layers: any three of them occur in all eight combinations.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {**ONE_DENSE, **ONE_GROUP, "num_hidden_layers": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.446},
    "groups": {**THREE_DENSE, **FOUR_GROUPS, "tie_word_embeddings": True, "routed_scaling_factor": 1.5},
    "yarn": {**THREE_DENSE, **ONE_GROUP, **yarn(64.0, 0.707, 0.707), "v_head_dim": 24},
    "yarn_groups": {**ONE_DENSE, **FOUR_GROUPS, **yarn(16.0, 1.0, 0.5), "norm_topk_prob": False},
    # An eps that would show in the latents' norms, where transformers has 1e-6 whatever the config says.
    "q_lora": {**THREE_DENSE, **ONE_GROUP, "q_lora_rank": 24, "rms_norm_eps": 0.05},
    "q_lora_groups": {**ONE_DENSE, **FOUR_GROUPS, "q_lora_rank": 24, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5},
    "q_lora_yarn": {
        **ONE_DENSE,
        **ONE_GROUP,
        **yarn(64.0, 1.0, 1.0, theta=50000.0, beta_fast=1.0, beta_slow=1.0),
        "q_lora_rank": 24,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.827,
    },
    "q_lora_yarn_groups": {
        **THREE_DENSE,
        **FOUR_GROUPS,
        **yarn(40.0, 0.707, 1.0, beta_fast=4.0),
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
    },
}


class Parity(NamedTuple):
    """A model, prompts ``ids`` with their ``logits``, and ``hidden`` states of prompt 1; see the module's docstring."""

    config: ModelConfig
    weights: dict[str, np.ndarray]
    ids: list[np.ndarray]
    logits: list[np.ndarray]
    hidden: np.ndarray


def load(name: str) -> Parity:
    """Read one of the stored files."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.offset_keys()}
        config = ModelConfig.from_hf(json.loads(file.metadata()["parity"])["config"])
    prompts = range(len(PROMPT_LENGTHS))
    ids, logits = ([tensors.pop(f"{kind}.{prompt}") for prompt in prompts] for kind in ("ids", "logits"))
    return Parity(config, hidden=tensors.pop("hidden"), weights=tensors, ids=ids, logits=logits)


class TransformersModel:
    """One of ``MODELS`` with random weights, run by transformers in float32."""

    def __init__(self, name: str, seed: int) -> None:
        from transformers import DeepseekV3Config

        self.settings = json.loads(DeepseekV3Config(**{**COMMON, **MODELS[name]}).to_json_string())
        self.config = ModelConfig.from_hf(self.settings)
        self.weights = random_weights(self.config, seed)
        self.model = load_with_transformers(self.settings, self.weights)

    def run(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits [tokens, vocab]; the embedding and the output of every layer but the last [layers, tokens, hidden]."""
        import torch

        with torch.no_grad():
            output = self.model(torch.from_numpy(ids)[None].long(), output_hidden_states=True, use_cache=False)
        return output.logits[0].numpy(), torch.cat(output.hidden_states[:-1]).numpy()

    def generate(self, ids: np.ndarray, new_tokens: int) -> np.ndarray:
        """Extend a prompt greedily, with transformers' cache: int32 [tokens + new_tokens]."""
        import torch

        prompt = torch.from_numpy(ids)[None].long()
        mask = torch.ones_like(prompt)
        output = self.model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
        return output[0].numpy().astype(np.int32)

    def prompt(self, tokens: int, seed: int, greedy_tokens: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A prompt after which every argmax is clear: its ids, logits and hidden states.

        Random, but for ``greedy_tokens`` of its ``tokens`` at the end.
        """
        random = np.random.default_rng(seed)
        while True:
            ids = random.integers(self.config.vocab_size, size=tokens - greedy_tokens, dtype=np.int32)
            if greedy_tokens:
                ids = self.generate(ids, greedy_tokens)
            logits, hidden = self.run(ids)
            best = np.sort(logits, axis=1)[:, -2:]
            if (best[:, 1] - best[:, 0]).min() > MARGIN:
                return ids, logits, hidden


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights that make every part of a model felt in its logits, whose standard deviation is about 1."""
    random = np.random.default_rng(seed)
    # With groups all biases are below −1, so that a masked expert's choice must be −inf: a 0 would win.
    bias = -1.5 if config.n_group > 1 else 0.0
    weights: dict[str, np.ndarray] = {}
    for name, shape in config.weight_shapes().items():
        noise = random.standard_normal(shape, dtype=np.float32)
        if name.endswith("e_score_correction_bias"):
            weights[name] = np.float32(bias) + np.float32(0.2) * noise
        elif name.endswith("norm"):
            weights[name] = (1 + np.float32(0.3) * noise).astype(bfloat16)
        else:
            gain = 2 if name.endswith(("q_proj", "q_b_proj", "o_proj")) else 1  # sharp attention that matters
            noise *= np.float32(gain / shape[1] ** 0.5)
            weights[name] = noise if name.endswith("mlp.gate") else noise.astype(bfloat16)
    return weights


def load_with_transformers(settings: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """Write a checkpoint folder and let transformers read it; ``settings`` is its config.json."""
    import torch
    from transformers import DeepseekV3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        tensors = {name if name.endswith("_bias") else f"{name}.weight": weight for name, weight in weights.items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, info = DeepseekV3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise ValueError(f"transformers did not read the checkpoint as it was meant: {problems}")
    return model.eval()


def write(name: str) -> Path:
    """Make one model, run it on its prompts and store everything."""
    import torch
    import transformers

    seed = 100 * list(MODELS).index(name)
    made = TransformersModel(name, seed)
    tensors = dict(made.weights)
    for number, tokens in enumerate(PROMPT_LENGTHS):
        greedy_tokens = GREEDY_TOKENS if number == GREEDY_PROMPT else 0
        ids, logits, hidden = made.prompt(tokens, seed + number, greedy_tokens)
        tensors |= {f"ids.{number}": ids, f"logits.{number}": logits}
        if number == HIDDEN_PROMPT:
            tensors["hidden"] = hidden
    spread = tensors[f"logits.{len(PROMPT_LENGTHS) - 1}"].std()
    if not 0.7 < spread < 1.4:
        raise ValueError(f"{name}: logits have standard deviation {spread:.2f}, expected about 1")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    # One key: the library writes several in an order that differs from run to run.
    metadata = {"parity": json.dumps({"config": made.settings, "seed": seed, **versions})}
    path = FOLDER / f"{name}.safetensors"
    save_file(tensors, path, metadata)
    return path


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model_name in sys.argv[1:] or MODELS:
        written = write(model_name)
        print(f"{written.name}: {written.stat().st_size:,} bytes")
