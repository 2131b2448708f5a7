"""What each kernel uses on four GPUs, as compilers say."""

from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

from kdtree_nb.kernels.nvrtc import Resources, compile_cubin
from kdtree_nb.kernels.source import read_source

ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
DEFINES: dict[str, dict[str, str]] = {
    "dense_gemm.cu": {"WEIGHT": "__nv_bfloat16"},
    "dense_mma.cu": {"IN_FEATURES": "2048", "OUT": "float"} | {"PARTS": "8", "TILES": "1", "ROWS": "16", "STAGES": "3"},
    "w4a16_gemm.cu": {"SCALE": "__nv_bfloat16"},
    "tree_attention_mma.cu": {"KV_LORA": "512", "ROPE": "64", "ROWS": "64", "STAGES": "2"},
    "tree_attention_wgmma.cu": {"KV_LORA": "512", "ROPE": "64"},
    "tree_attention_combine.cu": {"KV_LORA": "512"},
    **{name: {"OUT": "__nv_bfloat16"} for name in ("split_queries.cu", "swiglu.cu")},
    "rms_norm.cu": {"OUT": "__nv_bfloat16", "THREADS": "1024", "VALUES": "7"},
    "latent_write.cu": {"CACHE": "__nv_bfloat16", "THREADS": "256", "VALUES": "2"},
    "block_attention.cu": {"CACHE": "__nv_bfloat16", "OUT": "__nv_bfloat16"},
    "block_write.cu": {"CACHE": "__nv_bfloat16"},
    "cache_commit.cu": {"VALUE": "__nv_bfloat16"},
    "embed.cu": {"VALUE": "__nv_bfloat16"},
    "w4a16_mma.cu": {"IN_FEATURES": "7168", "PARTS": "8", "TILES": "2", "ROWS": "16", "STAGES": "4"},
    "moe.cu": {"WEIGHT": "Int4Weight<__nv_bfloat16>", "VALUE": "uint4", "SCALE": "__nv_bfloat16"},
    "moe_mma.cu": {"IN_FEATURES": "7168", "PARTS": "4", "TILES": "4", "STAGES": "4"},
}
"""What a source needs to know of weights, results and cache: as Kimi K2 checkpoints store them, and bfloat16."""

HOPPER = {"tree_attention_wgmma.cu"}
"""Sources whose instructions are those of sm_90a only."""


class KernelResources(NamedTuple):
    """A kernel compiled for one architecture: what it uses, and the bytes of its source's machine code."""

    kernel: str
    arch: str
    used: Resources
    code_bytes: int


def resources(archs: tuple[str, ...] = ARCHS) -> Iterator[KernelResources]:
    """Compile every kernel for each architecture; no GPU is needed.

    Raises
    ------
    NvrtcError
        If NVRTC is not installed, or refuses a source.
    """
    sources = sorted(path.name for path in files("kdtree_nb.kernels").iterdir() if path.name.endswith(".cu"))
    for name in sources:
        for arch in archs:
            if name in HOPPER and arch != "sm_90a":
                continue
            cubin = compile_cubin(read_source(name), arch, DEFINES.get(name))
            for kernel, used in cubin.resources.items():
                yield KernelResources(kernel, arch, used, len(cubin.code))
