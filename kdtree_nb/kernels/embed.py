"""What a model starts from: its tokens' rows of a table."""

import numpy as np

from kdtree_nb.kernels.gemm import float_type, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, empty_beside, runs_cuda

_embed = Kernel("embed.cu")


def embed(table: Array, token_ids: Array) -> Array:
    """Rows of a table as float32 [tokens, features].

    Parameters
    ----------
    table : float32, bfloat16 (on a GPU its bits as uint16) or float16 [rows, features]
    token_ids : int32 [tokens]
        Each below ``rows``; −1 in padding, which gets some row.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if table.ndim != 2 or token_ids.ndim != 1:
        raise ValueError(
            f"embed: table {list(table.shape)} and token_ids {list(token_ids.shape)}, "
            "expected [rows, features] and [tokens]"
        )
    kernel = _embed.specialize(VALUE=float_type("embed", "table", table))
    if not runs_cuda(table):
        return table[token_ids].astype(np.float32, copy=False)
    tokens, features = len(token_ids), table.shape[1]
    y = empty_beside(table, (tokens, features), np.float32)
    if y.size:
        kernel((tokens,), (threads_for(features, 1024),), (table, token_ids, y, np.int32(features)))
    return y
