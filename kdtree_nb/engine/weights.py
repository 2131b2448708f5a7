"""The one place that asks whether a weight is INT4."""

import numpy as np

from kdtree_nb.bundle import Bundle
from kdtree_nb.reference.linear import COLUMNS, Tiles, linear, tile


class Weights:
    """A bundle's weights, each loaded on first use and kept in the one layout that its use needs.

    NumPy has no INT4 product: a packed weight is dequantised, once, when it first meets an input. Experts
    that no token chose stay packed on the disk.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._shapes = bundle.config.weight_shapes()
        self._tied = bundle.config.tie_word_embeddings
        self._vectors: dict[str, np.ndarray] = {}
        self._embedding: np.ndarray | None = None
        self._tiles: dict[tuple[str, ...], Tiles] = {}

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """``x · weightᵀ``: float32 [tokens, in] to [tokens, out], from INT4 where the bundle holds ``name.qw``."""
        return self._product(x, (name,))

    def linears(self, x: np.ndarray, *names: str) -> list[np.ndarray]:
        """:meth:`linear` with several weights of one input, as a single product."""
        outputs = self._product(x, names)
        return np.split(outputs, np.cumsum([self._shapes[name][0] for name in names])[:-1], axis=1)

    def _product(self, x: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        return linear(x, self._tiled(names))

    def _tiled(self, names: tuple[str, ...]) -> Tiles:
        if names not in self._tiles:
            self._tiles[names] = tile(np.concatenate([self.matrix(name) for name in names]))
        return self._tiles[names]

    def matrix(self, name: str) -> np.ndarray:
        """A weight as float32 [out, in]; loaded anew at each call, for those that re-arrange it."""
        return self._bundle.weight(name).astype(np.float32, copy=False)

    def vector(self, name: str) -> np.ndarray:
        """A norm's weight or a router's bias, float32."""
        if name not in self._vectors:
            self._vectors[name] = self._bundle[name].astype(np.float32)
        return self._vectors[name]

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """Rows of the embedding, float32 [tokens, hidden]; the table keeps its stored dtype, or is the head's tiles."""
        if self._tied:
            return self._tiled(("model.embed_tokens",)).values[token_ids // COLUMNS, :, token_ids % COLUMNS]
        if self._embedding is None:
            self._embedding = self._bundle["model.embed_tokens"]
        return self._embedding[token_ids].astype(np.float32)
