"""The trained drafter in bfloat16: near its specification in float64, the same bits each time, and what is rounded."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import build, tiny_config, tiny_drafter_config
from helpers import assert_same_bits
from ml_dtypes import bfloat16
from test_dflash import HISTORIES, Pair, Recorded, Recorder, Scratch, histories, log_softmax, random_prompt

from kdtree_nb import golden
from kdtree_nb.engine import DFlash, Engine, PromptLookup
from kdtree_nb.engine import budget as engine_budget
from kdtree_nb.engine import model as engine_model
from kdtree_nb.engine import weights as engine_weights
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.drafter import Drafter
from kdtree_nb.golden import bundle_of, load_cases
from kdtree_nb.reference.linear import Tiles
from kdtree_nb.verify import BF16_DRAFT_TOLERANCE, most_probable

DEVICES = ("cpu", "emulated")
SIZES = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
"""Of the target: what tensor cores take."""
TARGET = tiny_config(num_hidden_layers=3, **SIZES)
DRAFTERS: dict[str, dict] = {
    "transition": dict(),
    "int4": dict(storage="int4", num_hidden_layers=3, num_key_value_heads=4),
    "window": dict(sliding_window=5, block_size=4, target_layer_ids=(1,)),
    "no transition, one layer": dict(transition_rank=0, block_size=9, storage="bfloat16", num_hidden_layers=1),
}
TRAINED = golden.folder() / "kdt16m" / f"kdt16m-int4{golden.SUFFIX}"


def build_pair(folder: Path, storage: str = "float32", **changes: object) -> Pair:
    config = tiny_drafter_config(TARGET, **({"head_dim": 8} | changes))
    target = build(folder / "tiny.kdtr", TARGET, 1)
    return Pair(target, build(folder / "tiny.drafter.kdtr", config, 2, storage))


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("bf16"), **DRAFTERS[request.param])


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("plain"))


def load(pair: Pair, device: str = "cpu", dtype: str = "bfloat16") -> Engine:
    return Engine.load(pair.target.path, device, dtype=dtype)


def started(engine: Engine, tokens: int = 9) -> Drafter:
    """The drafter of a text of so many committed tokens, whose features are random and the same everywhere."""
    assert isinstance(engine.drafter, DFlash)
    cache = LatentCache(engine.config, 40, engine.device, engine.model.weights.dtype)
    drafter = engine.drafter.start(cache)
    shape = (tokens, len(drafter.taps), TARGET.hidden_size)
    drafter.observe(np.random.default_rng(5).standard_normal(shape, np.float32))
    cache.length[:] = tokens
    return drafter


def rows_of(pair: Pair, device: str, dtype: str = "bfloat16") -> np.ndarray:
    engine = load(pair, device, dtype)
    with engine.device.running():
        return started(engine).rows(np.array([7], np.int32)).astype(np.float32)


# ---- how near --------------------------------------------------------------------------------------------------------


def differences(scratch: Scratch, recorded: Recorded) -> float:
    """The largest of the candidates' log-probabilities, and of what those leave out, to float64's marginals."""
    tokens, (log_probs, token_ids, children) = recorded
    weights, config = scratch.pair.target.weights, scratch.pair.drafter.config
    rows = scratch.rows(len(tokens))
    marginals = log_softmax(rows @ weights["lm_head"].T.astype(np.float64))
    candidates = np.take_along_axis(marginals, token_ids, axis=1)
    best = -np.sort(-marginals, axis=1)[:, : config.num_candidates]
    found, expected = log_probs, candidates
    if children is not None:
        found = np.empty_like(log_probs)
        np.put_along_axis(found, children, log_probs, axis=2)
        after = [
            scratch.after_each_parent(rows[depth], token_ids[depth - 1], token_ids[depth], candidates[depth])
            for depth in range(1, len(token_ids))
        ]
        found, expected = np.concatenate([found[0, :1], *found[1:]]), np.concatenate([candidates[:1], *after])
    return max(np.abs(found - expected).max(), (best.min(axis=1) - candidates.min(axis=1)).max())


@pytest.mark.parametrize("device", DEVICES)
def test_near_the_specification_in_float64(pair: Pair, device: str) -> None:
    """Target and drafter both rounded: as ``verify`` has it, half of the rounds; 1/2 nat for all. Float32 has 2e-4.

    Every text is plain decoding's, whatever was drafted, and at equal texts all histories give the same bits.
    """
    engine, prompt = load(pair, device), random_prompt(20)
    settings, new_tokens = (HISTORIES, 14) if device == "cpu" else (HISTORIES[1:2], 8)
    found, seen = [], {}
    for generation, kept in histories(pair, engine, prompt, settings, new_tokens):
        scratch = Scratch(pair, np.concatenate([prompt, generation.tokens]))
        for recorded in kept:
            same = seen.setdefault(len(recorded.tokens), recorded.proposal)
            for actual, expected in zip(recorded.proposal, same, strict=True):
                if expected is not None:
                    assert_same_bits(actual, expected)
            found.append(differences(scratch, recorded))
    assert len(found) >= 3
    assert 1 / 400 < np.median(found) < BF16_DRAFT_TOLERANCE
    assert max(found) < 1 / 2


def test_kernels_and_numpy_round_in_the_same_places(pair: Pair) -> None:
    """Of the same features: most numbers of the last rows have the same bits, few are more than a rounding away.

    Sums in another order differ in float32's last bits, and where that tips a rounding to bfloat16 by 2^-8 of a number.
    An engine that rounds elsewhere is as far away as float32 is.
    """
    on_cpu, on_kernels, exact = (*(rows_of(pair, device) for device in DEVICES), rows_of(pair, "cpu", "float32"))
    apart, rounding = np.abs(on_kernels - on_cpu), np.abs(exact - on_cpu)
    assert np.mean(apart) < np.mean(rounding) / 2
    assert np.median(apart) <= np.median(rounding) / 4


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_run_gives_the_same_draft(plain_pair: Pair, device: str) -> None:
    runs = []
    for _ in range(2):
        engine = load(plain_pair, device)
        with engine.device.running():
            drafter = started(engine)
            runs += [drafter.propose_after(np.array([7], np.int32)) for _ in range(2)]
    for run in runs[1:]:
        for actual, expected in zip(run, runs[0], strict=True):
            assert_same_bits(actual, expected)


def test_a_trained_drafter_says_the_same() -> None:
    """Of the golden texts: its chains and its candidates are float32's in nearly all rounds."""
    case = load_cases(TRAINED)[0]
    recorded = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine.load(bundle_of(TRAINED), "cpu", dtype=dtype)
        recorder = Recorder(engine.drafter, PromptLookup())
        text = engine.generate(case.prompt, "ddtree", 8, len(case.tokens), drafter=recorder).tokens
        assert text == case.tokens.tolist()
        recorded.append(recorder.kept)
    both = list(zip(*recorded, strict=True))
    best, chains = [], []
    for exact, rounded in both:
        np.testing.assert_array_equal(exact.tokens, rounded.tokens)
        best += (exact.proposal.token_ids[:, 0] == rounded.proposal.token_ids[:, 0]).tolist()
        chains.append(most_probable(exact.proposal) == most_probable(rounded.proposal))
    assert len(both) > 10
    assert np.mean(best) > 0.95
    assert np.mean(chains) > 0.8


