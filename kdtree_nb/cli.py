"""The command line: ``python -m kdtree_nb COMMAND``."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.table import Column, Table

from kdtree_nb.bench.commands import bench
from kdtree_nb.console import BUDGET, Device, Dtype, JsonFile, err, node_budget_of, out, token_ids_of, writable
from kdtree_nb.golden import folder
from kdtree_nb.kernels.emulator.build import KernelError
from kdtree_nb.kernels.nvrtc import NvrtcError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="INT4 W4A16 inference with draft-tree speculative decoding for DeepSeek-V3 / Kimi K2 style models.",
)
app.add_typer(bench, name="bench")

BundlePath = Annotated[Path, typer.Argument(help="A .kdtr file, a .kdtr.index.json, or the folder of one.")]
LONG_TO_LOAD = 10**9
"""Bytes from which on there is a bar to watch."""


@app.command()
def demo(
    figure: Annotated[Path, typer.Option(help="Where the figure goes.", callback=writable)] = Path("demo.png"),
    device: Device = "auto",
) -> None:
    """Verify the golden files, generate with every decoder, compare them, and draw one figure."""
    from kdtree_nb.demo import NEW_TOKENS, check_figure, compare, draw, trained_bundle
    from kdtree_nb.engine import Engine

    started, golden = time.perf_counter(), folder()
    check_figure(figure)
    passed = _verify(golden, device, new_tokens=NEW_TOKENS)
    engine = Engine.load(trained_bundle(golden), device)
    table = Table("domain", "decoder", "target forwards", "τ", "tokens/s", "same tokens")
    comparisons = []
    for comparison in compare(engine, golden):
        comparisons.append(comparison)
        out.rule(f"{comparison.domain}", align="left", style="dim")
        text = comparison.runs["ar"].text or ""
        out.print(f"[dim]{escape(comparison.prompt)}[/dim]{escape(text)}")
        for decoder, run in comparison.runs.items():
            table.add_row(
                comparison.domain if decoder == "ar" else "",
                decoder,
                str(run.target_forwards),
                f"{run.acceptance_length:.2f}",
                f"{run.tokens_per_second:.0f}",
                "yes" if comparison.agree else "[red]NO[/red]",
                end_section=decoder == "ddtree",
            )
    out.print(table)
    draw(engine, golden, comparisons, figure)
    agree = all(comparison.agree for comparison in comparisons)
    out.print(f"{'PASS' if agree else 'FAIL'}  decoders      ar, chain and ddtree agree token for token")
    out.print(f"figure: {figure.resolve()}   {time.perf_counter() - started:.0f} s", soft_wrap=True)
    if not (passed and agree):
        raise typer.Exit(1)


@app.command()
def verify(
    golden: Annotated[Path | None, typer.Option(help="Folder of golden files; the repository's by default.")] = None,
    device: Device = "auto",
    tokens: Annotated[
        int | None, typer.Option(help="Of each held-out text, 24 or more; by default 500, emulated 24.")
    ] = None,
    json_file: JsonFile = None,
    dtype: Dtype = "float32",
    soak_rounds: Annotated[int, typer.Option("--soak", min=0, help="Then run this many rounds of random trees.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print what golden/measurements/ records, and stop.")] = False,
) -> None:
    """Check every golden bundle: checksums, each decoder and the trained drafter against the specification."""
    from kdtree_nb.record import record, recorded
    from kdtree_nb.verify import EMULATED_TOKENS

    if tokens is not None and tokens < EMULATED_TOKENS:
        reason = "of fewer, none may be a draft that came true, and a drafter has to save forwards in every text"
        raise ValueError(f"verify: --tokens {tokens}, expected {EMULATED_TOKENS} or more: {reason}")
    golden = golden or folder()
    if show:
        for line in recorded(golden / "measurements"):
            out.print(escape(line), soft_wrap=True)
        return
    lines: list[str] = []
    passed = _verify(golden, device, tokens, lines, dtype)
    if soak_rounds:
        passed &= _soak(golden, device, soak_rounds, lines, dtype)
    if json_file is not None:
        record(json_file, device, lines, dtype=dtype, passed=passed)
    if not passed:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt; without one, standard input is read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    token_ids: Annotated[
        Any, typer.Option(parser=token_ids_of, metavar="1,2,3", help="The prompt as ids; the answer comes as ids, too.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle; the repository's trained model by default.")] = None,
    decoder: Annotated[str, typer.Option(help="ar, chain or ddtree; the text is the same.")] = "ddtree",
    node_budget: Annotated[
        Any, typer.Option(parser=node_budget_of, metavar=BUDGET, help="Drafted nodes a round, the root not counted.")
    ] = 16,
    drafter: Annotated[
        str | None, typer.Option(help="A drafter's bundle, or lookup; by default the one beside the bundle, if any.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Where to stop, if the text does not end before.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: samples.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of these, from the fewest with this probability; 1: all.")] = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message, put into the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Continue a prompt. What is new goes to standard output as it comes, the statistics to standard error."""
    from tokenizers.decoders import DecodeStream

    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine, PromptLookup
    from kdtree_nb.engine.budget import round_costs
    from kdtree_nb.engine.options import check_options
    from kdtree_nb.kernels.choose_tokens import Sampling

    check_options(decoder, node_budget, max_new_tokens, Sampling(temperature, seed, top_k, top_p))
    given = _prompt(prompt, prompt_file, token_ids, chat)
    path = None if drafter == "lookup" else drafter
    engine = Engine.load(bundle or trained_bundle(folder()), device, drafter=path, dtype=dtype)
    if isinstance(given, str) and chat:
        from kdtree_nb.chat import chat_tokens

        prompt_ids = engine.token_ids(chat_tokens(engine, given))
    else:
        prompt_ids = engine.token_ids(given)
    if engine.device.name == "cuda" and engine.bundle.nbytes >= LONG_TO_LOAD:
        with _bytes_bar("loading") as progress:
            engine.preload(progress)
    tokenizer = engine.tokenizer if isinstance(given, str) else None
    stream, comma = DecodeStream(skip_special_tokens=True), ""

    def show(token: int) -> None:
        nonlocal comma
        if tokenizer is not None:
            sys.stdout.write(stream.step(tokenizer, token) or "")
        else:
            sys.stdout.write(f"{comma}{token}")
            comma = ","
        sys.stdout.flush()

    drafts = PromptLookup() if drafter == "lookup" else engine.drafter
    if node_budget == "auto" and decoder != "ar":
        with err.status("what does a round cost here? (measured once)"), engine.device.running():
            round_costs(engine.model, drafts, engine.capacity)
    watching = None if as_json else show
    run = engine.generate(
        prompt_ids, decoder, node_budget, max_new_tokens, temperature, seed, top_k, top_p, drafts, on_token=watching
    )
    if as_json:
        statistics = {
            "prompt": given,
            "text": run.text,
            "tokens": run.tokens,
            "finish_reason": run.finish_reason,
            "decoder": decoder,
            "node_budget": node_budget,
            "drafter": type(drafts).__name__,
            "dtype": dtype,
            "temperature": temperature,
            "seed": seed,
            "top_k": top_k,
            "top_p": top_p,
            "target_forwards": run.target_forwards,
            "acceptance_length": run.acceptance_length,
            "accepted": [r.accepted for r in run.rounds],
            "drafted": [r.drafted for r in run.rounds],
            "prefill_seconds": run.prefill_seconds,
            "decode_seconds": run.decode_seconds,
            "tokens_per_second": run.tokens_per_second,
        }
        print(json.dumps(statistics, ensure_ascii=False))
        return
    print(flush=True)
    err.print(
        f"{len(run.tokens)} tokens ({run.finish_reason}), {run.target_forwards} target forwards, "
        f"τ={run.acceptance_length:.2f}, {run.tokens_per_second:.1f} tokens/s, "
        f"prompt {run.prefill_seconds * 1e3:.0f} ms",
        style="dim",
        soft_wrap=True,
    )


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A bundle, or the folder of a Hugging Face checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every tensor of a bundle and check its sum.")] = False,
    every: Annotated[bool, typer.Option("--all", help="A row for each weight of each layer and expert.")] = False,
) -> None:
    """Show what a bundle or a checkpoint holds, and what it takes to run it."""
    from kdtree_nb.bundle import Bundle, Entry
    from kdtree_nb.bundle.bundle import summarise
    from kdtree_nb.checkpoint import Checkpoint, open_folder, read_checkpoint
    from kdtree_nb.checkpoint.conversion import convert_source
    from kdtree_nb.checkpoint.folder import is_checkpoint
    from kdtree_nb.checkpoint.needs import describe_needs
    from kdtree_nb.config import ModelConfig

    opened: Bundle | Checkpoint
    stored: Mapping[str, Entry]
    if is_checkpoint(path):
        if verify:
            raise ValueError(f"inspect: --verify of {path}, expected a bundle: a checkpoint has no checksums")
        opened, title = read_checkpoint(open_folder(path)), path
        stored = convert_source(opened).entries()
        packed = sum(name.endswith(".qw") for name in stored)
        size = sum(entry.nbytes for entry in stored.values())
        note = f"convert makes a bundle of {size:,} bytes with {packed} weights in INT4"
        if opened.skipped:
            note += f", and leaves out {len(opened.skipped)} tensors that are of no use to it"
    else:
        opened = Bundle.open(path)
        title, stored, note = opened.path, opened.entries, f"tokenizer: {opened.tokenizer or 'none'}"
    name = Column("name", overflow="fold")  # in a narrow terminal or a pipe, whole over two lines
    table = Table(name, "kind", "shape", "dtype", "bytes", "share", title=escape(str(title)), title_justify="left")
    for row in opened.rows() if every else summarise(opened.rows()):
        shape = " × ".join(map(str, row.shape))
        table.add_row(escape(row.name), row.kind, shape, row.dtype, f"{row.bytes:,}", f"{row.share:.1%}")
    out.print(table)
    out.print(f"{opened.config}; {opened.nbytes:,} bytes of weights, {note}", soft_wrap=True)
    if isinstance(opened.config, ModelConfig):
        for line in describe_needs(opened.config, stored):
            out.print(line, soft_wrap=True)
    if verify and isinstance(opened, Bundle):
        with err.status("checking") as status:
            opened.verify(lambda name: status.update(f"checking {escape(name)}"))
        out.print(f"PASS  {len(opened)} tensors match their checksums")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors, as on the Hub.")],
    target: Annotated[Path, typer.Argument(help="The folder of the bundle; called again, it goes on.")],
    rule: Annotated[str, typer.Option(help="minmax, amax7 or mse: how a group's scale is chosen.")] = "minmax",
    select: Annotated[
        str | None,
        typer.Option(help="Floats to quantise: mlp, routed (experts) or none; mlp, or none beside INT4, by default."),
    ] = None,
) -> None:
    """Make a bundle of a Hugging Face checkpoint: bf16, fp16, fp32, DeepSeek's fp8, or INT4 as in Kimi K2."""
    from kdtree_nb.checkpoint import convert as convert_checkpoint

    with _bytes_bar("converting") as progress:
        path = convert_checkpoint(source, target, rule, select, progress=progress)
    out.print(f"{path}", markup=False, soft_wrap=True)


