"""The drafter's specification against transformers' Qwen3 layers, live: golden/make_drafter.py's with other weights.

Needs torch and transformers: ``make parity``.
"""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import Qwen3Config

from golden.make_drafter import COMMON, DRAFTERS, load, load_shipped, make_case, qwen3_rows, training_rows
from kdtree_nb.config import DrafterConfig
from kdtree_nb.reference.drafter import draft_rows


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_rows(name: str, seed: int) -> None:
    case = make_case(name, 9000 + seed)
    arguments = case.weights, case.config, case.features, case.block
    exact = qwen3_rows(case, "float64")
    np.testing.assert_allclose(draft_rows(*arguments, np.float64), exact, rtol=0, atol=1e-10)
    # transformers' own norms and angles
    np.testing.assert_allclose(draft_rows(*arguments), qwen3_rows(case, "float32"), rtol=0, atol=5e-5)
    np.testing.assert_allclose(draft_rows(*arguments), exact, rtol=0, atol=2e-5)


def random_drafter(random: np.random.Generator) -> dict:
    kv_heads, window = int(random.integers(1, 4)), int(random.integers(1, 30))
    return {
        "tokens": int(random.integers(0, 50)),
        "hidden_size": int(random.integers(3, 40)),
        "num_hidden_layers": int(random.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * int(random.integers(1, 4)),
        "head_dim": 2 * int(random.integers(1, 9)),
        "intermediate_size": int(random.integers(1, 50)),
        "block_size": int(random.integers(2, 17)),
        "target_layer_ids": tuple(sorted({*random.integers(0, 9, 3).tolist()})),
        "sliding_window": None if random.random() < 0.4 else window,
        "rope_theta": float(random.uniform(2, 1e6)),
    }


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_random_configs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "random", random_drafter(np.random.default_rng(seed)))
    case = make_case("random", seed)
    rows = draft_rows(case.weights, case.config, case.features, case.block, np.float64)
    np.testing.assert_allclose(rows, qwen3_rows(case, "float64"), rtol=0, atol=1e-10)


def test_the_shipped_drafter_in_the_torch_that_trained_it() -> None:
    """What is stored is what those modules give, whether blocks are drafted together, as in training, or alone."""
    shipped = load_shipped()
    alone = [training_rows(shipped["ids"], shipped["anchors"][i : i + 1])[0] for i in (1, 3)]
    np.testing.assert_allclose(shipped["rows"][[1, 3]], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", [None, 9])
def test_transformers_reads_the_config_we_write(window: int | None) -> None:
    ours = DrafterConfig(**COMMON, sliding_window=window, rope_theta=77.0)
    theirs = Qwen3Config(**ours.to_hf())
    assert theirs.sliding_window == window
    assert set(theirs.layer_types) == {"full_attention" if window is None else "sliding_attention"}
    assert theirs.rope_parameters["rope_theta"] == 77
    assert DrafterConfig.from_hf(theirs.to_dict()) == ours


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_stored_files_can_be_made_again(name: str) -> None:
    case, rows = load(name)
    np.testing.assert_allclose(qwen3_rows(case, "float64"), rows, rtol=0, atol=1e-12)
