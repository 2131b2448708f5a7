"""The engine in bfloat16: the same bits whatever the decoder, and how far from float32 and from its own NumPy path."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from builders import Built, build, build_drafter_beside, tiny_config
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb import golden, verify
from kdtree_nb.engine import DFlash, Engine, Oracle
from kdtree_nb.engine import model as engine_model
from kdtree_nb.engine import weights as engine_weights
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.golden import GoldenCase, bundle_of, load_cases
from kdtree_nb.quantization import routed_experts
from kdtree_nb.reference.linear import Tiles
from kdtree_nb.reference.model import forward
from kdtree_nb.reference.tree import ancestors
from kdtree_nb.verify import BF16_ROUNDINGS, BF16_TOLERANCE, check_ar_bf16, nudged, verify_bundle

DEVICES = ("cpu", "emulated")
INT4 = golden.folder() / "tiny" / f"tiny-int4{golden.SUFFIX}"
TRAINED = golden.folder() / "kdt16m" / f"kdt16m-int4{golden.SUFFIX}"
SIZES = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
"""Multiples of 16, as the kernels of tensor cores have them."""
MODELS: dict[str, tuple[dict, dict]] = {
    "int4": (dict(), dict()),
    "int4, q_proj, tied": (dict(q_lora_rank=None, tie_word_embeddings=True), dict()),
    "float32": (dict(), dict(storage="float32")),
    "bfloat16": (dict(), dict(storage="bfloat16")),
    "int4, two shared experts": (dict(n_shared_experts=2), dict()),
    "experts alone in int4": (dict(n_shared_experts=2), dict(select=routed_experts)),
    "down projections alone in int4": (dict(), dict(select=lambda name: name.endswith("down_proj"))),
    "gates alone in int4": (dict(), dict(select=lambda name: name.endswith("gate_proj"))),
}
PROMPT = np.array([5, 3, 60, 3, 5, 3], np.int32)


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    changes, storage = MODELS[request.param]
    return build(tmp_path_factory.mktemp("bf16") / "tiny.kdtr", tiny_config(**SIZES, **changes), seed=1, **storage)


@pytest.fixture
def one(tmp_path: Path) -> Built:
    return build(tmp_path / "tiny.kdtr", tiny_config(**SIZES), seed=1)


def load(path: Path, device: str) -> Engine:
    return Engine.load(path, device, dtype="bfloat16")


# ---- bit for bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_every_decoder_gives_the_same_bits(built: Built, device: str) -> None:
    engine = load(built.path, device)
    plain = engine.generate(PROMPT, "ar", max_new_tokens=8, keep_logits=True)
    answer = np.concatenate([PROMPT, plain.tokens])
    for decoder, nodes in (("chain", 5), ("ddtree", 9), ("ddtree", 33)):
        drafter = Oracle(answer, 67, hit_rate=0.7, seed=nodes)
        drafted = engine.generate(PROMPT, decoder, nodes, 8, drafter=drafter, keep_logits=True)
        assert drafted.tokens == plain.tokens
        assert_same_bits(drafted.logits, plain.logits)
        assert drafted.target_forwards < 8


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_is_the_same_alone_in_a_prompt_and_in_a_tree(one: Built, device: str) -> None:
    """Every node of a random tree behind a prefix: in it, in a prompt with its path at the end, and alone."""
    engine = load(one.path, device)
    random = np.random.default_rng(0)
    nodes = 11 if device == "emulated" else 40
    parents = np.array([-1, *(random.integers(node) for node in range(1, nodes))], np.int32)
    tokens, prefix = random.integers(67, size=nodes, dtype=np.int32), random.integers(67, size=21, dtype=np.int32)
    paths = ancestors(parents)
    depths = ((paths >= 0).sum(axis=1) - 1).astype(np.int32)

    def run(cache: LatentCache, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> np.ndarray:
        with engine.device.running():
            return engine.model.forward(tokens, parents, depths, cache).logits

    def chain(cache: LatentCache, tokens: np.ndarray, keep: bool) -> np.ndarray:
        rows = np.arange(len(tokens), dtype=np.int32)
        logits = run(cache, tokens, rows - 1, rows)
        if keep:
            cache.commit(rows, np.array([len(tokens)], np.int32))
        return logits

    def cache() -> LatentCache:
        return LatentCache(engine.config, 80, engine.device, engine.model.weights.dtype)

    behind = cache()
    chain(behind, prefix, keep=True)
    in_tree = run(behind, tokens, parents, depths)
    for node in range(nodes):
        path = tokens[paths[node][paths[node] >= 0]]
        assert_same_bits(chain(cache(), np.concatenate([prefix, path]), keep=False)[-1], in_tree[node])
        alone = cache()
        for start in range(0, len(prefix), 4):
            chain(alone, prefix[start : start + 4], keep=True)
        for token in path:
            logits = chain(alone, np.array([token]), keep=True)
        assert_same_bits(logits[0], in_tree[node])


@pytest.mark.parametrize("device", DEVICES)
def test_a_trained_drafter_drafts_for_it(one: Built, device: str) -> None:
    """It takes the engine's dtype, reads float32 residuals, and goes through the target's head and embedding."""
    build_drafter_beside(one, head_dim=8)
    engine = load(one.path, device)
    assert isinstance(engine.drafter, DFlash)
    assert engine.drafter.weights.dtype == bfloat16
    plain = engine.generate(PROMPT, "ar", max_new_tokens=6, keep_logits=True)
    for decoder in ("chain", "ddtree"):
        drafted = engine.generate(PROMPT, decoder, 12, 6, keep_logits=True)
        assert drafted.tokens == plain.tokens
        assert_same_bits(drafted.logits, plain.logits)


@pytest.mark.parametrize("file", [INT4, TRAINED], ids=lambda path: path.name)
def test_golden_models_on_the_kernels(file: Path) -> None:
    case, engine = load_cases(file)[0], load(bundle_of(file), "emulated")
    plain = engine.generate(case.prompt, "ar", max_new_tokens=4, keep_logits=True)
    drafter = Oracle(np.concatenate([case.prompt, plain.tokens]), engine.config.vocab_size)
    for decoder in ("chain", "ddtree"):
        drafted = engine.generate(case.prompt, decoder, 12, 4, drafter=drafter, keep_logits=True)
        assert drafted.tokens == plain.tokens
        assert_same_bits(drafted.logits, plain.logits)
    if file == TRAINED:
        assert plain.tokens == case.tokens[:4].tolist()  # a trained model's margins are wider than the roundings


# ---- how near --------------------------------------------------------------------------------------------------------


def deviations(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Each row's largest difference, in deviations of what is expected."""
    return np.abs(logits - expected).max(axis=1) / expected.std()


