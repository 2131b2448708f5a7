"""The stored parity files catch every fault that is easily made in a DeepSeek-V3 forward pass.

Each mutation is one such fault, put into the reference model; on its stored model it has to move the logits and to flip
argmaxes. ``python -m pytest -rP tests/test_mutations.py`` prints how many.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from golden.make_parity import Parity, load
from kdtree_nb.config import ModelConfig
from kdtree_nb.reference import model, moe, rope

TOLERANCE = 1e-4
LONGEST = -1  # the prompt of 96 tokens

Mutation = Callable[[pytest.MonkeyPatch, Parity], Parity]
Routing = tuple[np.ndarray, np.ndarray]


def in_model(name: str, function: Callable[..., object]) -> Mutation:
    """The fault of having another function where the model uses ``name``."""

    def mutate(patch: pytest.MonkeyPatch, parity: Parity) -> Parity:
        patch.setattr(model, name, function)
        return parity

    return mutate


# Faults of positions and of the softmax scale


def half_split_rope(x: np.ndarray, positions: np.ndarray, rotation: rope.Rope) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    interleaved = np.stack([first, second], axis=-1).reshape(x.shape)
    return rope.apply_rope(interleaved, positions, rotation)


def m(config: ModelConfig) -> float:
    """YaRN's m(mscale_all_dim); 1 without YaRN."""
    scaling = config.rope_scaling
    return 1.0 if scaling is None else 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0


def scale_without_m(config: ModelConfig) -> float:
    return config.qk_head_dim**-0.5


def scale_from_latent(config: ModelConfig) -> float:
    return config.latent_dim**-0.5 * m(config) ** 2


def rope_times_m(config: ModelConfig) -> rope.Rope:
    rotation = rope.rope(config)
    return rotation._replace(magnitude=rotation.magnitude * m(config))


def rope_without_magnitude(config: ModelConfig) -> rope.Rope:
    return rope.rope(config)._replace(magnitude=1.0)


def rope_without_yarn(config: ModelConfig) -> rope.Rope:
    return rope.rope(dataclasses.replace(config, rope_scaling=None))


# Faults of the router


