"""From logits to tokens: the drafter's marginals, the target's choice."""

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logits minus their logsumexp over the last axis; at most 0, also after rounding, as no sum is below 1."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k most probable tokens of each position.

    Parameters
    ----------
    logits : float32 [L, V]

    Returns
    -------
    log_probs : float32 [L, k]
        Descending; equal values by the lower token id.
    token_ids : int32 [L, k]
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"top_k: k={k}, expected 1 to the vocabulary's {logits.shape[1]}")
    log_probs = log_softmax(logits)
    token_ids = np.argsort(-log_probs, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(log_probs, token_ids, axis=1), token_ids.astype(np.int32)


def choose_tokens(logits: np.ndarray, positions: np.ndarray, temperature: float = 0.0, seed: int = 0) -> np.ndarray:
    """The target's token after each row: its argmax at temperature 0, else a sample.

    A sample is drawn by inverting the cumulative distribution at a random number that depends on the seed
    and the row's position alone. So the same seed gives the same text, however the rows were grouped into
    rounds and trees, and each position's choice is independent of every other's.

    Parameters
    ----------
    logits : float [N, V]
    positions : int [N]
        Of the rows; two nodes at one position share their random number, but at most one of them is
        on the path that is accepted.

    Returns
    -------
    int32 [N]; equal logits go to the lowest id.
    """
    logits = np.where(np.isnan(logits), -np.inf, logits)  # NaN is never chosen
    if temperature == 0:
        return logits.argmax(axis=1).astype(np.int32)
    logits = logits.astype(np.float64)
    cumulative = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature).cumsum(axis=1)
    thresholds = uniform(seed, positions) * cumulative[:, -1]
    return (cumulative <= thresholds[:, None]).sum(axis=1).astype(np.int32)


def uniform(seed: int, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each position: Philox (Salmon et al., SC 2011) with the position as counter."""
    distinct, which = np.unique(positions, return_inverse=True)
    numbers = [np.random.Generator(np.random.Philox(counter=int(p), key=seed)).random() for p in distinct]
    return np.array(numbers)[which]