def whole(engine: Engine, text: np.ndarray) -> np.ndarray:
    """Logits of every row of a text in one pass."""
    rows = np.arange(len(text), dtype=np.int32)
    cache = LatentCache(engine.config, len(text), engine.device, engine.model.weights.dtype)
    with engine.device.running():
        return engine.model.forward(text, rows - 1, rows, cache).logits


def alone(engine: Engine, text: np.ndarray) -> np.ndarray:
    """Logits of every token as if it were the first."""
    return np.concatenate([whole(engine, text[i : i + 1]) for i in range(len(text))])


def of_one_rounding(built: Built, text: np.ndarray) -> float:
    """The median row's deviation if each weight were moved by up to half a unit of bfloat16's last place."""
    expected = forward(built.weights, built.config, text)
    return float(np.median(deviations(forward(nudged(built.weights), built.config, text), expected)))


def test_kernels_and_numpy_round_in_the_same_places(built: Built, request: pytest.FixtureRequest) -> None:
    """A token alone attends to itself with weight 1, which no rounding changes: left are float32's last bits.

    A single rounding that only one of the two has moves the median row by 2e-3 and more. They are as far apart where a
    layer's gates are INT4 and its ups floats: kernels stack and round them together.
    """
    text = np.random.default_rng(2).integers(67, size=12, dtype=np.int32)
    on_cpu, on_kernels = (alone(load(built.path, device), text) for device in DEVICES)
    apart = np.median(deviations(on_kernels, on_cpu))
    if request.node.callspec.params["built"] == "gates alone in int4":
        assert 1e-3 < apart < of_one_rounding(built, text)
    else:
        assert apart < 64 * 2.0**-24  # of the largest logits' last bit, a few deviations


def test_attention_alone_sets_kernels_and_numpy_apart(built: Built) -> None:
    """Of several tokens the kernels round the weights too, one rounding of many: no more than one of every weight."""
    text = np.random.default_rng(2).integers(67, size=30, dtype=np.int32)
    on_cpu, on_kernels = (whole(load(built.path, device), text) for device in DEVICES)
    assert np.median(deviations(on_kernels, on_cpu)) < 1.5 * of_one_rounding(built, text)


@pytest.mark.parametrize("device", DEVICES)
def test_near_the_float32_specification(built: Built, device: str) -> None:
    """As ``verify`` has it, the engine's three roundings; and not as near as float32 would be."""
    text = np.random.default_rng(3).integers(67, size=30, dtype=np.int32)
    differences = deviations(whole(load(built.path, device), text), forward(built.weights, built.config, text))
    assert 1 / 10 < np.median(differences) / of_one_rounding(built, text) < BF16_ROUNDINGS


