"""bench cpu: which products make the floor, and that floor and decoding are timed in turn."""

from collections.abc import Callable

import numpy as np
import pytest
from builders import Built, build_text_model

from kdtree_nb.bench import cpu
from kdtree_nb.bench.cpu import floor_products, measure
from kdtree_nb.engine import Engine


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def built(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Built:
    folder = tmp_path_factory.mktemp("cpu")
    return build_text_model(folder, eos_token_ids=(), tie_word_embeddings=request.param, n_shared_experts=2)


def test_a_token_has_every_matrix_once_and_its_share_of_the_experts(built: Built) -> None:
    config = built.config
    tokens = list(floor_products(Engine.load(built.path, "cpu")))
    assert len(tokens) == config.n_routed_experts / config.num_experts_per_tok == 3

    def elements(wanted: Callable[[str], bool]) -> int:
        return sum(w.size for name, w in built.weights.items() if w.ndim == 2 and wanted(name))

    every_token = elements(
        lambda name: ".experts." not in name and (name != "model.embed_tokens" or config.tie_word_embeddings)
    )
    routed = elements(lambda name: ".experts." in name)
    for products in tokens:
        assert sum(weight.size for _, weight in products) == every_token + routed / 3
        for x, weight in products:
            assert x.dtype == weight.dtype == np.float32
            assert (x @ weight).shape == (*weight.shape[:-2], 1, weight.shape[-1])
        assert len({id(weight) for _, weight in products}) == len(products)


def test_absorbed_halves_are_products_of_heads(built: Built) -> None:
    config, (products, *_) = built.config, floor_products(Engine.load(built.path, "cpu"))
    by_head = [weight for _, weight in products if weight.ndim == 3]
    assert len(by_head) == 2 * config.num_hidden_layers
    stored = built.weights["model.layers.0.self_attn.kv_b_proj"]
    whole = stored.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    np.testing.assert_array_equal(by_head[0], whole[:, : config.qk_nope_head_dim])
    np.testing.assert_array_equal(by_head[1], whole[:, config.qk_nope_head_dim :].swapaxes(1, 2))


def test_floor_and_decoding_take_turns(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(built.path, "cpu")
    ticks, calls = iter([0, 0.08, 1, 1.02, 2, 2.04]), []
    generate = engine.generate

    def timed(*args: object, **more: object) -> object:
        generation = generate(*args, **more)
        calls.append(generation.target_forwards)
        generation.decode_seconds = 0.2 * len(calls)
        return generation

    monkeypatch.setattr(engine, "generate", timed)
    monkeypatch.setattr(cpu, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks))}))
    found = measure(engine, "for i", new_tokens=4, repeats=3)
    assert calls == [4] * 4  # one before, that loads
    assert found.floor == pytest.approx(10)  # of 20, 5 and 10
    assert found.decode == pytest.approx(150)  # of 100, 150 and 200
    assert found.ratio == pytest.approx(15)


def test_real_times(built: Built) -> None:
    found = measure(Engine.load(built.path, "cpu"), [5, 6], new_tokens=3, repeats=1)
    assert 0 < found.floor < found.decode


def test_another_device(built: Built) -> None:
    with pytest.raises(ValueError, match="bench cpu: device='emulated', expected 'cpu'"):
        measure(Engine.load(built.path, "emulated"), [5])