# ---- what is rounded, and what is not --------------------------------------------------------------------------------


def is_rounded(array: np.ndarray) -> bool:
    return bool((array == array.astype(bfloat16).astype(np.float32)).all())


def test_what_enters_a_product_is_rounded_and_nothing_else(plain_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the NumPy path: both operands of every product, keys and values; no sum, no log-probability."""
    product, seen, sums = engine_weights.linear, [], []

    def watched(x: np.ndarray, weight: Tiles) -> np.ndarray:
        seen.append(is_rounded(x) and is_rounded(weight.values))
        sums.append(product(x, weight))
        return sums[-1]

    monkeypatch.setattr(engine_weights, "linear", watched)
    drafter = started(load(plain_pair))
    proposal = drafter.propose_after(np.array([7], np.int32))
    assert len(seen) == 2 + 4 * plain_pair.drafter.config.num_hidden_layers + 2 and all(seen)
    assert not any(map(is_rounded, sums))
    assert proposal.log_probs.dtype == np.float32 and not is_rounded(proposal.log_probs[proposal.log_probs > -np.inf])


@pytest.mark.parametrize("device", DEVICES)
def test_its_cache_takes_half_the_bytes(plain_pair: Pair, device: str) -> None:
    narrow, wide = (started(load(plain_pair, device, dtype)) for dtype in ("bfloat16", "float32"))
    for name in ("_keys", "_values"):
        cached, exact = getattr(narrow, name), getattr(wide, name)
        assert cached.shape == exact.shape and 2 * cached.nbytes == exact.nbytes
        assert cached[:, :9].astype(np.float32).any(axis=(0, 2, 3)).all()


def test_its_name_says_what_its_time_depends_on(
    plain_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs of rounds are kept under it: arithmetic, config, and how its weights are stored."""
    monkeypatch.setattr(engine_budget, "cache_folder", lambda name: tmp_path)
    monkeypatch.setattr(engine_budget, "measure", lambda *_: np.ones(2, np.float32))
    packed = build_pair(tmp_path, storage="int4")
    engines = load(plain_pair), load(plain_pair, dtype="float32"), load(packed)
    names = [repr(engine.drafter) for engine in engines]
    assert len(set(names)) == 3
    assert [re.search(r"dtype=(\w+)\)$", name)[1] for name in names] == ["bfloat16", "float32", "bfloat16"]
    for engine in engines:
        engine_budget.round_costs(engines[0].model, engine.drafter, 3)
    assert len(list(tmp_path.glob("*.json"))) == 3


# ---- what its kernels do not take is refused when it is loaded -------------------------------------------------------

REFUSED_TARGETS: dict[str, tuple[dict, str]] = {
    "latent": (dict(kv_lora_rank=24), "kv_lora_rank=24, expected a multiple of 16"),
    "rotated part": (dict(qk_rope_head_dim=8), "qk_rope_head_dim=8, expected a multiple of 16"),
    "part without position": (dict(qk_nope_head_dim=12), "qk_nope_head_dim=12, expected a multiple of 8"),
    "rank of queries": (dict(q_lora_rank=20), "inputs of .*self_attn.q_b_proj=20, expected a multiple of 8"),
    "values": (dict(v_head_dim=10), "inputs of .*self_attn.o_proj=20, expected a multiple of 8"),
    "hidden": (dict(hidden_size=36), "inputs of .*q_a_proj=36, expected a multiple of 8"),
    "width of a dense layer": (dict(intermediate_size=60), "inputs of .*layers.0.mlp.down_proj=60, expected"),
    "width of shared experts": (dict(moe_intermediate_size=20), "inputs of .*layers.1.mlp.shared_experts.down_proj=20"),
    "head": (dict(hidden_size=36, tie_word_embeddings=True), "inputs of .*=36, expected a multiple of 8"),
}
REFUSED_DRAFTERS: dict[str, tuple[dict, str]] = {
    "heads": (
        dict(head_dim=6, num_attention_heads=2),
        "inputs of layers.0.self_attn.o_proj=12, expected a multiple of 8",
    ),
    "width": (dict(intermediate_size=52), "inputs of layers.0.mlp.down_proj=52, expected a multiple of 8"),
}


def outcomes(path: Path) -> Iterator[tuple[str, str, str | None]]:
    """Device, dtype, and the refusal to load; what is loaded must run."""
    for device in DEVICES:
        for dtype in ("float32", "bfloat16"):
            try:
                engine = Engine.load(path, device, dtype=dtype)
            except ValueError as error:
                yield device, dtype, str(error)
                continue
            engine.generate([3, 5, 8], "ddtree", 4, 2)
            yield device, dtype, None


def check_refused(path: Path, file: str, message: str) -> None:
    for device, dtype, refusal in outcomes(path):
        if (device, dtype) == ("emulated", "bfloat16"):
            assert refusal is not None and re.search(rf"{file}: {message}", refusal), refusal
            assert "dtype='bfloat16'" in refusal and "'float32' take any" in refusal
        else:
            assert refusal is None, refusal


@pytest.mark.parametrize(("changes", "message"), REFUSED_TARGETS.values(), ids=REFUSED_TARGETS)
def test_a_target_that_tensor_cores_do_not_take(tmp_path: Path, changes: dict, message: str) -> None:
    build(tmp_path / "tiny.kdtr", tiny_config(**(SIZES | changes)), storage="float32")
    check_refused(tmp_path / "tiny.kdtr", r"tiny\.kdtr", message)


@pytest.mark.parametrize(("changes", "message"), REFUSED_DRAFTERS.values(), ids=REFUSED_DRAFTERS)
def test_a_drafter_that_tensor_cores_do_not_take(tmp_path: Path, changes: dict, message: str) -> None:
    build_pair(tmp_path, **changes)
    check_refused(tmp_path / "tiny.kdtr", r"tiny\.drafter\.kdtr", message)


def test_odd_sizes_that_no_product_on_tensor_cores_meets_are_taken(tmp_path: Path) -> None:
    """Routed experts of floats go through the exact kernels; a vocabulary, ranks and numbers of heads are outputs."""
    target = tiny_config(**SIZES, moe_intermediate_size=20, n_shared_experts=0, num_attention_heads=3, vocab_size=61)
    build(tmp_path / "tiny.kdtr", target, storage="float32")
    changes = dict(head_dim=8, num_attention_heads=3, num_key_value_heads=1, transition_rank=5)
    build(tmp_path / "tiny.drafter.kdtr", tiny_drafter_config(target, **changes), storage="float32")
    assert all(refusal is None for *_, refusal in outcomes(tmp_path / "tiny.kdtr"))


def test_a_latent_that_no_block_has_room_for(plain_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with less shared memory than the largest latents take."""
    small = engine_model.processor_of(np.zeros(1))._replace(shared_bytes=8192)
    monkeypatch.setattr(engine_model, "processor_of", lambda _: small)
    with pytest.raises(ValueError, match=r"a latent of 48 elements takes .* shared memory, expected at most 8192"):
        load(plain_pair, "emulated")
    load(plain_pair, "cpu")
    load(plain_pair, "emulated", "float32")


def test_another_target_is_named_first(plain_pair: Pair, tmp_path: Path) -> None:
    """Before any size: what does not belong together."""
    config = dataclasses.replace(plain_pair.drafter.config, hidden_size=36)
    other = build(tmp_path / "other.kdtr", config, storage="float32")
    with pytest.raises(ValueError, match="the drafter has hidden_size=36, its target 32"):
        Engine.load(plain_pair.target.path, "emulated", drafter=other.path, dtype="bfloat16")
