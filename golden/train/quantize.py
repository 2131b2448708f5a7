"""INT4 in torch, for training: groups of 32 along the input, rule ``minmax``, as compressed-tensors computes it.

Kept apart from ``kdtree_nb.quantization`` on purpose: training ends with these codes and scales, `export` checks that
the package computes the same bits from the same weights. Everything happens in bfloat16, each division a true one: a
multiplication by 1/7.5 would move a third of the groups to other codes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

GROUP = 32
QUANTISED = ("gate_proj", "up_proj", "down_proj")  # of the dense MLP, the routed and the shared experts


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes −8…7 int8 [..., in] and scales bfloat16 [..., in / 32] of a weight [..., in]."""
    groups = weight.to(torch.bfloat16).unflatten(-1, (-1, GROUP))
    # A divisor on the weight's own device: torch turns a division by a host number into a multiplication on a GPU.
    half_range = torch.full((), 7.5, dtype=torch.bfloat16, device=weight.device)
    scales = groups.abs().amax(-1, keepdim=True) / half_range
    scales = torch.where(scales == 0, torch.finfo(torch.bfloat16).eps, scales)
    codes = (groups / scales).clamp(-8, 7).round().to(torch.int8)
    return codes.flatten(-2), scales.squeeze(-1)


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The exact products code · scale, float32 [..., in]."""
    return (codes.float().unflatten(-1, (-1, GROUP)) * scales.float().unsqueeze(-1)).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Codes [out, in] to int32 words [out, in / 8]: offset binary, element 0 in the low nibble."""
    nibbles = (codes.long() + 8).unflatten(-1, (-1, 8))
    words = (nibbles << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Codes int8 [out, in] of packed words [out, in / 8]."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    return (((words.long().unsqueeze(-1) >> shifts) & 15) - 8).to(torch.int8).flatten(-2)


def is_quantised(name: str) -> bool:
    return name.endswith(QUANTISED)


def stays_float32(name: str) -> bool:
    """The router is never rounded: neither its weight nor its bias. Works on torch's names and on checkpoint names."""
    return name.endswith(("mlp.router", "mlp.bias", "mlp.gate", "e_score_correction_bias"))


@torch.no_grad()
def round_in_place(model: nn.Module) -> None:
    """Give every weight the value that it will ship with: INT4, bfloat16, or unchanged (the router)."""
    parameters = dict(model.named_parameters())
    quantised = [p for name, p in parameters.items() if is_quantised(name)]
    groups = torch.cat([p.detach().reshape(-1, GROUP) for p in quantised])  # groups know no matrix: all at once
    for parameter, rounded in zip(
        quantised, dequantise(*quantise(groups)).split([p.numel() // GROUP for p in quantised]), strict=True
    ):
        parameter.copy_(rounded.view_as(parameter))
    for name, parameter in parameters.items():
        if not is_quantised(name) and not stays_float32(name):
            parameter.copy_(parameter.to(torch.bfloat16))


@contextmanager
def as_shipped(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with its weights as they will ship; afterwards it has its masters back.

    A backward pass inside leaves the gradients of the rounded weights, which the optimiser then applies to the masters:
    the straight-through estimator.
    """
    masters = [p.detach().clone() for p in model.parameters()]
    round_in_place(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)


def shipped_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a bundle holds of `tensors` (checkpoint names): NAME.qw and NAME.sc, bfloat16, or float32 for the router."""
    shipped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantised(name):
            codes, scales = quantise(tensor)
            shipped |= {f"{name}.qw": pack(codes), f"{name}.sc": scales}
        else:
            shipped[name] = tensor.float() if stays_float32(name) else tensor.to(torch.bfloat16)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in shipped.items()}


def float_tensors(shipped: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 values that a bundle's tensors stand for, under checkpoint names."""
    values: dict[str, Tensor] = {}
    for name, tensor in shipped.items():
        if name.endswith(".qw"):
            values[name[:-3]] = dequantise(unpack(tensor), shipped[f"{name[:-3]}.sc"])
        elif not name.endswith(".sc"):
            values[name] = tensor.float()
    return values
