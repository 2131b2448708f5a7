"""Bits per byte of held-out text, in fp32.

Each document is scored alone, after one ``<|endoftext|>``. Windows of 512 tokens move on by `stride`; a window scores
the tokens that no window before it scored, so with stride 256 every token (past the first 512) sees at least 256 tokens
before it, and with stride 512 the windows are disjoint and a token sees 1 to 512. Bits are summed over all tokens of a
domain's documents and divided by their UTF-8 bytes. The separator itself is not scored.
"""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from model import Transformer
from sources import DOMAINS


def windows(length: int, context: int, stride: int) -> list[tuple[int, int]]:
    """(start, number of predictions to skip) of each window over `length` tokens, of which the first is not scored."""
    found = [(0, 0)]
    while found[-1][0] + context < length - 1:
        found.append((found[-1][0] + stride, context - stride))
    return found


@torch.no_grad()
def bits(model: Transformer, documents: list[np.ndarray], stride: int, batch_size: int = 32) -> float:
    """Bits that `model` needs for all tokens of `documents` but the first of each."""
    context = model.a.max_position_embeddings
    device = model.lm_head.weight.device
    rows = [(d[at : at + context + 1], skip) for d in documents for at, skip in windows(d.size, context, stride)]
    total = 0.0
    model.eval()
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        width = max(tokens.size for tokens, _ in batch)
        ids = np.zeros((len(batch), width), dtype=np.int64)
        scored = np.zeros((len(batch), width - 1), dtype=bool)
        for row, (tokens, skip) in enumerate(batch):
            ids[row, : tokens.size] = tokens
            scored[row, skip : tokens.size - 1] = True
        tokens = torch.from_numpy(ids).to(device)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        total += loss.double()[torch.from_numpy(scored).to(device).flatten()].sum().item()
    return total / math.log(2)


def heldout(tokens: dict[str, np.ndarray], domain: str) -> tuple[list[np.ndarray], int]:
    """The held-out documents of `domain` in tokens, and their bytes."""
    starts = tokens[f"heldout_{domain}_starts"]
    documents = [tokens[f"heldout_{domain}"][a:b] for a, b in itertools.pairwise(starts)]
    return documents, int(tokens[f"heldout_{domain}_bytes"].sum())


def bits_per_byte(model: Transformer, tokens: dict[str, np.ndarray], stride: int) -> dict[str, float]:
    """Held-out bits per byte of every domain."""
    result = {}
    for domain in DOMAINS:
        documents, size = heldout(tokens, domain)
        result[domain] = bits(model, documents, stride) / size
    return result
