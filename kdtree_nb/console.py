"""What the commands share: two consoles, and the options that several of them have."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out, err = Console(highlight=False, width=None if sys.stdout.isatty() else 120), Console(stderr=True, highlight=False)

Device = Annotated[str, typer.Option(help="auto, cuda, cpu or emulated (the CUDA source, run on this CPU).")]
Dtype = Annotated[str, typer.Option(help="What the engine computes in: float32, or bfloat16 on tensor cores.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Record device, versions and results here.")]
BUDGET = "INTEGER|auto"


def node_budget_of(text: str) -> int | str:
    """The value of ``--node-budget``."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto") from None
