"""The most probable tokens of each position."""

import numpy as np

from kdtree_nb.kernels.gemm import threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import sampling

MAX_K = 1024
_top_k = Kernel("top_k.cu")


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
    length, vocab = logits.shape
    if not 1 <= k <= min(vocab, MAX_K):
        raise ValueError(f"top_k: k={k}, expected 1 to {min(vocab, MAX_K)}")
    xp = array_module(logits)
    log_probs, token_ids = xp.empty((length, k), np.float32), xp.empty((length, k), np.int32)
    if length:
        _top_k((length,), (threads_for(vocab, 1024),), (logits, log_probs, token_ids, np.int32(vocab), np.int32(k)))
    return log_probs, token_ids
