"""Step 2 of the drafter: train it on the target's own text, then its transition heads on what it drafts.

Labels are the tokens of the text; the loss of position k of a block weighs exp(−(k − 1) / γ). The heads learn on a
detached trunk, among its `num_candidates` best of each position and a tail that keeps its mass, as the engine uses
them. Over the last fifth every weight is used as it will ship, as for the target.

Output: ``drafter.safetensors``, the shipped tensors with the gated head, ``drafter-static.safetensors``, the tables
of the static one, and ``drafter.json``: recipe, versions, device, curve.
"""

import itertools
import json
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import texts
import torch
import torch.nn.functional as F
from drafter import Drafter, Transition
from model import Transformer, load_named_tensors
from quantize import as_shipped, float_tensors, shipped_tensors
from recipe import Architecture, DrafterArchitecture, DrafterRecipe
from safetensors.torch import save_file
from torch import Tensor, nn
from train import optimiser_for


def anchors_of(prompt: Tensor, length: int, recipe: DrafterRecipe, block: int, generator: torch.Generator) -> Tensor:
    """Positions int [texts, anchors] of last committed tokens, all of their block inside the text."""
    span = (length - block - prompt + 1).clamp(max=recipe.anchor_span)
    where = torch.rand(len(prompt), recipe.anchors, generator=generator, device=prompt.device)
    return prompt[:, None] - 1 + (where * span[:, None]).long()


def weighted(losses: Tensor, decay: float) -> Tensor:
    """Mean of losses [..., block − 1], each position by its weight."""
    weight = torch.exp(-torch.arange(losses.shape[-1], device=losses.device) / decay)
    return (losses * weight).mean(tuple(range(losses.ndim - 1))).sum() / weight.sum()


def transition_loss(
    head: Transition, hidden: Tensor, log_probs: Tensor, candidates: Tensor, labels: Tensor, decay: float
) -> Tensor:
    """Of positions 2 … of a block, their parents the labels before them; a label that is no candidate is in the tail.

    hidden [..., block − 1, hidden]; log_probs, candidates [..., block − 1, K]; labels [..., block − 1].
    """
    after = slice(1, None)
    base, known = log_probs[..., after, :], candidates[..., after, :]
    scores = base + head(labels[..., :-1], hidden[..., after, :], known).float()
    tail = torch.log1p(-base.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    scores = torch.cat((scores, tail), -1).log_softmax(-1)
    right = known == labels[..., after, None]
    chosen = torch.where(right.any(-1), right.int().argmax(-1), known.shape[-1])
    losses = -scores.gather(-1, chosen[..., None])[..., 0]
    return weighted(losses, decay)


class Training(nn.Module):
    """One step's losses and what the drafter got right, from ids and features."""

    def __init__(self, target: Transformer, drafter: Drafter, heads: nn.ModuleDict, recipe: DrafterRecipe) -> None:
        super().__init__()
        self.target, self.drafter, self.heads, self.recipe = target, drafter, heads, recipe

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor, with_heads: bool) -> tuple[Tensor, ...]:
        a = self.drafter.a
        hidden = self.drafter(self.target, features, ids, anchors)
        offsets = torch.arange(1, a.block_size, device=ids.device)
        labels = ids.gather(1, (anchors[..., None] + offsets).flatten(1)).view(*anchors.shape, -1)
        logits = self.target.lm_head(hidden).float()
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
        right = (logits.argmax(-1) == labels).cumprod(-1).sum(-1).float().mean()
        total = weighted(losses, self.recipe.decay)
        parts = [total.detach(), right]
        if with_heads:
            log_probs, candidates = logits.detach().log_softmax(-1).topk(a.num_candidates)
            for head in self.heads.values():
                loss = transition_loss(head, hidden.detach(), log_probs, candidates, labels, self.recipe.decay)
                total = total + loss
                parts.append(loss.detach())
        return total, torch.stack(parts)


def load_target(bundle: dict[str, Tensor], device: str) -> Transformer:
    """The target with the values that its bundle holds."""
    target = Transformer(Architecture())
    load_named_tensors(target, float_tensors(bundle))
    return target.to(device).eval().requires_grad_(False)


def initialised(
    target: Transformer, ids: Tensor, a: DrafterArchitecture, recipe: DrafterRecipe
) -> tuple[Drafter, nn.ModuleDict]:
    """A drafter whose first projection is scaled to the target's features of some texts, and its two heads."""
    with torch.no_grad():
        tapped = target.hidden(ids.long(), a.target_layer_ids)[1]
    drafter = Drafter(a)
    drafter.initialise(recipe.initial_std, [feature.square().mean().sqrt().item() for feature in tapped])
    heads = nn.ModuleDict({name: Transition(a, target.a.vocab_size, name == "gated") for name in ("static", "gated")})
    for head in heads.to(ids.device).values():
        nn.init.normal_(head.parent_table.weight, std=recipe.parent_std)
        nn.init.normal_(head.child_table.weight, std=recipe.child_std)
    return drafter.to(ids.device), heads


