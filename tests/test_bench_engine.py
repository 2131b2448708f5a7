"""bench step and model without a GPU: the cost model by hand, records, and what they time, run on the CPU instead."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from builders import build, build_drafter_beside, build_text_model, tiny_config
from ml_dtypes import bfloat16

from kdtree_nb import golden
from kdtree_nb.bench import ceilings, engines, layer, model, step
from kdtree_nb.bench.ceilings import Ceilings
from kdtree_nb.bundle import Bundle
from kdtree_nb.bundle.format import check_layout
from kdtree_nb.cli import main
from kdtree_nb.demo import trained_bundle
from kdtree_nb.engine import Engine, Generation, Round
from kdtree_nb.engine.device import Device

TINY = golden.folder() / "tiny" / "tiny-int4.kdtr"
KIMI_EXPERT_BYTES = 3 * 7168 * 2048 * 9 // 16


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What would be timed runs once, in NumPy; every timing is 1 µs. Gives how many calls each was to hold."""
    timed: list[int] = []

    def microseconds(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        timed.append(len(calls))
        return 1.0

    for module in (step, model, layer):
        monkeypatch.setattr(module, "require_gpu", lambda: None)
    for module in (step, layer):
        monkeypatch.setattr(module, "microseconds", microseconds)
    return timed


# ---- the cost model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "experts"), [(1, 8), (4, 31), (8, 60), (16, 110), (22, 142), (64, 284)])
def test_expected_experts_of_kimi_k2(rows: int, experts: int) -> None:
    assert round(engines.expected_experts(384, 8, rows)) == experts


def test_expected_experts_are_those_of_random_rows() -> None:
    random = np.random.default_rng(0)
    seen = [len({e for _ in range(5) for e in random.choice(16, 4, replace=False)}) for _ in range(4000)]
    assert engines.expected_experts(16, 4, 5) == pytest.approx(np.mean(seen), abs=0.1)


def test_pass_bytes_of_one_row() -> None:
    """By hand: all of the bundle but 5 experts of 8 in each sparse layer and the embedding's other rows; a cache."""
    bundle = Bundle.open(TINY)
    config = bundle.config
    expert = 3 * 32 * 64 // 2 + 3 * 32 * 64 // 32 * 4  # codes, and float32 scales
    unread = 3 * 5 * expert + 511 * 64 * 4
    cache = 4 * 11 * 96 * 4
    assert engines.pass_bytes(config, bundle.entries, 1, 10, 4) == pytest.approx(bundle.nbytes - unread + cache)
    narrow = engines.pass_bytes(config, bundle.entries, 1, 10, 2)
    assert narrow == pytest.approx(bundle.nbytes - unread + cache / 2)


def test_pass_bytes_of_a_shared_table(tmp_path: Path) -> None:
    """A head that is the embedding reads all of it."""
    built = build(tmp_path / "tied.kdtr", tiny_config(tie_word_embeddings=True))
    bundle = Bundle.open(built.path)
    every = engines.pass_bytes(built.config, bundle.entries, 10_000, 0, 4)  # rows that leave no expert out
    assert every - 2 * 10_000 * 32 * 4 == pytest.approx(bundle.nbytes)


def test_prompts_come_from_the_held_out_texts() -> None:
    engine = Engine.load(trained_bundle(golden.folder()), "cpu")
    tokens = engines.prompt_of(engine, 300)
    first = next(iter(golden.held_out_prompts(trained_bundle(golden.folder()).parent).values()))[0]
    assert tokens.dtype == np.int32
    assert len(tokens) == 300
    assert engine.tokenizer.decode(tokens.tolist()).startswith(first[:40])


def test_prompts_without_texts_are_random_tokens() -> None:
    tokens = engines.prompt_of(Engine.load(TINY, "cpu"), 50)
    assert len(set(tokens.tolist())) > 30
    assert 0 <= tokens.min() <= tokens.max() < 512


# ---- step ------------------------------------------------------------------------------------------------------------


def test_idle_is_what_no_part_accounts_for() -> None:
    one = step.Step(17, 100, 8e6, verify=400.0, draft=90.0, build=10.0, commit=20.0, round=600.0)
    assert one.idle == 80.0
    assert one.measured.floor(Ceilings(4000.0, 800.0)) == 2.0
    assert one.measured.case == {"rows": 17}


def test_step_runs_every_part(on_the_cpu: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "ROUNDS", 3)
    monkeypatch.setattr(step, "NEW_TOKENS", 8)
    target = build_text_model(tmp_path, eos_token_ids=())
    build_drafter_beside(target)
    engine = Engine.load(target.path, "cpu")
    plain, tree = step.measure(engine, (1, 9))
    assert on_the_cpu == [1] * 6  # pass and commit; draft, build, pass and commit
    assert (plain.rows, plain.draft, plain.build, plain.verify, plain.commit) == (1, 0.0, 0.0, 1.0, 1.0)
    assert (tree.rows, tree.draft, tree.build, tree.verify, tree.commit) == (9, 1.0, 1.0, 1.0, 1.0)
    assert plain.context == tree.context == step.PROMPT + 4
    assert plain.round > 0 < tree.round
    assert tree.bytes > plain.bytes == engines.pass_bytes(engine.config, engine.bundle.entries, 1, plain.context, 4)


def test_step_where_the_host_drafts(on_the_cpu: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "ROUNDS", 1)
    monkeypatch.setattr(step, "NEW_TOKENS", 8)
    (tree,) = step.measure(Engine.load(build_text_model(tmp_path).path, "cpu"), (9,))
    assert (tree.draft, tree.build) == (0.0, 0.0)


# ---- model -----------------------------------------------------------------------------------------------------------


def generation(seconds: float, prefill: float) -> Generation:
    rounds = [Round(16, 3), Round(16, 1)]
    return Generation(tokens=[1] * 6, rounds=rounds, prefill_seconds=prefill, decode_seconds=seconds)


def test_median_run() -> None:
    run = model.median_run("ddtree", 16, 101, [generation(*times) for times in ((3.0, 0.5), (1.0, 0.1), (2.0, 1.0))])
    assert run == model.Run("ddtree", 16, 3.0, 3.0, 2, 6, 200.0)


@pytest.mark.parametrize(("asked", "capacity", "length"), [(None, 4096, 512), (None, 512, 256), (100, 512, 100)])
def test_prompt_length(asked: int | None, capacity: int, length: int) -> None:
    assert model.prompt_length(asked, capacity) == length


@pytest.mark.parametrize(("asked", "capacity"), [(257, 512), (1, 512), (None, 200)])
def test_a_prompt_that_does_not_fit(asked: int | None, capacity: int) -> None:
    with pytest.raises(ValueError, match=f"bench model: --prompt-tokens .*the model has room for {capacity}"):
        model.prompt_length(asked, capacity)


def test_floor_is_the_time_of_a_tokens_bytes() -> None:
    engine = Engine.load(TINY, "cpu")
    moved = engines.pass_bytes(engine.config, engine.bundle.entries, 1, 20 + model.NEW_TOKENS // 2, 2)
    assert model.floor(engine, 20, Ceilings(4000.0, None), "bfloat16") == pytest.approx(4000e9 / moved)


def test_model_runs_every_decoder(on_the_cpu: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "NEW_TOKENS", 6)
    monkeypatch.setattr(model, "WAYS", tuple(way for way in model.WAYS if way[1] != "auto"))  # which would calibrate
    engine = Engine.load(build_text_model(tmp_path, eos_token_ids=()).path, "cpu")
    runs = list(model.measure(engine, 20))
    assert [(run.decoder, run.node_budget) for run in runs] == list(model.WAYS)
    assert {run.tokens for run in runs} == {6}
    assert runs[0].target_forwards == 6
    assert all(run.tokens_per_second > 0 < run.prefill_tokens_per_second for run in runs)


# ---- a layer of Kimi K2 ----------------------------------------------------------------------------------------------


def test_the_random_layer_is_laid_out_like_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "POOL", 1 << 16)
    bundle = layer.RandomBundle(tiny_config(num_hidden_layers=1, first_k_dense_replace=0))
    check_layout(bundle.path, bundle.config, bundle.entries)
    for name, entry in bundle.entries.items():
        assert (bundle[name].shape, bundle[name].nbytes) == (entry.shape, entry.nbytes), name
        assert bundle.place(name) == (Path(name), 0)
    weight = bundle.weight("model.layers.0.mlp.experts.3.gate_proj").astype(np.float32)
    assert weight.std() * math.sqrt(32) == pytest.approx(1, rel=0.3)
    assert bundle["model.norm"].astype(np.float32).mean() == pytest.approx(1, abs=0.1)


def test_an_upload_of_the_random_layer_gets_numbers_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "POOL", 1 << 16)
    bundle = layer.RandomBundle(tiny_config(num_hidden_layers=1, first_k_dense_replace=0))
    expert = "model.layers.0.mlp.experts.3.down_proj"

    def read(name: str, begin: int) -> bytes:
        out = np.empty(bundle.entries[name].nbytes // 2, np.uint8)
        bundle.read_into(out, *bundle.place(name)[:1], begin)
        return out.tobytes()

    halves = [read(f"{expert}.qw", begin) for begin in (0, 256)]
    assert halves[0] != halves[1]
    assert halves[0] == read(f"{expert}.qw", 0) != read("model.layers.0.mlp.experts.2.down_proj.qw", 0)
    scales = np.frombuffer(read(f"{expert}.sc", 0), bfloat16).astype(np.float32)
    assert ((scales > 0.49 / (4.6 * 32**0.5)) & (scales < 1.51 / (4.6 * 32**0.5))).all()


def test_a_pass_of_the_layer_reads_its_experts_and_its_attention() -> None:
    """For one row: 8 experts, and in bfloat16 the MLA projections, the shared expert, router and norms."""
    config = layer.KIMI_LAYER
    stored = {name: e for name, e in layer._entries(config) if name.startswith("model.layers.")}
    projections = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    others = projections + 3 * 7168 * 2048 + 384 * 7168 + 384 + 2 * 7168 + 1536 + 512
    expected = 8 * KIMI_EXPERT_BYTES + 2 * others + 4 * (4096 + 1) * 576
    assert engines.pass_bytes(config, stored, 1, 4096, 4) == pytest.approx(expected)


def test_passes_on_paper() -> None:
    assert layer.passes_per_second(100.0) == pytest.approx(8e6 / 6100)


def test_an_unknown_layer() -> None:
    with pytest.raises(ValueError, match="bench model: --layer 'llama', expected one of kimi-k2"):
        layer.config_of("llama")


def test_the_layer_is_timed_behind_its_prefix(monkeypatch: pytest.MonkeyPatch, on_the_cpu: list[int]) -> None:
    tiny = tiny_config(num_hidden_layers=1, first_k_dense_replace=0)
    monkeypatch.setattr(layer, "POOL", 1 << 16)
    monkeypatch.setattr(layer, "LAYERS", {"tiny": tiny})
    monkeypatch.setattr(Device, "named", lambda name: Device("cpu", np))
    found = list(layer.measure("tiny", (1, 9), "float32", context=70))
    assert [(one.kernel, one.case, one.microseconds) for one in found] == [
        ("layer", {"rows": 1}, 1.0),
        ("layer", {"rows": 9}, 1.0),
    ]
    assert on_the_cpu == [layer.CALLS] * 2
    assert found[1].bytes > found[0].bytes > 0


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def told(
    on_the_cpu: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[list[str]], str, dict]]:
    """Runs ``bench`` on a model of this CPU, with ceilings of 4,000 GB/s; gives table rows, lines and the record."""
    bundle = build_text_model(tmp_path / "model", eos_token_ids=()).path
    load, file = Engine.load, tmp_path / "record.json"
    tiny = tiny_config(num_hidden_layers=1, first_k_dense_replace=0)
    monkeypatch.setattr(ceilings, "ceilings", lambda: Ceilings(4000.0, None))
    monkeypatch.setattr(Device, "named", lambda name: Device("cpu", np))
    monkeypatch.setattr(Engine, "load", lambda path, device, dtype="float32": load(path, "cpu", dtype=dtype))
    monkeypatch.setattr(model, "memory_held", lambda: 5e9)
    monkeypatch.setattr(layer, "LAYERS", {"kimi-k2": tiny})
    for module, name, value in (
        (layer, "POOL", 1 << 16),
        (layer, "ROWS", (1, 9)),
        (layer, "CONTEXT", 70),
        (model, "NEW_TOKENS", 6),
        (model, "WAYS", (("ar", 0), ("ddtree", 8))),
        (step, "ROUNDS", 3),
        (step, "ROWS", (1, 9)),
        (step, "NEW_TOKENS", 8),
    ):
        monkeypatch.setattr(module, name, value)

    def run(*arguments: str) -> tuple[list[list[str]], str, dict]:
        monkeypatch.setattr(
            "sys.argv", ["kdtree_nb", "bench", *arguments, "--bundle", str(bundle), "--json", str(file)]
        )
        with pytest.raises(SystemExit, match="0"):
            main()
        text = capsys.readouterr().out
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
        return rows, text, json.loads(file.read_text(encoding="utf-8"))

    return run


