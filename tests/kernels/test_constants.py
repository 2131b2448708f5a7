"""Sizes that a source and its Python file both name are the same."""

import re

import pytest

from kdtree_nb.engine.options import MAX_NODE_BUDGET
from kdtree_nb.kernels import block_attention, gemm, moe_mma, moe_pairs, top_k, transition, tree_attention, tree_build
from kdtree_nb.kernels.source import read_source

PAIRS = [
    ("block_attention.cu", "MAX_SIZE", block_attention.MAX_SIZE),
    ("moe_mma.cu", "ROWS", moe_mma.ROWS),
    ("moe_pairs.cu", "MAX_EXPERTS", moe_pairs.MAX_EXPERTS),
    ("moe.cu", "ROWS", gemm.ROWS),
    ("moe.cu", "OUTPUTS", gemm.OUTPUTS),
    ("moe_route.cu", "MAX_EXPERTS", moe_pairs.MAX_EXPERTS),
    ("top_k.cu", "MAX_K", top_k.MAX_K),
    ("top_k.cu", "SEGMENT", top_k.SEGMENT),
    ("transition.cu", "MAX_K", transition.MAX_K),
    ("transition.cu", "MAX_RANK", transition.MAX_RANK),
    ("tree_build.cu", "MAX_NODES", tree_build.MAX_BUDGET + 1),
    ("tree_build.cu", "MAX_NODES", MAX_NODE_BUDGET + 1),
    ("tree_attention.cu", "SPLIT", tree_attention.SPLIT),
    ("tree_attention.cu", "HEADS", tree_attention.HEADS),
]


@pytest.mark.parametrize(("source", "name", "value"), PAIRS)
def test_the_source_says_the_same(source: str, name: str, value: int) -> None:
    (found,) = re.findall(rf"constexpr int {name} = (\d+)", read_source(source).text)
    assert int(found) == value
