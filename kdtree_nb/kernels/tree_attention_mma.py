"""Attention of a draft tree's nodes over the latent cache on tensor cores: bfloat16 in and out, softmax in fp32."""

import functools
from math import e, log2
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels.gemm import check_bfloat16
from kdtree_nb.kernels.gpu import Processor
from kdtree_nb.kernels.launch import Array, Kernel, array_module, processor_of, runs_cuda
from kdtree_nb.kernels.nvrtc import find_nvrtc
from kdtree_nb.kernels.tree_attention import check_shapes, scratch
from kdtree_nb.reference import attention as reference

TILE, THREADS, MAX_PATH, SPLIT_TILES = 64, 256, 1024, 16
"""Keys in a tile, threads in a block, most ancestors of a node, tiles in a split, as in ``tree_attention.cuh``."""
CHUNK = 16
"""Of what a latent's two parts are multiples: what one product of tensor cores takes."""
HOPPER = "90"
"""The compute capability that has warpgroup products; CuPy does not compile them, NVRTC does."""
SCRATCH_BYTES = 2**30
"""Of the partial sums of one launch; rows that do not fit go into the next."""
_attend_split = Kernel("tree_attention_mma.cu", "attend_split")
_attend_split_wgmma = Kernel("tree_attention_wgmma.cu", "attend_split_wgmma", arch="sm_90a")
_combine_splits = Kernel("tree_attention_combine.cu", "combine_splits")


class Geometry(NamedTuple):
    """How a launch cuts its work: a row's splits give its sums their order; what a block holds changes no bit."""

    rows: int
    min_splits: int = 8
    max_splits: int = 32
    stages: int = 2
    warpgroups: bool = False

    def most_splits(self, tiles: int) -> int:
        """Of rows with up to so many tiles, as ``split_length`` in ``tree_attention.cuh`` cuts them."""
        return min(tiles, self.max_splits, max(self.min_splits, tiles // SPLIT_TILES))

    def shared_bytes(self, latent: int) -> int:
        """Queries and tiles, weights, the warps' largest scores, the path."""
        pitch = -(-latent // 64) * 128
        key_warps = 2 if self.warpgroups else 4 if self.rows == 64 else 8
        return (self.rows + self.stages * TILE) * pitch + self.rows * (2 * TILE + 4 * key_warps) + 2 * MAX_PATH

    def attend(self, kv_lora: int, rope: int) -> Kernel:
        """What takes a split."""
        if self.warpgroups:
            return _attend_split_wgmma.specialize(KV_LORA=kv_lora, ROPE=rope)
        return _attend_split.specialize(KV_LORA=kv_lora, ROPE=rope, ROWS=self.rows, STAGES=self.stages)


@functools.cache
def geometry_of(nodes: int, heads: int, latent: int, processor: Processor) -> Geometry:
    """What fits there. Few nodes make few blocks, so each takes fewer heads where it can; a warpgroup takes 64.

    On Hopper the heads alone decide, as warpgroups add in another order.

    Raises
    ------
    ValueError
        If nothing does.
    """
    hopper = Geometry(64, warpgroups=True)
    if (
        heads > 16
        and processor.capability == HOPPER
        and hopper.shared_bytes(latent) <= processor.shared_bytes
        and find_nvrtc()
    ):
        return hopper
    most = 16 if nodes < 8 else 64
    rows = next(rows for rows in (16, 32, 64) if rows >= min(heads, most))
    choices = [Geometry(r, stages=stages) for r in (64, 32, 16) if r <= rows for stages in (2, 1)]
    fitting = [geometry for geometry in choices if geometry.shared_bytes(latent) <= processor.shared_bytes]
    if not fitting:
        least = choices[-1].shared_bytes(latent)
        raise ValueError(
            f"tree_attention_mma: a latent of {latent} elements takes {least} bytes of shared memory, "
            f"expected at most {processor.shared_bytes}, which a block has here"
        )
    return fitting[0]


def tree_attention_mma(
    queries: Array,
    cache: Array,
    prefix_len: Array,
    parents: Array,
    depths: Array,
    kv_lora_rank: int,
    scale: float,
) -> Array:
    """Absorbed MLA attention to prefix, ancestors and self, a row's bits the same in a prompt, a chain or a tree.

    Scores, weights and sums are fp32; a weight is rounded to bfloat16 before it multiplies its value, and so is the
    result. On NumPy arrays this is :func:`kdtree_nb.reference.attention.tree_attention` of the same numbers, rounded.

    Parameters
    ----------
    queries : bfloat16 (on a GPU its bits as uint16) [N, heads, kv_lora + rope]
        N up to 1,025; kv_lora and rope multiples of 16.
    cache : bfloat16 [capacity, kv_lora + rope]
        One layer's; node i in row prefix_len + i.
    prefix_len : int32 [1]
    parents, depths : int32 [N]
        −1 in padding, whose rows come back as zeros.

    Returns
    -------
    bfloat16 (on a GPU its bits as uint16) [N, heads, kv_lora]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    check_shapes("tree_attention_mma", queries, cache, parents, depths)
    check_bfloat16("tree_attention_mma", queries=queries, cache=cache)
    if not runs_cuda(queries):
        q, c = (array.view(bfloat16).astype(np.float32) for array in (queries, cache))
        exact = reference.tree_attention(q, c, int(prefix_len[0]), parents, kv_lora_rank, scale)
        return exact.astype(bfloat16).view(queries.dtype)
    geometry = geometry_of(*queries.shape, processor_of(queries))
    return launch(queries, cache, prefix_len, parents, depths, kv_lora_rank, scale, geometry)


def launch(
    queries: Array,
    cache: Array,
    prefix_len: Array,
    parents: Array,
    depths: Array,
    kv_lora_rank: int,
    scale: float,
    geometry: Geometry,
) -> Array:
    """What :func:`tree_attention_mma` does, in a given geometry."""
    nodes, heads, latent = queries.shape
    if not 0 < kv_lora_rank <= latent or kv_lora_rank % CHUNK or latent % CHUNK:
        raise ValueError(f"tree_attention_mma: kv_lora_rank={kv_lora_rank} of {latent}, expected multiples of {CHUNK}")
    if nodes > MAX_PATH + 1:
        raise ValueError(f"tree_attention_mma: {nodes} nodes, expected 0 to {MAX_PATH + 1}")
    xp = array_module(queries)
    output = xp.empty((nodes, heads, kv_lora_rank), queries.dtype)
    if not output.size:
        return output
    splits = geometry.most_splits(-(-len(cache) // TILE))
    partial, stats = scratch(nodes, splits, heads, kv_lora_rank, SCRATCH_BYTES, xp)
    rows = len(partial)
    attend = geometry.attend(kv_lora_rank, latent - kv_lora_rank)
    combine = _combine_splits.specialize(KV_LORA=kv_lora_rank)
    cut = np.int32(geometry.min_splits), np.int32(geometry.max_splits)
    for first in range(0, nodes, rows):
        count, first_row = min(rows, nodes - first), np.int32(first)
        sizes = (first_row, np.int32(nodes), np.int32(heads), *cut, np.float32(scale * log2(e)))
        attend(
            (count, -(-heads // geometry.rows), splits),
            (THREADS,),
            (queries.view(np.int32), cache.view(np.int32), prefix_len, parents, depths, partial, stats, *sizes),
            geometry.shared_bytes(latent),
        )
        combine(
            (count, heads),
            (kv_lora_rank // 4,),
            (partial, stats, prefix_len, depths, output.view(np.int32), first_row, np.int32(splits), *cut),
            8 * splits,
        )
    return output
