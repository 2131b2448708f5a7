"""KDTR bundles: a model's config and weights in one safetensors file, or in shards with an index beside them.

A bundle comes from somewhere else, so nothing in it is believed before it is checked. Opening reads headers
only and holds them against the shapes that the config asks for; a tensor's bytes are read when it is used.
"""

import hashlib
import html
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeGuard

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from kdtree_nb.config import ModelConfig
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, QuantizedWeight, dequantize, quantized_names

SUFFIX, INDEX_SUFFIX = ".kdtr", ".kdtr.index.json"
FORMAT, VERSION = "kdtr", "1"
FLOATS = ("F32", "BF16", "F16")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.kdtr$")
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(bfloat16),
    "F16": np.dtype(np.float16),
    "I32": np.dtype(np.int32),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"  # the library reserves this name, so no tensor can have it
_CONFIG_LIMIT, _HEADER_LIMIT = 2**20, 2**25  # characters of JSON that are parsed; Kimi K2's index has 15 million
_CHECKSUM_LIMIT = 256  # characters a tensor


class BundleError(ValueError):
    """A bundle that must not be used: one line that names the file, the tensor, its value and what was expected."""


@dataclass(frozen=True)
class Entry:
    """What a header says of a stored tensor; ``dtype`` is safetensors' name for it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


class Row(NamedTuple):
    """One weight in the table of ``inspect``; ``kind`` is ``int4`` or ``float``, ``share`` a fraction of the bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    share: float


