"""Every kernel compiles for every GPU that we name, with no GPU here, and keeps its numbers in registers."""

from importlib.resources import files

import pytest

from kdtree_nb.bench.resources import HOPPER
from kdtree_nb.kernels import dense_mma
from kdtree_nb.kernels.moe_mma import DOWN, FEW, GATE_UP
from kdtree_nb.kernels.nvrtc import compile_cubin, find_nvrtc
from kdtree_nb.kernels.source import read_source
from kdtree_nb.kernels.w4a16_mma import LONG, MIDDLE, SHORT, WIDE, Geometry

ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
FLOATS = ("float", "__half", "__nv_bfloat16")
PACKED = {"WEIGHT": "Int4Weight<__nv_bfloat16>", "VALUE": "uint4", "SCALE": "__nv_bfloat16"}
DENSE = {"WEIGHT": "DenseWeight<__half>", "VALUE": "__half", "SCALE": "float"}
NO_DEFINES: list[dict[str, str]] = [{}]
MMA = [
    {"IN_FEATURES": str(in_features)} | {name: str(value) for name, value in Geometry(plan.parts, *cut).defines.items()}
    for in_features, plan in ((7168, MIDDLE), (7168, LONG), (2048, WIDE), (1408, SHORT))
    for cut in plan.geometries.values()
]
DENSE_MMA = [
    {"IN_FEATURES": "2048", "OUT": out} | {k: str(n) for k, n in dense_mma.Geometry(plan.parts, *cut).defines.items()}
    for plan, out in (
        (dense_mma.MANY, "float"),
        (dense_mma.FEW, "float"),
        (dense_mma.SOME, "float"),
        (dense_mma.MIDDLE, "__nv_bfloat16"),
    )
    for cut in plan.geometries.values()
]
EXPERTS = [
    {"IN_FEATURES": str(in_features), "PARTS": str(plan.parts), "TILES": str(tiles), "STAGES": str(stages)}
    for in_features, plan in ((7168, GATE_UP), (2048, DOWN), (1408, DOWN))
    for tiles, _, stages in dict.fromkeys([*plan.geometries.values(), FEW])
]
VARIANTS = {path.name: NO_DEFINES for path in files("kdtree_nb.kernels").iterdir() if path.name.endswith(".cu")} | {
    "w4a16_gemm.cu": [{"SCALE": name} for name in reversed(FLOATS)],
    "dense_gemm.cu": [{"WEIGHT": name} for name in reversed(FLOATS)],
    "tree_attention_mma.cu": [
        {"KV_LORA": "512", "ROPE": "64", "ROWS": rows, "STAGES": stages}
        for rows, stages in (("64", "2"), ("32", "2"), ("16", "2"), ("64", "1"), ("16", "1"))
    ],
    "tree_attention_wgmma.cu": [{"KV_LORA": "512", "ROPE": "64"}],
    "tree_attention_combine.cu": [{"KV_LORA": "512"}],
    "w4a16_mma.cu": MMA,
    **{name: [{"OUT": "__nv_bfloat16"}, {"OUT": "float"}] for name in ("moe_route.cu", "swiglu.cu")},
    "rms_norm.cu": [
        {"OUT": out, "THREADS": threads, "VALUES": values}
        for out in ("__nv_bfloat16", "float")
        for threads, values in (("1024", "7"), ("512", "4"))
    ],
    "mla_inputs.cu": [{"OUT": name, "THREADS": "256", "VALUES": "2"} for name in ("__nv_bfloat16", "float")],
    "block_attention.cu": [{"CACHE": name, "OUT": name, "WARPS": "16"} for name in ("__nv_bfloat16", "float")],
    "block_write.cu": [{"CACHE": "__nv_bfloat16"}, {"CACHE": "float"}],
    "cache_commit.cu": [{"VALUE": "__nv_bfloat16"}, {"VALUE": "float"}],
    "embed.cu": [{"VALUE": "__nv_bfloat16"}, {"VALUE": "float"}],
    "dense_mma.cu": DENSE_MMA,
    "moe.cu": [PACKED, DENSE],
    "moe_mma.cu": EXPERTS,
}
"""By source, its defines: the first for every architecture, the others for one."""
CASES = [
    pytest.param(file, arch, defines, id=f"{file}-{arch}" if first else f"{file}-{arch}-{'-'.join(defines.values())}")
    for file, variants in sorted(VARIANTS.items())
    for defines in variants
    for first in [defines is variants[0]]
    for arch in (ARCHS if first and file not in HOPPER else ["sm_90a"])
]

SPILLS: dict[str, str] = {}
"""Kernels that may spill or keep an array in memory, each with the reason."""
WHOLE_BLOCK = ("top_k", "top_k_sums", "top_k_join", "moe_sort", "moe_route", "rms_norm", "add_norm")
MOST_THREADS = {**dict.fromkeys(WHOLE_BLOCK, 1024), "block_attention": 512}
"""Of a block, where it is not 256."""


@pytest.mark.skipif(find_nvrtc() is None, reason="no NVRTC here: pip install 'kdtree_nb[test]'")
@pytest.mark.parametrize(("file", "arch", "defines"), CASES)
def test_compiles_and_does_not_spill(file, arch, defines, record_property):
    source = read_source(file)
    resources = compile_cubin(source, arch, defines).resources
    assert set(resources) == set(source.kernels)
    for kernel, used in resources.items():
        record_property("resources", (kernel, arch, used.registers, used.spills, used.shared))
        assert kernel in SPILLS or used.spills == used.stack == 0, f"{kernel}: {used}"
        assert used.registers * MOST_THREADS.get(kernel, 256) <= 65_536, f"{kernel} cannot be launched: {used}"
        assert used.shared <= 48 * 1024, f"{kernel}: {used}"
