"""Rotary positions (arXiv 2104.09864), interleaved, with YaRN's context extension (arXiv 2309.00071)."""

import math
from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig, YarnScaling


class Rope(NamedTuple):
    """How a model rotates: ``inverse_frequencies`` float64 [rope / 2] and the factor on cos and sin."""

    inverse_frequencies: np.ndarray
    magnitude: float


def rope(config: ModelConfig) -> Rope:
    """The rotation of a model, YaRN included (section 3.2 of its paper, "NTK-by-parts")."""
    dim = config.qk_rope_head_dim
    frequencies = 1.0 / config.rope_theta ** (np.arange(0, dim, 2) / dim)
    yarn = config.rope_scaling
    if yarn is None:
        return Rope(frequencies, 1.0)
    low, high = _ramp_bounds(yarn, config.rope_theta, dim)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    frequencies = ramp * frequencies / yarn.factor + (1 - ramp) * frequencies
    if yarn.mscale and yarn.mscale_all_dim:
        magnitude = _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)
    else:
        magnitude = _mscale(yarn, 1.0)
    return Rope(frequencies, magnitude)


def softmax_scale(config: ModelConfig) -> float:
    """The factor on attention scores: (nope + rope)^-½, times YaRN's m(mscale_all_dim)²."""
    scale = config.qk_head_dim**-0.5
    yarn = config.rope_scaling
    if yarn is not None and yarn.mscale_all_dim:
        scale *= _mscale(yarn, yarn.mscale_all_dim) ** 2
    return scale


def rope_table(rotation: Rope, positions: np.ndarray, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions int [tokens], magnitude included: two arrays dtype [tokens, rope / 2]."""
    angles = positions[:, None] * rotation.inverse_frequencies
    return (np.cos(angles) * rotation.magnitude).astype(dtype), (np.sin(angles) * rotation.magnitude).astype(dtype)


def rotate(x: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    """Rotate the pairs (0, 1), (2, 3), … of the last axis.

    Parameters
    ----------
    x : float [tokens, ..., rope]
        Pairs interleaved, as the projections of DeepSeek checkpoints write them.
    cosines, sines : float [tokens, rope / 2]

    Returns
    -------
    float [tokens, ..., rope], first all rotated even elements, then all odd ones (the order in which
    transformers caches them; a score does not depend on it).
    """
    by_token = (len(x), *(1,) * (x.ndim - 2), cosines.shape[1])
    cosines, sines = cosines.reshape(by_token), sines.reshape(by_token)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.concatenate([even * cosines - odd * sines, odd * cosines + even * sines], axis=-1)


def apply_rope(x: np.ndarray, positions: np.ndarray, rotation: Rope) -> np.ndarray:
    """:func:`rotate` float [tokens, ..., rope] by each token's position, int [tokens]."""
    return rotate(x, *rope_table(rotation, positions, x.dtype.type))


def _mscale(yarn: YarnScaling, coefficient: float) -> float:
    return 1.0 if yarn.factor <= 1 else 0.1 * coefficient * math.log(yarn.factor) + 1.0


def _ramp_bounds(yarn: YarnScaling, theta: float, dim: int) -> tuple[float, float]:
    def correction_dim(rotations: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(correction_dim(yarn.beta_slow)), dim - 1)
    return low, high if high != low else high + 0.001
