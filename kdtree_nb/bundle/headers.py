"""Opening what may come from anyone: every header is checked here before a tensor is believed to exist."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import numpy as np
from safetensors import SafetensorError, safe_open

from kdtree_nb.bundle.format import (
    DRAFTER_INDEX_SUFFIX,
    DRAFTER_SUFFIX,
    DTYPES,
    FORMAT,
    INDEX_SUFFIX,
    METADATA,
    SHARD,
    SUFFIX,
    VERSION,
    BundleError,
    Entry,
    beside,
    fault,
    metadata_checksum,
)
from kdtree_nb.config import Config, config_from_hf

CONFIG_LIMIT, HEADER_LIMIT = 2**20, 2**26  # characters of JSON to parse; Kimi K2 in one file has 36 million
CHECKSUM_LIMIT = 256  # characters a tensor
MOST_DIMENSIONS = 8


class TensorFile(NamedTuple):
    """A safetensors file whose header the library found valid.

    ``offsets`` says where in the file a tensor begins, ``state`` is what :func:`state_of` said of the file.
    """

    path: Path
    handle: Any
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    offsets: Mapping[str, int]
    state: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One file of a bundle, its header read and checked."""

    path: Path
    handle: Any
    config: Config
    tokenizer: str | None
    checksums: Mapping[str, object]
    entries: Mapping[str, Entry]
    offsets: Mapping[str, int]
    state: tuple[int, ...]


def find(path: Path) -> Path:
    """The file or the index that a path means; in a folder, the model's."""
    if not path.is_dir():
        index = path.with_name(path.stem + INDEX_SUFFIX)
        return index if path.suffix == SUFFIX and not path.exists() and index.exists() else path
    of_drafter = (DRAFTER_SUFFIX, DRAFTER_INDEX_SUFFIX)
    models = [file for file in sorted(path.glob(f"*{SUFFIX}*")) if not file.name.endswith(of_drafter)]
    indexes = [file for file in models if file.name.endswith(INDEX_SUFFIX)]
    hidden_by_index = {index.name.removesuffix(".index.json") for index in indexes}
    files = [file for file in models if file.name.endswith(SUFFIX) and not SHARD.search(file.name)]
    found = indexes + [file for file in files if file.name not in hidden_by_index]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise fault(path, f"the folder holds {len(found)} bundles ({names}), expected one; shards need their index")
    return found[0]


