"""A drafter in z-lab's layout becomes the drafter of a matching target."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from builders import build, random_weights, tiny_config, tiny_drafter_config
from safetensors.numpy import save_file

from kdtree_nb.bundle import BundleError, write_bundle
from kdtree_nb.checkpoint import convert, export
from kdtree_nb.config import DrafterConfig
from kdtree_nb.engine import DFlash, Engine
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.rounds import prefill
from kdtree_nb.reference.drafter import draft_rows
from kdtree_nb.reference.model import hidden_states


def zlab_drafter(folder: Path, config: DrafterConfig, weights: Mapping[str, np.ndarray]) -> Path:
    """A folder as z-lab publishes its DFlash drafters: no embedding, no head, no transition head."""
    folder.mkdir()
    settings = config.to_hf()
    settings["dflash_config"] = {
        name: settings["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")
    }
    (folder / "config.json").write_text(json.dumps(settings | {"num_target_layers": 2, "torch_dtype": "float32"}))
    save_file({f"{name}.weight": weight for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("select", ["none", "mlp"])
def test_a_drafter_converts_beside_its_target_and_drafts(tmp_path: Path, select: str) -> None:
    target = build(tmp_path / "model.kdtr", tiny_config(), 1, "float32")
    config = tiny_drafter_config(target.config, transition_rank=0)
    convert(zlab_drafter(tmp_path / "dflash", config, random_weights(config, 2)), tmp_path, select=select)
    engine = Engine.load(tmp_path, "cpu")
    assert isinstance(engine.drafter, DFlash)
    assert engine.drafter.bundle.path.name == "model.drafter.kdtr"
    assert any(name.endswith(".qw") for name in engine.drafter.bundle) == (select == "mlp")

    text = np.random.default_rng(3).integers(0, target.config.vocab_size, 23, np.int32)
    cache = LatentCache(engine.config, 40, engine.device)
    drafter = engine.drafter.start(cache)
    prefill(engine.model, cache, text[:-1], drafter)
    states = list(hidden_states(target.weights, target.config, text[:-1], np.float64))
    features = np.concatenate([states[layer + 1] for layer in config.target_layer_ids], axis=1)
    block = np.full(config.block_size, config.mask_token_id)
    block[0] = text[-1]
    expected = draft_rows(
        engine.drafter.bundle.weights(), config, features, target.weights["model.embed_tokens"][block], np.float64
    )
    np.testing.assert_allclose(drafter.rows(text[-1:]), expected, atol=1e-4)
    plain = engine.generate(text, "ar", max_new_tokens=9)
    assert engine.generate(text, node_budget=8, max_new_tokens=9).tokens == plain.tokens


def test_a_drafter_is_not_exported(tmp_path: Path) -> None:
    target = build(tmp_path / "model.kdtr", tiny_config(), 1, "float32")
    config = tiny_drafter_config(target.config)
    weights = {name: np.ones(shape, np.float32) for name, shape in config.weight_shapes().items()}
    path = write_bundle(tmp_path / "model.drafter.kdtr", config, weights)
    with pytest.raises(BundleError, match=r"model\.drafter\.kdtr: is a drafter, expected a model"):
        export(path, tmp_path / "out")
