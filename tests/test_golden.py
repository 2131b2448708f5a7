"""Golden files, and verify: what it prints, and that it sees every fault it is there for."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import build, tiny_config
from safetensors.numpy import save_file

from golden import make_sums
from kdtree_nb import golden
from kdtree_nb.bundle import Bundle
from kdtree_nb.engine import Engine, cache, rounds, weights
from kdtree_nb.engine import model as engine_model
from kdtree_nb.golden import GoldenCase, bundle_of, golden_files, load_cases, make_cases, save_cases
from kdtree_nb.reference.model import forward
from kdtree_nb.verify import Check, verify, verify_bundle

TINY = golden.folder() / "tiny"
FILES = sorted(TINY.glob(f"*{golden.SUFFIX}"))
INT4 = TINY / f"tiny-int4{golden.SUFFIX}"
SPECULATIVE = {"model_chain", "model_ddtree"}
EVERY = {"model_ar", *SPECULATIVE}


# ---- files -----------------------------------------------------------------------------------------------------------


def small_case(tokens: int = 3, vocab_size: int = 7) -> GoldenCase:
    random = np.random.default_rng(tokens)
    logits = random.standard_normal((tokens, vocab_size), np.float32)
    return GoldenCase(np.array([1, 2], np.int32), logits.argmax(axis=1).astype(np.int32), logits)


def test_cases_come_back_as_written(tmp_path: Path) -> None:
    cases = [small_case(tokens) for tokens in (3, 5, 1)]
    save_cases(tmp_path / f"a{golden.SUFFIX}", cases)
    loaded = load_cases(tmp_path / f"a{golden.SUFFIX}")
    assert len(loaded) == 3
    for case, again in zip(cases, loaded, strict=True):
        for array, other in zip(case, again, strict=True):
            assert array.dtype == other.dtype
            np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(loaded[0].text, [1, 2, *cases[0].tokens])


def test_files_are_found_with_the_tiny_models_first(tmp_path: Path) -> None:
    for name in ("b/z", "a/y", "tiny/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_cases(tmp_path / f"{name}{golden.SUFFIX}", [small_case()])
    found = golden_files(tmp_path)
    assert [bundle_of(path) for path in found] == [tmp_path / f"{name}.kdtr" for name in ("tiny/x", "a/y", "b/z")]


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "not safetensors": lambda path: path.write_bytes(b"not a file"),
    "empty": lambda path: path.write_bytes(b""),
    "no tensors": lambda path: save_file({}, path),
    "other tensors": lambda path: save_file({"weight": np.zeros(3)}, path),
    "a field is missing": lambda path: save_file({"0.prompt": np.zeros(3), "0.tokens": np.zeros(3)}, path),
    "no tokens": lambda path: save_cases(path, [small_case()._replace(tokens=np.zeros(0, np.int32))]),
    "no logits": lambda path: save_cases(path, [small_case()._replace(logits=np.zeros((0, 7), np.float32))]),
    "fewer logits than tokens": lambda path: save_cases(path, [small_case()._replace(logits=small_case().logits[:2])]),
    "flat logits": lambda path: save_cases(path, [small_case()._replace(logits=np.zeros(3, np.float32))]),
}


@pytest.mark.parametrize("write", BAD_FILES.values(), ids=BAD_FILES)
def test_what_is_no_golden_file_says_so(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / f"bad{golden.SUFFIX}"
    write(path)
    with pytest.raises(ValueError, match=r"bad\.golden\.safetensors is not a golden file: "):
        load_cases(path)


def test_make_cases_keeps_clear_texts_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts 0 … 4: a narrow margin, an end of text inside, one at its end, two clear ones."""
    config = tiny_config(vocab_size=5, eos_token_ids=(4,))
    clear = np.eye(5, dtype=np.float32)
    narrow = clear.copy()
    narrow[1, 1] = golden.NARROWEST_MARGIN / 2
    texts = {0: narrow[[1, 2, 3]], 1: clear[[1, 4, 2]], 2: clear[[1, 2, 4]], 3: clear[[3, 2, 1]], 4: clear[[2, 2, 2]]}

    def greedy(weights: object, config: object, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        return texts[int(prompt[0])].argmax(axis=1).astype(np.int32), texts[int(prompt[0])]

    monkeypatch.setattr(golden, "greedy", greedy)
    prompts = [np.array([i]) for i in range(5)]
    cases = make_cases({}, config, prompts, 2)
    assert [case.prompt.tolist() for case in cases] == [[2], [3]]
    assert cases[0].prompt.dtype == np.int32
    with pytest.raises(ValueError, match=r"golden: 3 of 5 prompts keep the margin, expected 4"):
        make_cases({}, config, prompts, 4)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_golden_files_are_what_the_reference_says(path: Path) -> None:
    """Also on this machine, and by a route that doesn't go through ``greedy``."""
    bundle, cases = Bundle.open(bundle_of(path)), load_cases(path)
    reference_weights = bundle.weights()
    assert len(cases) == 3
    for case in cases:
        logits = forward(reference_weights, bundle.config, case.text[:-1])[len(case.prompt) - 1 :]
        np.testing.assert_array_equal(case.tokens, logits.argmax(axis=1))
        assert np.abs(case.logits - logits).max() <= 1e-4
        second, best = np.sort(case.logits, axis=1)[:, -2:].T
        assert (best - second).min() >= golden.NARROWEST_MARGIN
        assert len(set(case.tokens.tolist())) > 12


def test_fp32_and_int4_are_told_apart() -> None:
    fp32, int4 = (load_cases(path) for path in FILES)
    for one, other in zip(fp32, int4, strict=True):
        np.testing.assert_array_equal(one.prompt, other.prompt)
        assert not np.array_equal(one.tokens, other.tokens)


# ---- the report ------------------------------------------------------------------------------------------------------

CONTRACT = [  # other tools read these lines; what follows a match is free
    r"PASS  bundle        \d+ tensors match their checksums",
    r"PASS  model_ar      tokens=24/24 exact  max_abs_logit_diff=\d\.\de-0\d",
    r"PASS  model_chain   AR==golden and CHAIN==golden \(24 tokens\), greedy-exact, target_forwards=\d+",
    r"PASS  model_ddtree  AR==golden and DDTREE==golden \(24 tokens\), greedy-exact, target_forwards=\d+",
]


def test_report_of_the_shipped_models() -> None:
    report = list(verify(TINY))
    assert [path.name for path, _ in report] == ["tiny-fp32.kdtr"] * 4 + ["tiny-int4.kdtr"] * 4
    for pattern, (_, check) in zip(CONTRACT * 2, report, strict=True):
        assert re.match(pattern, str(check))
    forwards = {check.name: int(re.search(r"target_forwards=(\d+)", str(check))[1]) for _, check in report[2:4]}
    assert forwards["model_ddtree"] <= forwards["model_chain"] < 24


def test_a_line_says_fail() -> None:
    assert str(Check("model_ar", False, "x")) == "FAIL  model_ar      x"


def test_no_golden_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no golden file below {re.escape(str(tmp_path))}"):
        list(verify(tmp_path))


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="device='abacus', expected one of"):
        list(verify(TINY, "abacus"))


