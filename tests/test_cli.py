"""The command line: what it prints where, its exit codes, and that a fault is one line."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from builders import Built, build_drafter_beside, build_text_model

from kdtree_nb import cli, demo, golden
from kdtree_nb.bench import engine_commands
from kdtree_nb.bundle import Bundle
from kdtree_nb.config import ModelConfig
from kdtree_nb.engine import Engine
from kdtree_nb.golden import load_cases, make_cases, save_cases
from kdtree_nb.verify import Check

TINY = golden.folder() / "tiny"
ROOT = golden.folder().parent
COMMANDS = ("demo", "verify", "generate", "inspect", "doctor")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """``python -m kdtree_nb``, in this process."""

    def main(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kdtree_nb", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        return Ran(code or 0, *capsys.readouterr())

    return main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_text_model(tmp_path_factory.mktemp("text"), max_position_embeddings=8192)


def start(*arguments: object, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "kdtree_nb", *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=allow_interrupts, **(pipes | options))


def allow_interrupts() -> None:
    """A job that a script put into the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def assert_one_line(ran: Ran, message: str) -> None:
    """Exit 1, nothing on standard output, one line on standard error that holds the message."""
    assert (ran.code, ran.out) == (1, "")
    assert re.fullmatch(r"error [^\n]+\n", ran.err)
    assert message in ran.err


# ---- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands(run: Callable[..., Ran]) -> None:
    shown = run("--help")
    assert shown.code == 0
    for command in COMMANDS:
        assert command in shown.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(run: Callable[..., Ran], command: str) -> None:
    shown = run(command, "--help")
    assert shown.code == 0
    assert command in shown.out
    assert "Usage" in shown.out


@pytest.mark.parametrize("arguments", [["no-such-command"], ["inspect"], ["generate", "--node-budget", "many"]])
def test_wrong_usage_exits_2(run: Callable[..., Ran], arguments: list[str]) -> None:
    shown = run(*arguments)
    assert (shown.code, shown.out) == (2, "")
    assert "Usage" in shown.err
    assert "Traceback" not in shown.err


# ---- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_shows_every_weight(run: Callable[..., Ran]) -> None:
    shown = run("inspect", TINY / "tiny-int4.kdtr", "--all")
    bundle = Bundle.open(TINY / "tiny-int4.kdtr")
    assert (shown.code, shown.err) == (0, "")
    cells = [line.split("│")[1:-1] for line in shown.out.splitlines() if line.startswith("│")]
    names = "".join("\n" * bool(row[1].strip()) + row[0].strip() for row in cells).split()
    assert names == [row.name for row in bundle.rows()]
    assert f"{bundle.nbytes:,} bytes of weights, tokenizer: none" in shown.out
    assert "4 layers, hidden 64, 8 experts (top 3), vocabulary 512" in shown.out


def test_inspect_draws_experts_together(run: Callable[..., Ran]) -> None:
    shown = run("inspect", TINY / "tiny-int4.kdtr")
    assert "(24 weights)" in shown.out
    assert "experts.7" not in shown.out


def test_inspect_does_not_read_markup_in_a_path(run: Callable[..., Ran], tmp_path: Path) -> None:
    path = tmp_path / "[red]a.kdtr"
    shutil.copy(TINY / "tiny-fp32.kdtr", path)
    assert "[red]a.kdtr" in run("inspect", path).out.replace("\n", "")


def test_inspect_verifies(run: Callable[..., Ran], tmp_path: Path) -> None:
    assert "PASS  213 tensors match their checksums" in run("inspect", TINY / "tiny-int4.kdtr", "--verify").out
    data = bytearray((TINY / "tiny-int4.kdtr").read_bytes())
    data[-1] ^= 1
    (tmp_path / "broken.kdtr").write_bytes(data)
    shown = run("inspect", tmp_path / "broken.kdtr", "--verify")
    assert shown.code == 1
    assert "PASS" not in shown.out
    assert re.fullmatch(r"error .*broken\.kdtr: tensor '.*': checksum sha256:\w+, expected .*\n", shown.err)


