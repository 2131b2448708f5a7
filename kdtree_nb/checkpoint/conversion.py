"""From a Hugging Face folder to a bundle, block of rows by block of rows."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.bundle.format import DRAFTER_SUFFIX, SUFFIX, Entry, entry, fault
from kdtree_nb.bundle.stream import Source
from kdtree_nb.bundle.write import write_bundle
from kdtree_nb.checkpoint.folder import open_folder
from kdtree_nb.checkpoint.layout import FP8_BLOCK, Checkpoint, Weight, read_checkpoint
from kdtree_nb.checkpoint.tokenizer import bring_tokenizer, copy_companions
from kdtree_nb.config import DrafterConfig
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, RULES, quantize, quantized_names, routed_experts

SELECT: dict[str, Callable[[str], bool] | None] = {"mlp": None, "routed": routed_experts, "none": lambda name: False}
"""Which float weights become INT4: all that can, the routed experts as in Kimi K2, or none."""
SHARD_BYTES = 4 * 2**30
BLOCK_BYTES = 2**20
"""Of a weight as it is stored. A thread quantising a block needs about ten times as much."""
THREADS = min(8, os.cpu_count() or 1)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rule: str = "minmax",
    select: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the bundle of a checkpoint, ``TARGET/model.kdtr`` or its shards, with its tokenizer beside it.

    That of a drafter is ``TARGET/model.drafter.kdtr``: put into its target's folder, it is found with it.

    INT4 weights are taken over byte for byte. Blocks of fp8 become bfloat16 first, as DeepSeek's own conversion has
    it; norms, attention, router, embeddings and head keep the float type that they have. Float weights are quantised
    in their own type, float16 in float32.
    Stopped at any time and called again, it goes on with the first shard that is not finished.

    Parameters
    ----------
    source : path
        A folder with config.json and safetensors.
    target : path
        A folder, made if missing.
    rule : {"minmax", "amax7", "mse"}
        As in :func:`~kdtree_nb.quantization.quantize`.
    select : {"mlp", "routed", "none"}, optional
        Which float weights are quantised: ``mlp`` all projections of MLPs and experts, ``routed`` the routed experts.
        By default ``mlp``, or ``none`` where the checkpoint comes with INT4 weights: it has made that choice.
    progress : callable, optional
        Called with the bytes written so far and the bytes of all.

    Returns
    -------
    Path
        As :meth:`Bundle.open` takes it.

    Raises
    ------
    BundleError
        Before anything is written, for what cannot be converted, and where the disk has too little room.
    """
    if rule not in RULES:
        raise ValueError(f"convert: rule={rule!r}, expected one of {', '.join(RULES)}")
    if select is not None and select not in SELECT:
        raise ValueError(f"convert: select={select!r}, expected one of {', '.join(SELECT)}")
    target = Path(target)
    if (target.exists() and not target.is_dir()) or target.resolve() == Path(source).resolve():
        raise fault(target, "is a file or the checkpoint itself, expected another folder or nothing")
    checkpoint = read_checkpoint(open_folder(source))
    tensors = convert_source(checkpoint, rule, select)
    total, done = sum(entry.nbytes for entry in tensors.entries().values()), 0
    target.mkdir(parents=True, exist_ok=True)
    unfinished = sum(file.stat().st_size for file in target.glob(f".*{SUFFIX}.*"))
    free = shutil.disk_usage(target).free + unfinished
    if total > free:
        raise fault(target, f"the disk has {free:,} bytes left, expected {total:,} and more for the bundle")

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    copy_companions(checkpoint.folder.path, target)
    return write_bundle(
        target / f"model{DRAFTER_SUFFIX if isinstance(checkpoint.config, DrafterConfig) else SUFFIX}",
        checkpoint.config,
        tensors,
        tokenizer=bring_tokenizer(checkpoint.folder.path, target),
        max_shard_bytes=max_shard_bytes,
        threads=THREADS,
        resume=json.dumps([checkpoint.folder.identity, rule, select]),
        progress=advance,
    )


def convert_source(checkpoint: Checkpoint, rule: str = "minmax", select: str | None = None) -> Source:
    """The weights of a checkpoint as a bundle stores them, each made when it is asked for."""
    if select is None:
        select = "none" if any(weight.kind == "int4" for weight in checkpoint.weights.values()) else "mlp"
    chosen = quantized_names(checkpoint.config, SELECT[select])
    layout: dict[str, dict[str, Entry]] = {}
    for name, weight in checkpoint.weights.items():
        file = weight.data.file
        dtype = {"fp8": "BF16"}.get(weight.kind, weight.data.dtype)
        if weight.kind != "int4" and name not in chosen:
            layout[name] = {name: entry(weight.shape, dtype, file)}
            continue
        out, columns = weight.shape
        if columns % GROUP_SIZE:
            expected = f"a multiple of group_size={GROUP_SIZE}; --select can leave it out"
            raise fault(file, f"tensor {weight.data.name!r}: in_features={columns}, expected {expected}")
        if weight.kind == "int4" and weight.scales is not None:
            dtype = weight.scales.dtype
        elif dtype == "F16":
            dtype = "F32"
        layout[name] = {
            f"{name}.qw": entry((out, columns // CODES_PER_WORD), "I32", file),
            f"{name}.sc": entry((out, columns // GROUP_SIZE), dtype, file),
        }

    def blocks(name: str) -> Iterator[dict[str, np.ndarray]]:
        weight = checkpoint.weights[name]
        for begin, end in _blocks(weight):
            if weight.kind == "int4":
                assert weight.scales is not None
                parts = weight.data.slice(begin, end), weight.scales.slice(begin, end)
                yield {f"{name}.qw": parts[0].read(), f"{name}.sc": parts[1].read()}
                continue
            values = _floats(weight, begin, end)
            if name in chosen:
                if values.dtype == np.float16:  # a scale could fall below its range
                    values = values.astype(np.float32)
                quantized = quantize(values, rule, name)
                yield {f"{name}.qw": quantized.qweight, f"{name}.sc": quantized.scales}
            else:
                yield {name: values}

    return Source(layout, blocks)


def _blocks(weight: Weight) -> Iterator[tuple[int, int]]:
    """Ranges of rows of bounded size, each a whole number of fp8 blocks."""
    rows = max(1, BLOCK_BYTES // weight.data.row_bytes // FP8_BLOCK) * FP8_BLOCK
    for begin in range(0, weight.shape[0], rows):
        yield begin, min(begin + rows, weight.shape[0])


def _floats(weight: Weight, begin: int, end: int) -> np.ndarray:
    values = weight.data.slice(begin, end).read()
    if weight.scales is None:
        return values
    scales = weight.scales.slice(begin // FP8_BLOCK, -(-end // FP8_BLOCK)).read()
    scales = scales.repeat(FP8_BLOCK, axis=0)[: end - begin].repeat(FP8_BLOCK, axis=1)[:, : weight.shape[1]]
    return (values.astype(np.float32) * scales).astype(bfloat16)