class Bundle(Mapping[str, np.ndarray]):
    """An open bundle: a mapping from stored names to arrays, read from the mapped file when asked for.

    Attributes
    ----------
    config : ModelConfig
    tokenizer : str or None
        Name of a file beside the bundle.
    path : Path
        The ``.kdtr`` file or the ``.kdtr.index.json`` that was opened.
    entries : mapping from stored name to Entry
    """

    def __init__(self, path: Path, shards: Sequence["_Shard"], entries: Mapping[str, Entry]) -> None:
        self.path = path
        self.config, self.tokenizer = shards[0].config, shards[0].tokenizer
        self.entries = MappingProxyType(dict(entries))
        self._shards = {shard.path: shard for shard in shards}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Bundle":
        """Open a ``.kdtr`` file, a ``.kdtr.index.json``, or a folder that holds one bundle.

        Raises
        ------
        BundleError
            For every fault that shows without reading a tensor. :meth:`verify` finds the others.
        """
        found = _find(Path(path))
        shards = _open_index(found) if found.name.endswith(INDEX_SUFFIX) else [_open_shard(found)]
        entries = {name: entry for shard in shards for name, entry in shard.entries.items()}
        _check_layout(found, shards[0].config, entries)
        return cls(found, shards, entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> np.ndarray:
        """The stored tensor as a fresh array."""
        if name not in self.entries:
            raise KeyError(f"{self.path}: no tensor {name!r}")
        if not self._shards:
            raise ValueError(f"{self.path}: the bundle is closed (tensor {name!r} was asked for)")
        tensor: np.ndarray = self._shards[self.entries[name].file].handle.get_tensor(name)
        return tensor

    # Mapping compares contents, which would read every tensor.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def quantized(self, name: str) -> QuantizedWeight:
        """The weight that is stored as ``NAME.qw`` and ``NAME.sc``."""
        return QuantizedWeight(self[f"{name}.qw"], self[f"{name}.sc"], name)

    def weight(self, name: str) -> np.ndarray:
        """The weight as a float array: as stored, or float32 ``code · scale`` where it is INT4."""
        return dequantize(self.quantized(name)) if f"{name}.qw" in self else self[name]

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight as float32, for the reference."""
        return {name: self.weight(name).astype(np.float32, copy=False) for name in self.config.weight_shapes()}

    def verify(self, progress: Callable[[str], None] | None = None) -> None:
        """Read every tensor and compare its checksum; ``progress`` is called with each name beforehand.

        Raises
        ------
        BundleError
            For the first tensor that differs; the message names its file too.
        """
        for name, entry in self.entries.items():
            if progress is not None:
                progress(name)
            found, expected = _checksum(_bytes_of(self[name])), self._shards[entry.file].checksums[name]
            if found != expected:
                raise _fault(entry.file, f"tensor {name!r}: checksum {found}, expected {expected!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def rows(self) -> list[Row]:
        """One row a weight, in the order of the forward pass."""
        rows, total = [], self.nbytes
        for name, shape in self.config.weight_shapes().items():
            kind, stored = ("float", [name]) if name in self else ("int4", [f"{name}.qw", f"{name}.sc"])
            parts = [self.entries[part] for part in stored]
            size = sum(part.nbytes for part in parts)
            rows.append(Row(name, kind, shape, " + ".join(part.dtype for part in parts), size, size / total))
        return rows

    def summary(self) -> list[Row]:
        """:meth:`rows` with a layer's routed experts drawn together; shape () where they differ."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows():
            name = re.sub(r"\.experts\.\d+\..*", ".experts.*", row.name)
            groups.setdefault((name, row.kind, row.dtype), []).append(row)
        return [
            Row(
                name if len(rows) == 1 else f"{name} ({len(rows)} weights)",
                kind,
                rows[0].shape if len({row.shape for row in rows}) == 1 else (),
                dtype,
                sum(row.bytes for row in rows),
                sum(row.share for row in rows),
            )
            for (name, kind, dtype), rows in groups.items()
        ]

    def _repr_html_(self) -> str:
        lines = [
            f"<tr><td><code>{html.escape(row.name)}</code></td><td>{row.kind}</td>"
            f"<td>{' × '.join(map(str, row.shape))}</td><td>{row.dtype}</td>"
            f"<td>{row.bytes:,}</td><td>{row.share:.1%}</td></tr>"
            for row in self.summary()
        ]
        heads = "".join(f"<th>{head}</th>" for head in ("weight", "kind", "shape", "dtype", "bytes", "share"))
        caption = f"<b>{html.escape(self.path.name)}</b>: {len(self)} tensors, {self.nbytes:,} bytes"
        return f"<table><caption>{caption}</caption><tr>{heads}</tr>{''.join(lines)}</table>"

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, {len(self)} tensors, {self.nbytes:,} bytes)"

    def close(self) -> None:
        """Unmap the files; arrays already read stay valid."""
        self._shards = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_bundle(
    path: str | os.PathLike[str],
    config: ModelConfig,
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
        raise _fault(path, f"suffix {path.suffix!r}, expected {SUFFIX!r}")
    if tokenizer is not None:
        _beside(path, "tokenizer", tokenizer)
    entries = {name: _entry(path, name, tensors[name]) for name in tensors}
    _check_layout(path, config, entries)

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
        earlier = [file for file in path.parent.glob(f"*{SUFFIX}") if _SHARD.sub(SUFFIX, file.name) == path.name]
        for file in {index, *earlier} - set(finals):
            file.unlink(missing_ok=True)
        _sync_folder(path.parent)
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return finals[-1]


def _plan_shards(
    path: Path, config: ModelConfig, entries: Mapping[str, Entry], limit: int | None
) -> dict[Path, list[str]]:
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
    config: ModelConfig,
    tokenizer: str | None,
    entries: Mapping[str, Entry],
    tensors: Mapping[str, np.ndarray],
) -> None:
    # Not the library's save_file: it orders the metadata anew in every run, and takes a strided array for a dense one.
    order = sorted(entries, key=lambda name: (-_DTYPES[entries[name].dtype].itemsize, name))  # keeps tensors aligned
    ends = list(itertools.accumulate((entries[name].nbytes for name in order), initial=0))
    metadata = {"format": FORMAT, "version": VERSION, "config": json.dumps(config.to_hf(), sort_keys=True)}
    if tokenizer is not None:
        metadata["tokenizer"] = tokenizer
    checksums = dict.fromkeys(order, _checksum(b"")) | {_METADATA: _metadata_checksum(metadata)}

    def header() -> bytes:
        fields: dict[str, Any] = {_METADATA: metadata | {"checksums": json.dumps(checksums)}}
        for name, offsets in zip(order, itertools.pairwise(ends), strict=True):
            fields[name] = {"dtype": entries[name].dtype, "shape": entries[name].shape, "data_offsets": offsets}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with open(target, "xb") as out:
        out.write(header())
        for name in order:
            data = _bytes_of(tensors[name])
            if data.nbytes != entries[name].nbytes:
                raise _fault(target, f"tensor {name!r} now has {data.nbytes} bytes, had {entries[name].nbytes}")
            checksums[name] = _checksum(data)
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
    if array.dtype not in _DTYPE_NAMES:
        raise _fault(path, f"tensor {name!r} is {array.dtype}, expected float32, bfloat16, float16 or int32")
    return Entry(array.shape, _DTYPE_NAMES[array.dtype], array.nbytes, path)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _checksum(data: bytes | memoryview) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _metadata_checksum(metadata: Mapping[str, str]) -> str:
    return _checksum(json.dumps([metadata.get("config"), metadata.get("tokenizer")]).encode())


