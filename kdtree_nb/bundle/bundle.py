"""An open bundle."""

import html
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np

from kdtree_nb.bundle.format import INDEX_SUFFIX, Entry, bytes_of, check_layout, checksum, fault
from kdtree_nb.bundle.headers import Shard, find, open_index, open_shard, state_of
from kdtree_nb.quantization import QuantizedWeight, dequantize


class Row(NamedTuple):
    """One weight in the table of ``inspect``; ``share`` is a fraction of the bytes.

    ``kind`` is ``int4`` or ``float``, in a checkpoint also ``fp8``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    share: float


def summarise(every: Iterable[Row]) -> list[Row]:
    """Rows with what differs in layer or expert only drawn together; shape () where shapes differ too."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in every:
        name = re.sub(r"\.(layers|experts)\.\d+\.", r".\1.*.", row.name)
        groups.setdefault((name, row.kind, row.dtype), []).append(row)
    return [
        Row(
            rows[0].name if len(rows) == 1 else f"{name} ({len(rows)} weights)",
            kind,
            rows[0].shape if len({row.shape for row in rows}) == 1 else (),
            dtype,
            sum(row.bytes for row in rows),
            sum(row.share for row in rows),
        )
        for (name, kind, dtype), rows in groups.items()
    ]


class Bundle(Mapping[str, np.ndarray]):
    """An open bundle: a mapping from stored names to arrays, read from the mapped file when asked for.

    Attributes
    ----------
    config : ModelConfig or DrafterConfig
    tokenizer : str or None
        Name of a file beside the bundle.
    path : Path
        The ``.kdtr`` file or the ``.kdtr.index.json`` that was opened.
    entries : mapping from stored name to Entry
    """

    def __init__(self, path: Path, shards: Sequence[Shard], entries: Mapping[str, Entry]) -> None:
        self.path = path
        self.config, self.tokenizer = shards[0].config, shards[0].tokenizer
        self.entries = MappingProxyType(dict(entries))
        self._shards = {shard.path: shard for shard in shards}
        self._places = {name: (shard.path, begin) for shard in shards for name, begin in shard.offsets.items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Bundle":
        """Open a ``.kdtr`` file, a ``.kdtr.index.json``, or a folder that holds one bundle.

        Raises
        ------
        BundleError
            For every fault that shows without reading a tensor. :meth:`verify` finds the others.
        """
        found = find(Path(path))
        shards = open_index(found) if found.name.endswith(INDEX_SUFFIX) else [open_shard(found)]
        entries = {name: entry for shard in shards for name, entry in shard.entries.items()}
        check_layout(found, shards[0].config, entries)
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

    def place(self, name: str) -> tuple[Path, int]:
        """The file that holds a stored tensor, and the byte of it where the tensor begins."""
        return self._places[name]

    def read_into(self, out: np.ndarray, file: Path, begin: int) -> None:
        """Fill memory that is there already, uint8 [bytes], with the bytes of a file from ``begin`` on.

        Unlike a tensor asked for by name, nothing is made in between. May be called from several threads.

        Raises
        ------
        BundleError
            If the file is not the one that was opened, or has been written to.
        ValueError
            If the bundle is closed.
        """
        if not self._shards:
            raise ValueError(f"{self.path}: the bundle is closed ({file.name} was asked for)")
        with open(file, "rb", buffering=0) as stream:
            if state_of(stream) != self._shards[file].state:
                raise fault(file, "has changed since it was opened")
            stream.seek(begin)
            done = 0
            while done < len(out):
                count = stream.readinto(out.data[done:])
                if not count:
                    raise fault(file, f"ends at byte {begin + done}, expected {begin + len(out)} and more")
                done += count

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
            found, expected = checksum(bytes_of(self[name])), self._shards[entry.file].checksums[name]
            if found != expected:
                raise fault(entry.file, f"tensor {name!r}: checksum {found}, expected {expected!r}")

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
        """:meth:`rows`, summed up by :func:`summarise`."""
        return summarise(self.rows())

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
