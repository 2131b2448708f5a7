"""Results with what they were measured on: the JSON files of ``golden/measurements/``."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kdtree_nb.engine.device import Device

PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "humming-kernels", "transformers")


def record(path: Path, device: str, results: list[Any], **about: Any) -> None:
    """Write results, a line each, with device, versions, commit, date, and what else is to be known about them."""
    known = {"device": Device.named(device).description(), "versions": versions(), "commit": commit()}
    known["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    head = json.dumps({**known, **about}, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(result) for result in results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "results": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def recorded(folder: Path) -> Iterator[str]:
    """What the folder's files say, line by line.

    Raises
    ------
    FileNotFoundError
        If there are none.
    """
    paths = sorted(folder.glob("verify-*.json"))
    if not paths:
        raise FileNotFoundError(f"no verify-*.json in {folder}")
    for path in paths:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        packages = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
        yield f"{path.name}: {found['device']}, {packages}, {found['date']}, commit {found['commit'][:10]}"
        yield from found["results"]


def versions() -> dict[str, str]:
    """Python's version and those of the packages that compute."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """What ``GIT_COMMIT`` says, else the checkout's commit, ``-dirty`` where files differ, or ``unknown``."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