def learning_rate(step: int, progress: float, recipe: DrafterRecipe) -> float:
    """A warm-up by steps, under a cosine to 0 over the time."""
    warm = min(1, (step + 1) / recipe.warmup_steps)
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))


def curve_point(step: int, seconds: float, recent: list[Tensor]) -> dict[str, float]:
    """Means over the recent steps, of those that trained what the last one did."""
    means = torch.stack([parts for parts in recent if len(parts) == len(recent[-1])]).mean(0).tolist()
    named = zip(("loss", "right_from_the_first", "static", "gated"), means, strict=False)
    return {"step": step, "seconds": round(seconds, 1)} | {name: round(value, 4) for name, value in named}


def train(
    target: Transformer, data: dict[str, Tensor], a: DrafterArchitecture, recipe: DrafterRecipe, device: str
) -> tuple[Drafter, nn.ModuleDict, list[dict]]:
    """Train for the recipe's seconds, which begin when all is compiled; return the drafter, its heads and the curve."""
    torch.manual_seed(recipe.seed)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    drafter, heads = initialised(target, data["ids"][: recipe.batch_size], a, recipe)
    losses: nn.Module = Training(target, drafter, heads, recipe)
    if device == "cuda":
        losses = torch.compile(losses, dynamic=False)
        for layer in target.layers:
            layer.compile(dynamic=False)
    shipping = nn.ModuleList([drafter, heads])
    optimiser = optimiser_for(shipping, recipe)

    curve, recent, started = [], [], math.inf
    for step in itertools.count():
        if step == 3:  # compiling is not training
            started = time.time()
        progress = max(0.0, time.time() - started) / recipe.seconds
        if progress >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, progress, recipe)
        chosen = torch.randint(len(data["ids"]), (recipe.batch_size,), generator=generator, device=device)
        ids, prompt = data["ids"][chosen].long(), data["prompt"][chosen].long()
        anchors = anchors_of(prompt, ids.shape[1], recipe, a.block_size, generator)
        with torch.no_grad():
            features = torch.cat(target.hidden(ids, a.target_layer_ids)[1], -1)
        with_heads = progress >= recipe.transition_from or step == 1  # step 1 compiles it
        with as_shipped(shipping) if progress >= recipe.rounded_from else nullcontext():
            with torch.autocast(device, dtype=torch.bfloat16):
                loss, parts = losses(features, ids, anchors, with_heads)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(shipping.parameters(), recipe.gradient_clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        recent.append(parts)
        if (step + 1) % 500 == 0:
            curve.append(curve_point(step + 1, max(0.0, time.time() - started), recent))
            recent.clear()
            print("  ", json.dumps(curve[-1]), flush=True)
    return drafter, heads, curve


def drafter_tensors(drafter: Drafter, head: Transition) -> dict[str, Tensor]:
    """Every weight under its checkpoint name without ``.weight``."""
    tensors = {name.removesuffix(".weight"): tensor for name, tensor in drafter.state_dict().items()}
    return tensors | {f"transition.{name.removesuffix('.weight')}": t for name, t in head.state_dict().items()}


def build(folder: Path, bundle: dict[str, Tensor], recipe: DrafterRecipe, device: str) -> None:
    """Write texts for the target of `bundle`, train on them; write the three files into `folder`."""
    torch.backends.cuda.matmul.allow_tf32 = True
    a = DrafterArchitecture()
    target = load_target(bundle, device)
    begun = time.time()
    data = texts.write(target, dict(np.load(folder / "tokens.npz")), recipe, device)
    drafter, heads, curve = train(target, data, a, recipe, device)
    seconds = time.time() - begun
    save_file(shipped_tensors(drafter_tensors(drafter, heads["gated"])), folder / "drafter.safetensors")
    static = {name: t for name, t in drafter_tensors(drafter, heads["static"]).items() if name.startswith("transition")}
    save_file(shipped_tensors(static), folder / "drafter-static.safetensors")
    record = {
        "architecture": asdict(a),
        "recipe": asdict(recipe),
        "parameters": {
            "drafter": sum(p.numel() for p in drafter.parameters()),
            "transition": sum(p.numel() for p in heads["gated"].parameters()),
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "curve": curve,
    }
    (folder / "drafter.json").write_text(json.dumps(record, indent=1) + "\n")
