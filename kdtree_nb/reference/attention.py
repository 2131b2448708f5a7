"""Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1), over a cache and a draft tree.

One latent row a token serves all heads: ``[latent after norm (kv_lora) | rotated key (rope)]``. The queries
were multiplied by the key half of ``kv_b_proj`` beforehand, the output still has to go through its value half.
"""

from functools import lru_cache

import numpy as np

from kdtree_nb.reference.tree import ancestors

SPLIT = 64
"""Positions in a split. Splits lie on absolute positions, so a row's sums never depend on how it was decoded."""


def tree_attention(
    queries: np.ndarray,
    cache: np.ndarray,
    prefix_len: int,
    parents: np.ndarray,
    kv_lora_rank: int,
    scale: float,
) -> np.ndarray:
    """Attention of a draft tree's nodes to the prefix, to their ancestors and to themselves.

    A prompt is a tree too (a chain), and so is plain decoding (one node). A row's keys are taken in the
    order of their positions and summed split by split; so its result has the same bits alone, in a
    prompt, in a chain or in a tree.

    Parameters
    ----------
    queries : float [N, heads, kv_lora + rope]
        Absorbed queries.
    cache : float [capacity, kv_lora + rope]
        Committed tokens in rows 0 … prefix_len − 1, node i of the tree in row prefix_len + i.
    parents : int [N]
        −1 for the root at index 0 and for padding after the tree, whose rows come back as zeros.
    scale : float
        Multiplies every score.

    Returns
    -------
    float [N, heads, kv_lora]
    """
    slots, mask = _tail(prefix_len, parents.astype(np.int32).tobytes())
    (nodes, tails, _), (_, heads, _), splits = slots.shape, queries.shape, prefix_len // SPLIT
    prefix = cache[: splits * SPLIT].reshape(splits, SPLIT, cache.shape[1])
    tail = cache.take(slots, axis=0)  # [nodes, tails, SPLIT, kv_lora + rope]
    by_split = queries[:nodes, None]

    weights = np.empty((nodes, splits + tails, heads, SPLIT), queries.dtype)
    np.matmul(by_split, prefix.swapaxes(1, 2), out=weights[:, :splits])
    np.matmul(by_split, tail.swapaxes(2, 3), out=weights[:, splits:])
    weights[:, splits:] += mask
    weights *= weights.dtype.type(scale)
    weights -= np.maximum.reduce(weights, axis=(1, 3), keepdims=True)
    np.exp(weights, out=weights)

    values = np.empty((nodes, splits + tails, heads, kv_lora_rank), queries.dtype)
    np.matmul(weights[:, :splits], prefix[..., :kv_lora_rank], out=values[:, :splits])
    np.matmul(weights[:, splits:], tail[..., :kv_lora_rank], out=values[:, splits:])
    output = np.zeros((len(queries), heads, kv_lora_rank), queries.dtype)
    output[:nodes] = _sum_splits(values) / _sum_splits(np.add.reduce(weights, axis=3))[:, :, None]
    return output


@lru_cache(maxsize=2)  # every layer asks for the same tree
def _tail(prefix_len: int, parents: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Each node's keys from the last full split of the prefix on, in the order of their positions; padding left out.

    Returns their cache rows [nodes, splits, SPLIT], and a mask [nodes, splits, 1, SPLIT] to add to scores: −∞ behind
    the last key, where the node's own row stands in (as no other row is sure to be finite where the node's is).
    """
    tree = np.frombuffer(parents, np.int32)
    paths = ancestors(tree[: 1 + np.count_nonzero(tree[1:] >= 0)])
    committed = prefix_len % SPLIT
    keys = committed + paths.shape[1]
    slots = np.full((len(paths), -(-keys // SPLIT) * SPLIT), -1)
    slots[:, :committed] = np.arange(prefix_len - committed, prefix_len)
    slots[:, committed:keys] = np.where(paths >= 0, prefix_len + paths, -1)
    own = prefix_len + np.arange(len(paths))[:, None]
    mask = np.where(slots >= 0, np.float32(0), np.float32(-np.inf))
    by_split = (len(paths), -1, SPLIT)
    return np.where(slots >= 0, slots, own).reshape(by_split), mask.reshape(by_split)[:, :, None]


def _sum_splits(parts: np.ndarray) -> np.ndarray:
    """Add parts [nodes, splits, ...] from first to last; a split that is all masked adds zeros and changes nothing."""
    total = parts[:, 0] + parts.dtype.type(0)  # no zero is negative
    for split in range(1, parts.shape[1]):
        total += parts[:, split]
    return total
