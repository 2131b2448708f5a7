"""Writing a bundle: whole or not at all, and with the same bytes for the same tensors."""

import itertools
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_nb.bundle.format import (
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    INDEX_SUFFIX,
    METADATA,
    SHARD,
    SUFFIX,
    VERSION,
    Entry,
    beside,
    bytes_of,
    check_layout,
    checksum,
    fault,
    metadata_checksum,
)
from kdtree_nb.config import Config


def write_bundle(
    path: str | os.PathLike[str],
    config: Config,
    tensors: Mapping[str, np.ndarray],
    *,
    tokenizer: str | None = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write ``NAME.kdtr``, or its shards and ``NAME.kdtr.index.json`` where the tensors exceed ``max_shard_bytes``.

    Equal input gives equal bytes. Files appear under their names only when all of them are written, the index
    last; a killed writer leaves no bundle, at most hidden ``.tmp`` files.

    Parameters
    ----------
    tensors : mapping
        ``NAME`` (float32, bfloat16 or float16) or ``NAME.qw`` and ``NAME.sc`` for each weight of the config,
        as :func:`~kdtree_nb.quantization.quantize_weights` returns. Each is asked for twice, its shape first and
        its bytes later, so that a lazy mapping never has to hold more than one.
    tokenizer : str, optional
        Name of a file beside the bundle.

    Returns
    -------
    Path
        The file or the index, as :meth:`Bundle.open` takes it.

    Raises
    ------
    BundleError
        If the tensors are not those the config asks for; nothing is written.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise fault(path, f"suffix {path.suffix!r}, expected {SUFFIX!r}")
    if tokenizer is not None:
        beside(path, "tokenizer", tokenizer)
    entries = {name: _entry(path, name, tensors[name]) for name in tensors}
    check_layout(path, config, entries)

    shards = _plan_shards(path, config, entries, max_shard_bytes)
    index = path.with_name(path.stem + INDEX_SUFFIX)
    finals = [path] if path in shards else [*shards, index]
    temporary = {final: final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp") for final in finals}
    try:
        for final, names in shards.items():
            _write_file(temporary[final], config, tokenizer, {name: entries[name] for name in names}, tensors)
        if index in finals:
            _write_index(temporary[index], shards, entries)
            index.unlink(missing_ok=True)  # an old index over new shards would be half a bundle
        for final in finals:
            os.replace(temporary[final], final)
        earlier = [file for file in path.parent.glob(f"*{SUFFIX}") if SHARD.sub(SUFFIX, file.name) == path.name]
        for file in {index, *earlier} - set(finals):
            file.unlink(missing_ok=True)
        _sync_folder(path.parent)
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return finals[-1]


def _plan_shards(path: Path, config: Config, entries: Mapping[str, Entry], limit: int | None) -> dict[Path, list[str]]:
    """Stored names file by file, in the order of the forward pass; a weight's two tensors stay together."""
    groups: list[list[str]] = [[]]
    room = remaining = math.inf if limit is None else limit
    for weight in config.weight_shapes():
        names = [name for name in (weight, f"{weight}.qw", f"{weight}.sc") if name in entries]
        size = sum(entries[name].nbytes for name in names)
        if size > remaining and groups[-1]:
            groups.append([])
            remaining = room
        groups[-1] += names
        remaining -= size
    if len(groups) == 1:
        return {path: groups[0]}
    return {
        path.with_name(f"{path.stem}-{i:05d}-of-{len(groups):05d}{SUFFIX}"): names for i, names in enumerate(groups, 1)
    }


def _write_file(
    target: Path,
    config: Config,
    tokenizer: str | None,
    entries: Mapping[str, Entry],
    tensors: Mapping[str, np.ndarray],
) -> None:
    # Not the library's save_file: it orders the metadata anew in every run, and takes a strided array for a dense one.
    order = sorted(entries, key=lambda name: (-DTYPES[entries[name].dtype].itemsize, name))  # keeps tensors aligned
    ends = list(itertools.accumulate((entries[name].nbytes for name in order), initial=0))
    metadata = {"format": FORMAT, "version": VERSION, "config": json.dumps(config.to_hf(), sort_keys=True)}
    if tokenizer is not None:
        metadata["tokenizer"] = tokenizer
    checksums = dict.fromkeys(order, checksum(b"")) | {METADATA: metadata_checksum(metadata)}

    def header() -> bytes:
        fields: dict[str, Any] = {METADATA: metadata | {"checksums": json.dumps(checksums)}}
        for name, offsets in zip(order, itertools.pairwise(ends), strict=True):
            fields[name] = {"dtype": entries[name].dtype, "shape": entries[name].shape, "data_offsets": offsets}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with open(target, "xb") as out:
        out.write(header())
        for name in order:
            data = bytes_of(tensors[name])
            if data.nbytes != entries[name].nbytes:
                raise fault(target, f"tensor {name!r} now has {data.nbytes} bytes, had {entries[name].nbytes}")
            checksums[name] = checksum(data)
            out.write(data)
        out.seek(0)
        out.write(header())  # as long as before: only the sums changed
        out.flush()
        os.fsync(out.fileno())


def _write_index(target: Path, shards: Mapping[Path, Sequence[str]], entries: Mapping[str, Entry]) -> None:
    weight_map = {name: file.name for file, names in shards.items() for name in names}
    total = sum(entry.nbytes for entry in entries.values())
    with open(target, "x", encoding="utf-8") as out:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, out, indent=2, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _entry(path: Path, name: str, array: np.ndarray) -> Entry:
    if array.dtype not in DTYPE_NAMES:
        raise fault(path, f"tensor {name!r} is {array.dtype}, expected float32, bfloat16, float16 or int32")
    return Entry(array.shape, DTYPE_NAMES[array.dtype], array.nbytes, path)
