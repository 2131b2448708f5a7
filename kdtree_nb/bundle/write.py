"""Writing a bundle: whole or not at all, and with the same bytes for the same tensors."""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdtree_nb.bundle.format import (
    DTYPE_NAMES,
    FORMAT,
    INDEX_SUFFIX,
    METADATA,
    SHARD,
    SUFFIX,
    VERSION,
    Entry,
    beside,
    check_layout,
    fault,
    metadata_checksum,
)
from kdtree_nb.bundle.stream import Source, plan_shards, sync_folder, write_index, write_tensors
from kdtree_nb.config import Config


def write_bundle(
    path: str | os.PathLike[str],
    config: Config,
    tensors: Mapping[str, np.ndarray] | Source,
    *,
    tokenizer: str | None = None,
    max_shard_bytes: int | None = None,
    threads: int = 1,
    resume: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write ``NAME.kdtr``, or its shards and ``NAME.kdtr.index.json`` where the tensors exceed ``max_shard_bytes``.

    Equal input gives equal bytes. Files appear under their names only when all of them are written, the index
    last; a killed writer leaves no bundle, at most hidden ``.tmp`` and ``.done`` files.

    Parameters
    ----------
    tensors : mapping or Source
        ``NAME`` (float32, bfloat16 or float16) or ``NAME.qw`` and ``NAME.sc`` for each weight of the config,
        as :func:`~kdtree_nb.quantization.quantize_weights` returns. Each is asked for twice, its shape first and
        its bytes later, so that a lazy mapping never has to hold more than one. A :class:`Source` knows the shapes,
        and gives its tensors block by block.
    tokenizer : str, optional
        Name of a file beside the bundle.
    threads : int
        Weights that are made and written at the same time.
    resume : str, optional
        What the tensors were made of and how. Shards that an earlier call with the same ``resume``, config and layout
        had finished when it was stopped are kept; without it, nothing is.
    progress : callable, optional
        Called with a number of bytes when that many were written, or found finished.

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
    if not isinstance(tensors, Source):
        tensors = _source(path, config, tensors)
    check_layout(path, config, tensors.entries())

    common = {"format": FORMAT, "version": VERSION, "config": json.dumps(config.to_hf(), sort_keys=True)}
    if tokenizer is not None:
        common["tokenizer"] = tokenizer

    def metadata(checksums: Mapping[str, str]) -> dict[str, str]:
        return common | {"checksums": json.dumps({**checksums, METADATA: metadata_checksum(common)})}

    shards = _name_shards(path, plan_shards(tensors, max_shard_bytes))
    index = path.with_name(path.stem + INDEX_SUFFIX)
    finals = [path] if path in shards else [*shards, index]
    token = secrets.token_hex(4) if resume is None else _token(resume, common, shards, tensors)
    files = {final: _Hidden.behind(final, token) for final in finals}
    _sweep(path, {file.finished.name for file in files.values()})
    try:
        for final, weights in shards.items():
            if not files[final].finished.exists():
                write_tensors(files[final].temporary, tensors, weights, metadata, threads, progress)
                files[final].finish()
            elif progress is not None:
                progress(sum(entry.nbytes for entry in tensors.entries(weights).values()))
        if index in files:
            files[index].finished.unlink(missing_ok=True)
            write_index(files[index].temporary, {file.name: weights for file, weights in shards.items()}, tensors)
            files[index].finish()
        _publish(path, index, files)
    finally:
        for file in files.values():
            file.temporary.unlink(missing_ok=True)
            if resume is None:
                file.finished.unlink(missing_ok=True)
    return finals[-1]


class _Hidden(NamedTuple):
    """A file's names before it has its own: while it is written, and while others of its bundle still are."""

    temporary: Path
    finished: Path

    @classmethod
    def behind(cls, final: Path, token: str) -> "_Hidden":
        """Another temporary name for each run: of two at once, neither may finish what the other has half written."""
        endings = f"{token}.{secrets.token_hex(4)}.tmp", f"{token}.done"
        return cls(*(final.with_name(f".{final.name}.{ending}") for ending in endings))

    def finish(self) -> None:
        os.replace(self.temporary, self.finished)


def _publish(path: Path, index: Path, files: Mapping[Path, _Hidden]) -> None:
    """Give all files their names, in their order; then remove those of an earlier bundle that this one has not."""
    if index in files:
        index.unlink(missing_ok=True)  # an old index over new shards would be half a bundle
    for final, file in files.items():
        os.replace(file.finished, final)
    earlier = [file for file in path.parent.glob(f"*{SUFFIX}") if SHARD.sub(SUFFIX, file.name) == path.name]
    for old in {index, *earlier} - files.keys():
        old.unlink(missing_ok=True)
    sync_folder(path.parent)


def _source(path: Path, config: Config, tensors: Mapping[str, np.ndarray]) -> Source:
    """Arrays, or a lazy mapping, as a source; what is no weight's comes last, for the layout's check to name."""
    layout: dict[str, dict[str, Entry]] = {}
    entries = {name: _entry(path, name, tensors[name]) for name in tensors}
    for weight in [*config.weight_shapes(), *entries]:
        stored = {name: entries.pop(name) for name in (weight, f"{weight}.qw", f"{weight}.sc") if name in entries}
        if stored:
            layout[weight] = stored

    def blocks(weight: str) -> Iterator[dict[str, np.ndarray]]:
        for name in layout[weight]:
            yield {name: tensors[name]}

    return Source(layout, blocks)


def _entry(path: Path, name: str, array: np.ndarray) -> Entry:
    if array.dtype not in DTYPE_NAMES:
        raise fault(path, f"tensor {name!r} is {array.dtype}, expected float32, bfloat16, float16 or int32")
    return Entry(array.shape, DTYPE_NAMES[array.dtype], array.nbytes, path)


def _name_shards(path: Path, groups: list[list[str]]) -> dict[Path, list[str]]:
    if len(groups) == 1:
        return {path: groups[0]}
    return {
        path.with_name(f"{path.stem}-{i:05d}-of-{len(groups):05d}{SUFFIX}"): names for i, names in enumerate(groups, 1)
    }


def _token(resume: str, common: Mapping[str, str], shards: Mapping[Path, list[str]], source: Source) -> str:
    """Digits that differ whenever a shard's bytes could."""
    layout = [[(name, e.shape, e.dtype) for name, e in source.entries(weights).items()] for weights in shards.values()]
    return sha256(json.dumps([resume, common, layout]).encode()).hexdigest()[:16]


def _sweep(path: Path, keep: set[str]) -> None:
    """Remove what stopped writers of this bundle left, but for shards that this one can use."""
    for file in path.parent.glob(".*"):
        final, _, ending = file.name.removeprefix(".").partition(SUFFIX)
        stale = ending.endswith((".tmp", ".done")) and file.name not in keep
        if stale and SHARD.sub(SUFFIX, final + SUFFIX) == path.name:
            file.unlink(missing_ok=True)