# --- Reading: everything below meets untrusted bytes -----------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    path: Path
    handle: Any
    config: ModelConfig
    tokenizer: str | None
    checksums: Mapping[str, object]
    entries: Mapping[str, Entry]


def _fault(path: Path, message: str) -> BundleError:
    """An error of one printable line, whatever the bundle put into it."""
    text = "".join(character if character.isprintable() else "?" for character in f"{path}: {message}")
    return BundleError(text if len(text) <= 1000 else f"{text[:1000]}…")


def _find(path: Path) -> Path:
    if not path.is_dir():
        index = path.with_name(path.stem + INDEX_SUFFIX)
        return index if path.suffix == SUFFIX and not path.exists() and index.exists() else path
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    hidden_by_index = {index.name.removesuffix(".index.json") for index in indexes}
    files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if not _SHARD.search(file.name)]
    found = indexes + [file for file in files if file.name not in hidden_by_index]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise _fault(path, f"the folder holds {len(found)} bundles ({names}), expected one; shards need their index")
    return found[0]


def _beside(path: Path, what: str, name: str) -> Path:
    """The file ``name`` in the folder of ``path``, and nowhere else."""
    if not (0 < len(name) < 256 and name.isprintable()) or name == "." or ".." in name or set(name) & set("/\\:"):
        raise _fault(path, f"{what} {name!r} is not a plain file name, expected one in the same folder")
    file = path.with_name(name)
    if os.path.dirname(os.path.realpath(file)) != os.path.realpath(path.parent):
        raise _fault(path, f"{what} {name!r} leads outside the folder, expected a file in it")
    return file


