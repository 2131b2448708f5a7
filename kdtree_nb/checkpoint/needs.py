"""What it takes to run a model: bytes of weights and cache, on a GPU and on a CPU, before anything is loaded."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kdtree_nb.bundle.format import Entry
from kdtree_nb.config import ModelConfig

GPU_SIZES = (24, 48, 80, 141, 192)
"""Gigabytes, 10⁹ bytes: an RTX 4090, L40S, H100, H200 and B200."""
CONTEXT = 8192
WORKSPACE = 2 * 10**9
"""CUDA's own memory, activations and logits of one forward pass."""
_KV_B = re.compile(r"\.kv_b_proj$")


class Needs(NamedTuple):
    """Bytes.

    Attributes
    ----------
    gpu : weights as stored, but for ``kv_b_proj``, whose halves the absorbed attention holds in float32
    cpu : every weight in float32, as the NumPy path holds those that it has used
    cache : latent cache of 8,192 tokens, float32
    """

    gpu: int
    cpu: int
    cache: int

    def gpus(self, gigabytes: int) -> int:
        """How many GPUs of a size hold weights and cache; each also needs a workspace."""
        return math.ceil((self.gpu + self.cache) / (gigabytes * 10**9 - WORKSPACE))


def needs(config: ModelConfig, stored: Mapping[str, Entry]) -> Needs:
    """The memory that a bundle's tensors need."""
    elements = {name: math.prod(shape) for name, shape in config.weight_shapes().items()}
    absorbed = sum(4 * count for name, count in elements.items() if _KV_B.search(name))
    kept = sum(entry.nbytes for name, entry in stored.items() if not _KV_B.search(name))
    cache = 4 * config.num_hidden_layers * CONTEXT * config.latent_dim
    return Needs(kept + absorbed, 4 * sum(elements.values()), cache)


def describe_needs(config: ModelConfig, stored: Mapping[str, Entry]) -> Iterable[str]:
    """Lines for a reader: memory needed, how many GPUs hold it, and whether this machine does."""
    needed = needs(config, stored)
    yield (
        f"GPU memory: {_gb(needed.gpu)} of weights + {_gb(needed.cache)} of latent cache for {CONTEXT:,} tokens, "
        "computing in float32"
    )
    yield "GPUs that hold it: " + ", ".join(f"{needed.gpus(size)} × {size} GB" for size in GPU_SIZES)
    yield f"CPU memory: up to {_gb(needed.cpu + needed.cache)}, everything in float32"
    for what, available, wanted in (
        ("GPU", gpu_memory(), needed.gpu + needed.cache + WORKSPACE),
        ("memory", main_memory(), needed.cpu + needed.cache),
    ):
        if available is not None:
            verdict = "runs it" if available >= wanted else f"is too small, {_gb(wanted)} are needed"
            yield f"this machine: {what} of {_gb(available)} {verdict}"


def gpu_memory() -> int | None:
    """Bytes of the GPU that CuPy would use, None without one."""
    from kdtree_nb.engine.device import cuda_available

    if not cuda_available():
        return None
    import cupy

    return int(cupy.cuda.Device().mem_info[1])


def main_memory() -> int | None:
    """Bytes of main memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 10**8 else f"{count / 1e6:,.2f} MB"
