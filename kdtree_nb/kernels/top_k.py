"""The most probable tokens of each position."""

import numpy as np

from kdtree_nb.kernels.gemm import threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import sampling

MAX_K = 1024
SEGMENT = 10_240
"""Tokens of a row that a block takes; those of 163,840 are 16 segments."""
_sums, _top_k, _join = (Kernel("top_k.cu", name) for name in ("top_k_sums", "top_k", "top_k_join"))


def top_k(logits: Array, k: int) -> tuple[Array, Array]:
    """Log-probabilities and ids of each row's k most probable tokens.

    Parameters
    ----------
    logits : float32 [L, vocab]
        NaN counts as −inf on a GPU.
    k : int
        At most 1,024 on a GPU.

    Returns
    -------
    log_probs : float32 [L, k]
        At most 0, descending; equal values by the lower token id.
    token_ids : int32 [L, k]

    Raises
    ------
    ValueError, TypeError
        If k or the logits' shape or dtype does not fit; the message names it.
    """
    if logits.ndim != 2:
        raise ValueError(f"top_k: logits {list(logits.shape)}, expected [L, vocab]")
    if not runs_cuda(logits):
        return sampling.top_k(logits, k)
    if logits.dtype != np.float32:
        raise TypeError(f"top_k: 'logits' is {logits.dtype.name} {list(logits.shape)}, expected float32")
    length, vocab = logits.shape
    if not 1 <= k <= min(vocab, MAX_K):
        raise ValueError(f"top_k: k={k}, expected 1 to {min(vocab, MAX_K)}")
    xp = array_module(logits)
    log_probs, token_ids = xp.empty((length, k), np.float32), xp.empty((length, k), np.int32)
    if length:
        segments, block = -(-vocab // SEGMENT), (threads_for(vocab, 1024),)
        sums = xp.empty((length, segments, 2), np.float32)
        keys = xp.empty((length, segments, k), np.uint64) if segments > 1 else None
        _sums((length, segments), block, (logits, sums, np.int32(vocab)))
        arrays = logits, sums, keys, log_probs, token_ids
        _top_k((length, segments), block, (*arrays, np.int32(vocab), np.int32(k)))
        if keys is not None:
            _join((length,), block, (keys, log_probs, token_ids, np.int32(segments), np.int32(k)))
    return log_probs, token_ids
