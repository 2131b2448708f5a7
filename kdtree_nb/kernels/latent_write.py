"""Writing a token's latent and rotated key into the cache."""

import numpy as np

from kdtree_nb.kernels.gemm import check_rows, elements, float_type
from kdtree_nb.kernels.launch import Array, Kernel, pointer, runs_cuda
from kdtree_nb.kernels.rms_norm import cut_of
from kdtree_nb.reference.norm import LATENT_EPS, rms_norm
from kdtree_nb.reference.rope import rotate

_latent_write = Kernel("latent_write.cu")

Table = tuple[Array, Array]
"""Cosines and sines, float32 [positions, rope / 2]: :func:`kdtree_nb.reference.rope.rope_table`."""


def latent_write(
    compressed: Array, weight: Array, table: Table, prefix_len: Array, depths: Array, cache: Array
) -> None:
    """Normalise each token's latent, rotate its key, and write both to cache row prefix_len + i.

    Parameters
    ----------
    compressed : float32 [tokens, kv_lora + rope]
        What ``kv_a_proj_with_mqa`` gives; rows may lie apart.
    weight : float32 [kv_lora]
        Of ``kv_a_layernorm``.
    table : Table
    prefix_len : int32 [1]
    depths : int32 [tokens]
        The key's position is prefix_len + depth, the row's prefix_len + index.
    cache : float32 or bfloat16 (on a GPU its bits as uint16) [capacity, kv_lora + rope]
        One layer's; what is written is rounded to its dtype.
    """
    tokens, kv_lora, pairs = len(compressed), len(weight), table[0].shape[1]
    check_rows("latent_write", compressed, kv_lora + 2 * pairs)
    if cache.shape[1:] != compressed.shape[1:] or depths.shape != (tokens,):
        raise ValueError(
            f"latent_write: compressed {list(compressed.shape)}, cache {list(cache.shape)}, "
            f"depths {list(depths.shape)} do not fit"
        )
    if not runs_cuda(compressed):
        start = int(prefix_len[0])
        positions = start + np.maximum(depths, 0)
        rows = cache[start : start + tokens]
        rows[:, :kv_lora] = rms_norm(compressed[:, :kv_lora], weight, LATENT_EPS)
        rows[:, kv_lora:] = rotate(compressed[:, kv_lora:], table[0][positions], table[1][positions])
        return
    if tokens:
        cut = cut_of(kv_lora)
        sizes = (np.int32(kv_lora), np.int32(pairs), np.float32(LATENT_EPS), elements(compressed, 0))
        arrays = (pointer(compressed), weight, *table, prefix_len, depths, cache)
        kernel = _latent_write.specialize(CACHE=float_type("latent_write", "cache", cache), **cut)
        kernel((tokens, 2), (cut["THREADS"],), (*arrays, *sizes))
