"""From a bundle to a Hugging Face folder, its INT4 weights in compressed-tensors' ``pack-quantized`` format."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_nb.bundle import Bundle
from kdtree_nb.bundle.format import Entry, fault
from kdtree_nb.bundle.stream import Source, plan_shards, sync_folder, write_index, write_tensors
from kdtree_nb.checkpoint.conversion import SHARD_BYTES, THREADS
from kdtree_nb.checkpoint.folder import CONFIG, INDEX, WEIGHTS
from kdtree_nb.checkpoint.tokenizer import TOKENIZER, copy_companions
from kdtree_nb.config import DrafterConfig
from kdtree_nb.quantization import GROUP_SIZE

SUFFIXES = {".qw": ".weight_packed", ".sc": ".weight_scale"}


def export(
    bundle: str | os.PathLike[str],
    target: str | os.PathLike[str],
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the checkpoint folder of a bundle, as transformers, vLLM and SGLang load it.

    INT4 weights keep their bytes: ``.qw`` becomes ``weight_packed``, ``.sc`` ``weight_scale``. config.json comes last,
    so that a folder which was not finished is none.

    Parameters
    ----------
    bundle : path
        As :meth:`Bundle.open` takes it.
    target : path
        A folder that does not exist yet, or is empty.
    progress : callable, optional
        Called with the bytes written so far and the bytes of all.

    Returns
    -------
    Path
        The folder.
    """
    opened, target = Bundle.open(bundle), Path(target)
    if isinstance(opened.config, DrafterConfig):
        raise fault(opened.path, "is a drafter, expected a model")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise fault(target, "is in use, expected an empty folder or none")
    source = _source(opened)
    total, done = sum(entry.nbytes for entry in source.entries().values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if total > free:
        raise fault(target, f"the disk has {free:,} bytes left, expected {total:,} and more")
    groups = plan_shards(source, max_shard_bytes)
    files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    shards = dict(zip([WEIGHTS] if len(groups) == 1 else files, groups, strict=True))
    for file, weights in shards.items():
        write_tensors(target / file, source, weights, lambda checksums: {"format": "pt"}, THREADS, advance)
    if len(shards) > 1:
        write_index(target / INDEX, shards, source)
    if opened.tokenizer is not None:
        shutil.copyfile(opened.path.parent / opened.tokenizer, target / TOKENIZER)
    copy_companions(opened.path.parent, target)
    with open(target / CONFIG, "x", encoding="utf-8") as out:
        json.dump(exported_config(opened), out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    sync_folder(target)
    return target


def exported_config(bundle: Bundle) -> dict[str, Any]:
    """The config.json that describes a bundle, its INT4 weights included."""
    settings = bundle.config.to_hf()
    floats = {entry.dtype for name, entry in bundle.entries.items() if not name.endswith((".qw", ".sc"))}
    settings["torch_dtype"] = "bfloat16" if "BF16" in floats else "float16" if floats == {"F16"} else "float32"
    if not any(name.endswith(".qw") for name in bundle):
        return settings
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP_SIZE, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _ignored(bundle),
        "kv_cache_scheme": None,
    }
    return settings


def _ignored(bundle: Bundle) -> list[str]:
    """Projections that are not packed: one expression where that holds in all layers and experts, else each name."""
    kinds: dict[str, list[str]] = {}
    packed: set[str] = set()
    shapes = bundle.config.weight_shapes()
    for name, shape in shapes.items():
        if len(shape) == 2 and name != "model.embed_tokens":
            kind = re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name))
            if name in bundle:
                kinds.setdefault(kind, []).append(name)
            else:
                packed.add(kind)
    rules = [] if "lm_head" in shapes else ["lm_head"]  # a tied head is a module too
    for kind, names in kinds.items():
        rules += names if kind in packed or len(names) == 1 else [f"re:{kind}$"]
    return rules


def _source(bundle: Bundle) -> Source:
    """A bundle's tensors under their names in a checkpoint."""
    layout: dict[str, dict[str, Entry]] = {}
    shapes = bundle.config.weight_shapes()
    for name in shapes:
        if name in bundle:
            stored = name if name.endswith("_bias") else f"{name}.weight"
            layout[name] = {stored: bundle.entries[name]}
        else:
            layout[name] = {f"{name}{new}": bundle.entries[f"{name}{old}"] for old, new in SUFFIXES.items()}
            layout[name][f"{name}.weight_shape"] = Entry((2,), "I32", 8, bundle.path)

    def blocks(name: str) -> Iterator[Mapping[str, np.ndarray]]:
        if name in bundle:
            yield {next(iter(layout[name])): bundle[name]}
            return
        for old, new in SUFFIXES.items():
            yield {f"{name}{new}": bundle[f"{name}{old}"]}
        yield {f"{name}.weight_shape": np.array(shapes[name], np.int32)}

    return Source(layout, blocks)
