"""What a model starts from: its tokens' rows of a table."""

import numpy as np

from kdtree_nb.kernels.gemm import float_type, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, empty_beside, runs_cuda

_embed = Kernel("embed.cu")


def embed(table: Array, token_ids: Array, rows: int | None = None, rest: int = 0) -> Array:
    """Rows of a table as float32 [rows, features].

    Parameters
    ----------
    table : float32, bfloat16 (on a GPU its bits as uint16) or float16 [vocab, features]
    token_ids : int32 [tokens]
        Each below ``vocab``; −1 in padding, which gets some row.
    rows : int, optional
        Of the result; those behind the tokens, if there are more, are of the token ``rest``.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if table.ndim != 2 or token_ids.ndim != 1:
        raise ValueError(
            f"embed: table {list(table.shape)} and token_ids {list(token_ids.shape)}, "
            "expected [vocab, features] and [tokens]"
        )
    kernel = _embed.specialize(VALUE=float_type("embed", "table", table))
    if not runs_cuda(table):
        return table[filled(token_ids, rows, rest)].astype(np.float32, copy=False)
    tokens, features = len(token_ids), table.shape[1]
    rows = tokens if rows is None else rows
    y = empty_beside(table, (rows, features), np.float32)
    if y.size:
        sizes = map(np.int32, (features, tokens, rest))
        kernel((rows,), (threads_for(features, 1024),), (table, token_ids, y, *sizes))
    return y


def filled(token_ids: np.ndarray, rows: int | None, rest: int) -> np.ndarray:
    """Tokens, and behind them the token ``rest``, up to so many rows."""
    return token_ids if rows is None else np.append(token_ids, np.full(rows - len(token_ids), rest, np.int32))
