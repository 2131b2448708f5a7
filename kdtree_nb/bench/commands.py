"""``python -m kdtree_nb bench COMMAND``: each measures, prints a table, and may record it."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from kdtree_nb.bench.engine_commands import bench_acceptance, bench_cpu, bench_load, bench_model, bench_step
from kdtree_nb.bench.shown import Peers, missing, show, tracked
from kdtree_nb.console import JsonFile, err, out, writable

bench = typer.Typer(no_args_is_help=True, help="Measure; each command prints a table.")
for command in (bench_acceptance, bench_cpu, bench_load, bench_step, bench_model):
    bench.command(command.__name__.removeprefix("bench_"))(command)


@bench.command("resources")
def bench_resources(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the table here as well.", callback=writable)
    ] = None,
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
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([row._asdict() | {"used": vars(row.used)} for row in rows], indent=1) + "\n")


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
    with_peers: Peers = False,
    json_file: JsonFile = None,
) -> None:
    """One W4A16 product: microseconds, beside the memory's floor and other people's kernels."""
    from kdtree_nb.bench import gemm, peers
    from kdtree_nb.bench.ceilings import ceilings

    shapes = [gemm.parse_shape(text) for text in shape] if shape else gemm.SHAPES
    measured, lacking = peers.installed() if with_peers else ([], [])
    for sentence in lacking:
        err.print(sentence)
    limits, names = ceilings(), [peer.name for peer in measured]
    total = len(shapes) * len(rows or gemm.ROWS) * (len(gemm.OURS) + len(names))
    products = tracked(gemm.measure(shapes, rows or gemm.ROWS, measured), total)
    show("one W4A16 product", products, limits, json_file, names, lacking)


@bench.command("moe")
def bench_moe(
    shape: Annotated[list[str] | None, typer.Option(help="kimi-k2 or moonlight; both by default.")] = None,
    with_peers: Peers = False,
    json_file: JsonFile = None,
) -> None:
    """A layer's routed experts: microseconds by rows, beside the bytes of the chosen experts and humming's products."""
    from kdtree_nb.bench import moe
    from kdtree_nb.bench.ceilings import ceilings

    shapes = moe.chosen(shape or [])
    lacking = missing(with_peers, moe.PEER, "torch", "humming")
    peer = with_peers and not lacking
    limits = ceilings()
    found = tracked(moe.measure(shapes, moe.ROWS, peer), moe.steps(shapes, moe.ROWS, peer))
    show("routed experts of one layer", found, limits, json_file, [moe.PEER], lacking)


@bench.command("attention")
def bench_attention(with_peers: Peers = False, json_file: JsonFile = None) -> None:
    """Attention of a draft tree, 64 heads over the latent cache: microseconds by prefix and rows, beside torch."""
    from kdtree_nb.bench import attention
    from kdtree_nb.bench.ceilings import ceilings

    lacking = missing(with_peers, attention.PEER, "torch")
    peer = with_peers and not lacking
    limits, total = ceilings(), len(attention.PREFIXES) * len(attention.ROWS) * (1 + peer)
    found = tracked(attention.measure(attention.PREFIXES, attention.ROWS, peer), total)
    show("tree attention", found, limits, json_file, [attention.PEER], lacking)


@bench.command("tree")
def bench_tree(json_file: JsonFile = None) -> None:
    """What a round does besides the model: candidates, tree, accepted path, cache."""
    from kdtree_nb.bench import tree
    from kdtree_nb.bench.ceilings import ceilings

    limits = ceilings()
    show("a round without its model", tracked(tree.measure(), tree.STEPS), limits, json_file)
