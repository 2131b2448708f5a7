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


MASS_UNIT = 2.0**-40
"""Weights are counted in it to find where top_p cuts; the most probable token weighs 1."""


def choose_tokens(
    logits: np.ndarray,
    positions: np.ndarray,
    temperature: float = 0.0,
    seed: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """The target's token after each row: its argmax at temperature 0, else a sample of what top_k and top_p keep.

    A sample is drawn by inverting the cumulative distribution at a random number that depends on the seed
    and the row's position alone. So the same seed gives the same text, however the rows were grouped into
    rounds and trees, and each position's choice is independent of every other's.

    Parameters
    ----------
    logits : float [N, V]
        NaN counts as −inf. A row whose highest logit is infinite gives its argmax.
    positions : int [N]
        Of the rows; two nodes at one position share their random number, but at most one of them is
        on the path that is accepted.
    top_k, top_p : int, float
        What a sample is drawn from; 0 and 1 for all. See :func:`truncate`.

    Returns
    -------
    int32 [N]; equal logits go to the lowest id.
    """
    logits = np.where(np.isnan(logits), -np.inf, logits)  # NaN is never chosen
    chosen = logits.argmax(axis=1).astype(np.int32)
    if temperature == 0:
        return chosen
    highest = logits.max(axis=1, keepdims=True)
    (sampled,) = np.nonzero(np.isfinite(highest[:, 0]))
    if not len(sampled):
        return chosen
    logits = logits[sampled].astype(np.float64)
    weights = np.exp((logits - highest[sampled]) / temperature)
    if top_k or top_p < 1:
        weights = truncate(logits, weights, top_k, top_p)
    cumulative = weights.cumsum(axis=1)
    thresholds = uniform(seed, positions[sampled]) * cumulative[:, -1]
    chosen[sampled] = (cumulative <= thresholds[:, None]).sum(axis=1)
    return chosen


def truncate(logits: np.ndarray, weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The weights with 0 for each token that top_k or top_p drops.

    Tokens are ranked by their logit, equal ones by the lower id. top_k keeps the first k of them, 0 all. Of these,
    top_p < 1 keeps the fewest, in this order, that weigh top_p of what top_k kept or more: the token that crosses is
    kept, so at least one is. For this comparison a weight is a whole number of MASS_UNIT, half to even: sums of whole
    numbers are the same in any order, so a kernel can take its own.

    Where it matters, Transformers differs: TopKLogitsWarper keeps all that tie with the k-th, and TopPLogitsWarper
    drops the least probable while they sum to 1 − top_p or less, in float32, ties in the order of its sort.

    Parameters
    ----------
    logits : float [N, V]
    weights : float64 [N, V]
        exp((logit − highest) / temperature).
    top_k : int
    top_p : float
        Above 0 and at most 1.
    """
    order = np.argsort(-logits, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    if top_k:
        ranked[:, top_k:] = 0
    if top_p < 1:
        masses = np.rint(ranked / MASS_UNIT).astype(np.uint64)
        cumulative = masses.cumsum(axis=1)
        before, total = cumulative - masses, cumulative[:, -1:]
        ranked[before.astype(np.float64) >= top_p * total.astype(np.float64)] = 0
    kept = np.empty_like(weights)
    np.put_along_axis(kept, order, ranked, axis=1)
    return kept


def uniform(seed: int, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each position: Philox (Salmon et al., SC 2011) with the position as counter."""
    distinct, which = np.unique(positions, return_inverse=True)
    numbers = [np.random.Generator(np.random.Philox(counter=int(p), key=seed)).random() for p in distinct]
    return np.array(numbers)[which]
