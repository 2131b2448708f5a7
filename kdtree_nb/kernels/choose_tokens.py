"""The target's choice after each row: argmax or sample."""

from typing import NamedTuple

import numpy as np

from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import sampling as reference

_choose_tokens = Kernel("choose_tokens.cu")
_LAYOUT = np.dtype(
    [("temperature", np.float64), ("seed", np.uint64), ("top_k", np.int64), ("top_p", np.float64)], align=True
)
WORDS = _LAYOUT.itemsize // 8


class Sampling(NamedTuple):
    """How the target chooses: see :func:`kdtree_nb.reference.sampling.choose_tokens`.

    top_k : int
        0 keeps all.
    top_p : float
        1 keeps all. A GPU's ``exp`` may differ from NumPy's in the last bit, which moves a token's mass by one unit
        at most: of 163,840 tokens, a cut can differ only where a sum lies within 3e-7 of top_p.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0

    def words(self) -> np.ndarray:
        """As the kernel reads it, uint64 [4]: each field's 64 bits.

        Raises
        ------
        ValueError
            For a temperature, top_k or top_p out of range; the message names them.
        """
        temperature, seed, top_k, top_p = self
        if not 0 <= temperature < np.inf:
            raise ValueError(f"choose_tokens: temperature={temperature}, expected 0 or more, and finite")
        if top_k < 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"choose_tokens: top_k={top_k}, top_p={top_p}, expected 0 or more, and above 0 and at most 1"
            )
        return np.array([(temperature, seed, min(top_k, 2**63 - 1), top_p)], _LAYOUT).view(np.uint64)


def choose_tokens(logits: Array, prefix_len: Array, depths: Array, sampling: Array) -> Array:
    """The token after each row: see :func:`kdtree_nb.reference.sampling.choose_tokens`.

    Parameters
    ----------
    logits : float32 [N, vocab]
    prefix_len : int32 [1]
    depths : int32 [N]
        A row's position, which its random number belongs to, is prefix_len + depth.
    sampling : uint64 [4]
        :meth:`Sampling.words`, beside the logits: the host need not know it.

    Returns
    -------
    int32 [N]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit.
    """
    if logits.ndim != 2 or depths.shape != logits.shape[:1]:
        raise ValueError(
            f"choose_tokens: logits {list(logits.shape)} and depths {list(depths.shape)}, expected [N, vocab] and [N]"
        )
    if sampling.dtype != np.uint64 or sampling.shape != (WORDS,):
        found = f"{sampling.dtype} {list(sampling.shape)}"
        raise ValueError(f"choose_tokens: sampling {found}, expected Sampling.words(), uint64 [{WORDS}]")
    if not runs_cuda(logits):
        positions = int(prefix_len[0]) + np.maximum(depths, 0)
        return reference.choose_tokens(logits, positions, *sampling.view(_LAYOUT)[0].item())
    targets = array_module(logits).empty(len(logits), np.int32)
    if targets.size:
        _choose_tokens(
            (len(logits),), (256,), (logits, prefix_len, depths, sampling, targets, np.int32(logits.shape[1]))
        )
    return targets
