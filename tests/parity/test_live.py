"""The reference against Hugging Face transformers, live: the models of golden/make_parity.py with other weights.

Needs torch and transformers: ``make parity``.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    DeepseekV3Config,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402

from golden.make_parity import MODELS, PROMPT_LENGTHS, TransformersModel, load_with_transformers  # noqa: E402
from kdtree_nb.config import ModelConfig  # noqa: E402
from kdtree_nb.reference.model import forward, greedy, hidden_states  # noqa: E402
from kdtree_nb.reference.moe import moe_route  # noqa: E402
from kdtree_nb.reference.rope import apply_rope, rope, softmax_scale  # noqa: E402
from kdtree_nb.reference.sampling import choose_tokens, truncate  # noqa: E402

TOLERANCE = 1e-4

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
K2_YARN = {**YARN, "rope_theta": 50000.0, "factor": 64.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
ROTATIONS: dict[str, dict[str, Any]] = {
    "Moonlight": {"rope_type": "default", "rope_theta": 50000.0},
    "Kimi K2, beta 1 and 1": {**K2_YARN, "beta_fast": 1.0},
    "Kimi K2, beta 32 and 1": {**K2_YARN, "beta_fast": 32.0},
    "DeepSeek-V3": {**YARN, "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "no mscale": {**YARN, "rope_theta": 10000.0, "factor": 40.0},
    "mscale alone": {**YARN, "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.707},
    "mscale_all_dim alone": {**YARN, "rope_theta": 10000.0, "factor": 40.0, "mscale_all_dim": 0.707},
    "two mscales": {**YARN, "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "factor 1": {**YARN, "rope_theta": 10000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "few positions": {**YARN, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.fixture(scope="module", params=MODELS)
def live(request: pytest.FixtureRequest) -> TransformersModel:
    return TransformersModel(request.param, seed=5000 + list(MODELS).index(request.param))


@pytest.mark.parametrize("tokens", PROMPT_LENGTHS)
def test_logits(live: TransformersModel, tokens: int) -> None:
    ids, expected, _ = live.prompt(tokens, seed=tokens)
    assert 0.5 < expected.std() < 2
    for dtype in (np.float32, np.float64):
        logits = forward(live.weights, live.config, ids, dtype)
        error = np.abs(logits - expected).max()
        print(f"{np.dtype(dtype).name}: largest error {error:.1e}")
        assert error <= TOLERANCE
        np.testing.assert_array_equal(logits.argmax(axis=1), expected.argmax(axis=1))


def test_hidden_states(live: TransformersModel) -> None:
    ids, _, expected = live.prompt(20, seed=20)
    *states, _ = hidden_states(live.weights, live.config, ids, np.float64)
    np.testing.assert_allclose(states, expected, rtol=0, atol=TOLERANCE)


def test_greedy_text(live: TransformersModel) -> None:
    ids, _, _ = live.prompt(40, seed=40, greedy_tokens=24)
    prompt, expected = np.split(ids, [16])
    np.testing.assert_array_equal(greedy(live.weights, live.config, prompt, 24).tokens, expected)


def test_transformers_reads_the_config_we_write(live: TransformersModel) -> None:
    settings = live.config.to_hf()
    assert ModelConfig.from_hf(settings) == live.config
    ids, expected, _ = live.prompt(12, seed=12)
    with torch.no_grad():
        model = load_with_transformers(settings, live.weights)
        logits = model(torch.from_numpy(ids)[None].long()).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotation_at_real_sizes(name: str) -> None:
    theirs = DeepseekV3Config(
        rope_parameters=ROTATIONS[name], max_position_embeddings=262144, qk_nope_head_dim=128, qk_rope_head_dim=64
    )
    config = ModelConfig.from_hf(theirs.to_dict())
    embedding = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(theirs)
    with torch.device("meta"):
        scaling = modeling_deepseek_v3.DeepseekV3Attention(theirs, layer_idx=0).scaling
    rotation = rope(config)
    np.testing.assert_allclose(rotation.inverse_frequencies, embedding.inv_freq.numpy(), rtol=1e-6)
    assert rotation.magnitude == pytest.approx(embedding.attention_scaling, rel=1e-12)
    assert softmax_scale(config) == pytest.approx(scaling, rel=1e-12)

    positions = np.arange(50)
    cos, sin = embedding(torch.zeros(1), torch.from_numpy(positions)[None])
    keys = np.random.default_rng(0).standard_normal((50, 1, 64)).astype(np.float32)
    q = torch.from_numpy(keys).transpose(0, 1)[None]  # [1, heads, tokens, rope]
    rotated, _ = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q, q, cos, sin)
    ours = apply_rope(keys, positions, rotation)
    np.testing.assert_allclose(ours, rotated[0].transpose(0, 1).numpy(), rtol=0, atol=3e-5)  # their angles are float32


@pytest.mark.parametrize(("experts", "top_k", "groups", "kept"), [(384, 8, 1, 1), (256, 8, 8, 4), (64, 6, 1, 1)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("bias", [0.0, 5.0, -2.0])
def test_router_at_real_sizes(experts: int, top_k: int, groups: int, kept: int, norm: bool, bias: float) -> None:
    theirs = DeepseekV3Config(
        hidden_size=experts,  # so that the identity as its weight takes logits as hidden states
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
    )
    config = dataclasses.replace(ModelConfig.from_hf(theirs.to_dict()), hidden_size=experts)
    random = np.random.default_rng(experts)
    logits = 2 * random.standard_normal((200, experts), dtype=np.float32)
    biases = np.float32(bias) + np.float32(0.2) * random.standard_normal(experts, dtype=np.float32)
    router = modeling_deepseek_v3.DeepseekV3TopkRouter(theirs)
    router.weight.data = torch.eye(experts)
    router.e_score_correction_bias.data = torch.from_numpy(biases)
    with torch.no_grad():
        _, their_weights, their_ids = router(torch.from_numpy(logits))
    dense = np.zeros((200, experts), np.float32)  # their choice is not in an order
    np.put_along_axis(dense, their_ids.numpy(), their_weights.numpy(), axis=1)

    expert_ids, weights = moe_route(logits, biases, config)
    ours = np.zeros_like(dense)
    np.put_along_axis(ours, expert_ids, weights, axis=1)
    np.testing.assert_array_equal(ours != 0, dense != 0)
    np.testing.assert_allclose(ours, dense, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (0, 0.5), (20, 1.0), (1, 1.0), (50, 0.9), (5, 0.3)])
def test_samples_are_of_the_tokens_that_the_warpers_keep(temperature: float, top_k: int, top_p: float) -> None:
    """Logits without ties, as ties are where the two differ."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    logits = np.random.default_rng(0).normal(0, 3, (40, 500)).astype(np.float32)
    assert all(len(np.unique(row)) == 500 for row in logits)
    scores = torch.from_numpy(logits)
    for warper in warpers:
        scores = warper(None, scores)
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64) / temperature)
    kept = truncate(logits, weights, top_k, top_p)
    np.testing.assert_array_equal(kept > 0, np.isfinite(scores.numpy()))
    theirs = scores.double().softmax(dim=1).numpy()
    np.testing.assert_allclose(kept / kept.sum(axis=1, keepdims=True), theirs, rtol=1e-5)
    drawn = choose_tokens(logits, np.arange(40), temperature, 0, top_k, top_p)
    assert np.isfinite(scores.numpy()[np.arange(40), drawn]).all()