def _parse_object(path: Path, what: str, text: str | bytes, limit: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ValueError(f"{key!r} appears twice")
            values[key] = value
        return values

    if len(text) > limit:
        raise _fault(path, f"{what} has {len(text)} characters, expected at most {limit}")
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _fault(path, f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def _open_index(path: Path) -> list[_Shard]:
    if not path.is_file() or path.stat().st_size > _HEADER_LIMIT:
        raise _fault(path, f"not a file of at most {_HEADER_LIMIT} bytes")
    index = _parse_object(path, "the index", path.read_bytes(), _HEADER_LIMIT)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _fault(path, "weight_map is missing, expected an object that gives each tensor's file")
    files: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(SUFFIX):
            raise _fault(path, f"tensor {name!r}: shard {file!r}, expected the name of a {SUFFIX} file")
        if file not in files:
            files[file] = _beside(path, f"tensor {name!r}: shard", file)
            if not files[file].is_file():
                raise _fault(path, f"tensor {name!r}: shard {file!r} does not exist")
    shards = [_open_shard(file) for file in files.values()]
    for shard in shards:
        if (shard.config, shard.tokenizer) != (shards[0].config, shards[0].tokenizer):
            raise _fault(shard.path, f"config or tokenizer differ from those of {shards[0].path.name}")
        for name in shard.entries:
            if weight_map.get(name) != shard.path.name:
                where = weight_map.get(name, "nowhere")
                raise _fault(shard.path, f"tensor {name!r} is here, the index {path.name} has it in {where!r}")
    found = {name for shard in shards for name in shard.entries}
    for name, file in weight_map.items():
        if name not in found:
            raise _fault(files[file], f"tensor {name!r} is missing, the index {path.name} has it here")
    return shards


def _open_shard(path: Path) -> _Shard:
    if not path.is_file():
        raise _fault(path, "no such file")
    entries: dict[str, Entry] = {}
    try:
        handle: Any = safe_open(path, framework="numpy")
        metadata = handle.metadata() or {}
        for key, known in (("format", FORMAT), ("version", VERSION)):
            if metadata.get(key) != known:
                raise _fault(path, f"metadata {key}={metadata.get(key)!r}, expected {known!r}")
        for name in handle.offset_keys():
            view = handle.get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if dtype not in _DTYPES:
                raise _fault(path, f"tensor {name!r}: dtype {dtype!r}, expected one of {', '.join(_DTYPES)}")
            entries[name] = Entry(shape, dtype, math.prod(shape) * _DTYPES[dtype].itemsize, path)
    except (SafetensorError, OSError) as error:
        raise _fault(path, _explain(path) or str(error)) from error

    tokenizer = metadata.get("tokenizer")
    if tokenizer is not None:
        _beside(path, "tokenizer", tokenizer)
    limit = _CHECKSUM_LIMIT * (len(entries) + 1)
    checksums = _parse_object(path, "metadata checksums", metadata.get("checksums", ""), limit)
    if odd := {_METADATA, *entries} ^ checksums.keys():
        raise _fault(path, f"tensor {min(odd)!r}: expected a checksum for each tensor of the file and for no other")
    if _metadata_checksum(metadata) != checksums[_METADATA]:
        raise _fault(path, f"metadata config and tokenizer: not as written, whose checksum is {checksums[_METADATA]!r}")
    hf = _parse_object(path, "metadata config", metadata.get("config", ""), _CONFIG_LIMIT)
    try:
        config = ModelConfig.from_hf(hf)
    except ValueError as error:
        raise _fault(path, f"metadata {error}") from error
    return _Shard(path, handle, config, tokenizer, checksums, entries)


def _check_layout(path: Path, config: ModelConfig, entries: Mapping[str, Entry]) -> None:
    """Every weight of the config once, float or packed, in its shape; and nothing else."""
    sparse_layers = max(0, config.num_hidden_layers - config.first_k_dense_replace)
    at_least = 5 * config.num_hidden_layers + 3 * config.n_routed_experts * sparse_layers
    if at_least > len(entries):  # before the names are listed: a config can ask for billions
        raise _fault(
            path, f"holds {len(entries)} tensors, expected {at_least} weights and more; a shard opens by its index"
        )

    def expect(name: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
        entry = entries[name]
        if entry.dtype not in dtypes or entry.shape != shape:
            wanted = f"{' or '.join(dtypes)} {list(shape)}"
            raise _fault(entry.file, f"tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected {wanted}")

    packable = quantized_names(config)
    unclaimed = set(entries)
    for name, shape in config.weight_shapes().items():
        qw, sc = f"{name}.qw", f"{name}.sc"
        forms = [form for form in (name, qw, sc) if form in entries]
        unclaimed.difference_update(forms)
        if forms == [name]:
            expect(name, FLOATS, shape)
        elif forms == [qw, sc] and name in packable and shape[1] % GROUP_SIZE == 0:
            expect(qw, ("I32",), (shape[0], shape[1] // CODES_PER_WORD))
            expect(sc, FLOATS, (shape[0], shape[1] // GROUP_SIZE))
        elif not forms:
            raise _fault(path, f"tensor {name!r} is missing, expected {list(shape)} or its .qw and .sc")
        else:
            pair = name in packable and shape[1] % GROUP_SIZE == 0
            wanted = f"{name!r} alone" + (f", or {qw!r} and {sc!r}" if pair else f": {list(shape)} is never packed")
            raise _fault(entries[forms[0]].file, f"tensor {' and '.join(map(repr, forms))}: expected {wanted}")
    if unclaimed:
        name = min(unclaimed)
        raise _fault(entries[name].file, f"tensor {name!r} is no weight of the config, expected none of that name")


def _explain(path: Path) -> str | None:
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
            header = _parse_object(path, "header", file.read(min(length, _HEADER_LIMIT + 1)), _HEADER_LIMIT)
        except BundleError:
            return None
    header.pop(_METADATA, None)
    for name, info in header.items():
        if problem := _explain_tensor(info, available):
            return f"tensor {name!r}: {problem}"
    end, before = 0, "the header"
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if info["data_offsets"][0] != end:
            return f"tensor {name!r}: data_offsets {info['data_offsets']}, expected a start at {end}, after {before}"
        end, before = info["data_offsets"][1], repr(name)
    return f"tensor {before} ends at byte {end} of the data, expected the last one to end at {available}"


def _explain_tensor(info: object, available: int) -> str | None:
    if not isinstance(info, dict):
        return f"described by a {type(info).__name__}, expected an object"
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return f"dtype {dtype!r}, expected one of {', '.join(_DTYPES)}"
    if not _are_sizes(shape, 1, 2):
        return f"shape {shape!r}, expected one or two whole numbers"
    if not _are_sizes(offsets, 2) or not offsets[0] <= offsets[1] <= available:
        return f"data_offsets {offsets!r}, expected [begin, end] within {available} bytes of data (truncated?)"
    stored, needed = offsets[1] - offsets[0], math.prod(shape) * _DTYPES[dtype].itemsize
    return None if stored == needed else f"{stored} bytes for {dtype} {shape}, expected {needed}"


def _are_sizes(value: object, *lengths: int) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) not in lengths:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)