@app.command()
def export(
    bundle: BundlePath,
    target: Annotated[Path, typer.Argument(help="The new folder.")],
) -> None:
    """Write a bundle as a Hugging Face folder, for transformers, vLLM or SGLang."""
    from kdtree_nb.checkpoint import export as export_bundle

    with _bytes_bar("exporting") as progress:
        path = export_bundle(bundle, target, progress=progress)
    out.print(f"{path}", markup=False, soft_wrap=True)


@app.command()
def doctor() -> None:
    """Check this machine: what is there, what is missing, and what to do about it."""
    from kdtree_nb.doctor import checks, render

    found = checks()
    print(render(found))
    if any(check.ok is False for check in found):
        raise typer.Exit(1)


def main() -> NoReturn:
    """Run a command; a fault of the input is one line, not a traceback."""
    try:
        app()
    except (ValueError, OSError, MemoryError, NvrtcError, KernelError) as error:
        err.print(f"[red]error[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("\ninterrupted")
        sys.exit(130)
    sys.exit(0)


def _verify(
    golden: Path, device: str, new_tokens: int | None, lines: list[str] | None = None, dtype: str = "float32"
) -> bool:
    from kdtree_nb.verify import verify as run_checks

    passed, current = True, None
    with err.status("verify") as status:

        def doing(what: str) -> None:
            status.update(escape(what))

        for path, check in run_checks(golden, device, new_tokens, doing, dtype):
            status.stop()  # it would send what is printed to standard error
            if path != current:
                out.print(f"[bold]{escape(path.name)}[/bold]")
                current = path
            print(check, flush=True)
            status.start()
            passed &= check.passed
            if lines is not None:
                lines.append(f"{path.name}  {check}")
    return passed


def _soak(golden: Path, device: str, rounds: int, lines: list[str], dtype: str) -> bool:
    from kdtree_nb.engine import Engine
    from kdtree_nb.golden import bundle_of, golden_files
    from kdtree_nb.soak import soak

    path = bundle_of(golden_files(golden)[-1])
    with err.status("soak") as status:
        engine = Engine.load(path, device, dtype=dtype)
        found = soak(engine, rounds, progress=lambda done: status.update(f"soak: {done}/{rounds}"))
    passed = not found.mismatches and found.shortened > 0 and found.bytes_after <= found.bytes_before
    line = (
        f"{'PASS' if passed else 'FAIL'}  soak          {found.rounds} rounds of {found.texts} texts, "
        f"{found.mismatches} differ, {found.shortened} in fewer forwards, "
        f"device bytes {found.bytes_before:,} -> {found.bytes_after:,}"
    )
    print(line, flush=True)
    lines.append(f"{path.name}  {line}")
    return passed


@contextmanager
def _bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on standard error, with rate and remaining time; takes bytes done and bytes of all."""
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=err)

    def show(done: int, total: int) -> None:
        if not bar.task_ids:  # not before: what fails at once has one line, that of its error
            bar.start()
            bar.add_task(what)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield show
    finally:
        if bar.task_ids:
            bar.stop()


def _prompt(prompt: str | None, prompt_file: Path | None, token_ids: list[int] | None, chat: bool) -> str | list[int]:
    """The one prompt that was given: a text, or token ids."""
    options = {"--prompt": prompt, "--prompt-file": prompt_file, "--token-ids": token_ids}
    given = [option for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"generate: {' and '.join(given)} were given, expected one of them")
    if token_ids is not None:
        if chat:
            raise ValueError("generate: --chat and --token-ids were given, expected a text for the chat template")
        return token_ids
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{prompt_file}: not UTF-8 text") from error
    if prompt is None and sys.stdin.isatty():
        err.print("prompt (end with Ctrl-D): ", end="")
    return sys.stdin.read() if prompt is None else prompt
