"""The INT4 group format: symmetric codes −8..7, one scale per output and group of 32 inputs, 8 codes to an int32.

It is compressed-tensors' ``pack-quantized`` layout, the one Kimi K2 checkpoints ship, bit for bit:
``weight_packed`` is our ``.qw``, ``weight_scale`` our ``.sc``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ml_dtypes import bfloat16, finfo

from kdtree_nb.config import Config

GROUP_SIZE = 32
CODES_PER_WORD = 8
LOWEST, HIGHEST = -8, 7
RULES = ("minmax", "amax7", "mse")
_WORD_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A projection's weight in INT4.

    Parameters
    ----------
    qweight : int32 [out, in / 8]
        Codes in offset binary, element ``i`` in bits ``4 · (i mod 8)`` of word ``i div 8``.
    scales : float32, bfloat16 or float16 [out, in / 32]
    name : str
        Only for error messages.

    Raises
    ------
    ValueError
        If a dtype or shape is not the one above.
    """

    qweight: np.ndarray
    scales: np.ndarray
    name: str = ""

    def __post_init__(self) -> None:
        if self.qweight.dtype != np.int32 or self.qweight.ndim != 2:
            raise ValueError(
                f"{self._label}: qweight is {self.qweight.dtype} {list(self.qweight.shape)}, expected int32 [out, in/8]"
            )
        if self.scales.dtype not in (np.float32, bfloat16, np.float16):
            raise ValueError(f"{self._label}: scales are {self.scales.dtype}, expected float32, bfloat16 or float16")
        _check_groups(self.shape[1], self._label)
        expected = (self.shape[0], self.shape[1] // GROUP_SIZE)
        if self.scales.shape != expected:
            raise ValueError(
                f"{self._label}: scales are {list(self.scales.shape)}, expected {list(expected)} "
                f"for shape {list(self.shape)} and group_size={GROUP_SIZE}"
            )

    @property
    def _label(self) -> str:
        return f"weight {self.name!r}"

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the weight that is stored."""
        return self.qweight.shape[0], self.qweight.shape[1] * CODES_PER_WORD

    @cached_property
    def dequantized(self) -> np.ndarray:
        """The weight as float32 [out, in], made on first use and kept."""
        return dequantize(self)


def quantize(weight: np.ndarray, rule: str = "minmax", name: str = "") -> QuantizedWeight:
    """Round a weight to INT4 codes with a scale per output and group of 32 inputs.

    Parameters
    ----------
    weight : float32 or bfloat16 [out, in]
        All arithmetic is in this dtype, and so are the scales, as in compressed-tensors.
    rule : {"minmax", "amax7", "mse"}
        ``minmax`` divides the largest magnitude by 7.5 (bit-equal to compressed-tensors),
        ``amax7`` by 7 (the code −8 stays unused), ``mse`` searches, between 0.55 and 1 times
        ``amax7``'s scale, the one of least squared error; both other rules are among its candidates.

    Raises
    ------
    ValueError
        If ``in`` is not a multiple of 32, or for another dtype, rank or rule.

    Notes
    -----
    A group of zeros gets the dtype's eps as its scale. A NaN or an infinity makes its group's
    scale non-finite, so that it shows in the product instead of vanishing.
    """
    label = f"quantize: weight {name!r}"
    if weight.ndim != 2 or weight.dtype not in (np.float32, bfloat16):
        raise ValueError(
            f"{label} is {weight.dtype} {list(weight.shape)}, expected float32 or bfloat16 [out_features, in_features]"
        )
    _check_groups(weight.shape[1], label)
    groups = _grouped(weight)
    with np.errstate(invalid="ignore"):  # a NaN is to come through
        amax = np.abs(groups).max(axis=2)
    if rule == "minmax":
        scales = _usable(amax / weight.dtype.type(7.5))
    elif rule == "amax7":
        scales = _usable(amax / weight.dtype.type(7))
    elif rule == "mse":
        scales = _least_squares_scales(groups, amax)
    else:
        raise ValueError(f"quantize: rule={rule!r}, expected one of {', '.join(RULES)}")
    codes = _round_to_codes(groups, scales).reshape(weight.shape)
    return QuantizedWeight(pack(codes), scales, name)


def dequantize(weight: QuantizedWeight) -> np.ndarray:
    """``code · scale`` as float32 [out, in]; exact where the scales are bfloat16 or float16."""
    out_features, in_features = weight.shape
    codes = _grouped(unpack(weight.qweight, in_features))
    values = codes.astype(np.float32) * weight.scales.astype(np.float32)[:, :, None]
    return values.reshape(out_features, in_features)


def pack(codes: np.ndarray) -> np.ndarray:
    """Pack codes −8..7, int8 [out, in], into int32 [out, ceil(in / 8)]; a ragged tail is padded with raw 0."""
    if codes.size and (codes.min() < LOWEST or codes.max() > HIGHEST):
        raise ValueError(f"pack: codes span {codes.min()}..{codes.max()}, expected {LOWEST}..{HIGHEST}")
    nibbles = (codes.astype(np.int8) - LOWEST).astype(np.uint32)
    nibbles = np.pad(nibbles, ((0, 0), (0, -codes.shape[1] % CODES_PER_WORD)))
    words = nibbles.reshape(len(nibbles), nibbles.shape[1] // CODES_PER_WORD, CODES_PER_WORD) << _WORD_SHIFTS
    return np.bitwise_or.reduce(words, axis=2).view(np.int32)


def unpack(qweight: np.ndarray, in_features: int) -> np.ndarray:
    """The inverse of :func:`pack`: int8 codes [out, in_features]."""
    if not qweight.shape[1] * CODES_PER_WORD - CODES_PER_WORD < in_features <= qweight.shape[1] * CODES_PER_WORD:
        raise ValueError(f"unpack: in_features={in_features} does not fit {qweight.shape[1]} words of 8 codes")
    nibbles = (qweight.view(np.uint32)[:, :, None] >> _WORD_SHIFTS) & 0xF
    codes = nibbles.astype(np.int8).reshape(len(qweight), qweight.shape[1] * CODES_PER_WORD) + np.int8(LOWEST)
    return codes[:, :in_features]


def routed_experts(name: str) -> bool:
    """Kimi's own choice of what to quantise: the routed experts and nothing else. For ``select=``."""
    return ".mlp.experts." in name


def quantized_names(config: Config, select: Callable[[str], bool] | None = None) -> dict[str, tuple[int, int]]:
    """Names and shapes of the weights that are stored in INT4.

    These are the gate, up and down projections of dense MLPs, routed and shared experts. ``select``
    narrows them; MLA projections, embeddings, norms, router and head are never among them.
    """
    return {
        name: shape
        for layer in range(config.num_hidden_layers)
        for name, shape in config.mlp_projections(layer).items()
        if select is None or select(name)
    }


def quantize_weights(
    weights: Mapping[str, np.ndarray],
    config: Config,
    rule: str = "minmax",
    select: Callable[[str], bool] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Quantise a model's weights.

    Returns
    -------
    dequantized : dict of arrays
        Every weight under its name, quantised ones as float32 ``code · scale``: what the reference runs.
    packed : dict of arrays
        The same weights as a bundle stores them, ``NAME`` or ``NAME.qw`` and ``NAME.sc``: what the engine runs.
    """
    chosen = quantized_names(config, select)
    missing = chosen.keys() - weights.keys()
    if missing:
        raise ValueError(f"quantize_weights: {len(missing)} weights are missing, the first is {min(missing)!r}")
    dequantized: dict[str, np.ndarray] = {}
    packed: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        if name in chosen:
            quantized = quantize(weight, rule, name)
            dequantized[name] = dequantize(quantized)
            packed[f"{name}.qw"], packed[f"{name}.sc"] = quantized.qweight, quantized.scales
        else:
            dequantized[name] = packed[name] = weight
    return dequantized, packed


def _check_groups(in_features: int, label: str) -> None:
    if in_features % GROUP_SIZE:
        raise ValueError(f"{label}: in_features={in_features} is not a multiple of group_size={GROUP_SIZE}")


def _grouped(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), array.shape[1] // GROUP_SIZE, GROUP_SIZE)


def _usable(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, finfo(scales.dtype).eps, scales).astype(scales.dtype)


def _round_to_codes(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # inf / inf; the scale carries the fault
        ratios = (groups / scales[:, :, None]).astype(np.float32)
    return np.rint(np.clip(np.nan_to_num(ratios, nan=0.0), LOWEST, HIGHEST)).astype(np.int8)


def _least_squares_scales(groups: np.ndarray, amax: np.ndarray) -> np.ndarray:
    widest = amax.astype(np.float32) / 7
    scales = minmax = _usable(amax / groups.dtype.type(7.5))
    best = np.full(amax.shape, np.inf, np.float32)
    shrunk = (_usable((widest * np.float32(shrink)).astype(groups.dtype)) for shrink in np.linspace(1.0, 0.55, 46))
    for candidate in (minmax, *shrunk):
        with np.errstate(invalid="ignore", over="ignore"):  # an error that is not finite is never the best
            values = _round_to_codes(groups, candidate) * candidate.astype(np.float32)[:, :, None]
            error = np.square(values - groups.astype(np.float32)).sum(axis=2)
        better = error < best
        scales, best = np.where(better, candidate, scales), np.where(better, error, best)
    return scales
