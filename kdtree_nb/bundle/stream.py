"""One safetensors file, written as its tensors come: block by block, several weights at a time, the header last."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_nb.bundle.format import DTYPES, METADATA, Entry, bytes_of, checksum, fault


@dataclass(frozen=True)
class Source:
    """Tensors that are made when they are written.

    Attributes
    ----------
    layout : mapping from weight to {stored name: Entry}
        What will be stored of each weight; known before any of it is made.
    blocks : callable
        From a weight's name to ``{stored name: array}``, once with whole tensors or repeatedly with consecutive
        blocks of their rows, so that no tensor has to be in memory at once. Called from the writer's threads.
    """

    layout: Mapping[str, Mapping[str, Entry]]
    blocks: Callable[[str], Iterable[Mapping[str, np.ndarray]]]

    def entries(self, weights: Iterable[str] | None = None) -> dict[str, Entry]:
        """What is stored of these weights, or of all, under its stored names."""
        chosen = self.layout if weights is None else weights
        return {name: entry for weight in chosen for name, entry in self.layout[weight].items()}


def write_tensors(
    target: Path,
    source: Source,
    weights: Sequence[str],
    metadata: Callable[[Mapping[str, str]], Mapping[str, str]],
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a new file with these weights and bring it onto the disk.

    Parameters
    ----------
    metadata : callable
        From the checksum of each stored name to the header's metadata, whose length may not depend on them.
    progress : callable, optional
        Called with the size of each block that was written.

    Raises
    ------
    BundleError
        If a tensor comes with another size than its entry has.
    """
    # Not the library's save_file: it wants all tensors at once and orders the metadata anew in every run.
    entries = source.entries(weights)
    offsets = _offsets(entries)
    checksums = dict.fromkeys(offsets, checksum(b""))
    start = len(_header(entries, offsets, metadata(checksums)))
    begins = {name: start + begin for name, (begin, _) in offsets.items()}

    def write(weight: str) -> dict[str, str]:
        return _write_weight(target, source, weight, begins, progress)

    with open(target, "xb") as out:
        out.truncate(start + sum(entry.nbytes for entry in entries.values()))
        with ThreadPoolExecutor(threads) as pool:
            for found in pool.map(write, weights):  # a failure, or Ctrl-C, cancels those that have not begun
                checksums |= found
        out.write(_header(entries, offsets, metadata(checksums)))  # as long as before: only the sums changed
        out.flush()
        os.fsync(out.fileno())


def _offsets(entries: Mapping[str, Entry]) -> dict[str, tuple[int, int]]:
    """Where each tensor begins and ends behind the header; in an order that keeps all of them aligned."""
    order = sorted(entries, key=lambda name: (-DTYPES[entries[name].dtype].itemsize, name))
    ends = itertools.accumulate((entries[name].nbytes for name in order), initial=0)
    return dict(zip(order, itertools.pairwise(ends), strict=True))


def _header(entries: Mapping[str, Entry], offsets: Mapping[str, tuple[int, int]], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {METADATA: metadata}
    for name, place in offsets.items():
        fields[name] = {"dtype": entries[name].dtype, "shape": entries[name].shape, "data_offsets": place}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_weight(
    target: Path, source: Source, weight: str, begins: Mapping[str, int], progress: Callable[[int], None] | None
) -> dict[str, str]:
    """Write a weight's tensors, each from its place in the file on; returns their checksums."""
    entries = source.layout[weight]
    written = dict.fromkeys(entries, 0)
    sums = {name: hashlib.sha256() for name in entries}

    def check(name: str, fits: bool) -> None:
        if not fits:
            raise fault(target, f"tensor {name!r} now has {written[name]} bytes, had {entries[name].nbytes}")

    with open(target, "r+b") as out:
        for block in source.blocks(weight):
            for name, array in block.items():
                data = bytes_of(array)
                out.seek(begins[name] + written[name])
                written[name] += data.nbytes
                check(name, written[name] <= entries[name].nbytes)
                sums[name].update(data)
                out.write(data)
                if progress is not None:
                    progress(data.nbytes)
    for name in entries:
        check(name, written[name] == entries[name].nbytes)
    return {name: f"sha256:{sums[name].hexdigest()}" for name in entries}


def write_index(target: Path, shards: Mapping[str, Sequence[str]], source: Source) -> None:
    """Write the index of shards, ``{file name: weights}``, as the Hub has it."""
    weight_map = {name: file for file, weights in shards.items() for name in source.entries(weights)}
    total = sum(entry.nbytes for entry in source.entries().values())
    with open(target, "x", encoding="utf-8") as out:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, out, indent=2, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())


def plan_shards(source: Source, limit: int | None) -> list[list[str]]:
    """Weights file by file, in the order of the layout, each file up to ``limit`` bytes if it holds more than one."""
    groups: list[list[str]] = [[]]
    used = 0
    for weight, stored in source.layout.items():
        size = sum(entry.nbytes for entry in stored.values())
        if limit is not None and used + size > limit and groups[-1]:
            groups.append([])
            used = 0
        groups[-1].append(weight)
        used += size
    return groups


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files onto the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
