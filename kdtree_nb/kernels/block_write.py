"""From a drafter's projections to its queries and its cache."""

import numpy as np

from kdtree_nb.kernels.gemm import float_type, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, empty_beside, runs_cuda
from kdtree_nb.kernels.mla_inputs import Table
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

    Element i of a head is paired with element i + size / 2, as Qwen3 has it. Token i's position is its row. Several
    layers' projections, side by side, are written at once.

    Parameters
    ----------
    projected : float32 [tokens, layers · (heads + 2 · kv_heads) · size]
        Of each layer queries, then keys, then values; there may be no queries.
    norms : float32 [layers, size] each
        Of queries and of keys.
    table : Table
        [positions, size / 2].
    prefix_len : int32 [1]
        No row may lie beyond cache or table.
    keys, values : float32 or bfloat16 (on a GPU its bits as uint16) [layers, capacity, kv_heads, size]
        The layers' cache; what is written is rounded to its dtype.

    Returns
    -------
    float32 [tokens, layers, heads, size]
        The queries.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if projected.ndim != 2 or keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"block_write: projected {list(projected.shape)}, keys {list(keys.shape)} and values {list(values.shape)}, "
            "expected [tokens, columns] and twice [layers, capacity, kv_heads, size]"
        )
    tokens, (layers, capacity, kv_heads, size) = len(projected), keys.shape
    columns, rest = divmod(projected.shape[1], layers * size)
    heads = columns - 2 * kv_heads
    if rest or heads < 0:
        raise ValueError(
            f"block_write: projected {list(projected.shape)}, expected of each of {layers} layers heads of {size}, "
            f"{2 * kv_heads} or more"
        )
    if not norms[0].shape == norms[1].shape == (layers, size) or size != 2 * table[0].shape[1]:
        raise ValueError(
            f"block_write: norms {list(norms[0].shape)} and {list(norms[1].shape)}, table {list(table[0].shape)}, "
            f"expected [{layers}, {size}] and [positions, {size / 2:g}]"
        )
    if not runs_cuda(projected):
        start = int(prefix_len[0])
        rows = slice(start, start + tokens)

        def turned(by_head: np.ndarray, norm: np.ndarray) -> np.ndarray:
            halves = rms_norm(by_head, norm[:, None], eps).reshape(*by_head.shape[:3], 2, size // 2)
            return rotate(halves.swapaxes(3, 4).reshape(by_head.shape), table[0][rows], table[1][rows])

        by_head = projected.reshape(tokens, layers, columns, size)
        keys[:, rows] = turned(by_head[:, :, heads : heads + kv_heads], norms[1]).swapaxes(0, 1)
        values[:, rows] = by_head[:, :, heads + kv_heads :].swapaxes(0, 1)
        return turned(by_head[:, :, :heads], norms[0])
    queries = empty_beside(projected, (tokens, layers, heads, size), np.float32)
    if projected.size:
        sizes = (*map(np.int32, (heads, kv_heads, size, capacity)), np.float32(eps))
        arrays = projected, *norms, *table, prefix_len, queries, keys, values
        kernel = _block_write.specialize(CACHE=float_type("block_write", "keys", keys))
        kernel((tokens, columns, layers), (threads_for(size),), (*arrays, *sizes))
    return queries
