"""Attention of a draft tree over a latent cache: ours, the floors, and torch's two products with a mask between."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.inputs import Tree, as_torch, random_bfloat16, random_tree
from kdtree_nb.bench.timing import cache_bytes, copies_of, microseconds, require_gpu, torch_microseconds
from kdtree_nb.engine.device import Device
from kdtree_nb.kernels.launch import Array
from kdtree_nb.reference.tree import visibility

HEADS, KV_LORA, ROPE = 64, 512, 64
LATENT = KV_LORA + ROPE
"""Of Kimi K2 and DeepSeek-V3's cache."""
SCALE = 192**-0.5
PREFIXES = (1024, 4096, 32768)
ROWS = (1, 17, 65)
OURS, PEER = "tree_attention_mma", "torch bf16"


def bytes_moved(prefix: int, rows: int) -> int:
    """Of the cache's rows, the queries and the outputs in bfloat16, each once."""
    return 2 * ((prefix + rows) * LATENT + rows * HEADS * (LATENT + KV_LORA))


def operations(prefix: int, depths: np.ndarray) -> float:
    """Multiplications and additions: each node with the prefix, its ancestors and itself."""
    pairs = len(depths) * (prefix + 1) + int(depths.sum())
    return 2.0 * HEADS * pairs * (LATENT + KV_LORA)


def measure(prefixes: Sequence[int], rows: Sequence[int], with_peer: bool) -> Iterator[Measured]:
    """Time the attention of a random tree behind each prefix; every call of a graph has its own cache and queries.

    Torch's products take the whole cache for every node and a mask that was made before.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    for prefix in prefixes:
        for nodes in rows:
            tree = random_tree(nodes, np.random.default_rng(nodes))
            copies = copies_of(bytes_moved(prefix, nodes), cache_bytes())
            caches = random_bfloat16((copies, prefix + nodes, LATENT), seed=0)
            queries = random_bfloat16((copies, nodes, HEADS, LATENT), seed=1)
            needs = bytes_moved(prefix, nodes), operations(prefix, tree.depths)
            case = {"prefix": prefix, "rows": nodes}
            yield Measured(OURS, case, _ours(queries, caches, prefix, tree), *needs)
            if with_peer:
                yield Measured(PEER, case, _torch(queries, caches, prefix, tree), *needs)


def _ours(queries: Array, caches: Array, prefix: int, tree: Tree) -> float:
    from kdtree_nb.kernels.tree_attention_mma import tree_attention_mma

    put = Device.named("cuda").put
    at = put(np.array([prefix], np.int32)), put(tree.parents), put(tree.depths)
    return microseconds(
        [partial(tree_attention_mma, *own, *at, KV_LORA, SCALE) for own in zip(queries, caches, strict=True)]
    )


def _torch(queries: Array, caches: Array, prefix: int, tree: Tree) -> float:
    import torch

    mask = torch.zeros(len(tree.parents), 1, caches.shape[1], device="cuda", dtype=torch.bfloat16)
    mask[:, 0, prefix:].masked_fill_(torch.from_numpy(~visibility(tree.parents)).cuda(), float("-inf"))
    scaled = as_torch(queries) * SCALE
    return torch_microseconds([partial(attend, *own, mask) for own in zip(scaled, as_torch(caches), strict=True)])


def attend(queries: Any, cache: Any, mask: Any) -> Any:
    """Torch's attention: scaled queries [N, heads, latent], cache [rows, latent], added mask [N, 1, rows]."""
    scores = queries @ cache.T
    scores += mask
    return scores.softmax(-1) @ cache[:, :KV_LORA]
