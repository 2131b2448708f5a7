"""The target's choice after each row: argmax or sample."""

import numpy as np

from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import sampling

_choose_tokens = Kernel("choose_tokens.cu")


def choose_tokens(
    logits: Array,
    prefix_len: Array,
    depths: Array,
    temperature: float = 0.0,
    seed: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Array:
    """The token after each row: see :func:`kdtree_nb.reference.sampling.choose_tokens`.

    Parameters
    ----------
    logits : float32 [N, vocab]
    prefix_len : int32 [1]
    depths : int32 [N]
        A row's position, which its random number belongs to, is prefix_len + depth.
    top_k : int
        0 keeps all.
    top_p : float
        1 keeps all. A GPU's ``exp`` may differ from NumPy's in the last bit, which moves a token's mass by one unit
        at most: of 163,840 tokens, a cut can differ only where a sum lies within 3e-7 of top_p.

    Returns
    -------
    int32 [N]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit, or for a temperature, top_k or top_p out of range; the message names them.
    """
    if logits.ndim != 2 or depths.shape != logits.shape[:1]:
        raise ValueError(
            f"choose_tokens: logits {list(logits.shape)} and depths {list(depths.shape)}, expected [N, vocab] and [N]"
        )
    if not 0 <= temperature < np.inf:
        raise ValueError(f"choose_tokens: temperature={temperature}, expected 0 or more, and finite")
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"choose_tokens: top_k={top_k}, top_p={top_p}, expected 0 or more, and above 0 and at most 1")
    if not runs_cuda(logits):
        positions = int(prefix_len[0]) + np.maximum(depths, 0)
        return sampling.choose_tokens(logits, positions, temperature, seed, top_k, top_p)
    targets = array_module(logits).empty(len(logits), np.int32)
    vocab = logits.shape[1]
    scalars = (
        np.int32(vocab),
        np.float64(temperature),
        np.uint64(seed),
        np.int32(min(top_k, vocab)),
        np.float64(top_p),
    )
    if targets.size:
        _choose_tokens((len(logits),), (256,), (logits, prefix_len, depths, targets, *scalars))
    return targets