def bias_in_weights(logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> Routing:
    expert_ids, _ = moe.moe_route(logits, bias, config)
    weights = np.take_along_axis(moe.sigmoid(logits) + bias, expert_ids, axis=1)
    if config.norm_topk_prob:
        weights /= weights.sum(axis=1, keepdims=True)
    return expert_ids, weights * np.float32(config.routed_scaling_factor)


def scaled_twice(logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> Routing:
    expert_ids, weights = moe.moe_route(logits, bias, config)
    return expert_ids, weights * np.float32(config.routed_scaling_factor)


def not_normalised(logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> Routing:
    return moe.moe_route(logits, bias, dataclasses.replace(config, norm_topk_prob=False))


def masked_groups_0(patch: pytest.MonkeyPatch, parity: Parity) -> Parity:
    keep_best_groups = moe._keep_best_groups

    def fill_with_0(choice: np.ndarray, config: ModelConfig) -> np.ndarray:
        kept = keep_best_groups(choice, config)
        return np.where(kept == -np.inf, 0, kept)

    patch.setattr(moe, "_keep_best_groups", fill_with_0)
    return parity


def group_max(patch: pytest.MonkeyPatch, parity: Parity) -> Parity:
    def by_best_expert(choice: np.ndarray, config: ModelConfig) -> np.ndarray:
        grouped = choice.reshape(len(choice), config.n_group, -1)
        worst_kept = np.sort(grouped.max(axis=2), axis=1)[:, -config.topk_group]
        kept = grouped.max(axis=2) >= worst_kept[:, None]
        return np.where(kept[:, :, None], grouped, -np.inf).reshape(choice.shape)

    patch.setattr(moe, "_keep_best_groups", by_best_expert)
    return parity


# Faults of layout and norms


def kv_b_all_keys_first(patch: pytest.MonkeyPatch, parity: Parity) -> Parity:
    """Reading kv_b_proj's rows as all heads' keys, then all values: the right reading of rows in this order."""
    heads, nope, latent = (
        parity.config.num_attention_heads,
        parity.config.qk_nope_head_dim,
        parity.config.kv_lora_rank,
    )
    weights = dict(parity.weights)
    for name in (name for name in parity.weights if name.endswith("kv_b_proj")):
        keys, values = np.split(weights[name], [heads * nope])
        per_head = [keys.reshape(heads, nope, latent), values.reshape(heads, -1, latent)]
        weights[name] = np.concatenate(per_head, axis=1).reshape(weights[name].shape)
    return parity._replace(weights=weights)


def gate_as_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return moe.swiglu(up, gate)


def kv_norm_dropped(patch: pytest.MonkeyPatch, parity: Parity) -> Parity:
    ones = {name: np.ones_like(w) for name, w in parity.weights.items() if name.endswith("kv_a_layernorm")}
    return parity._replace(weights={**parity.weights, **ones})


def latent_eps_of_config(patch: pytest.MonkeyPatch, parity: Parity) -> Parity:
    patch.setattr(model, "LATENT_EPS", parity.config.rms_norm_eps)
    return parity


UNSEEN_AT_POSITION_0: dict[str, tuple[str, Mutation]] = {
    "half-split RoPE input": ("plain", in_model("apply_rope", half_split_rope)),
    "softmax scale without m²": ("yarn", in_model("softmax_scale", scale_without_m)),
    "softmax scale from kv_lora + rope": ("plain", in_model("softmax_scale", scale_from_latent)),
    "cos and sin times m": ("q_lora_yarn", in_model("rope", rope_times_m)),
    "cos and sin without mscale / mscale_all_dim": ("yarn_groups", in_model("rope", rope_without_magnitude)),
    "frequencies without YaRN": ("q_lora_yarn_groups", in_model("rope", rope_without_yarn)),
}
MUTATIONS: dict[str, tuple[str, Mutation]] = UNSEEN_AT_POSITION_0 | {
    "bias kept in the weights": ("yarn_groups", in_model("moe_route", bias_in_weights)),
    "masked groups filled with 0": ("yarn_groups", masked_groups_0),
    "group max instead of top-2 sum": ("yarn_groups", group_max),
    "no norm_topk_prob": ("plain", in_model("moe_route", not_normalised)),
    "routed_scaling_factor twice": ("plain", in_model("moe_route", scaled_twice)),
    "kv_b split all K, then all V": ("q_lora_yarn", kv_b_all_keys_first),
    "gate and up swapped": ("plain", in_model("swiglu", gate_as_up)),
    "kv norm weight dropped": ("plain", kv_norm_dropped),
    "latent eps from rms_norm_eps": ("q_lora", latent_eps_of_config),
}


def logits_of(parity: Parity, ids: np.ndarray) -> np.ndarray:
    return model.forward(parity.weights, parity.config, ids)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutate = MUTATIONS[mutation]
    parity = load(name)
    ids, expected = parity.ids[LONGEST], parity.logits[LONGEST]
    assert np.abs(logits_of(parity, ids) - expected).max() <= TOLERANCE

    mutated = logits_of(mutate(monkeypatch, parity), ids)
    error = np.abs(mutated - expected).max()
    flips = np.count_nonzero(mutated.argmax(axis=1) != expected.argmax(axis=1))
    print(f"{mutation} ({name}): {flips} of {len(ids)} argmaxes flip, logits are off by up to {error:.2g}")
    assert error > 1000 * TOLERANCE
    assert flips > len(ids) / 10


@pytest.mark.parametrize("mutation", UNSEEN_AT_POSITION_0)
def test_one_token_does_not_show_a_fault_of_positions_or_scale(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to one key has weight 1, whatever its score. So no test here has a prompt of one token."""
    name, mutate = MUTATIONS[mutation]
    parity = load(name)
    one, two = parity.ids[0][:1], parity.ids[0]
    right = logits_of(parity, one), logits_of(parity, two)
    mutated = mutate(monkeypatch, parity)
    np.testing.assert_array_equal(logits_of(mutated, one), right[0])
    assert np.abs(logits_of(mutated, two) - right[1])[1].max() > TOLERANCE
