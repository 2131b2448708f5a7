"""A checkpoint as large as Moonlight-16B-A3B, of random numbers: made, converted, loaded and run on one GPU.

    python -m golden.moonlight make FOLDER
    python -m golden.moonlight measure FOLDER measurements/moonlight-h200.json

``make`` writes a Hugging Face folder of 11 GB: routed experts in INT4 as Kimi K2 ships them, all else in bfloat16.
Weights are scaled so that activations stay near 1. With ``--shrink`` and ``--layers`` it is as small as a test needs.
The same seed gives the same tensors. ``measure`` needs a GPU, and room for the bundle beside the folder.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from ml_dtypes import bfloat16
from rich.console import Console
from rich.progress import Progress

from kdtree_nb.bundle import Bundle
from kdtree_nb.bundle.format import Entry, entry
from kdtree_nb.bundle.stream import Source, plan_shards, write_index, write_tensors
from kdtree_nb.checkpoint.conversion import THREADS
from kdtree_nb.config import ModelConfig
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, routed_experts

SHARD_BYTES = 2 * 10**9
BLOCK_ELEMENTS = 2**22
MOONLIGHT = ModelConfig(
    vocab_size=163840,
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=11264,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    num_experts_per_tok=6,
    n_shared_experts=2,
    first_k_dense_replace=1,
    max_position_embeddings=8192,
    routed_scaling_factor=2.446,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
)
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
PROMPT, NEW_TOKENS = 64, 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
err = Console(stderr=True)


def shrunk(layers: int, divisor: int) -> ModelConfig:
    """Moonlight's shape with fewer layers, and with widths and vocabulary divided, each still whole groups."""

    def divided(size: int) -> int:
        return max(1, size // divisor // GROUP_SIZE) * GROUP_SIZE

    names = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
    sizes = {name: divided(getattr(MOONLIGHT, name)) for name in names}
    return ModelConfig(**{**vars(MOONLIGHT), **sizes, "num_hidden_layers": layers})


def write_checkpoint(
    target: Path, config: ModelConfig, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a folder as the Hub has it, several tensors at a time; config.json comes last."""
    source = random_source(config, seed)
    total, done = sum(entry.nbytes for entry in source.entries().values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    target.mkdir(parents=True)
    groups = plan_shards(source, SHARD_BYTES)
    shards = {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
    for file, weights in shards.items():
        write_tensors(target / file, source, weights, lambda checksums: {"format": "pt"}, THREADS, advance)
    write_index(target / "model.safetensors.index.json", shards, source)
    settings = {**config.to_hf(), "torch_dtype": "bfloat16", "quantization_config": QUANTIZATION}
    (target / "config.json").write_text(json.dumps(settings, indent=2))


def random_source(config: ModelConfig, seed: int) -> Source:
    """The tensors of the checkpoint, each made when it is written: its numbers depend on seed and place alone."""
    shapes = config.weight_shapes()
    number = {name: i for i, name in enumerate(shapes)}
    layout: dict[str, dict[str, Entry]] = {}
    nowhere = Path()
    for name, shape in shapes.items():
        if routed_experts(name):
            out, columns = shape
            layout[name] = {
                f"{name}.weight_packed": entry((out, columns // CODES_PER_WORD), "I32", nowhere),
                f"{name}.weight_scale": entry((out, columns // GROUP_SIZE), "BF16", nowhere),
                f"{name}.weight_shape": entry((2,), "I32", nowhere),
            }
        elif name.endswith("_bias"):
            layout[name] = {name: entry(shape, "F32", nowhere)}
        else:
            layout[name] = {f"{name}.weight": entry(shape, "BF16", nowhere)}

    def blocks(name: str) -> Iterator[dict[str, np.ndarray]]:
        random, shape = np.random.default_rng([seed, number[name]]), shapes[name]
        deviation = np.float32(1 if name == "model.embed_tokens" else shape[-1] ** -0.5)
        if routed_experts(name):
            out, columns = shape
            words = random.integers(-(2**31), 2**31, (out, columns // CODES_PER_WORD), np.int32)
            steps = random.random((out, columns // GROUP_SIZE), np.float32) + np.float32(0.5)
            yield {
                f"{name}.weight_packed": words,
                f"{name}.weight_scale": bf16(
                    steps * deviation / np.float32(4.8)
                ),  # what 16 codes and the steps deviate
                f"{name}.weight_shape": np.array(shape, np.int32),
            }
        elif name.endswith("_bias"):
            yield {name: np.float32(0.01) * random.standard_normal(shape, np.float32)}
        elif len(shape) == 1:
            yield {f"{name}.weight": bf16(1 + np.float32(0.1) * random.standard_normal(shape, np.float32))}
        else:
            rows = max(1, BLOCK_ELEMENTS // shape[1])
            for begin in range(0, shape[0], rows):
                size = (min(rows, shape[0] - begin), shape[1])
                yield {f"{name}.weight": bf16(deviation * random.standard_normal(size, np.float32))}

    return Source(layout, blocks)


def bf16(values: np.ndarray) -> np.ndarray:
    """Cut to bfloat16. Rounding would be ml_dtypes', which keeps the other threads waiting."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(bfloat16)


@app.command()
def make(
    target: Annotated[Path, typer.Argument(help="The new folder.")],
    layers: Annotated[int, typer.Option(help="Of them the first is dense.", min=2)] = MOONLIGHT.num_hidden_layers,
    shrink: Annotated[int, typer.Option(help="By what widths and vocabulary are divided.", min=1)] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write the checkpoint."""
    with Progress(console=err) as bar:
        task = bar.add_task("writing", total=None)
        write_checkpoint(
            target,
            shrunk(layers, shrink),
            seed,
            lambda done, total: bar.update(task, completed=done, total=total),
        )


@app.command()
def measure(
    folder: Annotated[Path, typer.Argument(help="What make has written.")],
    json_file: Annotated[Path, typer.Argument(help="Where the figures go.")],
) -> None:
    """Convert, load and generate, each with its time and memory; the bundle is removed afterwards."""
    from kdtree_nb.bench import load
    from kdtree_nb.checkpoint.needs import needs
    from kdtree_nb.engine import Engine
    from kdtree_nb.record import record

    bundle = folder.with_name(f"{folder.name}-bundle")
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kdtree_nb", "convert", folder, bundle], check=True)
    seconds = time.perf_counter() - started
    # Kibibytes of the child, the pages of files that it mapped included.
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    stored = sum(file.stat().st_size for file in folder.iterdir())
    results: list[dict[str, Any]] = [
        {"step": "convert", "seconds": seconds, "bytes": stored, "gb_per_s": stored / seconds / 1e9, "host_bytes": peak}
    ]
    print(f"converted {stored / 1e9:.2f} GB in {seconds:.1f} s with {peak / 1e6:.0f} MB", flush=True)

    loaded = load.measure(bundle)
    about = loaded._asdict()
    about["loadings"] = [loading._asdict() for loading in loaded.loadings]
    results.append({"step": "load", **about})
    print(f"loaded: {about}", flush=True)

    opened = Bundle.open(bundle)
    assert isinstance(opened.config, ModelConfig)
    engine = Engine.load(bundle, "cuda")
    started = time.perf_counter()
    engine.preload()
    engine.device.wait()
    ready = time.perf_counter() - started
    prompt = np.random.default_rng(1).integers(0, opened.config.vocab_size, PROMPT)
    # Once to compile the kernels and to look at the logits, once for the time.
    first = engine.generate(prompt, "ar", max_new_tokens=NEW_TOKENS, keep_logits=True)
    run = engine.generate(prompt, "ar", max_new_tokens=NEW_TOKENS)
    if first.logits is None or not np.isfinite(first.logits).all() or first.tokens != run.tokens:
        raise SystemExit("logits are not finite, or a second run gave another text")
    results.append(
        {
            "step": "generate",
            "load_seconds": ready,
            "tokens": len(run.tokens),
            "seconds": run.decode_seconds,
            "tokens_per_second": run.tokens_per_second,
            "prefill_seconds": run.prefill_seconds,
            "gpu_bytes": engine.device.bytes_held(),
            "predicted_bytes": needs(opened.config, opened.entries).gpu,
            "logits_deviation": float(first.logits.std()),
        }
    )
    print(f"generated: {results[-1]}", flush=True)
    record(json_file, "cuda", results, tensors=len(opened), config=opened.config.to_hf())
    shutil.rmtree(bundle)


if __name__ == "__main__":
    app()