def parse_object(path: Path, what: str, text: str | bytes, limit: int) -> dict[str, Any]:
    """A JSON object of bounded length, no key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ValueError(f"{key!r} appears twice")
            values[key] = value
        return values

    if len(text) > limit:
        raise fault(path, f"{what} has {len(text)} characters, expected at most {limit}")
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise fault(path, f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise fault(path, f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def read_small(path: Path, limit: int) -> bytes:
    """A file whole, of at most so many bytes."""
    if not path.is_file():
        raise fault(path, "a folder, expected a file" if path.is_dir() else "no such file")
    if path.stat().st_size > limit:
        raise fault(path, f"has {path.stat().st_size} bytes, expected at most {limit}")
    return path.read_bytes()


def read_index(path: Path, suffix: str, locate: Callable[[Path, str, str], Path]) -> dict[str, Path]:
    """The file of each tensor, as an index gives it; ``locate`` decides which names may be followed."""
    index = parse_object(path, "the index", read_small(path, HEADER_LIMIT), HEADER_LIMIT)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(path, "weight_map is missing, expected an object that gives each tensor's file")
    files: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(suffix):
            raise fault(path, f"tensor {name!r}: shard {file!r}, expected the name of a {suffix} file")
        if file not in files:
            files[file] = locate(path, f"tensor {name!r}: shard", file)
            if not files[file].is_file():
                raise fault(path, f"tensor {name!r}: shard {file!r} does not exist")
    return {name: files[file] for name, file in weight_map.items()}


def check_index(path: Path, weight_map: Mapping[str, Path], held: Mapping[Path, Mapping[str, Entry]]) -> None:
    """That the files hold what the index says, each tensor where it says."""
    for file, entries in held.items():
        for name in entries:
            if weight_map.get(name) != file:
                where = repr(weight_map[name].name) if name in weight_map else "'nowhere'"
                raise fault(file, f"tensor {name!r} is here, the index {path.name} has it in {where}")
    for name, file in weight_map.items():
        if name not in held[file]:
            raise fault(file, f"tensor {name!r} is missing, the index {path.name} has it here")


def open_index(path: Path) -> list[Shard]:
    """Every shard of an index, each tensor where the index says."""
    weight_map = read_index(path, SUFFIX, beside)
    shards = [open_shard(file) for file in dict.fromkeys(weight_map.values())]
    for shard in shards:
        if (shard.config, shard.tokenizer) != (shards[0].config, shards[0].tokenizer):
            raise fault(shard.path, f"config or tokenizer differ from those of {shards[0].path.name}")
    check_index(path, weight_map, {shard.path: shard.entries for shard in shards})
    return shards


def open_tensors(path: Path, dtypes: Mapping[str, np.dtype]) -> TensorFile:
    """A safetensors file of these dtypes, its header read.

    The library maps the file. One that is shorter than its header says is refused here. One that another process cuts
    short later is beyond any check: the system stops whoever reads a page that is no longer there (SIGBUS). Nothing of
    this package shortens a file in place; a bundle that is written again takes the old one's name, not its bytes.
    """
    if not path.is_file():
        raise fault(path, "no such file")
    entries: dict[str, Entry] = {}
    offsets: dict[str, int] = {}
    try:
        handle: Any = safe_open(path, framework="numpy")
        with open(path, "rb") as file:
            end = 8 + int.from_bytes(file.read(8), "little")
            state = state_of(file)
        for name in handle.offset_keys():  # in the file's order, and a valid file has no gaps
            view = handle.get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if dtype not in dtypes:
                raise fault(path, f"tensor {name!r}: dtype {dtype!r}, expected one of {', '.join(dtypes)}")
            entries[name] = Entry(shape, dtype, math.prod(shape) * dtypes[dtype].itemsize, path)
            offsets[name] = end
            end += entries[name].nbytes
    except (SafetensorError, OSError) as error:
        raise fault(path, _explain(path, dtypes) or str(error)) from error
    return TensorFile(path, handle, handle.metadata() or {}, entries, offsets, state)


def state_of(file: IO[bytes]) -> tuple[int, ...]:
    """What is different as soon as a path leads to another file, or the file was written to."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_shard(path: Path) -> Shard:
    """One file: format and version known, dtypes ours, a checksum for each tensor, a valid config."""
    opened = open_tensors(path, DTYPES)
    metadata, entries = opened.metadata, opened.entries
    for key, known in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(key) != known:
            raise fault(path, f"metadata {key}={metadata.get(key)!r}, expected {known!r}")
    tokenizer = metadata.get("tokenizer")
    if tokenizer is not None:
        beside(path, "tokenizer", tokenizer)
    limit = CHECKSUM_LIMIT * (len(entries) + 1)
    checksums = parse_object(path, "metadata checksums", metadata.get("checksums", ""), limit)
    if odd := {METADATA, *entries} ^ checksums.keys():
        raise fault(path, f"tensor {min(odd)!r}: expected a checksum for each tensor of the file and for no other")
    if metadata_checksum(metadata) != checksums[METADATA]:
        raise fault(path, f"metadata config and tokenizer: not as written, whose checksum is {checksums[METADATA]!r}")
    hf = parse_object(path, "metadata config", metadata.get("config", ""), CONFIG_LIMIT)
    try:
        config = config_from_hf(hf)
    except ValueError as error:
        raise fault(path, f"metadata {error}") from error
    return Shard(path, opened.handle, config, tokenizer, checksums, entries, opened.offsets, opened.state)


def _explain(path: Path, dtypes: Mapping[str, np.dtype]) -> str | None:
    """What is wrong with a file that the library refused, tensor by name; None where this reader sees nothing.

    The library alone decides what is valid. Its messages often leave the tensor out, or name its neighbour.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        available = size - 8 - length
        if available < 0:
            return f"the header's length {length} does not fit into a file of {size} bytes (truncated?)"
        try:
            header = parse_object(path, "header", file.read(min(length, HEADER_LIMIT + 1)), HEADER_LIMIT)
        except BundleError:
            return None
    header.pop(METADATA, None)
    for name, info in header.items():
        if problem := _explain_tensor(info, dtypes, available):
            return f"tensor {name!r}: {problem}"
    end, before = 0, "the header"
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if info["data_offsets"][0] != end:
            return f"tensor {name!r}: data_offsets {info['data_offsets']}, expected a start at {end}, after {before}"
        end, before = info["data_offsets"][1], repr(name)
    return None if end == available else f"tensor {before} ends at byte {end} of the data, expected {available}"


def _explain_tensor(info: object, dtypes: Mapping[str, np.dtype], available: int) -> str | None:
    if not isinstance(info, dict):
        return f"described by a {type(info).__name__}, expected an object"
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in dtypes:
        return f"dtype {dtype!r}, expected one of {', '.join(dtypes)}"
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        return f"shape {shape!r}, expected at most {MOST_DIMENSIONS} whole numbers"
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= available:
        return f"data_offsets {offsets!r}, expected [begin, end] within {available} bytes of data (truncated?)"
    stored, needed = offsets[1] - offsets[0], math.prod(shape) * dtypes[dtype].itemsize
    return None if stored == needed else f"{stored} bytes for {dtype} {shape}, expected {needed}"


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
