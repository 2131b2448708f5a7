"""The decoding loop: round after round, until the text is long enough."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kdtree_nb.engine.device import Device
from kdtree_nb.engine.rounds import Budget, Outcome, Rounds
from kdtree_nb.kernels.choose_tokens import Sampling
from kdtree_nb.reference.tree import DraftTree

DECODERS = ("ar", "chain", "ddtree")


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
        Until the prompt was committed, and from then until the last token was read.
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


OnRound = Callable[[DraftTree, np.ndarray], None]
"""Called after each round with its tree, on the host and without padding, and the accepted nodes, root first."""


def decode(
    rounds: Rounds,
    prompt: np.ndarray,
    limit: int,
    decoder: str,
    budget: Budget,
    sampling: Sampling,
    on_token: Callable[[int], None] | None = None,
    on_round: OnRound | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Extend a prompt by at most ``limit`` tokens, the same text whatever the decoder; see :meth:`Engine.generate`.

    The last token of the prompt is the root of the first round, and each round's bonus token that of
    the next: a root's latent enters the cache in the pass that verifies its tree.

    Where a round needs nothing of the host, the next one is launched before it is read. So a GPU need not wait for the
    host, and at a text's end one round more may be running, which nobody reads.
    """
    rounds.record(decoder, budget)
    started = time.perf_counter()
    generation, device, config = Generation(), rounds.device, rounds.model.config
    rounds.begin(prompt, limit, sampling)
    device.host(rounds.cache.length)  # waits for a GPU
    generation.prefill_seconds = time.perf_counter() - started

    committed: list[int] = prompt.tolist()
    kept: list[np.ndarray] = []
    watched = on_round is not None or keep_logits  # the next round overwrites what is asked for
    ahead = 1 if rounds.unattended(decoder != "ar") and not watched else 0
    running: deque[Outcome] = deque()
    while len(generation.tokens) < limit:
        while len(running) <= ahead and (sure := len(generation.tokens) + len(running)) < limit:  # one token a round
            last = sure + 1 == limit  # there is nothing to be drafted
            running.append(rounds.run("ar" if last else decoder, budget, committed))
        outcome = running.popleft()
        nodes, paying, new_tokens, path = rounds.read(outcome)
        if on_round:
            on_round(on_host(outcome.tree, device, nodes, paying), path)
        if keep_logits:
            kept.extend(device.host(outcome.logits)[path])
        for token in new_tokens:
            generation.tokens.append(token)
            committed.append(token)
            if on_token:
                on_token(token)
            if token in config.eos_token_ids:
                generation.finish_reason = "stop"
                limit = 0
                new_tokens = new_tokens[: new_tokens.index(token) + 1]
                break
        generation.rounds.append(Round(nodes - 1, len(new_tokens) - 1))
    if keep_logits:
        generation.logits = np.array(kept[: len(generation.tokens)], np.float32).reshape(-1, config.vocab_size)
    generation.decode_seconds = time.perf_counter() - started - generation.prefill_seconds
    return generation


def on_host(tree: DraftTree, device: Device, nodes: int, paying: int) -> DraftTree:
    """A tree's nodes in NumPy arrays."""
    host = device.host
    columns = host(tree.tokens), host(tree.parents), host(tree.depths), host(tree.scores)
    return DraftTree(*columns, nodes, paying).first(nodes)