# ---- faults that a check must name -----------------------------------------------------------------------------------


def first_case(tokens: int = 10) -> GoldenCase:
    """The start of the first case: fewer tokens, and less for a fault to show in."""
    case = load_cases(INT4)[0]
    return GoldenCase(case.prompt, case.tokens[:tokens], case.logits[:tokens])


def failures(cases: list[GoldenCase], path: Path | None = None) -> dict[str, str]:
    checks = verify_bundle(path or bundle_of(INT4), cases, "cpu")  # what is mutated is the NumPy path
    return {check.name: check.detail for check in checks if not check.passed}


def test_nothing_fails_by_itself() -> None:
    assert failures([first_case()]) == {}


@pytest.mark.parametrize("position", [0, 4, 9])
def test_a_changed_golden_token_is_seen(position: int) -> None:
    case = first_case()
    case.tokens[position] = (case.tokens[position] + 1) % 510
    found = failures([case])
    assert found.keys() == EVERY
    assert found["model_ar"].startswith(f"tokens={position}/10 DIFFER  ")
    assert found["model_ddtree"] == "does not hold: AR==golden, DDTREE==golden"


@pytest.mark.parametrize(("offset", "which"), [(0.002, 0), (-0.002, 1), (np.inf, 0), (np.nan, 0), (np.nan, 1)])
def test_golden_logits_that_are_off_are_seen(offset: float, which: int) -> None:
    """In any of several prompts: NaN must not hide behind the maximum of the others."""
    cases = [first_case(), first_case()]
    cases[which].logits[7, 300] += offset
    found = failures(cases)
    assert found.keys() == {"model_ar"}
    assert found["model_ar"].startswith("tokens=10/10 exact  max_abs_logit_diff=")


