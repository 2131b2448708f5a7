"""The reference model against the logits of Hugging Face transformers, as golden/fixtures/parity stores them."""

import functools
import itertools

import numpy as np
import pytest

from golden.make_parity import (
    FOLDER,
    GREEDY_PROMPT,
    GREEDY_TOKENS,
    HIDDEN_PROMPT,
    MARGIN,
    MODELS,
    PROMPT_LENGTHS,
    load,
)
from kdtree_nb.reference.model import forward, greedy, hidden_states
from kdtree_nb.reference.norm import rms_norm

TOLERANCE = 1e-4
PROMPTS = range(len(PROMPT_LENGTHS))

stored = functools.cache(load)
each_model = pytest.mark.parametrize("name", MODELS)


@each_model
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_are_those_of_transformers(name: str, prompt: int, dtype: type) -> None:
    parity = stored(name)
    logits = forward(parity.weights, parity.config, parity.ids[prompt], dtype)
    assert logits.dtype == dtype
    assert logits.shape == (PROMPT_LENGTHS[prompt], parity.config.vocab_size)
    assert np.abs(logits - parity.logits[prompt]).max() <= TOLERANCE
    np.testing.assert_array_equal(logits.argmax(axis=1), parity.logits[prompt].argmax(axis=1))


@each_model
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    parity = stored(name)
    *states, _ = hidden_states(parity.weights, parity.config, parity.ids[HIDDEN_PROMPT])
    assert np.shape(states) == parity.hidden.shape
    assert np.abs(states - parity.hidden).max() <= TOLERANCE


def test_logits_are_the_head_of_the_last_hidden_state() -> None:
    parity = stored("plain")
    ids = parity.ids[HIDDEN_PROMPT]
    *_, last = hidden_states(parity.weights, parity.config, ids, np.float64)
    normed = rms_norm(last, parity.weights["model.norm"].astype(np.float64), parity.config.rms_norm_eps)
    logits = normed @ parity.weights["lm_head"].astype(np.float64).T
    np.testing.assert_array_equal(logits, forward(parity.weights, parity.config, ids, np.float64))


@each_model
def test_greedy_continues_as_transformers_generates(name: str) -> None:
    parity = stored(name)
    prompt, expected = np.split(parity.ids[GREEDY_PROMPT], [-GREEDY_TOKENS])
    tokens, logits = greedy(parity.weights, parity.config, prompt, GREEDY_TOKENS)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, expected)
    rows = parity.logits[GREEDY_PROMPT][len(prompt) - 1 : -1]  # the rows that chose them
    assert np.abs(logits - rows).max() <= TOLERANCE


def test_greedy_can_add_nothing() -> None:
    parity = stored("plain")
    tokens, logits = greedy(parity.weights, parity.config, parity.ids[0], 0)
    assert tokens.shape == (0,)
    assert logits.shape == (0, parity.config.vocab_size)


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    parity = stored("plain")
    head = np.repeat(parity.weights["lm_head"][::2], 2, axis=0)  # tokens 2n and 2n + 1 always tie
    tokens, _ = greedy({**parity.weights, "lm_head": head}, parity.config, parity.ids[0], 4)
    assert (tokens % 2 == 0).all()


@each_model
def test_a_token_does_not_see_the_ones_after_it(name: str) -> None:
    parity = stored(name)
    ids = parity.ids[1]
    changed = np.append(ids[:-1], (ids[-1] + 1) % parity.config.vocab_size)
    before, after = (forward(parity.weights, parity.config, tokens) for tokens in (ids, changed))
    np.testing.assert_allclose(after[:-1], before[:-1], rtol=0, atol=1e-5)
    assert np.abs(after[-1] - before[-1]).max() > 0.1


# What makes the stored files worth comparing with


def test_any_three_features_occur_in_all_combinations() -> None:
    configs = [stored(name).config for name in MODELS]
    features = [(c.q_lora_rank, c.rope_scaling is None, c.n_group, c.first_k_dense_replace) for c in configs]
    for three in itertools.combinations(range(4), 3):
        assert len({tuple(model[feature] for feature in three) for model in features}) == 8
    scalings = [c.rope_scaling for c in configs if c.rope_scaling]
    assert {s.mscale > s.mscale_all_dim for s in scalings if s.mscale != s.mscale_all_dim} == {True, False}
    assert {c.topk_group for c in configs if c.n_group == 4} == {2}
    assert {c.tie_word_embeddings for c in configs} == {c.norm_topk_prob for c in configs} == {True, False}
    assert {c.n_shared_experts for c in configs} == {1, 2}
    assert all(c.v_head_dim != c.qk_nope_head_dim and c.routed_scaling_factor != 1 for c in configs)


@each_model
def test_stored_logits_are_clear_and_of_unit_size(name: str) -> None:
    parity = stored(name)
    for ids, logits, tokens in zip(parity.ids, parity.logits, PROMPT_LENGTHS, strict=True):
        assert ids.shape == (tokens,)
        best = np.sort(logits, axis=1)[:, -2:]
        assert (best[:, 1] - best[:, 0]).min() > MARGIN > 2 * TOLERANCE
    assert 0.7 < parity.logits[-1].std() < 1.4


@each_model
def test_stored_weights_are_those_the_config_asks_for(name: str) -> None:
    parity = stored(name)
    assert {key: weight.shape for key, weight in parity.weights.items()} == parity.config.weight_shapes()
    biases = [w for key, w in parity.weights.items() if key.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.min() < 0 and len(set(bias)) == len(bias) for bias in biases)


def test_every_stored_file_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(MODELS)
