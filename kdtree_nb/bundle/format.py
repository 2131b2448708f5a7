"""What a bundle is made of: names, dtypes, checksums, and which tensors a config asks for."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.config import Config
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, quantized_names

SUFFIX, INDEX_SUFFIX = ".kdtr", ".kdtr.index.json"
DRAFTER_SUFFIX, DRAFTER_INDEX_SUFFIX = ".drafter.kdtr", ".drafter.kdtr.index.json"
FORMAT, VERSION = "kdtr", "1"
FLOATS = ("F32", "BF16", "F16")
SHARD = re.compile(r"-\d{5}-of-\d{5}\.kdtr$")
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(bfloat16),
    "F16": np.dtype(np.float16),
    "I32": np.dtype(np.int32),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"  # the library reserves this name, so no tensor can have it


class BundleError(ValueError):
    """A bundle or checkpoint that must not be used: one line names file, tensor, value and what was expected."""


class Entry(NamedTuple):
    """What a header says of a stored tensor; ``dtype`` is safetensors' name for it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


def entry(shape: tuple[int, ...], dtype: str, file: Path) -> Entry:
    """A tensor of one of the dtypes that a bundle has."""
    return Entry(shape, dtype, math.prod(shape) * DTYPES[dtype].itemsize, file)


def fault(path: Path, message: str) -> BundleError:
    """An error of one printable line, whatever the bundle put into it."""
    text = "".join(character if character.isprintable() else "?" for character in f"{path}: {message}")
    return BundleError(text if len(text) <= 1000 else f"{text[:1000]}…")


def sibling(path: Path, what: str, name: str) -> Path:
    """The file that is called ``name`` in the folder of ``path``; it may be a link."""
    if not (0 < len(name) < 256 and name.isprintable()) or name == "." or ".." in name or set(name) & set("/\\:"):
        raise fault(path, f"{what} {name!r} is not a plain file name, expected one in the same folder")
    return path.with_name(name)


def beside(path: Path, what: str, name: str) -> Path:
    """The file ``name`` in the folder of ``path``, and nowhere else."""
    file = sibling(path, what, name)
    if os.path.dirname(os.path.realpath(file)) != os.path.realpath(path.parent):
        raise fault(path, f"{what} {name!r} leads outside the folder, expected a file in it")
    return file


def bytes_of(array: np.ndarray) -> memoryview:
    """An array's bytes in row order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def checksum(data: bytes | memoryview) -> str:
    """As a bundle stores it: ``sha256:`` and 64 digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def metadata_checksum(metadata: Mapping[str, str]) -> str:
    """Of what no tensor's sum covers: the config and the tokenizer's name."""
    return checksum(json.dumps([metadata.get("config"), metadata.get("tokenizer")]).encode())


def check_count(path: Path, config: Config, found: int) -> None:
    """That there are about as many tensors as the config asks for, before it lists them: it can ask for billions."""
    if config.fewest_tensors > found:
        expected = f"{config.fewest_tensors} weights and more"
        raise fault(path, f"holds {found} tensors, expected {expected}; a shard opens by its index")


def check_layout(path: Path, config: Config, entries: Mapping[str, Entry]) -> None:
    """Every weight of the config once, float or packed, in its shape; and nothing else."""
    check_count(path, config, len(entries))

    def expect(name: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
        entry = entries[name]
        if entry.dtype not in dtypes or entry.shape != shape:
            wanted = f"{' or '.join(dtypes)} {list(shape)}"
            raise fault(entry.file, f"tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected {wanted}")

    packable = quantized_names(config)
    unclaimed = set(entries)
    for name, shape in config.weight_shapes().items():
        qw, sc = f"{name}.qw", f"{name}.sc"
        may_be_packed = name in packable and shape[1] % GROUP_SIZE == 0
        forms = [form for form in (name, qw, sc) if form in entries]
        unclaimed.difference_update(forms)
        if forms == [name]:
            expect(name, FLOATS, shape)
        elif forms == [qw, sc] and may_be_packed:
            expect(qw, ("I32",), (shape[0], shape[1] // CODES_PER_WORD))
            expect(sc, FLOATS, (shape[0], shape[1] // GROUP_SIZE))
        else:
            wanted = f"{name!r} {list(shape)}" + (f" or {qw!r} with {sc!r}" if may_be_packed else ", never packed")
            if not forms:
                raise fault(path, f"tensor {name!r} is missing, expected {wanted}")
            raise fault(entries[forms[0]].file, f"tensor {' and '.join(map(repr, forms))}, expected only {wanted}")
    if unclaimed:
        name = min(unclaimed)
        raise fault(entries[name].file, f"tensor {name!r} is no weight of the config, expected none of that name")
