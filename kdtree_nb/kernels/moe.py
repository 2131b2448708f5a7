"""The experts of a layer, from the router's choice to their weighted sum."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kdtree_nb.kernels.gemm import OUTPUTS, THREADS, check_rows, elements, float_type
from kdtree_nb.kernels.launch import Array, Kernel, array_module, pointer, runs_cuda
from kdtree_nb.kernels.moe_pairs import ROWS, Blocks, check_routing, sort_pairs, sum_pairs
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, QuantizedWeight
from kdtree_nb.reference import linear
from kdtree_nb.reference import moe as reference

_gate_up, _down = (Kernel("moe.cu", name) for name in ("moe_gate_up", "moe_down"))


class Experts(NamedTuple):
    """One projection of all experts.

    values : int32 [experts, out, in / 8] or float [experts, out, in]
    scales : float [experts, out, in / 32], or None where the experts are float
    """

    values: Array
    scales: Array | None = None

    @property
    def in_features(self) -> int:
        """Inputs of the projection."""
        return int(self.values.shape[2]) * (CODES_PER_WORD if self.scales is not None else 1)

    def expert(self, index: int) -> np.ndarray:
        """One expert's weight as float32 [out, in]."""
        if self.scales is None:
            return self.values[index].astype(np.float32)
        return QuantizedWeight(self.values[index], self.scales[index]).dequantized

    @property
    def types(self) -> dict[str, str]:
        """For ``moe.cu``: the class in ``gemm.cuh`` that reads the weight, what its values and its scales are."""
        if self.scales is None:
            value = float_type("moe", "an experts' weight", self.values)
            return {"WEIGHT": f"DenseWeight<{value}>", "VALUE": value, "SCALE": "float"}
        scale = float_type("moe", "an experts' scales", self.scales)
        return {"WEIGHT": f"Int4Weight<{scale}>", "VALUE": "uint4", "SCALE": scale}


def moe(
    x: Array,
    expert_ids: Array,
    weights: Array,
    gate_up: Experts,
    down: Experts,
    shared: Array | None = None,
    blocks: Blocks | None = None,
    entering: Callable[[Array], Array] = lambda activations: activations,
) -> Array:
    """The weighted sum of each token's SwiGLU experts, added in the order of its choice.

    Parameters
    ----------
    x : float32 [tokens, hidden]
        Rows may lie apart; each is contiguous.
    expert_ids : int32 [tokens, top_k]
    weights : float32 [tokens, top_k]
    gate_up : Experts
        [experts, 2 · width, hidden], gate rows first.
    down : Experts
        [experts, hidden, width].
    shared : float32 [tokens, hidden], optional
        What other experts have given, added last.
    blocks : Blocks, optional
        The pairs, sorted; by default they are sorted here.
    entering : callable, optional
        From SwiGLU's activations, float32, to what of them enters the down projection: by default all, in an engine of
        bfloat16 what that rounding leaves.

    Returns
    -------
    float32 [tokens, hidden]; a token's bits do not depend on the other tokens.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    _check("gate_up", gate_up)
    _check("down", down)
    check_rows("moe", x, gate_up.in_features)
    experts, width = gate_up.values.shape[0], down.in_features
    if gate_up.values.shape[1] != 2 * width or down.values.shape[:2] != (experts, x.shape[1]):
        raise ValueError(
            f"moe: down {list(down.values.shape)} does not fit gate_up {list(gate_up.values.shape)} "
            f"and x {list(x.shape)}"
        )
    check_routing("moe", x, expert_ids, weights, shared)
    if not runs_cuda(x):

        def expert(index: int, rows: np.ndarray) -> np.ndarray:
            gate, up = np.split(linear.linear(rows, linear.tile(gate_up.expert(index))), 2, axis=1)
            return linear.linear(entering(reference.swiglu(gate, up)), linear.tile(down.expert(index)))

        routed = reference.moe(x, expert_ids, weights, expert)
        return routed if shared is None else routed + shared

    xp, (tokens, hidden), top_k = array_module(x), x.shape, expert_ids.shape[1]
    pairs = tokens * top_k
    if not pairs:
        return xp.zeros((tokens, hidden), np.float32) if shared is None else shared
    blocks = blocks or sort_pairs(expert_ids, experts, ROWS)
    max_blocks = len(blocks.experts)

    activations = xp.empty((pairs, width), np.float32)
    sizes = (np.int32(width), np.int32(hidden), np.int32(top_k), elements(x, 0))
    _gate_up.specialize(**gate_up.types)(
        (max_blocks, -(-width // OUTPUTS)),
        (THREADS,),
        (pointer(x), gate_up.values, gate_up.scales, *blocks, activations, *sizes),
    )
    outputs = xp.empty((pairs, hidden), np.float32)
    _down.specialize(**down.types)(
        (max_blocks, -(-hidden // OUTPUTS)),
        (THREADS,),
        (entering(activations), down.values, down.scales, *blocks, outputs, np.int32(hidden), np.int32(width)),
    )
    return sum_pairs(outputs, weights, shared)


def _check(name: str, experts: Experts) -> None:
    values, scales = experts
    if values.ndim != 3:
        raise ValueError(f"moe: {name} {list(values.shape)}, expected three axes: experts, out, in")
    groups, rest = divmod(experts.in_features, GROUP_SIZE)
    if scales is not None and (rest or scales.shape != (*values.shape[:2], groups)):
        raise ValueError(
            f"moe: {name} {list(values.shape)} with scales {list(scales.shape)}, "
            f"expected [experts, out, in/8] and [experts, out, in/32] with in a multiple of group_size={GROUP_SIZE}"
        )
