"""Step 3: train the model on a GPU, then write what ships.

Random crops of the sources, bf16 autocast over fp32 masters, AdamW, a cosine over a fixed number of steps. Over the
last fifth every weight is used as it will ship (`quantize.as_shipped`), so the model learns around its own rounding.

Output: ``weights.safetensors``, the shipped tensors (packed codes, scales, bfloat16 floats, the router in float32);
``masters.safetensors``, what they were rounded from; and ``training.json``: recipe, versions, device, curves, and
held-out bits per byte of both.
"""

import json
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from model import MoE, Transformer, load_named_tensors, named_tensors
from quantize import as_shipped, float_tensors, shipped_tensors
from recipe import Architecture, DrafterRecipe, Recipe
from safetensors.torch import save_file
from sources import DOMAINS
from torch import Tensor, nn


class Crops:
    """Random crops of the training tokens, all on the device; a source is drawn by its tokens times its weight."""

    def __init__(self, tokens: dict[str, np.ndarray], recipe: Recipe, context: int, device: str) -> None:
        self.tokens = torch.from_numpy(tokens["train"].astype(np.int32)).to(device)
        starts = torch.from_numpy(tokens["starts"]).to(device)
        self.first, self.last = starts[:-1], starts[1:] - context - 1
        weights = torch.tensor([recipe.source_weights[str(name)] for name in tokens["sources"]], device=device)
        self.shares = weights * (starts[1:] - starts[:-1])
        self.offsets = torch.arange(context + 1, device=device)
        self.batch_size = recipe.batch_size
        self.generator = torch.Generator(device).manual_seed(recipe.seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [batch, context]."""
        source = torch.multinomial(self.shares, self.batch_size, replacement=True, generator=self.generator)
        where = torch.rand(self.batch_size, generator=self.generator, device=source.device, dtype=torch.float64)
        start = self.first[source] + (where * (self.last - self.first)[source]).long()
        crop = self.tokens[start[:, None] + self.offsets].long()
        return crop[:, :-1], crop[:, 1:]


def learning_rate(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def optimiser_for(model: nn.Module, recipe: Recipe | DrafterRecipe) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def quick_look(plain: Transformer, model: Transformer, tokens: dict[str, np.ndarray]) -> dict[str, float]:
    """Bits per byte on the first held-out documents of each domain, in bf16: for the curves, not for the record.

    `plain` is a second, uncompiled model that takes the weights of `model`: the windows here have many shapes.
    """
    plain.load_state_dict(model.state_dict())
    result = {}
    for domain in DOMAINS:
        documents, _ = evaluate.heldout(tokens, domain)
        some = documents[: max(1, len(documents) // 3)]
        size = tokens[f"heldout_{domain}_bytes"][: len(some)].sum()
        with torch.autocast(plain.lm_head.weight.device.type, dtype=torch.bfloat16):
            result[domain] = round(evaluate.bits(plain, some, stride=512) / float(size), 4)
    return result


def train(
    tokens: dict[str, np.ndarray], architecture: Architecture, recipe: Recipe, device: str
) -> tuple[Transformer, list[dict]]:
    """Train from scratch; return the model, holding its masters, and the curve."""
    torch.manual_seed(recipe.seed)
    model = Transformer(architecture, recipe.dropout)
    model.initialise(recipe.initial_std)
    model.to(device).train()
    plain = Transformer(architecture).to(device)
    experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    crops = Crops(tokens, recipe, architecture.max_position_embeddings, device)
    optimiser = optimiser_for(model, recipe)
    autocast = torch.autocast(device, dtype=torch.bfloat16)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), targets.flatten())

    if device == "cuda":
        for layer in model.layers:
            layer.compile(dynamic=False)
        loss_of = torch.compile(loss_of, dynamic=False)

    curve, started, recent = [], time.time(), torch.zeros((), device=device)
    for step in range(recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, recipe)
        inputs, targets = crops.draw()
        rounded = step >= recipe.rounded_from * recipe.steps
        with as_shipped(model) if rounded else nullcontext():
            with autocast:
                loss = loss_of(model.hidden(inputs)[0], targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        recent += loss.detach()
        load = torch.stack([moe.load / moe.load.sum() for moe in experts]) if (step + 1) % 100 == 0 else None
        for moe in experts:
            moe.balance(recipe.balance_step if step < recipe.balance_until * recipe.steps else 0.0)
        if load is not None:
            point = {
                "step": step + 1,
                "seconds": round(time.time() - started, 1),
                "loss": round(recent.item() / 100, 4),  # nats per token, dropout on, over the last 100 steps
                "largest_load": round(load.max().item(), 3),  # share of an expert in the last step, of all layers
                "smallest_load": round(load.min().item(), 3),
            }
            recent.zero_()
            if (step + 1) % recipe.evaluate_every == 0:
                point["held_out"] = quick_look(plain, model, tokens)
            curve.append(point)
            if (step + 1) % recipe.evaluate_every == 0 or step < 500:
                print("  ", json.dumps(point), flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"  {recipe.steps} steps in {time.time() - started:.1f} s", flush=True)
    return model, curve


def beginnings(tokens: dict[str, np.ndarray], length: int = 1025) -> dict[str, np.ndarray]:
    """The same tokens, but of each domain's held-out text only the first few, their bytes guessed: for smoke runs."""
    short = dict(tokens)
    for domain in DOMAINS:
        first = tokens[f"heldout_{domain}_starts"][1]
        kept = min(length, first)
        short[f"heldout_{domain}"] = tokens[f"heldout_{domain}"][:kept]
        short[f"heldout_{domain}_starts"] = np.array([0, kept])
        short[f"heldout_{domain}_bytes"] = tokens[f"heldout_{domain}_bytes"][:1] * kept // first
    return short


def build(folder: Path, recipe: Recipe, device: str, smoke: bool = False) -> None:
    """Train on ``tokens.npz`` of `folder`; write the three files there. A smoke run is scored on next to nothing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("train: needs a CUDA GPU (six minutes of an H200); for a smoke run: --device cpu --steps 20")
    architecture = Architecture()
    tokens = dict(np.load(folder / "tokens.npz"))
    if smoke:
        tokens = beginnings(tokens)
    begun = time.time()
    model, curve = train(tokens, architecture, recipe, device)
    seconds = time.time() - begun

    shipped = shipped_tensors(named_tensors(model))
    on_cpu = shipped_tensors({name: tensor.cpu() for name, tensor in named_tensors(model).items()})
    differing = [name for name in shipped if not torch.equal(shipped[name], on_cpu[name])]
    if differing:
        raise RuntimeError(f"train: GPU and CPU round differently: {len(differing)} tensors, first {differing[0]}")
    save_file(shipped, folder / "weights.safetensors")
    masters = {name: tensor.cpu().contiguous() for name, tensor in named_tensors(model).items()}
    save_file(masters, folder / "masters.safetensors")
    plain = Transformer(architecture).to(device)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, tensors in (("fp32", named_tensors(model)), ("int4", float_tensors(shipped))):
        load_named_tensors(plain, tensors)
        results[name] = {f"stride_{s}": evaluate.bits_per_byte(plain, tokens, s) for s in (256, 512)}
        print(f"  {name}", json.dumps(results[name]["stride_256"]), flush=True)
    record = {
        "architecture": asdict(architecture),
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "tokens_seen": recipe.steps * recipe.batch_size * architecture.max_position_embeddings,
        "bits_per_byte": results,
        "curve": curve,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