def test_a_trained_model_is_nearer() -> None:
    """Kilobytes of prose: the golden tokens come out of the other arithmetic as well."""
    case, engine = load_cases(TRAINED)[1], load(bundle_of(TRAINED), "cpu")
    expected = forward(engine.bundle.weights(), engine.config, case.text[:-1])
    found = whole(engine, case.text[:-1])
    assert np.median(deviations(found, expected)) < 1 / 50
    run = engine.generate(case.prompt, "ar", max_new_tokens=len(case.tokens))
    assert run.tokens == case.tokens.tolist()


# ---- what is rounded, and what is not --------------------------------------------------------------------------------


def is_rounded(array: np.ndarray) -> bool:
    return bool((array == array.astype(bfloat16).astype(np.float32)).all())


def test_what_enters_a_product_is_rounded_and_nothing_else(one: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the NumPy path, which is the specification: both operands of every product, the cache; no sum, no residual."""
    product, seen = engine_weights.linear, []

    def watched(x: np.ndarray, weight: Tiles) -> np.ndarray:
        seen.append((is_rounded(x), is_rounded(weight.values)))
        return product(x, weight)

    monkeypatch.setattr(engine_weights, "linear", watched)
    engine = load(one.path, "cpu")
    text = np.random.default_rng(4).integers(67, size=9, dtype=np.int32)
    rows = np.arange(9, dtype=np.int32)
    cache = LatentCache(engine.config, 9, engine.device, engine.model.weights.dtype)
    logits, features = engine.model.forward(text, rows - 1, rows, cache, taps=(0, 1))
    inputs, weights = zip(*seen, strict=True)
    assert all(inputs)
    assert not all(weights)  # codes times scales have 12 bits, and stay as they are
    assert cache.rows.dtype == bfloat16 and cache.rows.any()
    for exact in (logits, features):
        assert exact.dtype == np.float32 and not is_rounded(exact)


def test_float_weights_and_scales_are_rounded(one: Built) -> None:
    weights = load(one.path, "cpu").model.weights
    assert is_rounded(weights.matrix("lm_head")) and not is_rounded(one.weights["lm_head"])
    name = "model.layers.0.mlp.up_proj"
    packed, stored = weights.matrix(name), one.weights[name]
    assert not is_rounded(packed)
    ratios = (packed / np.where(stored, stored, 1)).reshape(len(packed), -1, 32)
    known = stored.reshape(ratios.shape) != 0
    for group, which in zip(ratios.reshape(-1, 32), known.reshape(-1, 32), strict=True):
        assert np.ptp(group[which]) < 1e-6 and abs(group[which][0] - 1) <= 2.0**-8  # one factor a group: its scale's
    assert is_rounded(weights.embed(np.arange(67)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_takes_half_the_bytes(one: Built, device: str) -> None:
    engine = load(one.path, device)
    narrow = LatentCache(engine.config, 10, engine.device, engine.model.weights.dtype)
    assert 2 * narrow.rows.nbytes == LatentCache(engine.config, 10, engine.device).rows.nbytes


def test_float32_is_the_default_and_unchanged(one: Built) -> None:
    text = np.random.default_rng(5).integers(67, size=20, dtype=np.int32)
    plain, named = Engine.load(one.path, "cpu"), Engine.load(one.path, "cpu", dtype="float32")
    assert plain.dtype == "float32"
    assert_same_bits(whole(plain, text), whole(named, text))
    assert np.abs(whole(plain, text) - forward(one.weights, one.config, text)).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bf16", None])
def test_other_dtypes_are_named(one: Built, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"^Engine.load: dtype={re.escape(repr(dtype))}, expected one of float32, bfl"):
        Engine.load(one.path, dtype=dtype)


# ---- verify ----------------------------------------------------------------------------------------------------------

LINES = [
    r"PASS  bundle        \d+ tensors match",
    r"PASS  model_ar_bf16  near=\d+/12 tokens within 0\.125 deviations of float32's logits  largest=\d+\.\d\d  "
    r"median=[12]\.\d roundings  golden tokens of float32: \d+/12  prompts=2",
    r"PASS  model_chain_bf16  AR==CHAIN \(12 tokens\), greedy-exact, target_forwards=\d+  drafter=oracle prompts=2",
    r"PASS  model_ddtree_bf16  AR==DDTREE \(12 tokens\), greedy-exact, target_forwards=\d+  drafter=oracle prompts=2",
]


def first_cases(tokens: int = 12) -> list[GoldenCase]:
    return [GoldenCase(c.prompt, c.tokens[:tokens], c.logits[:tokens]) for c in load_cases(INT4)[:2]]


def report() -> list[str]:
    return [str(check) for check in verify_bundle(bundle_of(INT4), first_cases(), "cpu", dtype="bfloat16")]


def test_report() -> None:
    """No line has a name or a sentence of the float32 report's: nobody takes one for the other."""
    for pattern, line in zip(LINES, report(), strict=True):
        assert re.fullmatch(pattern + (".*" if "bundle" in pattern else ""), line), line


def test_the_trained_drafter_is_tried_on_every_text() -> None:
    cases = [GoldenCase(c.prompt, c.tokens[:4], c.logits[:4]) for c in load_cases(TRAINED)[:1]]
    checks = list(verify_bundle(bundle_of(TRAINED), cases, "cpu", 8, dtype="bfloat16"))
    assert all(check.passed for check in checks)
    assert [check.name for check in checks][4:] == ["drafter_bf16", *["model_ddtree_bf16"] * 5]
    assert all("drafter=trained" in check.detail for check in checks[5:])


linear, mla_inputs = engine_weights.linear, engine_model.mla_inputs
swiglu, scale = engine_model.swiglu, engine_model.softmax_scale


def position_one_too_high(*inputs):
    """Of queries; keys are then written where they belong."""
    *projections, depths, rows = inputs
    queries = mla_inputs(*projections, depths + 1, rows)
    mla_inputs(*inputs)
    return queries


MUTATIONS = {
    "softmax scale doubled": (engine_model, "softmax_scale", lambda config: 2 * scale(config), {"model_ar_bf16"}),
    "gate and up swapped": (
        engine_model,
        "swiglu",
        lambda gate_up, dtype: swiglu(np.concatenate(np.split(gate_up, 2, axis=1)[::-1], axis=1), dtype),
        {"model_ar_bf16"},
    ),
    "position one too high": (engine_model, "mla_inputs", position_one_too_high, {"model_ar_bf16"}),
    "rows that depend on their number": (
        engine_weights,
        "linear",
        lambda x, weight: linear(x, weight) * np.float32(1 + 1e-6 * (len(x) > 1)),
        {"model_chain_bf16", "model_ddtree_bf16"},
    ),
}


@pytest.mark.parametrize(("where", "name", "mutant", "failing"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutated_engine_is_caught(where, name, mutant, failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, mutant)
    assert {line.split()[1] for line in report() if line.startswith("FAIL")} == failing


def coarse(values: np.ndarray, bits: int) -> np.ndarray:
    """Float32 rounded to that many bits."""
    fraction, exponent = np.frexp(values.astype(np.float32))
    return np.ldexp(np.round(fraction * 2**bits) / 2**bits, exponent)


def write_coarsely(*inputs):
    """As a cache would be whose entries have 5 bits, where those of bfloat16 have 8."""
    queries, rows = mla_inputs(*inputs), inputs[-1]
    rows[...] = coarse(rows, 5).astype(rows.dtype)
    return queries


def test_a_short_text_hides_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 3 tokens of one are near, 4 of the other's 24."""
    specified = np.random.default_rng(0).standard_normal((40, 67)).astype(np.float32)
    monkeypatch.setattr(
        verify, "forward", lambda weights, config, text: specified[: len(text)] * (1 + 1e-3 * len(weights))
    )
    engine = SimpleNamespace(config=None, bundle=SimpleNamespace(weights=dict))
    monkeypatch.setattr(verify, "nudged", lambda weights: {"": None})
    prompt, cases, runs = np.zeros(1, np.int32), [], []
    for length, near in ((3, 3), (24, 4)):
        cases.append(GoldenCase(prompt, np.zeros(length, np.int32), specified[:length]))
        off = np.where(np.arange(length) < near, 0, 1).astype(np.float32)[:, None]
        runs.append(SimpleNamespace(tokens=[0] * length, logits=specified[:length] + off))
    check = check_ar_bf16(engine, cases, runs)  # type: ignore[arg-type]
    assert check.detail.startswith("near=4/24 ") and not check.passed


UNSEEN_BY_THE_TOLERANCE = {
    "softmax scale 3 % off": ("softmax_scale", lambda config: 1.03 * scale(config)),
    "a cache of 5 bits": ("mla_inputs", write_coarsely),
}


@pytest.mark.parametrize(("name", "mutant"), UNSEEN_BY_THE_TOLERANCE.values(), ids=UNSEEN_BY_THE_TOLERANCE)
def test_a_trained_model_tells_what_the_tolerance_does_not(name, mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault several times the size of bfloat16's own error, every token of which is within the tolerance."""
    cases = [GoldenCase(c.prompt, c.tokens[:12], c.logits[:12]) for c in load_cases(TRAINED)[:3]]

    def line() -> str:
        engine = load(bundle_of(TRAINED), "cpu")
        return str(
            check_ar_bf16(engine, cases, [engine.generate(c.prompt, "ar", 0, 12, keep_logits=True) for c in cases])
        )

    assert line().startswith("PASS")
    monkeypatch.setattr(engine_model, name, mutant)
    near = re.match(rf"FAIL  model_ar_bf16  near=(\d+)/12 tokens within {BF16_TOLERANCE} ", line())
    assert near and int(near[1]) >= 6
