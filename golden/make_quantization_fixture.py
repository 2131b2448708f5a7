"""Store what the compressed-tensors library itself makes of some weights, for tests/test_quantization.py.

    pip install -e '.[parity]' && python -m golden.make_quantization_fixture

Scales, codes, packed words and the dequantised weight are all the library's; nothing of kdtree_nb is imported.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file

TARGET = Path(__file__).parent / "fixtures" / "compressed_tensors.safetensors"
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
)


def quantized(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The library's way from a weight to what a checkpoint holds, and back."""
    scale, zero_point = compute_dynamic_scales_and_zp(weight, SCHEME.weights, module=None)
    codes = quantize(weight, scale, zero_point, SCHEME.weights, dtype=torch.int8)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    packed = PackedQuantizationCompressor.compress(state, SCHEME)
    return {
        "weight": weight,
        "codes": codes,
        **packed,
        "dequantized": PackedQuantizationCompressor.decompress(packed, SCHEME)["weight"],
    }


def special_rows() -> torch.Tensor:
    """float32 [13, 64]: groups that rounding, clipping and tiny scales could get wrong."""
    ramp = torch.arange(32, dtype=torch.float32)
    outlier = torch.full((32,), 0.01)
    outlier[5] = -100.0
    groups = [
        torch.zeros(32),
        torch.full((32,), 1e-6),
        torch.full((32,), 3e38),
        -ramp,  # the largest magnitude is negative: code -8 is reached
        ramp,
        ramp / 2 - 7.5,  # scale 1 and every half: ties go to the even code
        ramp / 4 - 3.75,
        outlier,
        torch.full((32,), 1e-45),  # a scale that underflows to zero
        ramp * 1e-44,  # a subnormal scale
        torch.tensor([-6.0, 2.0, 3.0, -2.0] * 8),
        torch.full((32,), -0.0),
        torch.linspace(-7.5, 7.5, 32),
    ]
    return torch.stack([torch.cat([group, groups[(i + 1) % len(groups)]]) for i, group in enumerate(groups)])


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(24, 96, generator=generator) * 0.02
    wide = torch.randn(8, 256, generator=generator) * torch.logspace(-6, 3, 8)[:, None]
    ragged = torch.randint(-8, 8, (5, 13), generator=generator, dtype=torch.int8)
    tensors = {"ragged.codes": ragged, "ragged.weight_packed": pack_to_int32(ragged, 4)}
    for case, weight in {"normal": normal, "wide": wide, "special": special_rows()}.items():
        for dtype in (torch.float32, torch.bfloat16):
            for name, tensor in quantized(weight.to(dtype)).items():
                tensors[f"{case}.{str(dtype).removeprefix('torch.')}.{name}"] = tensor.contiguous()
    packages = ("torch", "compressed-tensors", "transformers", "safetensors")
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    TARGET.parent.mkdir(exist_ok=True)
    save_file(tensors, TARGET, {"versions": json.dumps(versions)})  # one key: more come in an order that changes
    print(f"{TARGET}: {len(tensors)} tensors, {TARGET.stat().st_size} bytes, {versions}")


if __name__ == "__main__":
    main()
