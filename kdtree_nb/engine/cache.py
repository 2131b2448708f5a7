"""The latent cache: all that MLA keeps of a token, kv_lora + rope values a layer."""

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.tree import cache_commit


class LatentCache:
    """Rows of committed tokens, and behind them those of the tree that is being verified.

    Parameters
    ----------
    capacity : int
        Rows a layer: the longest sequence plus the largest tree.

    Attributes
    ----------
    rows : float32 [layers, capacity, kv_lora + rope]
    length : int
        Committed rows; a tree's node i lies in row ``length + i``.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.rows = np.zeros((config.num_hidden_layers, capacity, config.latent_dim), np.float32)
        self.length = 0

    def write(self, layer: int, latents: np.ndarray) -> None:
        """Put a tree's latents [N, kv_lora + rope] behind the committed rows of one layer."""
        self.rows[layer, self.length : self.length + len(latents)] = latents

    def commit(self, path: np.ndarray) -> None:
        """Keep the rows of the accepted nodes, in all layers."""
        cache_commit(self.rows, self.length, path)
        self.length += len(path)
