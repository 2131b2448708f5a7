"""The command line: ``python -m kdtree_nb COMMAND``."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kdtree_nb.golden import folder
from kdtree_nb.kernels.emulator.build import KernelError
from kdtree_nb.kernels.nvrtc import NvrtcError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="INT4 W4A16 inference with draft-tree speculative decoding for DeepSeek-V3 / Kimi K2 style models.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure; each command prints a table.")
app.add_typer(bench, name="bench")
out, err = Console(highlight=False, width=None if sys.stdout.isatty() else 120), Console(stderr=True, highlight=False)

BundlePath = Annotated[Path, typer.Argument(help="A .kdtr file, a .kdtr.index.json, or the folder of one.")]
Device = Annotated[str, typer.Option(help="auto, cuda, cpu or emulated (the CUDA source, run on this CPU).")]
BUDGET = "INTEGER|auto"
LONG_TO_LOAD = 10**9
"""Bytes from which on there is a bar to watch."""


def _node_budget(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto") from None


@app.command()
def demo(
    figure: Annotated[Path, typer.Option(help="Where the figure goes.")] = Path("demo.png"), device: Device = "auto"
) -> None:
    """Verify the golden files, generate with every decoder, compare them, and draw one figure."""
    from kdtree_nb.demo import NEW_TOKENS, compare, draw, trained_bundle
    from kdtree_nb.engine import Engine

    started, golden = time.perf_counter(), folder()
    if not figure.absolute().parent.is_dir():
        raise ValueError(f"demo: --figure {figure}: no such folder")
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
        int | None, typer.Option(min=2, help="Of each held-out text; by default 500, emulated 24.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")] = None,
    soak_rounds: Annotated[int, typer.Option("--soak", help="Then run this many rounds of random trees.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print what golden/measurements/ records, and stop.")] = False,
) -> None:
    """Check every golden bundle: checksums, each decoder and the trained drafter against the specification."""
    from kdtree_nb.record import record, recorded

    golden = golden or folder()
    if show:
        for line in recorded(golden / "measurements"):
            out.print(escape(line), soft_wrap=True)
        return
    lines: list[str] = []
    passed = _verify(golden, device, tokens, lines)
    if soak_rounds:
        passed &= _soak(golden, device, soak_rounds, lines)
    if json_file is not None:
        record(json_file, device, lines, passed=passed)
    if not passed:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt; without one, standard input is read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle; the repository's trained model by default.")] = None,
    decoder: Annotated[str, typer.Option(help="ar, chain or ddtree; the text is the same.")] = "ddtree",
    node_budget: Annotated[
        Any, typer.Option(parser=_node_budget, metavar=BUDGET, help="Drafted nodes a round, the root not counted.")
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
) -> None:
    """Continue a prompt. The text goes to standard output as it comes, the statistics to standard error."""
    from tokenizers.decoders import DecodeStream

    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine, PromptLookup
    from kdtree_nb.engine.budget import round_costs

    text = _prompt(prompt, prompt_file)
    path = None if drafter == "lookup" else drafter
    engine = Engine.load(bundle or trained_bundle(folder()), device, drafter=path)
    if engine.device.name == "cuda" and engine.bundle.nbytes >= LONG_TO_LOAD:
        with _bytes_bar("loading") as progress:
            engine.preload(progress)
    stream = DecodeStream(skip_special_tokens=True)

    def show(token: int) -> None:
        if engine.tokenizer is not None and not as_json:
            sys.stdout.write(stream.step(engine.tokenizer, token) or "")
            sys.stdout.flush()

    drafts = PromptLookup() if drafter == "lookup" else engine.drafter
    if node_budget == "auto" and decoder != "ar":
        with err.status("what does a round cost here? (measured once)"), engine.device.running():
            round_costs(engine.model, drafts, engine.capacity)
    prompt_or_tokens: str | list[int] = text
    if chat:
        from kdtree_nb.chat import chat_tokens

        prompt_or_tokens = chat_tokens(engine, text)
    run = engine.generate(
        prompt_or_tokens, decoder, node_budget, max_new_tokens, temperature, seed, top_k, top_p, drafts, on_token=show
    )
    if as_json:
        statistics = {
            "prompt": text,
            "text": run.text,
            "tokens": run.tokens,
            "finish_reason": run.finish_reason,
            "decoder": decoder,
            "node_budget": node_budget,
            "drafter": type(drafts).__name__,
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


@bench.command("resources")
def bench_resources(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table here as well.")] = None,
) -> None:
    """Registers, spills and shared memory of every kernel, compiled for four GPUs; needs none."""
    from rich.progress import track

    from kdtree_nb.bench import ARCHS, resources

    rows = list(track(resources(), "compiling", console=err))
    table = Table(Column("kernel", no_wrap=True), *ARCHS, title="registers / spilled bytes / shared bytes")
    for kernel in dict.fromkeys(row.kernel for row in rows):
        used = {row.arch: row.used for row in rows if row.kernel == kernel}
        table.add_row(kernel, *(f"{used[a].registers} / {used[a].spills} / {used[a].shared:,}" for a in ARCHS))
    out.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([row._asdict() | {"used": vars(row.used)} for row in rows], indent=1) + "\n")


@bench.command("acceptance")
def bench_acceptance(
    domain: Annotated[list[str] | None, typer.Option(help="Of the held-out prompts; all by default.")] = None,
    decoder: Annotated[
        list[str] | None, typer.Option(help="plain, ngram, chain, marginal (no transition head), ddtree; all.")
    ] = None,
    node_budget: Annotated[
        list[Any] | None, typer.Option(parser=_node_budget, metavar=BUDGET, help="4 to 256 and auto by default.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each domain, at most.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: samples.")] = 0.0,
    device: Device = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")] = None,
) -> None:
    """Accepted drafts on held-out prompts. The options --domain, --decoder and --node-budget may be repeated."""
    from rich.progress import Progress

    from kdtree_nb.acceptance import automatic_costs, cells, measure, over_domains
    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine
    from kdtree_nb.golden import held_out_prompts
    from kdtree_nb.record import record

    wanted, path = cells(decoder or [], node_budget or []), trained_bundle(folder())
    held_out = held_out_prompts(path.parent)
    for name in domain or []:
        if name not in held_out:
            raise ValueError(f"bench acceptance: domain={name!r}, expected one of {', '.join(held_out)}")
    chosen = {name: held_out[name][:prompts] for name in domain or held_out}
    engine = Engine.load(path, device)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=len(wanted) * sum(map(len, chosen.values())))
        step = partial(bar.update, task, advance=1)
        results = list(measure(engine, chosen, wanted, tokens, temperature, lambda doing: step(description=doing)))
    columns = ("τ", "τ ≤ 32", "τ > 32", "forwards", "drafted", "tokens/s", "distinct bigrams")
    keys = (
        "tau",
        "tau_first_32",
        "tau_after_32",
        "target_forwards",
        "drafted",
        "tokens_per_second",
        "distinct_bigrams",
    )
    table = Table("domain", "decoder", "B", *columns)
    rows = [*results, *over_domains(results)]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        values = ["" if row[key] is None else f"{row[key]:.{2 * (type(row[key]) is float)}f}" for key in keys]
        last = following is None or following["domain"] != row["domain"]
        table.add_row(row["domain"], row["decoder"], str(row["node_budget"]), *values, end_section=last)
    out.print(table)
    if json_file is not None:
        settings = {"bundle": path.name, "drafter": repr(engine.drafter), "tokens": tokens, "temperature": temperature}
        settings["prompts"] = {name: len(texts) for name, texts in chosen.items()}
        settings["round_costs"] = automatic_costs(engine, wanted)
        record(json_file, device, results, settings=settings)


@bench.command("ceilings")
def bench_ceilings(
    json_file: Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")] = None,
) -> None:
    """What this GPU does at most: bytes read a second, and bf16 operations in torch's matrix product."""
    from kdtree_nb.bench.ceilings import ceilings
    from kdtree_nb.record import record

    found = ceilings()
    out.print(f"read {found.read_gb_per_s:,.0f} GB/s")
    rate = found.bf16_tflop_per_s
    out.print(f"bf16 product {rate:.0f} TFLOP/s" if rate else "bf16 product not measured: torch is not installed")
    if json_file is not None:
        record(json_file, "cuda", [found._asdict()])


