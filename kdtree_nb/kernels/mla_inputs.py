"""From a token's projections to absorbed attention: its queries in two parts, its latent and its key in the cache."""

from typing import NamedTuple

import numpy as np

from kdtree_nb.kernels.gemm import check_rows, elements, float_type
from kdtree_nb.kernels.launch import Array, Kernel, empty_beside, pointer, runs_cuda
from kdtree_nb.kernels.rms_norm import cut_of
from kdtree_nb.reference.norm import LATENT_EPS, rms_norm
from kdtree_nb.reference.rope import rotate

_mla_inputs = Kernel("mla_inputs.cu")

Table = tuple[Array, Array]
"""Cosines and sines, float32 [positions, rope / 2]: :func:`kdtree_nb.reference.rope.rope_table`."""


class Queries(NamedTuple):
    """``plain`` [tokens, heads, nope], and ``absorbed`` [tokens, heads, kv_lora + rope], whose end alone is written."""

    plain: Array
    absorbed: Array


def mla_inputs(
    queries: Array, compressed: Array, weight: Array, table: Table, prefix_len: Array, depths: Array, cache: Array
) -> Queries:
    """Write each token's normalised latent and rotated key to cache row prefix_len + i; split and rotate its queries.

    Keys, and the pairs at each head's end, are rotated by the token's position, prefix_len + depth; what a head has
    before them is passed on.

    Parameters
    ----------
    queries : float32 [tokens, heads, nope + rope]
        Pairs interleaved; tokens and heads may lie apart.
    compressed : float32 [tokens, kv_lora + rope]
        What ``kv_a_proj_with_mqa`` gives; rows may lie apart.
    weight : float32 [kv_lora]
        Of ``kv_a_layernorm``.
    table : Table
    prefix_len : int32 [1]
    depths : int32 [tokens]
        −1 in padding, which is rotated like the root. No position may lie beyond the table.
    cache : float32 or bfloat16 (on a GPU its bits as uint16) [capacity, kv_lora + rope]
        One layer's; all that is written is rounded to its dtype.

    Returns
    -------
    Queries
        Of the cache's dtype. Rotated even elements come before odd ones. The first kv_lora of ``absorbed`` are to be
        written still.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    tokens, kv_lora, pairs = len(compressed), len(weight), table[0].shape[1]
    rope = 2 * pairs
    check_rows("mla_inputs", compressed, kv_lora + rope, name="compressed")
    if queries.ndim != 3 or len(queries) != tokens or queries.shape[2] < rope:
        raise ValueError(f"mla_inputs: queries {list(queries.shape)}, expected [{tokens}, heads, {rope} or more]")
    if queries.strides[2] != queries.itemsize:
        raise ValueError(f"mla_inputs: the heads of queries are not contiguous (strides {queries.strides})")
    if cache.shape[1:] != compressed.shape[1:] or depths.shape != (tokens,):
        raise ValueError(
            f"mla_inputs: compressed {list(compressed.shape)}, cache {list(cache.shape)}, "
            f"depths {list(depths.shape)} do not fit"
        )
    heads, nope = queries.shape[1], queries.shape[2] - rope
    plain = empty_beside(queries, (tokens, heads, nope), cache.dtype)
    absorbed = empty_beside(queries, (tokens, heads, kv_lora + rope), cache.dtype)
    if not runs_cuda(compressed):
        start = int(prefix_len[0])
        positions = start + np.maximum(depths, 0)
        cosines, sines = table[0][positions], table[1][positions]
        rows = cache[start : start + tokens]
        rows[:, :kv_lora] = rms_norm(compressed[:, :kv_lora], weight, LATENT_EPS)
        rows[:, kv_lora:] = rotate(compressed[:, kv_lora:], cosines, sines)
        plain[...] = queries[..., :nope]
        absorbed[..., kv_lora:] = rotate(queries[..., nope:], cosines, sines)
    elif tokens:
        cut = cut_of(kv_lora)
        sizes = (*map(np.int32, (nope, kv_lora, pairs)), np.float32(LATENT_EPS))
        strides = elements(queries, 0), elements(queries, 1), elements(compressed, 0)
        arrays = pointer(queries), pointer(compressed), weight, *table, prefix_len, depths, plain, absorbed, cache
        kernel = _mla_inputs.specialize(OUT=float_type("mla_inputs", "cache", cache), **cut)
        kernel((tokens, 2 + heads), (cut["THREADS"],), (*arrays, *sizes, *strides))
    return Queries(plain, absorbed)
