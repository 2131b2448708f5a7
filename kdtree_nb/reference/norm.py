"""Root-mean-square normalisation."""

import numpy as np

LATENT_EPS = 1e-6
"""transformers hard-wires this eps in the norms of MLA's two latents, whatever ``rms_norm_eps`` says."""


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis (arXiv 1910.07467, eq. 4).

    Parameters
    ----------
    x : float [..., features]
    weight : float [features]
    """
    mean_square = np.square(x).sum(axis=-1, keepdims=True) / x.shape[-1]
    return x / np.sqrt(mean_square + eps) * weight
