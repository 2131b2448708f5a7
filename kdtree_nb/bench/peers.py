"""Other people's W4A16 products, as ``bench --peers`` calls them; each needs torch."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, QuantizedWeight


class Peer(NamedTuple):
    """A kernel to compare with.

    prepare
        From a weight and a number of copies, so many weights in the kernel's own form on the GPU.
    multiply
        From x, bfloat16 [rows, in] in torch, and one of these, x · weightᵀ.
    """

    name: str
    package: str
    bytes_per_weight: float
    prepare: Callable[[QuantizedWeight, int], list[Any]]
    multiply: Callable[[Any, Any], Any]


def installed() -> tuple[list[Peer], list[str]]:
    """The peers that can run here, and a sentence for each that cannot."""
    missing = {package for package in ("torch", "humming") if not find_spec(package)}
    if "torch" in missing:
        missing.add("humming")  # which needs it
    found = [peer for peer in PEERS if peer.package not in missing]
    return found, [f"{peer.name}: {peer.package} is not installed" for peer in PEERS if peer.package in missing]


def missing(peer: str, *packages: str) -> list[str]:
    """A sentence for each package that a peer needs and that is not installed."""
    return [f"{peer}: {package} is not installed" for package in packages if not find_spec(package)]


def to_torch(array: np.ndarray) -> Any:
    """An array on the GPU, floats as bfloat16."""
    import torch

    if array.dtype == np.int32:
        return torch.from_numpy(array).cuda()
    return torch.from_numpy(array.astype(bfloat16).view(np.int16)).cuda().view(torch.bfloat16)


def _bf16(weight: QuantizedWeight, copies: int) -> list[Any]:
    dense = to_torch(weight.dequantized)
    return [dense.clone() for _ in range(copies)]


def _multiply_bf16(x: Any, weight: Any) -> Any:
    return x @ weight.T


def _tinygemm(weight: QuantizedWeight, copies: int) -> list[Any]:
    """torch's own INT4 weight: bytes of two codes, the even one in the upper half; a zero beside each scale."""
    import torch

    pairs = to_torch(weight.qweight).view(torch.uint8)
    codes = torch.ops.aten._convert_weight_to_int4pack((pairs << 4) | (pairs >> 4), 8)
    scales = to_torch(weight.scales.astype(np.float32)).T
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()
    return [(codes.clone(), scales_and_zeros.clone()) for _ in range(copies)]


def _multiply_tinygemm(x: Any, weight: Any) -> Any:
    import torch

    codes, scales_and_zeros = weight
    return torch.ops.aten._weight_int4pack_mm(x, codes, GROUP_SIZE, scales_and_zeros)


def _humming(weight: QuantizedWeight, copies: int) -> list[Any]:
    scales = weight.scales.astype(np.float32)
    return [humming_layer(to_torch(weight.qweight), to_torch(scales)) for _ in range(copies)]


def humming_layer(qweight: Any, scales: Any) -> Any:
    """Humming's weight of codes int32 [out, in / 8] and bfloat16 scales [out, in / 32], or of experts' before these.

    It is a copy in humming's own order.
    """
    import torch
    from humming.layer import HummingLayer

    *experts, out_features, words = qweight.shape
    form = dict(quant_method="compressed-tensors", format="pack-quantized", type="int", num_bits=4)
    with torch.device("cuda"):
        layer = HummingLayer(
            shape_n=out_features,
            shape_k=words * CODES_PER_WORD,
            num_experts=experts[0] if experts else None,
            torch_dtype=torch.bfloat16,
            weight_config=dict(**form, strategy="group", group_size=GROUP_SIZE, symmetric=True),
        )
    layer.load_from_tensors({"weight_packed": qweight, "weight_scale": scales})
    layer.transform()
    return layer


PEERS = (
    Peer("torch bf16", "torch", 2.0, _bf16, _multiply_bf16),
    Peer("tinygemm", "torch", 0.5625, _tinygemm, _multiply_tinygemm),
    Peer("humming", "humming", 0.5625, _humming, lambda x, layer: layer(x)),
)