def test_inspect_of_what_is_no_bundle(run: Callable[..., Ran], tmp_path: Path) -> None:
    assert_one_line(run("inspect", tmp_path / "nothing.kdtr"), "nothing.kdtr: no such file")
    assert_one_line(run("inspect", tmp_path), "the folder holds 0 bundles")
    (tmp_path / "text.kdtr").write_text("a text")
    assert_one_line(run("inspect", tmp_path / "text.kdtr"), "text.kdtr: ")


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_passes(run: Callable[..., Ran], tmp_path: Path) -> None:
    shutil.copy(TINY / "tiny-int4.kdtr", tmp_path)
    save_cases(tmp_path / f"tiny-int4{golden.SUFFIX}", load_cases(TINY / f"tiny-int4{golden.SUFFIX}")[:1])
    shown = run("verify", "--golden", tmp_path, "--device", "cpu")
    assert (shown.code, shown.err) == (0, "")
    name, *lines = shown.out.splitlines()
    assert name == "tiny-int4.kdtr"
    assert [line[:20].rstrip() for line in lines] == [
        "PASS  bundle",
        "PASS  model_ar",
        "PASS  model_chain",
        "PASS  model_ddtree",
    ]


def test_verify_in_bfloat16_has_lines_of_its_own(run: Callable[..., Ran], tmp_path: Path) -> None:
    shutil.copy(TINY / "tiny-int4.kdtr", tmp_path)
    save_cases(tmp_path / f"tiny-int4{golden.SUFFIX}", load_cases(TINY / f"tiny-int4{golden.SUFFIX}")[:1])
    file = tmp_path / "recorded.json"
    shown = run("verify", "--golden", tmp_path, "--device", "cpu", "--dtype", "bfloat16", "--json", file)
    assert (shown.code, shown.err) == (0, "")
    names = [line.split()[1] for line in shown.out.splitlines()[1:]]
    assert names == ["bundle", "model_ar_bf16", "model_chain_bf16", "model_ddtree_bf16"]
    assert json.loads(file.read_text())["dtype"] == "bfloat16"
    assert_one_line(run("verify", "--golden", tmp_path, "--dtype", "half"), "dtype='half', expected one of float32, ")


def test_verify_fails(run: Callable[..., Ran], tmp_path: Path) -> None:
    shutil.copy(TINY / "tiny-int4.kdtr", tmp_path)
    case = load_cases(TINY / f"tiny-int4{golden.SUFFIX}")[0]
    case.tokens[2] += 1
    save_cases(tmp_path / f"tiny-int4{golden.SUFFIX}", [case])
    shown = run("verify", "--golden", tmp_path)
    assert shown.code == 1
    assert shown.err == ""
    assert re.search(r"^FAIL  model_ar      tokens=2/24 DIFFER", shown.out, re.MULTILINE)
    assert re.search(r"^FAIL  model_ddtree  does not hold: AR==golden, DDTREE==golden$", shown.out, re.MULTILINE)