def test_a_text_longer_than_the_first_must_agree_to_its_end() -> None:
    case, shorter = first_case(), first_case(6)
    assert failures([shorter, case]) == {}
    case.tokens[8] += 1
    assert failures([shorter, case]).keys() == EVERY


@pytest.mark.parametrize("place", [0.3, 0.9, -1])
def test_a_flipped_byte_is_seen(tmp_path: Path, place: float) -> None:
    path = tmp_path / "flipped.kdtr"
    data = bytearray(bundle_of(INT4).read_bytes())
    data[int(place * len(data)) if place > 0 else -1] ^= 1
    path.write_bytes(data)
    assert re.search(r"flipped\.kdtr: tensor '.*': checksum sha256:", failures([first_case()], path)["bundle"])


def test_a_missing_bundle_is_a_failed_check(tmp_path: Path) -> None:
    shutil.copy(INT4, tmp_path)
    ((path, check),) = verify(tmp_path)
    assert path == tmp_path / "tiny-int4.kdtr"
    assert str(check).startswith(f"FAIL  bundle        {path}: no such file")


def test_a_wrong_model_of_the_same_shape_is_seen(tmp_path: Path) -> None:
    config = Bundle.open(bundle_of(INT4)).config
    other = build(tmp_path / "other.kdtr", config, seed=5).path
    assert failures([first_case()], other).keys() == EVERY


forward_pass, tree_attention = engine_model.Model.forward, engine_model.tree_attention
linear, softmax_scale, tree_accept = weights.linear, engine_model.softmax_scale, rounds.tree_accept
mla_inputs, swiglu = engine_model.mla_inputs, engine_model.swiglu
cache_commit = cache.cache_commit


def positions_by_slot(self, tokens, parents, depths, *args, **options):
    return forward_pass(self, tokens, parents, np.arange(len(tokens), dtype=np.int32), *args, **options)


def all_earlier_nodes_visible(queries, rows, prefix_len, parents, *rest):
    return tree_attention(queries, rows, prefix_len, np.arange(len(parents)) - 1, *rest)


def siblings_visible(queries, rows, prefix_len, parents, *rest):
    """A node's parent becomes its sibling before it, if there is one."""
    seen, shifted = {}, parents.copy()
    for node, parent in enumerate(parents):
        shifted[node] = seen.get(int(parent), parent) if node else parent
        seen[int(parent)] = node
    return tree_attention(queries, rows, prefix_len, shifted, *rest)


def ancestors_hidden(queries, rows, prefix_len, parents, depths, *rest):
    """A node sees the root and the row after it in place of its path."""
    first, pair = np.array([-1], np.int32), np.array([-1, 0], np.int32)
    return np.concatenate(
        [tree_attention(queries[:1], rows, prefix_len, first, first + 1, *rest)]
        + [
            tree_attention(np.stack([queries[0], queries[i]]), rows, prefix_len, pair, pair + 1, *rest)[1:]
            for i in range(1, len(parents))
        ]
    )


def position_one_too_high(*inputs):
    """Of queries; keys are then written where they belong."""
    *projections, prefix_len, depths, rows = inputs
    queries = mla_inputs(*projections, prefix_len, depths + (prefix_len[0] + depths > 4), rows)
    mla_inputs(*inputs)
    return queries


def gate_and_up_swapped(gate_up, dtype):
    return swiglu(np.concatenate(np.split(gate_up, 2, axis=1)[::-1], axis=1), dtype)


def commit_first_rows(rows, prefix_len, path, length):
    cache_commit(rows, prefix_len, np.arange(len(path)), length)


def commit_nothing(rows, prefix_len, path, length):
    pass


def commit_backwards(rows, prefix_len, path, length):
    """The right rows in another order: a rotated key knows its position, so only sums change, in their last bits."""
    cache_commit(rows, prefix_len, path[::-1], length)


