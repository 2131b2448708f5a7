"""The drafter's specification against transformers' Qwen3 layers and against the torch that the drafter was trained in.

What those give is stored by golden/make_drafter.py; ``tests/parity`` runs them live, on other weights.
"""

import dataclasses
from functools import cache

import numpy as np
import pytest
from helpers import assert_same_bits

from golden.make_drafter import DRAFTERS, FOLDER, SHIPPED, SHIPPED_ROWS, Case, load, load_shipped
from kdtree_nb.bundle import Bundle
from kdtree_nb.reference.drafter import block_attention, draft_rows, rotate_halves
from kdtree_nb.reference.model import hidden_states

stored = cache(load)
each_drafter = pytest.mark.parametrize("name", DRAFTERS)


def rows_of(case: Case, dtype: type = np.float64) -> np.ndarray:
    return draft_rows(case.weights, case.config, case.features, case.block, dtype)


@each_drafter
def test_rows_are_those_of_qwen3_layers(name: str) -> None:
    case, expected = stored(name)
    assert 0.5 < expected.std() < 2
    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 1e-5)):
        rows = rows_of(case, dtype)
        assert (rows.dtype, rows.shape) == (dtype, (case.config.block_size - 1, case.config.hidden_size))
        np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerance)


def test_the_shipped_drafter_is_the_one_that_was_trained() -> None:
    """Behind the shipped target's hidden states of a held-out text, its start and beyond the drafter's window."""
    shipped = load_shipped()
    target, drafter = (Bundle.open(SHIPPED / f"kdt16m-int4{kind}.kdtr") for kind in ("", ".drafter"))
    config, weights, own, ids = drafter.config, target.weights(), drafter.weights(), shipped["ids"]
    assert shipped["anchors"].max() > config.sliding_window
    _, *outputs = hidden_states(weights, target.config, ids)
    features = np.concatenate([outputs[layer] for layer in config.target_layer_ids], axis=1)
    for anchor, expected in zip(shipped["anchors"], shipped["rows"], strict=True):
        block = weights["model.embed_tokens"][[ids[anchor], *[config.mask_token_id] * (config.block_size - 1)]]
        rows = draft_rows(own, config, features[:anchor], block)
        np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-4)  # of values up to about 10
        assert expected.std() > 1


def test_every_stored_file_is_compared() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        *(f"{name}.safetensors" for name in DRAFTERS),
        SHIPPED_ROWS.name,
    }


@each_drafter
def test_stored_weights_are_those_the_config_asks_for(name: str) -> None:
    case, _ = stored(name)
    assert {key: weight.shape for key, weight in case.weights.items()} == case.config.weight_shapes()


def test_stored_drafters_have_every_feature() -> None:
    cases = [stored(name)[0] for name in DRAFTERS]
    groups = {c.config.num_attention_heads // c.config.num_key_value_heads for c in cases}
    shorter = {len(c.features) > (c.config.sliding_window or np.inf) for c in cases}
    assert groups == {1, 2, 4}
    assert shorter == {c.config.sliding_window is None for c in cases} == {True, False}
    assert {len(c.config.target_layer_ids) for c in cases} == {1, 2, 3}
    assert min(len(c.features) for c in cases) == 0


@each_drafter
def test_every_weight_matters(name: str) -> None:
    case, _ = stored(name)
    before = rows_of(case)
    for key, weight in case.weights.items():
        moved = case.weights | {
            key: weight.astype(np.float64) + 0.25 * (np.arange(weight.size) % 3).reshape(weight.shape)
        }
        change = np.abs(rows_of(case._replace(weights=moved)) - before).max()
        unused = key in ("fc", "hidden_norm") and not len(case.features)
        assert change == 0 if unused else change > 1e-4, key


# ---- what a block sees -----------------------------------------------------------------------------------------------


def test_a_block_sees_its_window_and_itself_in_both_directions() -> None:
    case, _ = stored("windowed")
    before, window = rows_of(case), case.config.sliding_window
    for token in range(len(case.features)):
        features = case.features.copy()
        features[token] += np.arange(features.shape[1]) % 2
        moved = (rows_of(case._replace(features=features)) != before).any(axis=1)
        assert moved.all() if token >= len(features) - window else not moved.any()
    for row in range(case.config.block_size):
        block = case.block.copy()
        block[row] += np.arange(block.shape[1]) % 2
        assert (rows_of(case._replace(block=block)) != before).any(axis=1).all()


def test_only_distances_count() -> None:
    """Tokens outside of the window may as well not be there: rotary positions are relative."""
    case, expected = stored("windowed")
    later = case._replace(features=case.features[-case.config.sliding_window :])
    np.testing.assert_allclose(rows_of(later), expected, rtol=0, atol=1e-10)
    without = case._replace(config=dataclasses.replace(case.config, sliding_window=None))
    assert np.abs(rows_of(without) - expected).max() > 0.01


# ---- its parts -------------------------------------------------------------------------------------------------------


def test_rotation_turns_the_pairs_i_and_i_plus_half() -> None:
    """As complex numbers, one position at a time."""
    x = np.random.default_rng(0).standard_normal((5, 3, 8))
    positions = np.array([0, 1, 7, 3, 300])
    rotated = rotate_halves(x, positions, 50.0)
    numbers = x[..., :4] + 1j * x[..., 4:]
    for token, position in enumerate(positions):
        for i in range(4):
            turned = numbers[token, :, i] * np.exp(1j * position * 50.0 ** (-2 * i / 8))
            np.testing.assert_allclose(rotated[token, :, i] + 1j * rotated[token, :, i + 4], turned, atol=1e-12)
    assert rotate_halves(x.astype(np.float32), positions, 50.0).dtype == np.float32
    assert_same_bits(rotated[0], x[0])


@pytest.mark.parametrize(("first", "end"), [(0, 9), (0, 12), (4, 10), (11, 12)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_block_attention_is_the_sum_over_the_keys(first: int, end: int, heads: int, kv_heads: int) -> None:
    random = np.random.default_rng([end, heads])
    queries = random.standard_normal((3, heads, 10))
    keys, values = random.standard_normal((2, 12, kv_heads, 10))
    keys[:first] = keys[end:] = values[:first] = values[end:] = np.nan
    output = block_attention(queries, keys, values, first, end)
    for row in range(3):
        for head in range(heads):
            mine = head // (heads // kv_heads)
            shares = [np.exp(queries[row, head] @ keys[seen, mine] / 10**0.5) for seen in range(first, end)]
            mixed = sum(share * values[first + at, mine] for at, share in enumerate(shares)) / sum(shares)
            np.testing.assert_allclose(output[row, head], mixed, rtol=0, atol=1e-12)


def test_block_attention_does_not_overflow() -> None:
    queries = np.full((1, 1, 4), 1e4, np.float32)
    keys = np.array([[[1.0] * 4], [[2.0] * 4]], np.float32)
    values = np.array([[[1.0] * 4], [[5.0] * 4]], np.float32)
    assert (block_attention(queries, keys, values, 0, 2) == 5).all()
