"""``python -m kdtree_nb bench COMMAND``: each measures, prints a table, and may record it."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from kdtree_nb.console import BUDGET, Device, err, node_budget_of, out
from kdtree_nb.golden import folder

bench = typer.Typer(no_args_is_help=True, help="Measure; each command prints a table.")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")]


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
        columns = (used.get(arch) for arch in ARCHS)
        table.add_row(kernel, *(f"{u.registers} / {u.spills} / {u.shared:,}" if u else "" for u in columns))
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
        list[Any] | None, typer.Option(parser=node_budget_of, metavar=BUDGET, help="4 to 256 and auto by default.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each domain, at most.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: samples.")] = 0.0,
    device: Device = "auto",
    json_file: JsonFile = None,
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
    json_file: JsonFile = None,
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
    json_file: JsonFile = None,
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