def test_verify_of_one_bundle_that_fails_among_others(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later PASS does not make up for an earlier FAIL."""
    outcomes = {"one": ("a", True), "two": ("a", False), "three": ("b", True)}
    checks = [(tmp_path / path, Check(name, passed, "")) for name, (path, passed) in outcomes.items()]
    monkeypatch.setattr("kdtree_nb.verify.verify", lambda *_: iter(checks))
    shown = run("verify")
    assert shown.code == 1
    assert [line.split()[0] for line in shown.out.splitlines()] == ["a", "PASS", "FAIL", "b", "PASS"]


def test_verify_without_golden_files(run: Callable[..., Ran], tmp_path: Path) -> None:
    assert_one_line(run("verify", "--golden", tmp_path), f"no golden file below {tmp_path}")
    assert_one_line(run("verify", "--golden", tmp_path / "nowhere"), "nowhere: no such folder, expected a folder")
    (tmp_path / f"bad{golden.SUFFIX}").write_bytes(b"what")
    assert_one_line(run("verify", "--golden", tmp_path), f"bad{golden.SUFFIX} is not a golden file")
    assert_one_line(run("verify", "--golden", TINY, "--device", "abacus"), "device='abacus', expected one of")


def test_verify_of_few_tokens_is_refused_with_the_reason(run: Callable[..., Ran]) -> None:
    """Of the trained model's held-out texts, one has no draft that comes true before its third token."""
    for tokens in (-1, 0, 2, 23):
        shown = run("verify", "--golden", TINY, "--tokens", tokens)
        assert_one_line(shown, f"--tokens {tokens}, expected 24 or more: of fewer, none may be a draft that came true")


# ---- paths -----------------------------------------------------------------------------------------------------------

FILE, FOLDER = ROOT / "README.md", ROOT / "golden"
NEEDS_FOLDER = "expected a folder with config.json and model.safetensors or model.safetensors.index.json"
BAD_PATHS: dict[str, tuple[list[object], str]] = {
    "convert nothing": (["convert", "/no/such", "/no/out"], f"/no/such: no such folder, {NEEDS_FOLDER}"),
    "convert a file": (["convert", FILE, "/no/out"], f"README.md: a file, {NEEDS_FOLDER}"),
    "convert another folder": (["convert", FOLDER, "/no/out"], "golden/config.json: no such file"),
    "convert into a file": (["convert", FOLDER, FILE], "README.md: is a file or the checkpoint itself"),
    "convert into its source": (["convert", FOLDER, FOLDER], "golden: is a file or the checkpoint itself"),
    "export nothing": (["export", "/no/such.kdtr", "/no/out"], "/no/such.kdtr: no such file"),
    "export into a file": (["export", TINY / "tiny-int4.kdtr", FILE], "README.md: is in use, expected an empty folder"),
    "export into a full folder": (["export", TINY / "tiny-int4.kdtr", FOLDER], "golden: is in use, expected an empty"),
    "export below a file": (["export", TINY / "tiny-int4.kdtr", FILE / "x"], "Not a directory"),
    "inspect a folder with two": (["inspect", TINY], "the folder holds 2 bundles"),
    "verify a file": (["verify", "--golden", FILE], "README.md: a file, expected a folder"),
    "verify, recorded in a folder": (["verify", "--json", FOLDER], "golden: a folder, expected a file to write"),
    "verify, recorded below a file": (["verify", "--json", FILE / "x"], "README.md is a file, expected a folder"),
    "resources in a folder": (["bench", "resources", "--json", FOLDER], "golden: a folder, expected a file to write"),
    "acceptance in a folder": (["bench", "acceptance", "--json", FOLDER], "golden: a folder, expected a file to write"),
    "a figure in a folder": (["demo", "--figure", FOLDER], "golden: a folder, expected a file to write"),
    "a figure below a file": (["demo", "--figure", FILE / "x.png"], "README.md is a file, expected a folder"),
    "a figure of no format": (["demo", "--figure", "/no/x.xyz"], "/no/x.xyz, expected a name that ends in one of .eps"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_PATHS.values(), ids=BAD_PATHS)
def test_a_path_that_cannot_be(run: Callable[..., Ran], arguments: list[object], message: str) -> None:
    assert_one_line(run(*arguments), message)
    assert not Path("/no").exists()


def test_where_nobody_may_write(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    assert_one_line(run("verify", "--json", tmp_path / "new" / "x.json"), f"no permission to write in {tmp_path}")


# ---- generate --------------------------------------------------------------------------------------------------------

TEXT = "naïve [bold]"


@pytest.fixture(scope="module")
def expected(model: Built) -> str:
    text = Engine.load(model.path).generate(TEXT, max_new_tokens=12).text
    assert text
    return text


def test_text_to_standard_output_and_statistics_to_standard_error(
    run: Callable[..., Ran], model: Built, expected: str
) -> None:
    shown = run("generate", "--bundle", model.path, "--prompt", TEXT, "--max-new-tokens", 12)
    assert shown.code == 0
    assert shown.out.removesuffix("\n") == expected.rstrip("�")  # a character that never ended is not shown
    assert re.fullmatch(
        r"12 tokens \(length\), \d+ target forwards, τ=\d\.\d\d, [\d.]+ tokens/s, prompt \d+ ms\n", shown.err
    )


@pytest.mark.parametrize(("source", "decoder"), [("--prompt", "ar"), ("--prompt-file", "chain"), ("stdin", "ddtree")])
def test_json(
    run: Callable[..., Ran],
    model: Built,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    decoder: str,
) -> None:
    arguments: list[object] = []
    if source == "--prompt":
        arguments = [source, TEXT]
    else:
        (tmp_path / "prompt.txt").write_text(TEXT, encoding="utf-8")
        if source == "--prompt-file":
            arguments = [source, tmp_path / "prompt.txt"]
        else:
            monkeypatch.setattr(sys, "stdin", open(tmp_path / "prompt.txt", encoding="utf-8"))  # noqa: SIM115
    shown = run(
        "generate", "--bundle", model.path, "--max-new-tokens", 12, "--decoder", decoder, "--node-budget", 5, "--json",
        *arguments,
    )  # fmt: skip
    assert (shown.code, shown.err) == (0, "")
    (line,) = shown.out.splitlines()
    told = json.loads(line)
    assert (told["prompt"], told["text"], told["decoder"], told["node_budget"]) == (TEXT, expected, decoder, 5)
    assert told["finish_reason"] == "length"
    assert len(told["tokens"]) == 12 == sum(told["accepted"]) + told["target_forwards"]
    assert told["acceptance_length"] == 12 / told["target_forwards"]
    assert len(told["drafted"]) == len(told["accepted"]) == told["target_forwards"]
    assert max(told["drafted"]) <= 5


def test_what_shapes_a_sample_reaches_the_engine(run: Callable[..., Ran], model: Built) -> None:
    def told(*arguments: object) -> dict:
        options = ["--prompt", "a", "--max-new-tokens", 8, "--json", *arguments]
        return json.loads(run("generate", "--bundle", model.path, *options).out)

    def tokens(*arguments: object) -> list[int]:
        return told(*arguments)["tokens"]

    engine = Engine.load(model.path)
    assert tokens() == engine.generate("a", max_new_tokens=8).tokens
    sampled = engine.generate("a", max_new_tokens=8, temperature=1.0, seed=7).tokens
    assert tokens("--temperature", 1.0, "--seed", 7) == sampled != tokens("--temperature", 1.0, "--seed", 8)
    for option, cut in (("--top-k", {"top_k": 3}), ("--top-p", {"top_p": 0.4})):
        (value,) = cut.values()
        shown = told("--temperature", 1.0, "--seed", 7, option, value)
        expected = engine.generate("a", max_new_tokens=8, temperature=1.0, seed=7, **cut).tokens
        assert shown["tokens"] == expected != sampled
        assert {"top_k": shown["top_k"], "top_p": shown["top_p"]} == {"top_k": 0, "top_p": 1.0} | cut


def test_the_dtype_reaches_the_engine(run: Callable[..., Ran], model: Built) -> None:
    told = {}
    for dtype in ("float32", "bfloat16"):
        options = ["--prompt", "a", "--max-new-tokens", 80, "--dtype", dtype, "--device", "cpu", "--json"]
        told[dtype] = json.loads(run("generate", "--bundle", model.path, *options).out)
        expected = Engine.load(model.path, "cpu", dtype=dtype).generate("a", max_new_tokens=80)
        assert (told[dtype]["tokens"], told[dtype]["dtype"]) == (expected.tokens, dtype)
    assert told["float32"]["tokens"] != told["bfloat16"]["tokens"]  # a random model's margins are narrow


def test_the_drafter_beside_the_bundle_another_one_or_none(run: Callable[..., Ran], tmp_path: Path) -> None:
    target = build_text_model(tmp_path / "target", eos_token_ids=())
    elsewhere = build_drafter_beside(build_text_model(tmp_path / "elsewhere"), block_size=4).path

    def told(*arguments: object) -> dict:
        options = ["--prompt", "a", "--max-new-tokens", 20, "--node-budget", 40, "--json", *arguments]
        return json.loads(run("generate", "--bundle", target.path, *options).out)

    assert told()["drafter"] == "PromptLookup"
    short = told("--drafter", elsewhere)
    build_drafter_beside(target)
    beside, look_up = told(), told("--drafter", "lookup")
    assert [found["drafter"] for found in (short, beside, look_up)] == ["DFlash", "DFlash", "PromptLookup"]
    assert short["text"] == beside["text"] == look_up["text"]
    assert told("--decoder", "chain")["drafted"][0] == 5  # a block of 6
    assert told("--decoder", "chain", "--drafter", elsewhere)["drafted"][0] == 3
    assert look_up["drafted"] != beside["drafted"]


def test_a_budget_may_be_left_to_the_machine(run: Callable[..., Ran], model: Built, expected: str) -> None:
    options = ["--prompt", TEXT, "--max-new-tokens", 12, "--node-budget", "auto", "--json"]
    told = json.loads(run("generate", "--bundle", model.path, *options).out)
    assert (told["node_budget"], told["text"]) == ("auto", expected)


def test_streamed_text_is_the_text(run: Callable[..., Ran], model: Built) -> None:
    """Characters of several bytes come whole, whatever rounds they were committed in."""
    whole = Engine.load(model.path).generate("a", max_new_tokens=40, temperature=1.5, seed=3).text
    options = ["--prompt", "a", "--max-new-tokens", 40, "--temperature", 1.5, "--seed", 3]
    shown = run("generate", "--bundle", model.path, *options)
    assert shown.out.removesuffix("\n") == whole.rstrip("�")


BAD_GENERATE: dict[str, tuple[list[object], str]] = {
    "no such bundle": (["--bundle", "/no/such.kdtr", "--prompt", "a"], "/no/such.kdtr: no such file"),
    "no tokenizer": (
        ["--bundle", TINY / "tiny-int4.kdtr", "--prompt", "a"],
        "give the prompt as token ids (--token-ids)",
    ),
    "no such prompt file": (["--prompt-file", "/no/such.txt"], "/no/such.txt"),
    "a folder as prompt file": (["--prompt-file", "/"], "Is a directory: '/'"),
    "two prompts": (["--prompt", "a", "--prompt-file", "/no/such.txt"], "--prompt and --prompt-file were given, expec"),
    "a prompt and ids": (["--prompt", "a", "--token-ids", "1"], "--prompt and --token-ids were given, expected one of"),
    "ids for the chat template": (["--token-ids", "1", "--chat"], "--chat and --token-ids were given, expected a text"),
    "ids of another vocabulary": (
        ["--bundle", TINY / "tiny-int4.kdtr", "--token-ids", "7,512"],
        "prompt with token ids 7..512, expected 0 to 511",
    ),
    "empty prompt": (["--prompt", ""], "an empty prompt, expected 1 token or more"),
    "undecodable prompt": (["--prompt", "\udcff"], "lone surrogates"),
    "decoder": (["--prompt", "a", "--decoder", "greedy"], "decoder='greedy', expected one of ar, chain, ddtree"),
    "node budget": (["--prompt", "a", "--node-budget", -1], "node_budget=-1, expected"),
    "no such drafter": (["--prompt", "a", "--drafter", "/no/such.kdtr"], "/no/such.kdtr: no such file"),
    "a drafter of something else": (["--prompt", "a", "--drafter", TINY / "tiny-int4.kdtr"], "expected a drafter"),
    "temperature": (["--prompt", "a", "--temperature", "nan"], "temperature=nan, expected"),
    "top_k": (["--prompt", "a", "--top-k", -1], "top_k=-1, expected"),
    "top_p": (["--prompt", "a", "--top-p", 0], "top_p=0.0, expected a number above 0 and at most 1"),
    "max_new_tokens": (["--prompt", "a", "--max-new-tokens", 0], "max_new_tokens=0, expected"),
    "device": (["--prompt", "a", "--device", "abacus"], "device='abacus', expected one of"),
    "dtype": (["--prompt", "a", "--dtype", "half"], "dtype='half', expected one of float32, bfloat16"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_GENERATE.values(), ids=BAD_GENERATE)
def test_a_fault_is_one_line(run: Callable[..., Ran], model: Built, arguments: list[object], message: str) -> None:
    bundle = [] if "--bundle" in arguments else ["--bundle", model.path]
    assert_one_line(run("generate", *bundle, *arguments), message)


NEED_NO_BUNDLE = (
    "no such prompt file", "two prompts", "a prompt and ids", "ids for the chat template", "decoder", "node budget",
    "temperature", "top_k", "top_p", "max_new_tokens", "device", "dtype",
)  # fmt: skip


@pytest.mark.parametrize("fault", NEED_NO_BUNDLE)
def test_what_needs_no_bundle_is_told_before_one_is_opened(run: Callable[..., Ran], fault: str) -> None:
    arguments, message = BAD_GENERATE[fault]
    assert_one_line(run("generate", "--bundle", "/no/such.kdtr", *arguments), message)


def test_a_prompt_that_does_not_fit_is_told_before_weights_are_loaded(
    run: Callable[..., Ran], model: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Bundle, "__getitem__", load_nothing)
    for name in ("empty prompt", "undecodable prompt"):
        arguments, message = BAD_GENERATE[name]
        assert_one_line(run("generate", "--bundle", model.path, *arguments), message)
    assert_one_line(run("generate", "--bundle", model.path, "--token-ids", "1,99999"), "token ids 1..99999, expected")


def test_a_bundle_without_a_tokenizer_takes_ids_and_gives_ids(run: Callable[..., Ran], model: Built) -> None:
    options = ["--token-ids", "5,3,60", "--max-new-tokens", 6]
    for bundle in (TINY / "tiny-int4.kdtr", model.path):  # with a tokenizer, too
        expected = Engine.load(bundle).generate([5, 3, 60], max_new_tokens=6)
        shown = run("generate", "--bundle", bundle, *options)
        assert (shown.code, shown.out) == (0, ",".join(map(str, expected.tokens)) + "\n")
        assert shown.err.startswith("6 tokens (length), ")
        told = json.loads(run("generate", "--bundle", bundle, *options, "--json").out)
        assert (told["prompt"], told["tokens"], told["text"]) == ([5, 3, 60], expected.tokens, expected.text)


def test_ids_that_are_none(run: Callable[..., Ran]) -> None:
    shown = run("generate", "--token-ids", "1,b")
    assert (shown.code, shown.out) == (2, "")
    assert "'1,b' is not a list of whole numbers" in shown.err


def test_a_prompt_file_that_is_no_text(run: Callable[..., Ran], model: Built, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert_one_line(run("generate", "--bundle", model.path, "--prompt-file", tmp_path / "bytes"), "not UTF-8 text")


# ---- as a process ----------------------------------------------------------------------------------------------------


def test_the_package_imports_at_once_and_nothing_large() -> None:
    source = (
        "import sys, time; start = time.perf_counter(); import kdtree_nb; seconds = time.perf_counter() - start\n"
        "import kdtree_nb.cli, kdtree_nb.engine, kdtree_nb.verify\n"
        "print(seconds, *({'cupy', 'torch', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, *large = ran.stdout.split()
    assert float(seconds) < 0.5
    assert large == []


def test_ctrl_c_while_the_text_streams(model: Built) -> None:
    process = start("generate", "--bundle", model.path, "--prompt", "a", "--max-new-tokens", 8000, "--decoder", "ar")
    assert process.stdout.read(1)  # the text comes before its end
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_reader_that_leaves(model: Built) -> None:
    process = start("generate", "--bundle", model.path, "--prompt", "a", "--max-new-tokens", 8000, "--decoder", "ar")
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=20) != 0
    assert process.stderr.read() == b""


def test_verify_for_a_reader_that_leaves() -> None:
    process = start("verify", "--golden", TINY)
    assert process.stdout.readline() == b"tiny-fp32.kdtr\n"
    process.stdout.close()
    assert process.wait(timeout=20) != 0
    assert process.stderr.read() == b""


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A golden folder with a random model in the trained one's place, and prompts of two domains in turn."""
    built = build_text_model(tmp_path / "kdt16m", name="kdt16m-int4.kdtr", seed=3, eos_token_ids=())
    engine = Engine.load(built.path)
    prompts = [{"domain": d, "text": t} for d, t in (("code", "for i in"), ("prose", "It was"), ("code", "if x:"))]
    monkeypatch.setattr(golden, "NEW_TOKENS", 6)
    monkeypatch.setattr(golden, "NARROWEST_MARGIN", 0.0)
    ids = [np.array(engine.tokenizer.encode(prompt["text"]).ids) for prompt in prompts[:2]]
    save_cases(tmp_path / "kdt16m" / f"kdt16m-int4{golden.SUFFIX}", make_cases(built.weights, built.config, ids, 2))
    (tmp_path / "kdt16m" / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    for module in (cli, engine_commands):
        monkeypatch.setattr(module, "folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "NEW_TOKENS", 20)
    return tmp_path


def test_demo(run: Callable[..., Ran], trained: Path) -> None:
    figure = trained / "figures.png"
    shown = run("demo", "--figure", figure)
    assert (shown.code, shown.err) == (0, "")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert shown.out.startswith("kdt16m-int4.kdtr\nPASS  bundle")
    assert "PASS  decoders      ar, chain and ddtree agree token for token\n" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if line.endswith("─")][:2] == ["code", "prose"]
    assert "for i in" in shown.out
    assert "if x:" not in shown.out  # the second prompt of its domain
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.out.splitlines() if line.count("│") == 7]
    assert [row[0] for row in rows] == ["code", "", "", "prose", "", ""]
    assert [row[1] for row in rows] == ["ar", "chain", "ddtree"] * 2
    assert rows[0][2:4] == ["20", "1.00"]
    assert {row[5] for row in rows} == {"yes"}


def test_demo_fails_if_decoders_differ(run: Callable[..., Ran], trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = demo.compare

    def one_token_off(engine: Engine, folder: Path) -> object:
        for comparison in compare(engine, folder):
            comparison.runs["chain"].tokens[-1] ^= 1
            yield comparison

    monkeypatch.setattr(demo, "compare", one_token_off)
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    shown = run("demo", "--figure", trained / "figure.png")
    assert shown.code == 1
    assert "FAIL  decoders" in shown.out


def test_demo_fails_if_verify_does(run: Callable[..., Ran], trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    path = trained / "kdt16m" / f"kdt16m-int4{golden.SUFFIX}"
    cases = load_cases(path)
    cases[0].tokens[1] ^= 1
    save_cases(path, cases)
    shown = run("demo", "--figure", trained / "figure.png")
    assert shown.code == 1
    assert "FAIL  model_ar" in shown.out
    assert "PASS  decoders" in shown.out


def test_demo_drafts_with_the_trained_drafter(run: Callable[..., Ran], trained: Path) -> None:
    """The verify before it tries it as well, on as many tokens as the demo writes."""
    build_drafter_beside(Built(trained / "kdt16m" / "kdt16m-int4.kdtr", tiny_text_config(trained), {}))
    shown = run("demo", "--figure", trained / "figure.png")
    assert re.search(r"^PASS  drafter       best tokens of", shown.out, re.MULTILINE)
    lines = [line for line in shown.out.splitlines() if "drafter=trained" in line]
    assert [line.split("domain=")[1] for line in lines] == ["code", "prose"]
    assert "PASS  decoders      ar, chain and ddtree agree token for token\n" in shown.out


def tiny_text_config(folder: Path) -> ModelConfig:
    return Bundle.open(folder / "kdt16m" / "kdt16m-int4.kdtr").config


def test_demo_without_the_trained_model(run: Callable[..., Ran], trained: Path) -> None:
    (trained / "kdt16m" / "kdt16m-int4.kdtr").unlink()
    shown = run("demo", "--figure", trained / "figure.png")
    assert shown.code == 1
    assert re.fullmatch(r"error .*kdt16m-int4\.kdtr: no such file\n", shown.err)


# ---- bench acceptance ------------------------------------------------------------------------------------------------


def test_bench_acceptance(run: Callable[..., Ran], trained: Path) -> None:
    build_drafter_beside(Built(trained / "kdt16m" / "kdt16m-int4.kdtr", tiny_text_config(trained), {}))
    written = trained / "new" / "acceptance.json"
    options = ["--decoder", "plain", "--decoder", "ddtree", "--node-budget", 3, "--node-budget", "auto", "--tokens", 10]
    shown = run("bench", "acceptance", *options, "--json", written)
    assert shown.code == 0
    assert shown.err == ""
    told = json.loads(written.read_text())
    assert told.keys() == {"device", "versions", "commit", "date", "settings", "results"}
    costs = told["settings"].pop("round_costs")
    assert len(costs) == 65
    assert 0 < costs[0] <= costs[-1]
    assert told["settings"] | {"drafter": ""} == {
        "bundle": "kdt16m-int4.kdtr",
        "dtype": "float32",
        "drafter": "",
        "prompts": {"code": 2, "prose": 1},
        "tokens": 10,
        "temperature": 0.0,
    }
    assert told["settings"]["drafter"].startswith("DFlash(")
    cells = [("plain", 0), ("ddtree", 3), ("ddtree", "auto")]
    assert [(r["domain"], r["decoder"], r["node_budget"]) for r in told["results"]] == [
        (domain, *cell) for domain in ("code", "prose") for cell in cells
    ]
    assert [r["target_forwards"] for r in told["results"] if r["decoder"] == "plain"] == [20, 10]
    for result in told["results"]:
        assert result["tau"] >= 1
        assert 0 < result["distinct_bigrams"] <= 1
        assert result["tokens_per_second"] > 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.out.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [
        [domain, decoder, str(budget)] for domain in ("code", "prose", "mean") for decoder, budget in cells
    ]
    taus = [row[3] for row in rows]
    assert taus[:6] == [f"{r['tau']:.2f}" for r in told["results"]]
    assert taus[6:] == [f"{np.mean([told['results'][i]['tau'], told['results'][i + 3]['tau']]):.2f}" for i in range(3)]


def test_bench_acceptance_of_some_prompts_of_a_domain(run: Callable[..., Ran], trained: Path) -> None:
    options = ["--domain", "code", "--prompts", 1, "--tokens", 5, "--decoder", "plain", "--temperature", 0.8]
    written = trained / "acceptance.json"
    assert run("bench", "acceptance", *options, "--json", written).code == 0
    told = json.loads(written.read_text())
    assert told["settings"]["prompts"] == {"code": 1}
    assert told["settings"]["temperature"] == 0.8
    assert told["settings"]["round_costs"] is None  # nothing was left to the machine
    assert [r["target_forwards"] for r in told["results"]] == [5]


BAD_BENCH: dict[str, tuple[list[object], str]] = {
    "domain": (["--domain", "poems"], "domain='poems', expected one of code, prose"),
    "decoder": (["--decoder", "magic"], "decoder='magic', expected one of plain, ngram, chain, marginal, ddtree"),
    "budget": (["--decoder", "ddtree", "--node-budget", 10**6], "node_budget=1000000, expected"),
    "no trained drafter": (["--decoder", "marginal"], "has no transition head"),
    "device": (["--device", "abacus"], "device='abacus', expected one of"),
    "tokens and temperature": (["--temperature", -1], "temperature=-1.0, expected"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_BENCH.values(), ids=BAD_BENCH)
def test_a_bench_that_cannot_be(run: Callable[..., Ran], trained: Path, arguments: list[object], message: str) -> None:
    assert_one_line(run("bench", "acceptance", *arguments), message)


def test_a_budget_that_is_no_number(run: Callable[..., Ran]) -> None:
    shown = run("bench", "acceptance", "--node-budget", "many")
    assert (shown.code, shown.out) == (2, "")
    assert "'many' is neither a whole number nor auto" in shown.err
