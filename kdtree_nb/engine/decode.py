"""The decoding loop: draft, build the tree, verify, accept, commit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import Drafter, Proposal
from kdtree_nb.engine.model import Model
from kdtree_nb.kernels.choose_tokens import choose_tokens
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.tree_accept import Acceptance, tree_accept
from kdtree_nb.kernels.tree_build import tree_build
from kdtree_nb.reference.tree import DraftTree, check_marginals

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


class Sampling(NamedTuple):
    """How the target chooses: see :func:`kdtree_nb.reference.sampling.choose_tokens`."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0


class Budget(NamedTuple):
    """How many nodes a round drafts at most; with ``costs`` float32 [nodes + 1] as many of them as pay."""

    nodes: int
    costs: Array | None = None


OnRound = Callable[[DraftTree, np.ndarray], None]
"""Called after each round with its tree, on the host and without padding, and the accepted nodes, root first."""


def decode(
    model: Model,
    prompt: np.ndarray,
    capacity: int,
    decoder: str,
    drafter: Drafter,
    budget: Budget,
    max_new_tokens: int,
    sampling: Sampling,
    on_token: Callable[[int], None] | None = None,
    on_round: OnRound | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Extend a prompt, with the same text whatever the decoder; see :meth:`Engine.generate`.

    The last token of the prompt is the root of the first round, and each round's bonus token that of
    the next: a root's latent enters the cache in the pass that verifies its tree.
    """
    started = time.perf_counter()
    generation, device = Generation(), model.device
    limit = min(max_new_tokens, capacity - len(prompt))
    cache = LatentCache(model.config, len(prompt) + limit + budget.nodes, device)
    drafter = Drafter() if decoder == "ar" else drafter.start(cache)  # the first neither proposes nor observes
    prefill(model, cache, drafter, prompt[:-1])
    device.host(cache.length)  # waits for a GPU
    generation.prefill_seconds = time.perf_counter() - started

    committed: list[int] = prompt.tolist()
    kept: list[np.ndarray] = []
    while len(generation.tokens) < limit:
        depth_limit = limit - len(generation.tokens) - 1
        proposal = None
        if decoder != "ar" and budget.nodes and depth_limit:
            proposal = draft(drafter, committed, decoder == "chain", depth_limit, model.config.vocab_size)
        tree = build(model, committed[-1], proposal, budget)
        max_path = 1 + (len(proposal.token_ids) if proposal else 0)
        logits, accepted = verify(model, cache, drafter, tree, max_path, sampling)

        new_tokens = device.host(accepted.tokens).tolist()[: int(device.host(accepted.length)[0])]
        path = device.host(accepted.path)[: len(new_tokens)]
        nodes = count_nodes(tree, device)
        if on_round:
            on_round(on_host(tree, device).first(nodes), path)
        if keep_logits:
            kept.extend(device.host(logits[path]))
        for token in new_tokens:
            generation.tokens.append(token)
            committed.append(token)
            if on_token:
                on_token(token)
            if token in model.config.eos_token_ids:
                generation.finish_reason = "stop"
                limit = 0
                new_tokens = new_tokens[: new_tokens.index(token) + 1]
                break
        generation.rounds.append(Round(nodes - 1, len(new_tokens) - 1))
    if generation.finish_reason == "length" and limit < max_new_tokens:
        generation.finish_reason = "capacity"
    if keep_logits:
        generation.logits = np.array(kept[: len(generation.tokens)], np.float32).reshape(-1, model.config.vocab_size)
    generation.decode_seconds = time.perf_counter() - started - generation.prefill_seconds
    return generation


def verify(
    model: Model, cache: LatentCache, drafter: Drafter, tree: DraftTree, max_path: int, sampling: Sampling
) -> tuple[Array, Acceptance]:
    """One target forward over a tree: its logits, and what was accepted and committed.

    ``max_path`` bounds the nodes of an accepted path, the root included.
    """
    logits, features = model.forward(tree.tokens, tree.parents, tree.depths, cache, drafter.taps)
    targets = choose_tokens(logits, cache.length, tree.depths, *sampling)
    accepted = tree_accept(tree.tokens, tree.parents, targets, max_path)
    if drafter.taps:
        drafter.observe(features[:, model.device.xp.maximum(accepted.path, 0)])
    cache.commit(accepted.path, accepted.length)
    return logits, accepted


def prefill(model: Model, cache: LatentCache, drafter: Drafter, tokens: np.ndarray) -> None:
    """Commit a prompt's latents, a chunk of rows at a time; no logits are computed."""
    for start in range(0, len(tokens), PREFILL_ROWS):
        chunk = tokens[start : start + PREFILL_ROWS]
        rows = np.arange(len(chunk), dtype=np.int32)
        put = model.device.put
        _, features = model.forward(put(chunk), put(rows - 1), put(rows), cache, drafter.taps, logits_of=slice(0))
        if drafter.taps:
            drafter.observe(features)
        cache.commit(put(rows), put(np.array([len(chunk)], np.int32)))


def draft(drafter: Drafter, committed: list[int], chain: bool, depth_limit: int, vocab_size: int) -> Proposal:
    """This round's candidates; of each depth's a chain takes the best alone.

    Raises
    ------
    ValueError
        If the drafter proposes what are no log-probabilities, or no tokens of the target; on a GPU nobody looks.
    """
    log_probs, token_ids, children = Proposal(*drafter.propose(np.array(committed, np.int32)))
    if not hasattr(log_probs, "__cuda_array_interface__"):
        log_probs, token_ids = np.ascontiguousarray(log_probs, np.float32), np.asarray(token_ids)
        check_marginals(log_probs, token_ids, children)
        token_ids = _checked(token_ids, log_probs, vocab_size)
    if chain:
        log_probs = log_probs.copy()
        log_probs[..., 1:] = -np.inf
    kept = slice(depth_limit)
    return Proposal(log_probs[kept], token_ids[kept], None if children is None else children[kept])


def _checked(token_ids: np.ndarray, log_probs: np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids int32 [L, K] of the target, 0 where there is no candidate."""
    possible = log_probs > -np.inf if log_probs.ndim == 2 else np.ones(token_ids.shape, bool)
    proposed = token_ids[possible]
    if proposed.size and not 0 <= proposed.min() <= proposed.max() < vocab_size:
        raise ValueError(
            f"decode: the drafter proposed token ids {proposed.min()}..{proposed.max()}, "
            f"expected 0 to {vocab_size - 1}, the target's vocabulary"
        )
    return np.where(possible, token_ids, 0).astype(np.int32)


def build(model: Model, root: int, proposal: Proposal | None, budget: Budget) -> DraftTree:
    """The tree to verify.

    On a GPU it has a row for every node of the budget, padding included, since the host does not know how many there
    are; but for a budget with costs the host has to ask, as the cost of a pass lies in its rows.
    """
    put, xp = model.device.put, model.device.xp
    root_token = put(np.array([root], np.int32))
    if proposal is None:
        no_parent, depth, score = np.array([-1], np.int32), np.array([0], np.int32), np.zeros(1, np.float32)
        return DraftTree(root_token, put(no_parent), put(depth), put(score), 1)
    children = None if proposal.children is None else xp.asarray(proposal.children)
    log_probs, token_ids = xp.asarray(proposal.log_probs), xp.asarray(proposal.token_ids)
    tree = tree_build(root_token, log_probs, token_ids, budget.nodes, children, budget.costs)
    if budget.costs is None and not isinstance(tree.num_nodes, int):
        return tree
    return tree.first(count_nodes(tree, model.device))


def count_nodes(tree: DraftTree, device: Device) -> int:
    """How many nodes a tree has, the root included; waits for a GPU."""
    return tree.num_nodes if isinstance(tree.num_nodes, int) else int(device.host(tree.num_nodes)[0])


def on_host(tree: DraftTree, device: Device) -> DraftTree:
    """A tree in NumPy arrays."""
    host = device.host
    columns = host(tree.tokens), host(tree.parents), host(tree.depths), host(tree.scores)
    return DraftTree(*columns, num_nodes=count_nodes(tree, device))
