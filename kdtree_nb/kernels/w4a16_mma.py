"""A product of bfloat16 activations with an INT4 weight on tensor cores; the weight is re-ordered once, at load."""

from math import inf, prod
from typing import NamedTuple, Self

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels.gemm import check_bfloat16, check_rows, spread
from kdtree_nb.kernels.launch import Array, Kernel, array_module, processor_of, runs_cuda
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, QuantizedWeight
from kdtree_nb.reference import linear

STEP = 64
"""Inputs of a step, as in the source."""
OUTPUT_PAD = 128
"""Outputs are stored in multiples of it, those of the largest block."""
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the codes 0, 1, … of a word go: neighbours 16 bits apart, so that one mask gives both."""

_w4a16_mma = Kernel("w4a16_mma.cu")


class TiledWeight(NamedTuple):
    """A weight in the order in which the kernel reads it: tiles of 16 outputs, steps of 64 inputs, zeros as padding.

    codes : int32 [tiles, steps, 32, 4]
        Of lane 4 · r + p: the words of 8 inputs at 8 · p of both groups, for output r and r + 8 in turn.
    scales : int32 [tiles, steps, 8, 2]
        bfloat16 for each group of output r, and in the upper half of r + 8.
    shape : (out, in)
    """

    codes: Array
    scales: Array
    shape: tuple[int, int]


class Geometry(NamedTuple):
    """How a launch cuts its work: the source's defines; only ``parts`` changes the order of a sum."""

    parts: int
    tiles: int
    rows: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        """A warp's operands of one step."""
        return self.tiles * (512 + 64) + self.rows // 8 * 1024

    @property
    def shared_bytes(self) -> int:
        """A ring of stages for each warp, then the warps' sums in its place."""
        sums = self.rows * (16 * self.tiles + 4) * 4
        return self.parts * max(self.stages * self.stage_bytes, sums)

    @property
    def defines(self) -> dict[str, int]:
        """As the source names them."""
        return {name.upper(): value for name, value in self._asdict().items()}

    def within(self, shared_bytes: int) -> Self:
        """Where a block has less: fewer stages, then rows, then tiles, but the same parts, and so the same bits."""
        if self.shared_bytes <= shared_bytes:
            return self
        if self.stages > 2:
            smaller = self._replace(stages=self.stages - 1)
        elif self.rows > 8:
            smaller = self._replace(rows=self.rows // 16 * 8)
        elif self.tiles > 1:
            smaller = self._replace(tiles=self.tiles // 2)
        else:
            return self
        return smaller.within(shared_bytes)


class Plan(NamedTuple):
    """Parts of the inputs, and for rows of x up to a number the rest of a geometry: tiles, rows, stages."""

    parts: int
    geometries: dict[float, tuple[int, ...]]

    def geometry(self, rows: int) -> Geometry:
        """The one for so many rows of x."""
        return Geometry(self.parts, *next(cut for most, cut in self.geometries.items() if rows <= most))


SHORT = Plan(8, {4: (1, 8, 5), 8: (2, 8, 4), 32: (2, 16, 4), inf: (2, 32, 3)})
LONG = Plan(16, {4: (1, 8, 5), 16: (2, 8, 3), 32: (2, 16, 3), inf: (2, 32, 2)})
MIDDLE = Plan(8, {8: (2, 8, 4), 16: (2, 16, 4), 32: (2, 32, 3), inf: (4, 32, 2)})
WIDE = Plan(4, {4: (2, 8, 5), 8: (4, 8, 4), 32: (4, 16, 4), inf: (4, 32, 3)})


def plan_of(out_features: int, in_features: int) -> Plan:
    """The fastest for such a weight on an H200 of what was tried (``golden/measurements/NOTES.md``).

    Few outputs make few blocks, so more warps share the inputs of each: about 2,000 warps in all.
    """
    if out_features > 4096:
        return WIDE
    if out_features > 2048:
        return MIDDLE
    return LONG if in_features >= 4096 else SHORT


def geometry_of(rows: int, out_features: int, in_features: int) -> Geometry:
    """The plan's geometry for so many rows of x."""
    return plan_of(out_features, in_features).geometry(rows)


def tile_weight(qweight: Array, scales: Array) -> TiledWeight:
    """Bring a weight into the kernel's order, on the device where it lies.

    Parameters
    ----------
    qweight : int32 [out, in / 8]
        As in :class:`~kdtree_nb.quantization.QuantizedWeight`.
    scales : bfloat16 (on a GPU its bits as uint16) [out, in / 32]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    out_features, in_features = len(qweight), qweight.shape[-1] * CODES_PER_WORD
    if qweight.ndim != 2 or in_features % GROUP_SIZE or scales.shape != (out_features, in_features // GROUP_SIZE):
        raise ValueError(
            f"tile_weight: qweight {list(qweight.shape)} and scales {list(scales.shape)}, "
            f"expected [out, in/8] and [out, in/32] with in a multiple of group_size={GROUP_SIZE}"
        )
    if qweight.dtype != np.int32 or scales.dtype not in (bfloat16, np.uint16):
        raise TypeError(
            f"tile_weight: qweight is {qweight.dtype.name} and scales {scales.dtype.name}, expected int32 and bfloat16"
        )
    xp = array_module(qweight)
    outs, steps = -(-out_features // OUTPUT_PAD) * OUTPUT_PAD, -(-in_features // STEP)
    words = xp.zeros((outs, steps * STEP // CODES_PER_WORD), np.uint32)
    for code, nibble in enumerate(NIBBLES):
        words[:out_features, : qweight.shape[1]] |= (qweight.view(np.uint32) >> 4 * code & 15) << 4 * nibble
    halves = xp.zeros((outs, 2 * steps), np.uint16)
    halves[:out_features, : scales.shape[1]] = scales.view(np.uint16)
    # [tile, upper half, output, step, group, pair] and the same without pair
    codes = words.reshape(-1, 2, 8, steps, 2, 4).transpose(0, 3, 2, 5, 4, 1).reshape(-1, steps, 32, 4)
    pairs = xp.ascontiguousarray(halves.reshape(-1, 2, 8, steps, 2).transpose(0, 3, 2, 4, 1))
    return TiledWeight(codes.view(np.int32), pairs.view(np.int32)[..., 0], (out_features, in_features))


def untile_weight(weight: TiledWeight) -> QuantizedWeight:
    """The weight as it was before :func:`tile_weight`, on the host."""
    (out_features, in_features), (tiles, steps) = weight.shape, weight.codes.shape[:2]
    words = weight.codes.reshape(tiles, steps, 8, 4, 2, 2).transpose(0, 5, 2, 1, 4, 3).reshape(16 * tiles, 8 * steps)
    words = words[:out_features, : in_features // CODES_PER_WORD].view(np.uint32)
    qweight = np.zeros_like(words)
    for code, nibble in enumerate(NIBBLES):
        qweight |= (words >> 4 * nibble & 15) << 4 * code
    halves = weight.scales.view(np.uint16).reshape(tiles, steps, 8, 2, 2).transpose(0, 4, 2, 1, 3)
    scales = halves.reshape(16 * tiles, 2 * steps)[:out_features, : in_features // GROUP_SIZE].copy()
    return QuantizedWeight(qweight.view(np.int32), scales.view(bfloat16))


def w4a16_mma(x: Array, weight: TiledWeight) -> Array:
    """``x · weightᵀ`` with products of exact operands, summed in fp32; a row's bits do not depend on the other rows.

    Parameters
    ----------
    x : bfloat16 (on a GPU its bits as uint16) [rows, in]

    Returns
    -------
    float32 [rows, out]
        The sums as they are: who reads them decides where to round, and at these sizes they are few bytes.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    check_rows("w4a16_mma", x, weight.shape[1])
    check_bfloat16("w4a16_mma", x=x)
    if not runs_cuda(x):
        return linear.linear(x.view(bfloat16).astype(np.float32), linear.tile(untile_weight(weight).dequantized))
    return launch(x, weight, geometry_of(len(x), *weight.shape).within(processor_of(x).shared_bytes))


def launch(x: Array, weight: TiledWeight, geometry: Geometry) -> Array:
    """What :func:`w4a16_mma` does, in a given geometry."""
    rows, (out_features, in_features) = len(x), weight.shape
    y = array_module(x).empty((rows, out_features), np.float32)
    if y.size:
        kernel = _w4a16_mma.specialize(IN_FEATURES=in_features, **geometry.defines)
        grid = (-(-out_features // (16 * geometry.tiles)), -(-rows // geometry.rows))
        args = (x.view(np.int32), weight.codes, weight.scales, y, np.int32(rows), np.int32(out_features))
        shared_bytes = spread(geometry.shared_bytes, prod(grid), processor_of(x))
        kernel(grid, (32 * geometry.parts,), args, shared_bytes)
    return y
