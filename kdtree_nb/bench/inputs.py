"""Random inputs for measurements: made on the GPU where they are large, and the same in every run."""

from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.kernels.launch import Array
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE

MAX_DEPTH = 8


class Tree(NamedTuple):
    """``parents`` and ``depths`` int32 [N], as in :class:`~kdtree_nb.reference.tree.DraftTree`."""

    parents: np.ndarray
    depths: np.ndarray


def random_tree(nodes: int, random: np.random.Generator, max_depth: int = MAX_DEPTH) -> Tree:
    """A tree in which each node hangs below any earlier one that is not at the last depth."""
    parents, depths = np.full(nodes, -1, np.int32), np.zeros(nodes, np.int32)
    for node in range(1, nodes):
        parents[node] = random.choice(np.flatnonzero(depths[:node] < max_depth))
        depths[node] = depths[parents[node]] + 1
    return Tree(parents, depths)


def random_routing(rows: int, experts: int, top_k: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What a router without preferences gives: ids int32 [rows, top_k], no expert twice, and weights float32."""
    every = np.broadcast_to(np.arange(experts, dtype=np.int32), (rows, experts))
    expert_ids = np.ascontiguousarray(random.permuted(every, axis=1)[:, :top_k])
    weights = random.uniform(0.5, 1.5, expert_ids.shape).astype(np.float32)
    return expert_ids, weights / weights.sum(axis=1, keepdims=True)


def bfloat16_bits(x: Array) -> Array:
    """A float32 array of CuPy cut to bfloat16, as the uint16 in which CuPy holds its bits."""
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def random_int4(shape: tuple[int, ...], seed: int) -> tuple[Array, Array]:
    """A weight [..., out, in] on the GPU: codes int32 [..., out, in / 8] and bfloat16 scales [..., out, in / 32].

    The codes are the words' indices, mixed as MurmurHash3 ends.
    """
    import cupy

    *outer, in_features = shape
    count = int(np.prod(outer)) * (in_features // CODES_PER_WORD)
    words = cupy.arange(count, dtype=np.uint32)
    words += np.uint32(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words ^= words >> np.uint32(shift)
        words *= np.uint32(factor)
    groups = (*outer, in_features // GROUP_SIZE)
    scales = cupy.random.default_rng(seed).random(groups, dtype=np.float32)
    scales += np.float32(0.5)
    scales /= np.float32(4.6 * np.sqrt(in_features))
    return words.view(np.int32).reshape(*outer, -1), bfloat16_bits(scales)


def random_bfloat16(shape: tuple[int, ...], seed: int) -> Array:
    """Standard normal values on the GPU, as the bits of bfloat16."""
    import cupy

    return bfloat16_bits(cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def as_torch(array: Array) -> Any:
    """A CuPy array's memory as a tensor of torch; uint16 is taken for the bits of bfloat16."""
    import torch
    from torch.utils.dlpack import from_dlpack

    if array.dtype == np.uint16:
        return from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return from_dlpack(array)
