"""What the tests of experts share: random layers, random routing, and a loop over tokens in float64."""

import numpy as np

from kdtree_nb.kernels.moe import Experts

from .products import random_int4


def random_experts(rng, experts, out_features, in_features, dtype=np.float32, packed=True) -> Experts:
    if not packed:
        values = rng.standard_normal((experts, out_features, in_features)) / np.sqrt(in_features)
        return Experts(values.astype(dtype))
    weight = random_int4(rng, experts * out_features, in_features, dtype)
    shape = experts, out_features, -1
    return Experts(weight.qweight.reshape(shape), weight.scales.reshape(shape))


def random_layer(rng, experts, hidden, width, dtype=np.float32, packed=True) -> tuple[Experts, Experts]:
    gate_up = random_experts(rng, experts, 2 * width, hidden, dtype, packed)
    return gate_up, random_experts(rng, experts, hidden, width, dtype, packed)


def random_routing(rng, tokens, experts, top_k) -> tuple[np.ndarray, np.ndarray]:
    expert_ids = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1)[:, :top_k]
    return expert_ids.copy(), rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32)


def token_by_token(x, expert_ids, weights, gate_up, down) -> np.ndarray:
    """The sum of a token's experts, one after the other, in float64."""
    y = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(expert_ids[token], weights[token], strict=True):
            gate, up = np.split(gate_up.expert(expert).astype(np.float64) @ row, 2)
            y[token] += weight * (down.expert(expert).astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return y