@bench.command("gemm")
def bench_gemm(
    shape: Annotated[list[str] | None, typer.Option(help="Of the weight, OUTxIN; may be given again.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Of x; may be given again.", min=1)] = None,
    with_peers: Annotated[bool, typer.Option("--peers", help="Time torch's products and humming's as well.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")] = None,
) -> None:
    """One W4A16 product: microseconds, beside the memory's floor and other people's kernels."""
    from rich.progress import track

    from kdtree_nb.bench import gemm, peers
    from kdtree_nb.bench.ceilings import ceilings
    from kdtree_nb.record import record

    shapes = [gemm.parse_shape(text) for text in shape] if shape else gemm.SHAPES
    measured, missing = peers.installed() if with_peers else ([], [])
    for sentence in missing:
        err.print(sentence)
    limits = ceilings()
    names = [*gemm.OURS, *(peer.name for peer in measured)]
    total = len(shapes) * len(rows or gemm.ROWS) * len(names)
    steps = track(gemm.measure(shapes, rows or gemm.ROWS, measured), "measuring", total, console=err)
    products = list(steps)
    others = names[1:]
    title = f"{gemm.OURS[0]}; floor: its weight at {limits.read_gb_per_s:,.0f} GB/s; then its time over others'"
    table = Table("shape", "rows", "µs", "GB/s", "/ floor", *(f"/ {name}" for name in others), "/ best", title=title)
    for row in gemm.table(products, limits.read_gb_per_s):
        best = "" if row.of_best_peer is None else f"{row.of_best_peer:.2f} {row.best_peer}"
        ratios = (f"{row.ratios[name]:.2f}" for name in others)
        cells = (f"{row.microseconds:.2f}", f"{row.gb_per_s:,.0f}", f"{row.of_floor:.2f}", *ratios, best)
        table.add_row(row.shape, str(row.rows), *cells)
    out.print(table)
    if json_file is not None:
        results = [product._asdict() for product in products]
        record(json_file, "cuda", results, ceilings=limits._asdict(), missing=missing)


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
    except (ValueError, OSError, NvrtcError, KernelError) as error:
        err.print(f"[red]error[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("\ninterrupted")
        sys.exit(130)
    sys.exit(0)


def _verify(golden: Path, device: str, new_tokens: int | None, lines: list[str] | None = None) -> bool:
    from kdtree_nb.verify import verify as run_checks

    passed, current = True, None
    with err.status("verify") as status:
        for path, check in run_checks(golden, device, new_tokens, lambda doing: status.update(escape(doing))):
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


def _soak(golden: Path, device: str, rounds: int, lines: list[str]) -> bool:
    from kdtree_nb.engine import Engine
    from kdtree_nb.golden import bundle_of, golden_files
    from kdtree_nb.soak import soak

    path = bundle_of(golden_files(golden)[-1])
    with err.status("soak") as status:
        found = soak(Engine.load(path, device), rounds, progress=lambda done: status.update(f"soak: {done}/{rounds}"))
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
    with Progress(*columns, console=err) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ValueError("generate: --prompt and --prompt-file were both given, expected one of them")
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{prompt_file}: not UTF-8 text") from error
    if prompt is None and sys.stdin.isatty():
        err.print("prompt (end with Ctrl-D): ", end="")
    return sys.stdin.read() if prompt is None else prompt
