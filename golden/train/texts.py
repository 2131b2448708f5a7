"""Step 1 of the drafter: text that the shipped target writes, greedy and sampled, after prompts of its corpus.

The target runs as it ships (codes and scales of the bundle), one token a step for thousands of texts at once, over a
cache of latents; attention is absorbed, as in the engine.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from model import Transformer, rotate
from recipe import DrafterRecipe
from torch import Tensor


@torch.no_grad()
def continue_texts(
    model: Transformer, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Extend prompts int [texts, p] to [texts, length]; a temperature of 0 takes the most probable token."""
    texts, a = len(prompts), model.a
    ids = torch.empty(texts, length, dtype=torch.long, device=prompts.device)
    ids[:, : prompts.shape[1]] = prompts
    cache = [
        torch.empty(texts, length, a.kv_lora_rank + a.qk_rope_head_dim, device=prompts.device) for _ in model.layers
    ]
    for position in range(length - 1):
        x = model.embed_tokens(ids[:, position])
        for layer, rows in zip(model.layers, cache, strict=True):
            x = x + attend(layer.self_attn, layer.input_layernorm(x), rows, position, model.cos, model.sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        if position + 1 >= prompts.shape[1]:
            logits = model.lm_head(model.norm(x))
            noise = -torch.log(torch.empty_like(logits).exponential_(generator=generator))  # the Gumbel trick
            ids[:, position + 1] = (logits + temperatures[:, None] * noise).argmax(-1)
    return ids


def attend(attention: torch.nn.Module, x: Tensor, rows: Tensor, position: int, cos: Tensor, sin: Tensor) -> Tensor:
    """One new token's absorbed attention; its latent [kv_lora | rotated key] is added to `rows` [texts, length, …]."""
    a, heads = attention.a, attention.a.num_attention_heads
    at = slice(position, position + 1)
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x))).unflatten(-1, (heads, -1))
    q_nope, q_rope = q.split([a.qk_nope_head_dim, a.qk_rope_head_dim], -1)
    latent, k_rope = attention.kv_a_proj_with_mqa(x).split([a.kv_lora_rank, a.qk_rope_head_dim], -1)
    key, value = attention.kv_b_proj.weight.unflatten(0, (heads, -1)).split([a.qk_nope_head_dim, a.v_head_dim], 1)
    q = torch.cat((torch.einsum("nhd,hdl->nhl", q_nope, key), rotate(q_rope, cos[at], sin[at])), -1)
    rows[:, position] = torch.cat(
        (attention.kv_a_layernorm(latent), rotate(k_rope[:, None], cos[at], sin[at])[:, 0]), -1
    )
    seen = rows[:, : position + 1]
    scores = (q @ seen.transpose(1, 2)) * (a.qk_nope_head_dim + a.qk_rope_head_dim) ** -0.5
    mixed = scores.softmax(-1) @ seen[..., : a.kv_lora_rank]
    return attention.o_proj(torch.einsum("nhl,hvl->nhv", mixed, value).flatten(1))


def prompt_crops(tokens: dict[str, np.ndarray], recipe: DrafterRecipe, device: str) -> Iterator[Tensor]:
    """Batches of prompts int [generation_batch, p], p in turn from the recipe's lengths."""
    train = torch.from_numpy(tokens["train"].astype(np.int32)).to(device)
    starts = torch.from_numpy(tokens["starts"]).to(device)
    shares = torch.tensor([recipe.source_shares[str(name)] for name in tokens["sources"]], device=device)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    batch = min(recipe.generation_batch, recipe.texts // len(recipe.prompt_lengths))
    for index in range(recipe.texts // batch):
        length = recipe.prompt_lengths[index % len(recipe.prompt_lengths)]
        source = torch.multinomial(shares, batch, replacement=True, generator=generator)
        where = torch.rand(batch, generator=generator, device=device, dtype=torch.float64)
        first = starts[source] + (where * (starts[source + 1] - length - starts[source])).long()
        yield train[first[:, None] + torch.arange(length, device=device)].long()


def write(model: Transformer, tokens: dict[str, np.ndarray], recipe: DrafterRecipe, device: str) -> dict[str, Tensor]:
    """``ids`` int32 [texts, text_length] and ``prompt`` int32 [texts], how many of them are real text."""
    generator = torch.Generator(device).manual_seed(recipe.seed)
    started, ids, lengths = time.time(), [], []
    for prompts in prompt_crops(tokens, recipe, device):
        temperatures = torch.zeros(len(prompts), device=device)
        temperatures[: round(recipe.sampled_share * len(prompts))] = recipe.sampling_temperature
        ids.append(continue_texts(model, prompts, recipe.text_length, temperatures, generator).int())
        lengths.append(torch.full((len(prompts),), prompts.shape[1], dtype=torch.int32, device=device))
    whole = {"ids": torch.cat(ids), "prompt": torch.cat(lengths)}
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"  {len(whole['ids']):,d} texts of {recipe.text_length} tokens in {time.time() - started:.0f} s", flush=True)
    return whole
