"""One W4A16 product: our kernels, the memory's floor and other people's kernels, in one process."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.bench import peers
from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.timing import cache_bytes, copies_of, microseconds, require_gpu, torch_microseconds
from kdtree_nb.engine.device import Device
from kdtree_nb.kernels.w4a16_gemm import w4a16_gemm
from kdtree_nb.kernels.w4a16_mma import tile_weight, w4a16_mma
from kdtree_nb.quantization import GROUP_SIZE, QuantizedWeight, pack

SHAPES = ((2048, 7168), (4096, 7168), (7168, 2048), (1408, 2048), (2048, 1408), (11264, 2048))
"""Outputs and inputs: projections of Kimi K2's experts, then of Moonlight's experts and of its dense layer."""
ROWS = (1, 8, 16, 32, 64)
OURS = ("w4a16_mma", "w4a16_gemm")
BYTES_PER_WEIGHT = 0.5 + 2 / GROUP_SIZE
"""Of INT4 codes and bfloat16 scales."""


def product(kernel: str, out_features: int, in_features: int, rows: int, microseconds: float) -> Measured:
    """One kernel's time for x [rows, in] with a weight [out, in].

    It cannot do without the weight as INT4 codes and bfloat16 scales, whatever the kernel reads, nor without two
    operations for each weight and row.
    """
    case, weights = {"shape": f"{out_features}x{in_features}", "rows": rows}, out_features * in_features
    return Measured(kernel, case, microseconds, weights * BYTES_PER_WEIGHT, 2.0 * weights * rows)


def parse_shape(text: str) -> tuple[int, int]:
    """``2048x7168`` as outputs and inputs.

    Raises
    ------
    ValueError
        If it is not two positive numbers, or the inputs are no whole groups.
    """
    try:
        out_features, in_features = (int(part) for part in text.split("x"))
    except ValueError:
        raise ValueError(f"bench gemm: --shape {text!r}, expected OUTxIN such as 2048x7168") from None
    if out_features < 1 or in_features < 1 or in_features % GROUP_SIZE:
        raise ValueError(f"bench gemm: --shape {text!r}, expected positive sizes, IN a multiple of {GROUP_SIZE}")
    return out_features, in_features


def measure(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], with_peers: Sequence[peers.Peer]
) -> Iterator[Measured]:
    """Time every kernel for every shape and number of rows.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    device, cache = Device.named("cuda"), cache_bytes()
    for out_features, in_features in shapes:
        rng = np.random.default_rng(0)
        codes = rng.integers(-8, 8, (out_features, in_features)).astype(np.int8)
        scales = rng.uniform(0.5, 1.5, (out_features, in_features // GROUP_SIZE)) / (4.6 * np.sqrt(in_features))
        weight = QuantizedWeight(pack(codes), scales.astype(bfloat16))
        activations = [rng.standard_normal((m, in_features)).astype(np.float32) for m in rows]
        packed = device.put(weight.qweight), device.put(weight.scales)
        copies = copies_of(sum(array.nbytes for array in packed), cache)

        tiled = tile_weight(*packed)
        weights: list[Any] = [
            tiled._replace(codes=tiled.codes.copy(), scales=tiled.scales.copy()) for _ in range(copies)
        ]
        for x in activations:
            calls = _calls(w4a16_mma, device.put(x.astype(bfloat16)), weights)
            yield product(OURS[0], out_features, in_features, len(x), microseconds(calls))
        weights = [tuple(array.copy() for array in packed) for _ in range(copies)]
        for x in activations:
            calls = _calls(lambda x, w: w4a16_gemm(x, *w), device.put(x), weights)
            yield product(OURS[1], out_features, in_features, len(x), microseconds(calls))
        for peer in with_peers:
            copies_here = copies_of(int(out_features * in_features * peer.bytes_per_weight), cache)
            weights = peer.prepare(weight, copies_here)
            for x in activations:
                calls = _calls(peer.multiply, peers.to_torch(x), weights)
                yield product(peer.name, out_features, in_features, len(x), torch_microseconds(calls))
        del weights, calls


def _calls(multiply: Callable[[Any, Any], Any], x: Any, weights: Sequence[Any]) -> list[Callable[[], Any]]:
    return [partial(multiply, x, weight) for weight in weights]
