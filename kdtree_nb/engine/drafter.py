"""Drafters: anything that proposes, for each of the next positions, its most probable tokens."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kdtree_nb.kernels.launch import Array

if TYPE_CHECKING:
    from kdtree_nb.engine.cache import LatentCache


class Proposal(NamedTuple):
    """What a tree is built of: see :func:`kdtree_nb.reference.tree.tree_build`.

    log_probs : float32 [L, K], or with children [L, K, K]
        At most 0 and descending.
    token_ids : int32 [L, K]
    children : int32 [L, K, K] or None
        Where the candidates of a depth are ranked anew for each parent.
    """

    log_probs: Array
    token_ids: Array
    children: Array | None = None


class Drafter:
    """Proposes tokens that may follow. A subclass has to bring :meth:`propose`.

    Attributes
    ----------
    taps : tuple of int
        The target's layers whose outputs :meth:`observe` is to be given; none by default.
    on_device : bool
        Whether it drafts by :meth:`propose_after`, without the host.
    """

    taps: tuple[int, ...] = ()
    on_device: bool = False
    greedy_gain: float = 1.0
    """Drafted tokens that greedy decoding accepts for each that probabilities promise: for an automatic budget."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def start(self, cache: "LatentCache") -> "Drafter":
        """The drafter of one text, whose tokens the target commits to ``cache``; by default this one."""
        return self

    def observe(self, features: Array) -> None:
        """Take the tapped layers' outputs, float32 [tokens, taps, hidden], for the tokens that are committed next.

        On a GPU there may be rows after the last of those tokens, which the next call overwrites.
        """

    def propose(self, tokens: np.ndarray) -> Proposal:
        """Candidates for the next L positions after the committed ``tokens`` int32 [n], n ≥ 1, prompt included."""
        raise NotImplementedError

    def propose_after(self, root: Array) -> Proposal:
        """The same from what was observed and the last committed token, int32 [1]; all of it on the device."""
        raise NotImplementedError


NO_DRAFTER = Drafter()
"""Of plain decoding: it neither observes nor proposes."""


class PromptLookup(Drafter):
    """Drafts what followed the last token before, wherever it occurred in this text.

    Each earlier occurrence votes for its own continuation, with a weight that doubles with every further
    token of context that agrees, up to ``longest_match``. A constant in the denominator
    stands for all that was never seen, so few votes give little confidence.

    Parameters
    ----------
    length : int
        Positions drafted, L.
    width : int
        Candidates at each, K.
    """

    def __init__(self, length: int = 7, width: int = 8, longest_match: int = 12) -> None:
        if min(length, width, longest_match) < 1 or longest_match > 512:  # 2^longest_match votes are a float
            raise ValueError(
                f"PromptLookup: length={length}, width={width}, longest_match={longest_match}, "
                "expected 1 or more each, and at most 512 tokens of context"
            )
        self.length, self.width, self.longest_match = length, width, longest_match

    def __repr__(self) -> str:
        return f"PromptLookup(length={self.length}, width={self.width}, longest_match={self.longest_match})"

    def propose(self, tokens: np.ndarray) -> Proposal:
        """As :meth:`Drafter.propose`; a position that nothing votes for, and all after it, are −inf."""
        log_probs = np.full((self.length, self.width), -np.inf, np.float32)
        token_ids = np.zeros((self.length, self.width), np.int32)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        agreeing = np.ones(len(ends))
        still = np.ones(len(ends), bool)
        for back in range(1, self.longest_match):
            still &= (ends >= back) & (tokens[ends - back] == tokens[-1 - back] if back < len(tokens) else False)
            agreeing += still
        votes = 2.0**agreeing
        for depth in range(1, self.length + 1):
            known = ends + depth < len(tokens)
            seen, which = np.unique(tokens[ends[known] + depth], return_inverse=True)
            if not len(seen):
                break
            counts = np.bincount(which, votes[known])
            best = np.argsort(-counts, kind="stable")[: self.width]
            log_probs[depth - 1, : len(best)] = np.log(counts[best] / (counts.sum() + 4))
            token_ids[depth - 1, : len(best)] = seen[best]
        return Proposal(log_probs, token_ids)


class Oracle(Drafter):
    """For tests: knows the answer, and is wrong on purpose.

    The right token of each position is at rank 0 with probability ``hit_rate``, else at a random lower rank
    or, one time in ``width``, missing. What it does at a position depends on the seed and the position alone.

    Parameters
    ----------
    answer : int [n]
        The whole text, prompt included.
    vocab_size : int
    """

    def __init__(
        self, answer: np.ndarray, vocab_size: int, length: int = 7, width: int = 4, hit_rate: float = 0.8, seed: int = 0
    ) -> None:
        if not 1 <= width < vocab_size:
            raise ValueError(f"Oracle: width={width}, expected 1 or more and below vocab_size={vocab_size}")
        if not 0 <= hit_rate <= 1:
            raise ValueError(f"Oracle: hit_rate={hit_rate}, expected 0 to 1")
        self.answer = np.asarray(answer, np.int32)
        self.vocab_size, self.length, self.width = vocab_size, length, width
        self.hit_rate, self.seed = hit_rate, seed

    def __repr__(self) -> str:
        return f"Oracle(length={self.length}, width={self.width}, hit_rate={self.hit_rate})"

    def propose(self, tokens: np.ndarray) -> Proposal:
        """As :meth:`Drafter.propose`; beyond the answer's end, 0 counts as right."""
        token_ids = np.empty((self.length, self.width), np.int32)
        for depth in range(self.length):
            position = len(tokens) + depth
            random = np.random.default_rng((self.seed, position))
            right = int(self.answer[position]) if position < len(self.answer) else 0
            wrong = (right + 1 + random.choice(self.vocab_size - 1, self.width, replace=False)) % self.vocab_size
            rank = 0 if random.random() < self.hit_rate else int(random.integers(1, self.width + 1))
            token_ids[depth] = wrong
            if rank < self.width:
                token_ids[depth, rank] = right
        spread = np.log(np.array([self.hit_rate or 0.5, *[0.2 / self.width] * (self.width - 1)], np.float32))
        log_probs = np.sort(np.broadcast_to(np.minimum(spread, 0), token_ids.shape), axis=1)[:, ::-1]
        return Proposal(log_probs, token_ids)
