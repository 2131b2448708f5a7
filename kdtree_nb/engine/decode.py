"""The decoding loop: draft, build the tree, verify, accept, commit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.drafter import Drafter
from kdtree_nb.engine.model import Model
from kdtree_nb.reference.sampling import choose_tokens
from kdtree_nb.reference.tree import DraftTree, tree_accept, tree_build

DECODERS = ("ar", "chain", "ddtree")
PREFILL_ROWS = 64


@dataclass(frozen=True)
class Round:
    """One target forward: how many drafted nodes it verified, and how many of them it accepted."""

    drafted: int
    accepted: int


@dataclass
class Generation:
    """What came of a prompt.

    Attributes
    ----------
    tokens : list of int
        New tokens, the end-of-text token included where one ended it.
    text : str or None
        None without a tokenizer.
    finish_reason : {"length", "stop", "capacity"}
        ``max_new_tokens`` reached, end of text, or the cache's capacity.
    rounds : list of Round
        One for each target forward after the prompt's.
    logits : float32 [len(tokens), vocab] or None
        Those that chose each token, where they were asked for.
    prefill_seconds, decode_seconds : float
    """

    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str = "length"
    rounds: list[Round] = field(default_factory=list)
    logits: np.ndarray | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def target_forwards(self) -> int:
        """Forward passes of the target after the prompt."""
        return len(self.rounds)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per target forward; 1 for plain decoding."""
        return len(self.tokens) / max(self.target_forwards, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time after the prompt."""
        return len(self.tokens) / self.decode_seconds if self.decode_seconds else 0.0


def decode(
    model: Model,
    prompt: np.ndarray,
    capacity: int,
    decoder: str,
    drafter: Drafter,
    node_budget: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    on_token: Callable[[int], None] | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Extend a prompt, with the same text whatever the decoder; see :meth:`Engine.generate`.

    The last token of the prompt is the root of the first round, and each round's bonus token that of
    the next: a root's latent enters the cache in the pass that verifies its tree.
    """
    started = time.perf_counter()
    generation = Generation()
    cache = LatentCache(model.config, capacity + node_budget)
    prefill(model, cache, prompt[:-1])
    generation.prefill_seconds = time.perf_counter() - started

    limit = min(max_new_tokens, capacity - len(prompt))
    committed, kept = list(prompt), []
    while len(generation.tokens) < limit:
        depth_limit = limit - len(generation.tokens) - 1
        tree = draft(decoder, drafter, np.array(committed, np.int32), node_budget, depth_limit)
        if not 0 <= tree.tokens.min() <= tree.tokens.max() < model.config.vocab_size:
            raise ValueError(
                f"decode: the drafter proposed token ids {tree.tokens[1:].min()}..{tree.tokens[1:].max()}, "
                f"expected 0 to {model.config.vocab_size - 1}, the target's vocabulary"
            )
        logits = model.forward(tree.tokens, tree.parents, tree.depths, cache).logits
        targets = choose_tokens(logits, cache.length + tree.depths, temperature, seed)
        path, bonus = tree_accept(tree.tokens, tree.parents, targets)
        cache.commit(path)
        generation.rounds.append(Round(tree.num_nodes - 1, len(path) - 1))

        for node, token in zip(path, [*tree.tokens[path[1:]].tolist(), bonus], strict=True):
            generation.tokens.append(token)
            committed.append(token)
            if keep_logits:
                kept.append(logits[node])
            if on_token:
                on_token(token)
            if token in model.config.eos_token_ids:
                generation.finish_reason = "stop"
                limit = 0
                break
    if generation.finish_reason == "length" and limit < max_new_tokens:
        generation.finish_reason = "capacity"
    if keep_logits:
        generation.logits = np.array(kept, np.float32).reshape(-1, model.config.vocab_size)
    generation.decode_seconds = time.perf_counter() - started - generation.prefill_seconds
    return generation


def prefill(model: Model, cache: LatentCache, tokens: np.ndarray) -> None:
    """Commit a prompt's latents, a chunk of rows at a time; no logits are computed."""
    for start in range(0, len(tokens), PREFILL_ROWS):
        chunk = tokens[start : start + PREFILL_ROWS]
        rows = np.arange(len(chunk))
        model.forward(chunk, rows - 1, rows, cache, logits_of=slice(0))
        cache.commit(rows)


def draft(decoder: str, drafter: Drafter, tokens: np.ndarray, node_budget: int, depth_limit: int) -> DraftTree:
    """This round's tree: a lone root, the likeliest chain, or the best-first tree; without padding."""
    root = int(tokens[-1])
    if decoder == "ar" or node_budget == 0 or depth_limit == 0:
        return tree_build(root, np.empty((0, 0), np.float32), np.empty((0, 0), np.int32), 0)
    log_probs, token_ids = (marginals[:depth_limit] for marginals in drafter.propose(tokens))
    if decoder == "chain":
        log_probs, token_ids = log_probs[:, :1], token_ids[:, :1]
    tree = tree_build(root, log_probs, token_ids, node_budget)
    nodes = slice(tree.num_nodes)
    return DraftTree(tree.tokens[nodes], tree.parents[nodes], tree.depths[nodes], tree.num_nodes)