def test_bench_step(told: Callable[..., tuple[list[list[str]], str, dict]]) -> None:
    rows, text, record = told("step")
    assert "text.kdtr's bytes at 4,000 GB/s" in " ".join(text.split())
    steps = [step.Step(**result) for result in record["results"]]
    assert [row[:2] for row in rows] == [["1", "1.00"], ["9", "1.00"]]
    for row, one in zip(rows, steps, strict=True):
        floor = one.bytes / 4e6
        assert row[2:4] == [f"{floor:.2f}", f"{1 / floor:.2f}"]
    assert record["settings"]["drafter"].startswith("PromptLookup(")
    assert record["ceilings"] == {"read_gb_per_s": 4000.0, "bf16_tflop_per_s": None}


def test_bench_model(told: Callable[..., tuple[list[list[str]], str, dict]]) -> None:
    rows, text, record = told("model", "--layer", "kimi-k2", "--prompt-tokens", "20")
    runs, layers = record["results"][:2], record["results"][2:]
    assert [row[:2] for row in rows] == [["ar", "0"], ["ddtree", "8"], ["1", "1.00"], ["9", "1.00"]]
    assert rows[0][2] == f"{runs[0]['tokens_per_second']:,.0f}"
    assert rows[0][3] == f"{runs[0]['tokens_per_second'] / record['floor_tokens_per_second']:.3f}"
    assert [one["case"] for one in layers] == [{"rows": 1}, {"rows": 9}]
    assert "61 layers on 8 GPUs, on paper: 131148 passes/s of 9 rows, at most" in text  # 1 µs a layer
    assert record["memory_bytes"] == 0
    assert record["settings"] == {"bundle": "text.kdtr", "dtype": "float32", "prompt_tokens": 20, "new_tokens": 6}
