"""The command line: ``python -m kdtree_nb COMMAND``."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

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


@app.command()
def demo(
    figure: Annotated[Path, typer.Option(help="Where the figure goes.")] = Path("demo.png"), device: Device = "auto"
) -> None:
    """Verify the golden files, generate with every decoder, compare them, and draw one figure."""
    from kdtree_nb.demo import compare, draw, trained_bundle
    from kdtree_nb.engine import Engine

    started, golden = time.perf_counter(), folder()
    if not figure.absolute().parent.is_dir():
        raise ValueError(f"demo: --figure {figure}: no such folder")
    passed = _verify(golden, device)
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")] = None,
    soak_rounds: Annotated[int, typer.Option("--soak", help="Then run this many rounds of random trees.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print what golden/measurements/ records, and stop.")] = False,
) -> None:
    """Check every golden bundle: checksums, then each decoder against the specification's tokens and logits."""
    from kdtree_nb.record import record, recorded

    golden = golden or folder()
    if show:
        for line in recorded(golden / "measurements"):
            out.print(escape(line), soft_wrap=True)
        return
    lines: list[str] = []
    passed = _verify(golden, device, lines)
    if soak_rounds:
        passed &= _soak(golden, device, soak_rounds, lines)
    if json_file is not None:
        record(json_file, device, passed, lines)
    if not passed:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt; without one, standard input is read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle; the repository's trained model by default.")] = None,
    decoder: Annotated[str, typer.Option(help="ar, chain or ddtree; the text is the same.")] = "ddtree",
    node_budget: Annotated[int, typer.Option(help="Drafted nodes a round, the root not counted.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Where to stop, if the text does not end before.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: samples.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of these, from the fewest with this probability; 1: all.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    device: Device = "auto",
) -> None:
    """Continue a prompt. The text goes to standard output as it comes, the statistics to standard error."""
    from tokenizers.decoders import DecodeStream

    from kdtree_nb.demo import trained_bundle
    from kdtree_nb.engine import Engine

    text = _prompt(prompt, prompt_file)
    engine = Engine.load(bundle or trained_bundle(folder()), device)
    stream = DecodeStream(skip_special_tokens=True)

    def show(token: int) -> None:
        if engine.tokenizer is not None and not as_json:
            sys.stdout.write(stream.step(engine.tokenizer, token) or "")
            sys.stdout.flush()

    run = engine.generate(text, decoder, node_budget, max_new_tokens, temperature, seed, top_k, top_p, on_token=show)
    if as_json:
        statistics = {
            "prompt": text,
            "text": run.text,
            "tokens": run.tokens,
            "finish_reason": run.finish_reason,
            "decoder": decoder,
            "node_budget": node_budget,
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
    bundle: BundlePath,
    verify: Annotated[bool, typer.Option("--verify", help="Read every tensor and check its sum.")] = False,
    every: Annotated[bool, typer.Option("--all", help="A row for each weight of each layer and expert.")] = False,
) -> None:
    """Show what a bundle holds."""
    from kdtree_nb.bundle import Bundle

    opened = Bundle.open(bundle)
    name = Column("name", overflow="fold")  # in a narrow terminal or a pipe, whole over two lines
    table = Table(
        name, "kind", "shape", "dtype", "bytes", "share", title=escape(str(opened.path)), title_justify="left"
    )
    for row in opened.rows() if every else opened.summary():
        shape = " × ".join(map(str, row.shape))
        table.add_row(escape(row.name), row.kind, shape, row.dtype, f"{row.bytes:,}", f"{row.share:.1%}")
    out.print(table)
    size = f"{opened.nbytes:,} bytes of weights, tokenizer: {opened.tokenizer or 'none'}"
    out.print(f"{opened.config}; {size}", soft_wrap=True)
    if verify:
        with err.status("checking") as status:
            opened.verify(lambda name: status.update(f"checking {escape(name)}"))
        out.print(f"PASS  {len(opened)} tensors match their checksums")


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


@bench.command("ceilings")
def bench_ceilings(
    json_file: Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")] = None,
) -> None:
    """What this GPU does at most: bytes read a second, and bf16 operations in torch's matrix product."""
    from kdtree_nb.bench.ceilings import ceilings
    from kdtree_nb.record import provenance, write

    found = ceilings()
    out.print(f"read {found.read_gb_per_s:,.0f} GB/s")
    rate = found.bf16_tflop_per_s
    out.print(f"bf16 product {rate:.0f} TFLOP/s" if rate else "bf16 product not measured: torch is not installed")
    if json_file is not None:
        write(json_file, {**provenance("cuda"), "ceilings": found._asdict()})


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
    from kdtree_nb.record import provenance, write

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
        write(json_file, {**provenance("cuda"), "ceilings": limits._asdict(), "missing": missing, "results": results})


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


def _verify(golden: Path, device: str, lines: list[str] | None = None) -> bool:
    from kdtree_nb.verify import verify as run_checks

    passed, current = True, None
    for path, check in run_checks(golden, device):
        if path != current:
            out.print(f"[bold]{escape(path.name)}[/bold]")
            current = path
        print(check, flush=True)
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
