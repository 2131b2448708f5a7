"""The target's choice after each row: argmax or sample."""

import numpy as np

from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import sampling

_choose_tokens = Kernel("choose_tokens.cu")


def choose_tokens(logits: Array, prefix_len: Array, depths: Array, temperature: float = 0.0, seed: int = 0) -> Array:
    """The token after each row: see :func:`kdtree_nb.reference.sampling.choose_tokens`.

    Parameters
    ----------
    logits : float32 [N, vocab]
    prefix_len : int32 [1]
    depths : int32 [N]
        A row's position, which its random number belongs to, is prefix_len + depth.

    Returns
    -------
    int32 [N]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit, or for a negative temperature; the message names them.
    """
    if logits.ndim != 2 or depths.shape != logits.shape[:1]:
        raise ValueError(
            f"choose_tokens: logits {list(logits.shape)} and depths {list(depths.shape)}, expected [N, vocab] and [N]"
        )
    if not temperature >= 0:
        raise ValueError(f"choose_tokens: temperature={temperature}, expected 0 or more")
    if not runs_cuda(logits):
        return sampling.choose_tokens(logits, int(prefix_len[0]) + np.maximum(depths, 0), temperature, seed)
    targets = array_module(logits).empty(len(logits), np.int32)
    scalars = (np.int32(logits.shape[1]), np.float64(temperature), np.uint64(seed))
    if targets.size:
        _choose_tokens((len(logits),), (256,), (logits, prefix_len, depths, targets, *scalars))
    return targets
