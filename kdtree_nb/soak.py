"""Many rounds of random prompts, trees and budgets: plain and speculative decoding must agree to the bit."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kdtree_nb.engine import DFlash, Drafter, Engine, Oracle
from kdtree_nb.engine.options import MAX_NODE_BUDGET

WARM_UP_TEXTS = 20
"""After these, all weights are on the device."""


class Soak(NamedTuple):
    """What happened.

    Rounds run, texts compared, those that differed, those that took fewer target forwards than plain decoding, and the
    device memory that was held after the first texts and at the end, when nothing was kept for a next one.
    """

    rounds: int
    texts: int
    mismatches: int
    shortened: int
    bytes_before: int
    bytes_after: int


def soak(engine: Engine, rounds: int, seed: int = 0, progress: Callable[[int], None] | None = None) -> Soak:
    """Decode random prompts by ``ar``, then by ``chain`` or ``ddtree`` with a drafter that is wrong on purpose.

    An engine with a trained drafter takes that one every other time.

    Parameters
    ----------
    rounds : int
        Speculative rounds to run, at least.
    progress : callable, optional
        Called with the rounds done.
    """
    random = np.random.default_rng(seed)
    done = texts = mismatches = shortened = before = 0
    while done < rounds or texts <= WARM_UP_TEXTS:
        vocab_size, room = engine.config.vocab_size, engine.capacity
        prompt = random.integers(0, vocab_size, random.integers(1, max(2, room // 2)))
        length = int(random.integers(1, max(2, room // 2)))
        keep = texts % 4 < 2  # a GPU launches rounds ahead where nobody asks for logits
        plain = engine.generate(prompt, "ar", max_new_tokens=length, keep_logits=keep)
        budget = int(min(MAX_NODE_BUDGET, random.geometric(0.05)))
        width, hit_rate = int(random.integers(1, 12)), float(random.uniform(0, 1))
        answer = np.concatenate([prompt, plain.tokens])
        drafter: Drafter = Oracle(answer, vocab_size, int(random.integers(1, 16)), width, hit_rate, seed=done)
        if isinstance(engine.drafter, DFlash) and texts % 2:
            drafter = engine.drafter
        decoder = "chain" if random.random() < 0.25 else "ddtree"
        own = engine.generate(prompt, decoder, budget, length, drafter=drafter, keep_logits=keep)
        differ = own.tokens != plain.tokens
        if own.logits is not None and plain.logits is not None:
            differ |= not np.array_equal(own.logits, plain.logits)
        mismatches += differ
        done, texts = done + own.target_forwards, texts + 1
        shortened += own.target_forwards < plain.target_forwards
        if texts == WARM_UP_TEXTS:
            before = _bytes_held(engine)
        if progress:
            progress(done)
    return Soak(done, texts, mismatches, shortened, before, _bytes_held(engine))


def _bytes_held(engine: Engine) -> int:
    """Without caches and recorded rounds, which grow to a limit: what then grows is never given back."""
    engine.release()
    return engine.device.bytes_held()
