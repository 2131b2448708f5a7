"""The random checkpoint of Moonlight's shape: small ones of it, through convert and generate."""

from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits
from safetensors.numpy import load_file

from golden import moonlight
from kdtree_nb.bundle import Bundle
from kdtree_nb.checkpoint import convert
from kdtree_nb.engine import Engine

SMALL = moonlight.shrunk(layers=3, divisor=64)


def test_a_small_one_is_converted_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moonlight, "SHARD_BYTES", 2**20)
    moonlight.write_checkpoint(tmp_path / "hf", SMALL, seed=5)
    stored = {}
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        stored |= load_file(file)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    bundle = Bundle.open(convert(tmp_path / "hf", tmp_path / "out"))
    bundle.verify()
    assert bundle.config == SMALL
    expert = "model.layers.2.mlp.experts.63.down_proj"
    assert_same_bits(bundle[f"{expert}.qw"], stored[f"{expert}.weight_packed"])
    assert_same_bits(bundle["lm_head"], stored["lm_head.weight"])
    packed = sum(name.endswith(".qw") for name in bundle)
    assert packed == 2 * 64 * 3
    engine = Engine.load(tmp_path / "out", "cpu")
    run = engine.generate(np.arange(7), "ar", max_new_tokens=9, keep_logits=True)
    assert run.logits is not None
    assert np.isfinite(run.logits).all()
    assert 0.5 < run.logits.std() < 2
    assert len(set(run.tokens)) > 3
    chain = engine.generate(np.arange(7), "chain", max_new_tokens=9)
    assert chain.tokens == run.tokens


def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    files = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        moonlight.write_checkpoint(tmp_path / name, SMALL, seed)
        files[name] = b"".join(file.read_bytes() for file in sorted((tmp_path / name).glob("*.safetensors")))
    assert files["a"] == files["b"] != files["c"]


def test_the_full_shape() -> None:
    """16 billion weights, of which a token meets 3 (the name's 3 leaves the embedding out)."""
    shapes = moonlight.MOONLIGHT.weight_shapes()
    count = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    total = sum(count.values())
    experts = sum(size for name, size in count.items() if ".experts." in name)
    met = total - experts * (1 - 6 / 64) - 163840 * 2048
    assert round(total / 1e9) == 16
    assert 2.2e9 < met < 3.2e9
    assert moonlight.shrunk(27, 1) == moonlight.MOONLIGHT
    stored = sum(entry.nbytes for entry in moonlight.random_source(moonlight.MOONLIGHT, 0).entries().values())
    assert 11e9 < stored < 12e9
