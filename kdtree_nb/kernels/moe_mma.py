"""The INT4 experts of a layer for bfloat16 tokens, on tensor cores; the weights are re-ordered once, at load."""

from math import inf
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels.gemm import check_bfloat16, check_rows
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.kernels.moe_pairs import ROWS, Blocks, check_routing, sort_pairs, sum_pairs
from kdtree_nb.kernels.w4a16_mma import OUTPUT_PAD, STEP, Geometry, Plan, TiledWeight, tile_weight, untile_weight
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE
from kdtree_nb.reference import linear
from kdtree_nb.reference import moe as reference

_gate_up, _down = (Kernel("moe_mma.cu", name) for name in ("moe_gate_up_mma", "moe_down_mma"))


class TiledExperts(NamedTuple):
    """One projection of all experts in the order in which the kernel reads it.

    A tile of 16 is 8 outputs of the first half and the 8 of the second that correspond to them; an odd one is the
    first half's. Of gate and up this brings together what SwiGLU does; the sums of down do not care.

    codes : int32 [experts, tiles, steps, 32, 4]
    scales : int32 [experts, tiles, steps, 8, 2]
        Each expert's as in :class:`~kdtree_nb.kernels.w4a16_mma.TiledWeight`.
    shape : (experts, out, in)
    """

    codes: Array
    scales: Array
    shape: tuple[int, int, int]

    def expert(self, index: int) -> np.ndarray:
        """One expert's weight as float32 [out, in], its outputs in their own order."""
        _, out_features, in_features = self.shape
        tiles, half = self.codes.shape[1], -(-out_features // 2)
        weight = TiledWeight(self.codes[index], self.scales[index], (16 * tiles, in_features))
        rows = untile_weight(weight).dequantized.reshape(tiles, 2, 8, in_features)
        first, second = rows.swapaxes(0, 1).reshape(2, 8 * tiles, in_features)
        return np.concatenate([first[:half], second[: out_features - half]])


GATE_UP = Plan(4, {inf: (4, ROWS, 4)})
DOWN = Plan(4, {inf: (4, ROWS, 3)})
"""By tokens, the fastest for Kimi K2's experts on an H200 of what was tried (``golden/measurements/NOTES.md``)."""
FEW = (2, ROWS, 4)
"""Where a plan makes less than ``FEW_BLOCKS`` of threads: blocks of fewer tiles, so that there are more of them."""
FEW_BLOCKS = 400


def geometry_of(plan: Plan, tokens: int, pairs: int, out_features: int) -> Geometry:
    """For so many tokens and pairs of a token and an expert, and as many outputs; parts are the plan's."""
    geometry = plan.geometry(tokens)
    blocks = pairs * -(-out_features // (16 * geometry.tiles))
    return geometry if blocks >= FEW_BLOCKS else Geometry(plan.parts, *FEW)


def tile_experts(qweight: Array, scales: Array) -> TiledExperts:
    """Bring the experts of a projection into the kernel's order, on the device where they lie.

    Parameters
    ----------
    qweight : int32 [experts, out, in / 8]
        As in :class:`~kdtree_nb.quantization.QuantizedWeight`; of gate and up, the gates of all outputs first.
    scales : bfloat16 (on a GPU its bits as uint16) [experts, out, in / 32]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if qweight.dtype != np.int32:
        raise TypeError(
            f"tile_experts: qweight is {qweight.dtype.name}, expected int32: experts that are not INT4 are for moe"
        )
    check_bfloat16("tile_experts", scales=scales)
    in_features = qweight.shape[-1] * CODES_PER_WORD
    if qweight.ndim != 3 or in_features % GROUP_SIZE or scales.shape != (*qweight.shape[:2], in_features // GROUP_SIZE):
        raise ValueError(
            f"tile_experts: qweight {list(qweight.shape)} and scales {list(scales.shape)}, "
            f"expected [experts, out, in/8] and [experts, out, in/32] with in a multiple of group_size={GROUP_SIZE}"
        )
    xp, (experts, out_features) = array_module(qweight), qweight.shape[:2]
    tiles, steps = -(-out_features // OUTPUT_PAD) * (OUTPUT_PAD // 16), -(-in_features // STEP)
    tiled = TiledExperts(
        xp.empty((experts, tiles, steps, 32, 4), np.int32),
        xp.empty((experts, tiles, steps, 8, 2), np.int32),
        (experts, out_features, in_features),
    )
    for expert in range(experts):  # one after the other: a layer's experts are gigabytes
        weight = tile_weight(_pair_halves(qweight[expert]), _pair_halves(scales[expert].view(np.uint16)))
        tiled.codes[expert], tiled.scales[expert] = weight.codes, weight.scales
    return tiled


def moe_mma(
    x: Array,
    expert_ids: Array,
    weights: Array,
    gate_up: TiledExperts,
    down: TiledExperts,
    shared: Array | None = None,
    blocks: Blocks | None = None,
) -> Array:
    """The weighted sum of each token's SwiGLU experts, added in the order of its choice.

    Products are of exact operands and summed in fp32; between the two, activations are rounded to bfloat16.

    Parameters
    ----------
    x : bfloat16 (on a GPU its bits as uint16) [tokens, hidden]
    expert_ids : int32 [tokens, top_k]
    weights : float32 [tokens, top_k]
    gate_up : TiledExperts
        (experts, 2 · width, hidden), gates first.
    down : TiledExperts
        (experts, hidden, width).
    shared : float32 [tokens, hidden], optional
        What other experts have given, added last.
    blocks : Blocks, optional
        The pairs, sorted; by default they are sorted here.

    Returns
    -------
    float32 [tokens, hidden]; a token's bits do not depend on the other tokens.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them. Experts that are not INT4 do not: they are for
        :func:`~kdtree_nb.kernels.moe.moe`.
    """
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, TiledExperts):
            raise TypeError(
                f"moe_mma: {name} is {type(weight).__name__}, expected INT4 weights from tile_experts; "
                "others are for moe"
            )
    check_rows("moe_mma", x, gate_up.shape[2])
    check_bfloat16("moe_mma", x=x)
    experts, out_features, hidden = gate_up.shape
    if out_features % 2 or down.shape != (experts, hidden, out_features // 2):
        raise ValueError(f"moe_mma: down {down.shape} does not fit gate_up {gate_up.shape}")
    check_routing("moe_mma", x, expert_ids, weights, shared)
    if runs_cuda(x):
        of_gate_up, of_down = (
            geometry_of(plan, len(x), expert_ids.size, out) for plan, out in ((GATE_UP, out_features), (DOWN, hidden))
        )
        return launch(x, expert_ids, weights, gate_up, down, of_gate_up, of_down, shared, blocks)

    def expert(index: int, rows: np.ndarray) -> np.ndarray:
        gate, up = np.split(linear.linear(rows, linear.tile(gate_up.expert(index))), 2, axis=1)
        activations = reference.swiglu(gate, up).astype(bfloat16).astype(np.float32)
        return linear.linear(activations, linear.tile(down.expert(index)))

    routed = reference.moe(x.view(bfloat16).astype(np.float32), expert_ids, weights, expert)
    return routed if shared is None else routed + shared


def launch(
    x: Array,
    expert_ids: Array,
    weights: Array,
    gate_up: TiledExperts,
    down: TiledExperts,
    of_gate_up: Geometry,
    of_down: Geometry,
    shared: Array | None = None,
    blocks: Blocks | None = None,
) -> Array:
    """What :func:`moe_mma` does, in given geometries."""
    if not expert_ids.size:
        return array_module(x).zeros(x.shape, np.float32) if shared is None else shared
    blocks = blocks or sort_pairs(expert_ids, gate_up.shape[0], ROWS)
    activations = gate_up_products(x, expert_ids.shape, blocks, gate_up, of_gate_up)
    return sum_pairs(down_products(activations, blocks, down, of_down), weights, shared)


def gate_up_products(
    x: Array, routing: tuple[int, int], blocks: Blocks, weight: TiledExperts, geometry: Geometry
) -> Array:
    """SwiGLU of each pair's gates and ups: bfloat16 (its bits as uint16) [pairs, width]."""
    (tokens, top_k), width = routing, weight.shape[1] // 2
    activations = array_module(x).empty((tokens * top_k, width), np.uint16)
    _launch(_gate_up, x, blocks, weight, activations, geometry, (width, top_k))
    return activations


def down_products(activations: Array, blocks: Blocks, weight: TiledExperts, geometry: Geometry) -> Array:
    """Each pair's product with its expert's weight: float32 [pairs, hidden]."""
    hidden = weight.shape[1]
    outputs = array_module(activations).empty((len(activations), hidden), np.float32)
    _launch(_down, activations, blocks, weight, outputs, geometry, (hidden,))
    return outputs


def _launch(
    kernel: Kernel,
    x: Array,
    blocks: Blocks,
    weight: TiledExperts,
    y: Array,
    geometry: Geometry,
    sizes: tuple[int, ...],
) -> None:
    _, out_features, in_features = weight.shape
    parts, tiles, _, stages = geometry
    columns = -(-out_features // (16 * tiles))
    special = kernel.specialize(IN_FEATURES=in_features, PARTS=parts, TILES=tiles, STAGES=stages)
    numbers = [np.int32(n) for n in (weight.codes.shape[1], columns, *sizes)]
    args = (x.view(np.int32), weight.codes, weight.scales, *blocks, y, *numbers)
    special((len(blocks.experts) * columns,), (32 * parts,), args, geometry.shared_bytes)


def _pair_halves(rows: Array) -> Array:
    """Rows in the order of the tiles: 8 of the first half, 8 of the second; halves padded to whole blocks of tiles."""
    half = -(-len(rows) // 2)
    padded = -(-len(rows) // OUTPUT_PAD) * OUTPUT_PAD
    halves = array_module(rows).zeros((2, padded // 2, rows.shape[1]), rows.dtype)
    halves[0, :half], halves[1, : len(rows) - half] = rows[:half], rows[half:]
    return halves.reshape(2, -1, 8, rows.shape[1]).swapaxes(0, 1).reshape(padded, -1)
