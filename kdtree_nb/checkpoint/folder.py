"""A Hugging Face folder, opened without believing it: config, index and headers, and rows of tensors on demand."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kdtree_nb.bundle.format import DTYPES, Entry, fault, sibling
from kdtree_nb.bundle.headers import CONFIG_LIMIT, check_index, open_tensors, parse_object, read_index, read_small

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LANGUAGE_MODEL = "language_model."  # before every name of the text model, in a checkpoint that can also see
STORED_DTYPES = {
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    # Of no weight that is read, but their sizes say where the next tensor begins.
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U32": np.dtype(np.uint32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class Rows(NamedTuple):
    """Consecutive rows of a stored tensor, or all of it.

    ``name`` is that of the tensor in the file, ``shape`` that of these rows, ``offset`` the byte where they begin.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of one element, where there are no rows."""
        return math.prod(self.shape[1:]) * STORED_DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize

    def slice(self, begin: int, end: int) -> "Rows":
        """Rows ``begin`` to ``end`` of these."""
        offset = self.offset + begin * self.row_bytes
        return self._replace(shape=(end - begin, *self.shape[1:]), offset=offset)

    def read(self) -> np.ndarray:
        """Their values, in memory of their own.

        Raises
        ------
        BundleError
            If the file has become shorter.
        """
        # Read, not mapped: pages of a mapped file count as memory in use, and a folder can have a thousand gigabytes.
        data = np.fromfile(self.file, np.uint8, self.nbytes, offset=self.offset)
        if data.nbytes != self.nbytes:
            raise fault(self.file, f"tensor {self.name!r} ends early: the file has changed since it was opened")
        return data.view(STORED_DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class Folder:
    """What a checkpoint folder holds.

    Attributes
    ----------
    path : Path
    settings : dict
        config.json of the text model, where the checkpoint has other parts too.
    prefix : str
        What its tensors' names begin with.
    tensors : mapping from stored name to Rows
    """

    path: Path
    settings: Mapping[str, Any]
    prefix: str
    tensors: Mapping[str, Rows]

    @property
    def identity(self) -> str:
        """Changes with the config, and with the size or time of any file of weights."""
        files = sorted({rows.file for rows in self.tensors.values()})
        states = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
        return json.dumps([self.settings, states], sort_keys=True)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder that has a config.json."""
    return (path / CONFIG).is_file()


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read the config and the headers of a checkpoint; no tensor.

    Files may be links, as in the Hub's cache; names with which an index would leave the folder are refused.

    Raises
    ------
    BundleError
        If something is missing or malformed, or if the weights are pickles.
    """
    path = Path(path)
    if not path.is_dir():
        what = "a file" if path.exists() else "no such folder"
        raise fault(path, f"{what}, expected a folder with {CONFIG} and {WEIGHTS} or {INDEX}")
    settings = read_json(path / CONFIG)
    prefix = ""
    if isinstance(settings.get("text_config"), dict):
        outer, settings, prefix = settings, settings["text_config"], LANGUAGE_MODEL
        settings = {"quantization_config": outer.get("quantization_config"), **settings}
    if (path / "generation_config.json").is_file():  # its end of text is the one that transformers' generate obeys
        generation = read_json(path / "generation_config.json")
        settings = settings | {key: generation[key] for key in ("eos_token_id",) if generation.get(key) is not None}

    if (path / WEIGHTS).is_file():
        opened = open_tensors(path / WEIGHTS, STORED_DTYPES)
        return Folder(path, settings, prefix, _rows(opened.entries, opened.offsets))
    index = path / INDEX
    if not index.is_file():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        advice = f"; {pickles[0]} is a pickle, which can run code: save it as safetensors" if pickles else ""
        raise fault(path, f"the folder has no weights, expected {WEIGHTS} or {INDEX}{advice}")
    weight_map = read_index(index, ".safetensors", sibling)
    files = {file: open_tensors(file, STORED_DTYPES) for file in dict.fromkeys(weight_map.values())}
    check_index(index, weight_map, {file: opened.entries for file, opened in files.items()})
    tensors: dict[str, Rows] = {}
    for opened in files.values():
        tensors |= _rows(opened.entries, opened.offsets)
    return Folder(path, settings, prefix, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a sane length."""
    return parse_object(path, "the file", read_small(path, CONFIG_LIMIT), CONFIG_LIMIT)


def _rows(entries: Mapping[str, Entry], offsets: Mapping[str, int]) -> dict[str, Rows]:
    return {name: Rows(name, entry.file, entry.dtype, entry.shape, offsets[name]) for name, entry in entries.items()}
