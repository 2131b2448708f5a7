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
    features, added = x.dtype.type(x.shape[-1]), x.dtype.type(eps)  # NumPy is slower with Python's numbers
    mean_square = np.add.reduce(np.square(x), axis=-1, keepdims=True) / features
    return x / np.sqrt(mean_square + added) * weight