def accept_any_child(tokens, parents, targets, max_path):
    accepted = tree_accept(tokens, parents, targets, max_path)
    children = np.flatnonzero(parents == accepted.path[-1])
    if not len(children):
        return accepted
    path = np.append(accepted.path, children[0]).astype(np.int32)
    return accepted._replace(
        path=path, tokens=np.append(accepted.tokens, accepted.tokens[-1]), length=path[:1] * 0 + len(path)
    )


def bonus_of_the_root(tokens, parents, targets, max_path):
    accepted = tree_accept(tokens, parents, targets, max_path)
    return accepted._replace(tokens=np.append(accepted.tokens[:-1], targets[0]))


def row_variant_product(x, weight):
    return linear(x, weight) * np.float32(1 + 1e-6 * (len(x) > 1))


def latents_one_row_on(queries, compressed, weight, table, prefix_len, depths, rows):
    """Each node's latent lies where the next one's belongs."""
    parts = mla_inputs(queries, compressed, weight, table, prefix_len, depths, rows)
    mla_inputs(queries, np.roll(compressed, 1, axis=0), weight, table, prefix_len, np.roll(depths, 1), rows)
    return parts


MUTATIONS: dict[str, tuple[object, str, Callable, set[str]]] = {
    # what: where, attribute, replacement, the checks that fail
    "softmax scale without m²": (engine_model, "softmax_scale", lambda config: config.qk_head_dim**-0.5, EVERY),
    "softmax scale 0.3 % off": (engine_model, "softmax_scale", lambda c: softmax_scale(c) * 1.003, {"model_ar"}),
    "position one too high": (engine_model, "mla_inputs", position_one_too_high, EVERY),
    "gate and up swapped": (engine_model, "swiglu", gate_and_up_swapped, EVERY),
    "positions by slot": (engine_model.Model, "forward", positions_by_slot, {"model_ddtree"}),
    "all earlier nodes visible": (engine_model, "tree_attention", all_earlier_nodes_visible, {"model_ddtree"}),
    "siblings visible": (engine_model, "tree_attention", siblings_visible, {"model_ddtree"}),
    "ancestors hidden": (engine_model, "tree_attention", ancestors_hidden, EVERY),
    "first rows committed": (cache, "cache_commit", commit_first_rows, {"model_ddtree"}),
    "nothing moved": (cache, "cache_commit", commit_nothing, {"model_ddtree"}),
    "path committed backwards": (cache, "cache_commit", commit_backwards, SPECULATIVE),
    "latents in another's row": (engine_model, "mla_inputs", latents_one_row_on, EVERY),
    "a rejected child accepted": (rounds, "tree_accept", accept_any_child, SPECULATIVE),
    "bonus of the root": (rounds, "tree_accept", bonus_of_the_root, SPECULATIVE),
    "rows that depend on their number": (weights, "linear", row_variant_product, SPECULATIVE),
}


@pytest.mark.parametrize(("where", "name", "mutant", "checks"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutated_engine_is_caught(
    where: object, name: str, mutant: Callable, checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(where, name)
    monkeypatch.setattr(where, name, mutant)
    assert failures([first_case()]).keys() == checks


def test_only_the_bits_betray_rows_that_depend_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "linear", row_variant_product)
    assert failures([first_case()])["model_ddtree"] == "does not hold: greedy-exact"


def test_int4_nibbles_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Bundle.weight

    def swapped(self: Bundle, name: str) -> np.ndarray:
        weight = read(self, name)
        if f"{name}.qw" not in self:
            return weight
        return weight.reshape(len(weight), -1, 2)[:, :, ::-1].reshape(weight.shape)

    monkeypatch.setattr(Bundle, "weight", swapped)
    assert failures([first_case()]).keys() == EVERY


def test_engine_and_mutants_share_no_state() -> None:
    """After all of the above."""
    engine = Engine.load(bundle_of(INT4))
    case = first_case()
    run = engine.generate(case.prompt, "ar", max_new_tokens=10)
    assert run.tokens == case.tokens.tolist()


def test_the_files_are_those_whose_hashes_are_recorded() -> None:
    """A golden file that was made anew without ``make golden`` shows here."""
    assert make_sums.sums() == make_sums.SUMS.read_text(encoding="utf-8")
