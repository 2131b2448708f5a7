"""What the commands share: two consoles, and the options that several of them have.

Values that no command could use are refused here, before a command begins.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out, err = Console(highlight=False, width=None if sys.stdout.isatty() else 120), Console(stderr=True, highlight=False)


def known_device(name: str) -> str:
    """The value of ``--device``."""
    from kdtree_nb.engine.device import Device

    Device.named(name)
    return name


def known_dtype(name: str) -> str:
    """The value of ``--dtype``."""
    from kdtree_nb.engine.options import dtype_named

    dtype_named(name)
    return name


def writable(path: Path | None) -> Path | None:
    """A file that a command writes at its end, with the folders that it needs.

    Raises
    ------
    OSError
        If that cannot succeed.
    """
    if path is not None:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: a folder, expected a file to write")
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        if there != path.absolute() and not there.is_dir():
            raise NotADirectoryError(f"{path}: {there} is a file, expected a folder")
        if not os.access(there, os.W_OK):
            raise PermissionError(f"{path}: no permission to write in {there}")
    return path


Device = Annotated[
    str, typer.Option(help="auto, cuda, cpu or emulated (the CUDA source, run on this CPU).", callback=known_device)
]
Dtype = Annotated[
    str, typer.Option(help="What the engine computes in: float32, or bfloat16 on tensor cores.", callback=known_dtype)
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Record device, versions and results here.", callback=writable)
]
BUDGET = "INTEGER|auto"


def node_budget_of(text: str) -> int | str:
    """The value of ``--node-budget``."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto") from None


def token_ids_of(text: str) -> list[int]:
    """The value of ``--token-ids``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 1,2,3") from None
