"""From a drafter's projections to its queries and its cache."""

import numpy as np

from kdtree_nb.kernels.gemm import threads_for
from kdtree_nb.kernels.latent_write import Table
from kdtree_nb.kernels.launch import Array, Kernel, empty_beside, runs_cuda
from kdtree_nb.reference.norm import rms_norm
from kdtree_nb.reference.rope import rotate

_block_write = Kernel("block_write.cu")


def block_write(
    projected: Array,
    norms: tuple[Array, Array],
    eps: float,
    table: Table,
    prefix_len: Array,
    keys: Array,
    values: Array,
) -> Array:
    """Normalise and rotate each token's queries and keys; write keys and values to cache row prefix_len + i.

    Element i of a head is paired with element i + size / 2, as Qwen3 has it. Token i's position is its row.

    Parameters
    ----------
    projected : float32 [tokens, (heads + 2 · kv_heads) · size]
        Queries, then keys, then values; there may be no queries.
    norms : float32 [size] each
        Of queries and of keys.
    table : Table
        [positions, size / 2].
    prefix_len : int32 [1]
        No row may lie beyond cache or table.
    keys, values : float32 [capacity, kv_heads, size]
        The cache of one layer.

    Returns
    -------
    float32 [tokens, heads, size]
        The queries.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if projected.ndim != 2 or keys.ndim != 3 or keys.shape != values.shape:
        raise ValueError(
            f"block_write: projected {list(projected.shape)}, keys {list(keys.shape)} and values {list(values.shape)}, "
            "expected [tokens, columns] and twice [capacity, kv_heads, size]"
        )
    tokens, (_, kv_heads, size) = len(projected), keys.shape
    heads, rest = divmod(projected.shape[1] - 2 * kv_heads * size, size)
    if rest or heads < 0:
        raise ValueError(
            f"block_write: projected {list(projected.shape)}, expected heads of {size}, {2 * kv_heads} or more"
        )
    if not norms[0].shape == norms[1].shape == (size,) or size != 2 * table[0].shape[1]:
        raise ValueError(
            f"block_write: norms {list(norms[0].shape)} and {list(norms[1].shape)}, table {list(table[0].shape)}, "
            f"expected [{size}] and [positions, {size / 2:g}]"
        )
    if not runs_cuda(projected):
        start = int(prefix_len[0])
        rows = slice(start, start + tokens)

        def turned(by_head: np.ndarray, norm: np.ndarray) -> np.ndarray:
            halves = rms_norm(by_head, norm, eps).reshape(*by_head.shape[:2], 2, size // 2)
            return rotate(halves.swapaxes(2, 3).reshape(by_head.shape), table[0][rows], table[1][rows])

        by_head = projected.reshape(tokens, -1, size)
        keys[rows] = turned(by_head[:, heads : heads + kv_heads], norms[1])
        values[rows] = by_head[:, heads + kv_heads :]
        return turned(by_head[:, :heads], norms[0])
    queries = empty_beside(projected, (tokens, heads, size), np.float32)
    if projected.size:
        sizes = np.int32(heads), np.int32(kv_heads), np.int32(size), np.float32(eps)
        arrays = projected, *norms, *table, prefix_len, queries, keys, values
        _block_write((tokens, heads + 2 * kv_heads), (threads_for(size),), (*arrays, *sizes))
    return queries
