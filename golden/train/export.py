"""Step 6: the trained tensors as a KDTR bundle, with tokenizer, prompts, held-out samples and the record of it all.

The codes and scales that training ended with are written as they are. Before that, the package's own quantiser is held
against them: it must give the same bits from the masters (where training left them), and from random weights of the
same scale. The shipped tensors are then read back and scored on the held-out samples that ship beside them.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import evaluate
import ml_dtypes
import numpy as np
import quantize
import torch
from model import Transformer, load_named_tensors
from recipe import Architecture, DrafterArchitecture
from safetensors.torch import load_file
from sources import DOMAINS
from tokenize_corpus import END_OF_TEXT, encode
from tokenizers import Tokenizer

from kdtree_nb.bundle import Bundle, write_bundle
from kdtree_nb.bundle.format import DRAFTER_SUFFIX, SUFFIX
from kdtree_nb.config import DrafterConfig, ModelConfig
from kdtree_nb.quantization import quantize as package_quantize

BUNDLE = "kdt16m-int4.kdtr"


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def model_config(architecture: Architecture, tokenizer: Tokenizer) -> ModelConfig:
    numbers = {name: getattr(architecture, name) for name in architecture.__dataclass_fields__}
    return ModelConfig.from_hf(
        {**numbers, "model_type": "deepseek_v3", "eos_token_id": tokenizer.token_to_id(END_OF_TEXT)}
    )


def same_bits(name: str, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise unless the package quantises bfloat16 `weight` [out, in] to these packed codes and scales."""
    ours = package_quantize(to_numpy(weight), rule="minmax")
    if not np.array_equal(ours.qweight, codes.numpy()) or not np.array_equal(ours.scales, to_numpy(scales)):
        raise ValueError(f"export: {name}: kdtree_nb.quantization and training disagree on the INT4 codes or scales")


def check_quantiser(shipped: dict[str, torch.Tensor], masters: dict[str, torch.Tensor] | None) -> str:
    """Hold the package's quantiser against training's, matrix by matrix; return what was compared."""
    generator = torch.Generator().manual_seed(0)
    names = [name[:-3] for name in shipped if name.endswith(".qw")]
    for name in names:
        values = quantize.dequantise(quantize.unpack(shipped[f"{name}.qw"]), shipped[f"{name}.sc"])
        step = shipped[f"{name}.sc"].float().repeat_interleave(quantize.GROUP, 1)
        moved = (values + step * (torch.rand(values.shape, generator=generator) - 0.5)).to(torch.bfloat16)
        codes, scales = quantize.quantise(moved)
        same_bits(name, moved, quantize.pack(codes), scales)
        if masters is not None:
            same_bits(name, masters[name].to(torch.bfloat16), shipped[f"{name}.qw"], shipped[f"{name}.sc"])
    return f"{len(names)} matrices" + (", the masters too" if masters is not None else ", moved within half a step")


def score_samples(bundle: Path, tokenizer: Tokenizer, samples: Path) -> dict[str, float]:
    """INT4 bits per byte of each held-out sample, read as one document, from the bundle as it lies on disk."""
    opened = Bundle.open(bundle)
    model = Transformer(Architecture())
    load_named_tensors(model, quantize.float_tensors({name: to_torch(opened[name]) for name in opened}))
    result = {}
    for domain in DOMAINS:
        text = (samples / f"{domain}.txt").read_text(encoding="utf-8")
        bits = evaluate.bits(model, encode(tokenizer, [text]), stride=256, batch_size=8)
        result[domain] = round(bits / len(text.encode()), 5)
    return result


def build(folder: Path, out: Path) -> None:
    """Write everything that is committed, but the model card, into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    shipped = load_file(folder / "weights.safetensors")
    masters = load_file(folder / "masters.safetensors") if (folder / "masters.safetensors").exists() else None
    print(f"  same INT4 bits in training and in kdtree_nb: {check_quantiser(shipped, masters)}")
    for name in ("tokenizer.json", "prompts.json"):
        shutil.copy(folder / name, out / name)
    shutil.copytree(folder / "heldout", out / "heldout", dirs_exist_ok=True)
    shutil.copy(folder / "manifest.json", out / "corpus.json")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    config = model_config(Architecture(), tokenizer)
    tensors = {name: to_numpy(tensor) for name, tensor in shipped.items()}
    bundle = write_bundle(out / BUNDLE, config, tensors, tokenizer="tokenizer.json")
    record = json.loads((folder / "training.json").read_text())
    record["corpus_sha256"] = json.loads((folder / "manifest.json").read_text())["sha256"]
    record["baselines"] = json.loads((folder / "baselines.json").read_text())
    record["samples"] = {"int4": {"stride_256": score_samples(bundle, tokenizer, out / "heldout")}}
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"  {bundle.name}: {bundle.stat().st_size:,d} bytes")
    print_table(record)


def print_table(record: dict) -> None:
    """Held-out bits per byte, all models side by side."""
    scores, baselines = record["bits_per_byte"], record["baselines"]
    print(f"  {'bits per byte':14s}{'fp32':>8s}{'int4':>8s}{'disjoint':>10s}{'xz':>8s}{'5-gram':>8s}{'sample':>8s}")
    for domain in DOMAINS:
        row = [scores["fp32"]["stride_256"], scores["int4"]["stride_256"], scores["int4"]["stride_512"],
               baselines["xz"], baselines["five_gram"], record["samples"]["int4"]["stride_256"]]  # fmt: skip
        a, b, c, d, e, f = (column[domain] for column in row)
        print(f"  {domain:14s}{a:8.4f}{b:8.4f}{c:10.4f}{d:8.3f}{e:8.3f}{f:8.4f}")


def build_drafter(folder: Path, out: Path) -> None:
    """Write the drafter's bundle beside its target's, and the record of its training."""
    out.mkdir(parents=True, exist_ok=True)
    a, target = DrafterArchitecture(), Architecture()
    inner = ("mask_token_id", "target_layer_ids", "transition_rank", "num_candidates")
    config = DrafterConfig.from_hf(
        {
            **{name: value for name, value in asdict(a).items() if name not in inner},
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "use_sliding_window": True,
            "dflash_config": {name: getattr(a, name) for name in inner},
        }
    )
    tensors = {name: to_numpy(tensor) for name, tensor in load_file(folder / "drafter.safetensors").items()}
    bundle = write_bundle(out / BUNDLE.replace(SUFFIX, DRAFTER_SUFFIX), config, tensors)
    shutil.copy(folder / "drafter.json", out / "drafter.json")
    print(f"  {bundle.name}: {bundle.stat().st_size:,d} bytes")
