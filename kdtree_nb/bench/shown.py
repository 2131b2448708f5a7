"""What the bench commands have in common: a peer's absence, the bar, and the table of floors."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from kdtree_nb.console import err, out

if TYPE_CHECKING:
    from kdtree_nb.bench.ceilings import Ceilings
    from kdtree_nb.bench.floors import Measured

T = TypeVar("T")
Peers = Annotated[bool, typer.Option("--peers", help="Time other people's kernels as well, where installed.")]


def missing(wanted: bool, peer: str, *packages: str) -> list[str]:
    """What a wanted peer lacks, said on standard error too."""
    from kdtree_nb.bench import peers

    sentences = peers.missing(peer, *packages) if wanted else []
    for sentence in sentences:
        err.print(sentence)
    return sentences


def tracked(steps: Iterator[T], total: int) -> list[T]:
    """All that is measured, with a bar on standard error meanwhile."""
    from rich.progress import track

    return list(track(steps, "measuring", total, console=err))


def time_cell(microseconds: float) -> str:
    """Microseconds as a table shows them."""
    return f"{microseconds:.2f}" if abs(microseconds) < 100 else f"{microseconds:,.0f}"


def show(
    title: str,
    measured: "Sequence[Measured]",
    limits: "Ceilings",
    json_file: Path | None = None,
    peers: Collection[str] = (),
    missing: Sequence[str] = (),
) -> None:
    """Print a table of microseconds beside their floors and peers, and record them where a file is named."""
    from kdtree_nb.bench.floors import table as table_of
    from kdtree_nb.record import record

    rows = table_of(measured, limits, peers)
    kernels = dict.fromkeys(kernel for row in rows for kernel in row.microseconds)
    rate = f" or operations at {limits.bf16_tflop_per_s:.0f} TFLOP/s" if limits.bf16_tflop_per_s else ""
    title = f"{title}, in µs; floor: bytes at {limits.read_gb_per_s:,.0f} GB/s{rate}; ratios are of the first kernel"
    table = Table(*rows[0].case, *kernels, "floor", "/ floor", "/ best peer", title=title)
    for row in rows:
        times = (time_cell(row.microseconds[kernel]) if kernel in row.microseconds else "" for kernel in kernels)
        floor = ("", "") if row.of_floor is None else (time_cell(row.floor), f"{row.of_floor:.2f}")
        best = "" if row.of_best_peer is None else f"{row.of_best_peer:.2f} {row.best_peer}"
        table.add_row(*(f"{value}" for value in row.case.values()), *times, *floor, best)
    out.print(table)
    if json_file is not None:
        results = [one._asdict() for one in measured]
        record(json_file, "cuda", results, ceilings=limits._asdict(), missing=list(missing))
