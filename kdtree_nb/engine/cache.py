"""The latent cache: all that MLA keeps of a token, kv_lora + rope values a layer."""

from typing import Any

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.engine.device import Device
from kdtree_nb.kernels.cache_commit import cache_commit
from kdtree_nb.kernels.launch import Array


class LatentCache:
    """Rows of committed tokens, and behind them those of the tree that is being verified.

    Parameters
    ----------
    capacity : int
        Rows a layer: the longest sequence plus the largest tree.
    dtype : float32 or bfloat16

    Attributes
    ----------
    rows : dtype [layers, capacity, kv_lora + rope]
    length : int32 [1]
        Committed rows, counted where the rows are; a tree's node i lies in row ``length + i``.
    """

    def __init__(self, config: ModelConfig, capacity: int, device: Device, dtype: Any = np.float32) -> None:
        shape = (config.num_hidden_layers, capacity, config.latent_dim)
        self.rows: Array = device.zeros(shape, dtype)
        self.length: Array = device.xp.zeros(1, np.int32)

    def commit(self, path: Array, length: Array) -> None:
        """Keep the rows of the first ``length`` int32 [1] nodes of a path, in all layers."""
        cache_commit(self.rows, self.length, path, length)
        self.length += length
