"""A layer's routed experts: ours, the memory's floor, and humming's two grouped products."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.gemm import BYTES_PER_WEIGHT
from kdtree_nb.bench.inputs import as_torch, random_int4, random_routing
from kdtree_nb.bench.peers import humming_layer
from kdtree_nb.bench.timing import cache_bytes, copies_of, microseconds, require_gpu, torch_microseconds
from kdtree_nb.engine.device import Device
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.moe import Experts, moe

ROWS = (1, 4, 8, 16, 32, 64)
EXACT_ROWS = 8
"""The exact kernels are timed up to here: they multiply in fp32, which no one would do with more rows."""
OURS = ("moe_mma", "moe")
PEER = "humming"
Packed = tuple[Array, Array]


class Shape(NamedTuple):
    """A layer's routed experts."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def gate_up(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs of the two projections that SwiGLU joins."""
        return self.experts, 2 * self.width, self.hidden

    @property
    def down(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs of the last projection."""
        return self.experts, self.hidden, self.width

    @property
    def expert_bytes(self) -> float:
        """Of one expert's three weights, as INT4 codes and bfloat16 scales."""
        return 3 * self.hidden * self.width * BYTES_PER_WEIGHT

    def operations(self, rows: int) -> float:
        """Multiplications and additions for so many rows."""
        return 2.0 * rows * self.top_k * 3 * self.hidden * self.width


SHAPES = {"kimi-k2": Shape(384, 8, 7168, 2048), "moonlight": Shape(64, 6, 2048, 1408)}


def chosen(names: Sequence[str]) -> dict[str, Shape]:
    """The shapes of these names, all without any.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"bench moe: --shape {name!r}, expected one of {', '.join(SHAPES)}")
    return {name: SHAPES[name] for name in names or SHAPES}


def steps(shapes: Collection[str], rows: Sequence[int], with_peer: bool) -> int:
    """How many times :func:`measure` yields."""
    return len(shapes) * (len(rows) * (1 + with_peer) + sum(m <= EXACT_ROWS for m in rows))


def measure(shapes: dict[str, Shape], rows: Sequence[int], with_peer: bool) -> Iterator[Measured]:
    """Time the experts of each shape for each number of rows, routed at random.

    Every call of a graph has experts and a routing of its own, so that it finds nothing in the cache. Humming's figure
    is of its two products alone: its routing tables are made before, SwiGLU and the weighted sum left out. Its
    products take the same experts for the same rows.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    for name, shape in shapes.items():
        copies = copies_of(int(shape.top_k * shape.expert_bytes), cache_bytes())
        random = np.random.default_rng(0)
        packed = [
            (random_int4(shape.gate_up, 2 * copy), random_int4(shape.down, 2 * copy + 1)) for copy in range(copies)
        ]
        routings = {m: [random_routing(m, shape.experts, shape.top_k, random) for _ in packed] for m in rows}
        for kernel, timed, every in (
            (OURS[0], _fast, rows),
            (OURS[1], _exact, [m for m in rows if m <= EXACT_ROWS]),
            (PEER, _humming, rows if with_peer else ()),
        ):
            for m, time in timed(shape, packed, {m: routings[m] for m in every}) if every else ():
                distinct = float(np.mean([len(np.unique(expert_ids)) for expert_ids, _ in routings[m]]))
                case = {"layer": name, "rows": m}
                yield Measured(kernel, case, time, distinct * shape.expert_bytes, shape.operations(m))


Routing = tuple[np.ndarray, np.ndarray]
Timed = Iterator[tuple[int, float]]


def _fast(shape: Shape, packed: list[tuple[Packed, Packed]], routings: dict[int, list[Routing]]) -> Timed:
    from kdtree_nb.kernels.moe_mma import moe_mma, tile_experts

    tiled = [(tile_experts(*gate_up), tile_experts(*down)) for gate_up, down in packed]
    return _ours(moe_mma, bfloat16, shape, tiled, routings)


def _exact(shape: Shape, packed: list[tuple[Packed, Packed]], routings: dict[int, list[Routing]]) -> Timed:
    experts = [(Experts(*gate_up), Experts(*down)) for gate_up, down in packed]
    return _ours(moe, np.float32, shape, experts, routings)


def _ours(
    kernel: Callable[..., Array], dtype: Any, shape: Shape, experts: list[Any], routings: dict[int, list[Routing]]
) -> Timed:
    device = Device.named("cuda")
    for m, routed in routings.items():
        x = device.put(np.random.default_rng(m).standard_normal((m, shape.hidden)).astype(dtype))
        tables = [(device.put(expert_ids), device.put(weights)) for expert_ids, weights in routed]
        calls = [partial(kernel, x, *table, *own) for table, own in zip(tables, experts, strict=True)]
        yield m, microseconds(calls)


def _humming(shape: Shape, packed: list[tuple[Packed, Packed]], routings: dict[int, list[Routing]]) -> Timed:
    import cupy
    import torch

    cupy.get_default_memory_pool().free_all_blocks()  # what our kernels have left is torch's to take
    layers = [(humming_layer(*map(as_torch, gate_up)), humming_layer(*map(as_torch, down))) for gate_up, down in packed]
    for m, routed in routings.items():
        x = torch.randn(m, shape.hidden, device="cuda", dtype=torch.bfloat16)
        between = torch.randn(m * shape.top_k, shape.width, device="cuda", dtype=torch.bfloat16)
        calls = []
        for (expert_ids, _), (gate_up, down) in zip(routed, layers, strict=True):
            ids = torch.from_numpy(expert_ids).cuda()
            first = partial(gate_up, x, top_k=shape.top_k, **_tables(gate_up, ids))
            second = partial(down, between, top_k=1, **_tables(down, ids.reshape(-1, 1)))
            calls.append(partial(_both, first, second))
        yield m, torch_microseconds(calls)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


def _tables(layer: Any, expert_ids: Any) -> dict[str, Any]:
    """What humming's indexed product wants to know of a routing [rows, top_k], in blocks of the size that it takes."""
    from humming.testing.data import generate_moe_tensors
    from humming.tune import get_heuristics_config

    ranges = get_heuristics_config(layer.humming_config, gemm_type="indexed")
    pairs, experts = expert_ids.numel(), layer.num_experts
    block = next(config["block_shape"][0] for low, high, config in ranges if low < pairs <= high)
    _, _, sorted_ids, block_experts, padded = generate_moe_tensors(expert_ids, experts, "indexed", block)
    tables = {"sorted_ids": sorted_ids, "expert_ids": block_experts, "num_tokens_padded": padded}
    return {**tables, "compute_config": {"gemm_type": "indexed"}}
