"""A product whose rows do not depend on their neighbours.

BLAS chooses its order of summation by the shape of a product, so a token's result would change in its
last bits with the number of tokens beside it, and greedy text could differ between plain and speculative
decoding. Here every call to BLAS has one and the same shape: 4 rows by a tile of 64 output columns. At that
size OpenBLAS also leaves out the re-packing of the weight that makes its small products slow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROWS = 4
COLUMNS = 64


class Tiles(NamedTuple):
    """A weight cut into tiles of 64 outputs: ``values`` float [..., tiles, in, 64], zeros after the last output."""

    values: np.ndarray
    out_features: int


def tile(weight: np.ndarray) -> Tiles:
    """Cut weights [..., out, in] into tiles, each a matrix [in, 64]."""
    *stack, out_features, in_features = weight.shape
    tiles = np.zeros((*stack, -(-out_features // COLUMNS), in_features, COLUMNS), weight.dtype)
    for first in range(0, out_features, COLUMNS):  # never a second copy of a large weight
        part = weight[..., first : first + COLUMNS, :]
        tiles[..., first // COLUMNS, :, : part.shape[-2]] = part.swapaxes(-1, -2)
    return Tiles(tiles, out_features)


def linear(x: np.ndarray, weight: Tiles) -> np.ndarray:
    """``x · weightᵀ``, each row's bits the same whatever other rows there are.

    Parameters
    ----------
    x : float [..., tokens, in]
        Leading axes match those of the weight's stack, if it has one.

    Returns
    -------
    float [..., tokens, out]
    """
    *stack, tokens, in_features = x.shape
    if in_features != weight.values.shape[-2]:
        raise ValueError(f"linear: x has {in_features} features, the weight takes {weight.values.shape[-2]}")
    blocks = -(-tokens // ROWS)
    rows = np.zeros((*stack, blocks * ROWS, in_features), x.dtype)
    rows[..., :tokens, :] = x
    rows = rows.reshape(*stack, 1, blocks, ROWS, in_features)
    products = rows @ weight.values[..., None, :, :]  # [..., tiles, blocks, 4, 64]: a tile meets all rows while cached
    tiles = weight.values.shape[-3]
    by_tile = products.reshape(*stack, tiles, blocks * ROWS, COLUMNS)[..., :tokens, :]
    return by_tile.swapaxes(-2, -3).reshape(*stack, tokens, tiles * COLUMNS)[..., : weight.out_features]


def block_products(rows: np.ndarray, weights: Sequence[Tiles]) -> np.ndarray:
    """Blocks of 4 rows, each times a weight of its own: the bits that :func:`linear` gives those rows.

    Parameters
    ----------
    rows : float [blocks, 4, in]
    weights : one a block, of equal shapes

    Returns
    -------
    float [blocks, 4, out]
    """
    products = np.empty((len(rows), len(weights[0].values), ROWS, COLUMNS), rows.dtype)
    for block, weight in enumerate(weights):
        np.matmul(rows[block], weight.values, out=products[block])
    return products.swapaxes(1, 2).reshape(len(rows), ROWS, -1)[..., : weights[0].out_features]
