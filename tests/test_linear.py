"""linear: right within its bound, and a row's bits its own."""

import numpy as np
import pytest
from helpers import assert_same_bits

from kdtree_nb.reference.linear import COLUMNS, ROWS, block_products, linear, tile


def operands(tokens: int, in_features: int, out_features: int, dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([tokens, in_features, out_features])
    x, weight = rng.standard_normal((tokens, in_features)), rng.standard_normal((out_features, in_features))
    return x.astype(dtype), weight.astype(dtype)


def assert_within_rounding(actual: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """|error| ≤ γ · |x|·|w|ᵀ with γ = in · u / (1 − in · u): what any order of summation keeps (Higham, eq. 3.5)."""
    x, weight = x.astype(np.longdouble), weight.astype(np.longdouble)
    rounding = x.shape[-1] * np.finfo(actual.dtype).eps / 2
    bound = rounding / (1 - rounding) * (np.abs(x) @ np.abs(weight).swapaxes(-1, -2))
    assert (np.abs(actual - x @ weight.swapaxes(-1, -2)) <= bound).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("out_features", [1, 63, 64, 65, 131])
@pytest.mark.parametrize("in_features", [1, 2, 37, 256])
@pytest.mark.parametrize("tokens", [1, 4, 5, 9])
def test_is_the_product(tokens, in_features, out_features, dtype):
    x, weight = operands(tokens, in_features, out_features, dtype)
    actual = linear(x, tile(weight))
    assert actual.dtype == dtype and actual.shape == (tokens, out_features)
    assert_within_rounding(actual, x, weight)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 7), (37, 131), (256, 64), (1000, 65)])
def test_a_rows_bits_do_not_depend_on_the_others(in_features, out_features, dtype):
    x, weight = operands(64, in_features, out_features, dtype)
    tiles = tile(weight)
    whole = linear(x, tiles)
    for tokens in range(1, 65):
        assert_same_bits(linear(x[:tokens], tiles), whole[:tokens])
    for row in range(64):
        assert_same_bits(linear(x[row : row + 1], tiles), whole[row : row + 1])
    order = np.random.default_rng(0).permutation(64)
    assert_same_bits(linear(x[order], tiles), whole[order])
    assert_same_bits(linear(x[3:50], tiles), whole[3:50])


def test_an_outputs_bits_do_not_depend_on_the_tile_it_is_in():
    x, weight = operands(5, 300, 200)
    whole = linear(x, tile(weight))
    for first in range(0, 200, COLUMNS):
        assert_same_bits(linear(x, tile(weight[first : first + COLUMNS])), whole[:, first : first + COLUMNS])


@pytest.mark.parametrize("stack", [(), (3,)])
def test_no_rows(stack):
    weight = np.ones((*stack, 70, 5), np.float32)
    assert linear(np.empty((*stack, 0, 5), np.float32), tile(weight)).shape == (*stack, 0, 70)


def test_a_stack_of_weights():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 3, 6, 40)), rng.standard_normal((2, 3, 70, 40))
    tiles = tile(weight)
    assert tiles.out_features == 70
    actual = linear(x, tiles)
    for i, j in np.ndindex(2, 3):
        assert_same_bits(actual[i, j], linear(x[i, j], tile(weight[i, j])))
        assert_within_rounding(actual[i, j], x[i, j], weight[i, j])


def test_three_axes_over_one_weight():
    x, weight = operands(15, 40, 70)
    tiles = tile(weight)
    assert_same_bits(linear(x.reshape(3, 5, 40), tiles), linear(x, tiles).reshape(3, 5, 70))


def strided(x: np.ndarray) -> dict[str, np.ndarray]:
    wide = np.full((len(x), 2 * x.shape[1] + 3), np.nan, x.dtype)
    wide[:, 3 : 3 + x.shape[1]] = x
    every_second = np.full((2 * len(x), 2 * x.shape[1]), np.nan, x.dtype)
    every_second[::2, ::2] = x
    return {
        "slice": wide[:, 3 : 3 + x.shape[1]],
        "every second": every_second[::2, ::2],
        "transposed": np.asfortranarray(x),
        "reversed": x[::-1, ::-1].copy()[::-1, ::-1],
    }


@pytest.mark.parametrize("layout", ["slice", "every second", "transposed", "reversed"])
def test_layout_of_x_does_not_matter(layout):
    x, weight = operands(7, 40, 70)
    view = strided(x)[layout]
    assert not view.flags.c_contiguous
    assert_same_bits(linear(view, tile(weight)), linear(x, tile(weight)))


def test_layout_of_the_weight_does_not_matter():
    x, weight = operands(7, 40, 70)
    assert_same_bits(linear(x, tile(np.asfortranarray(weight))), linear(x, tile(weight)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("row", range(6))
def test_a_poisoned_row_stays_alone(row, poison):
    x, weight = operands(6, 40, 70)
    clean = linear(x, tile(weight))
    x[row] = poison
    others = np.arange(6) != row
    with np.errstate(invalid="ignore"):
        actual = linear(x, tile(weight))
    assert_same_bits(actual[others], clean[others])
    assert not np.isfinite(actual[row]).any()


def test_a_poisoned_output_stays_alone():
    """NaN in one row of the weight (a NaN scale) reaches that output column only."""
    x, weight = operands(6, 40, 70)
    clean = linear(x, tile(weight))
    weight[66] = np.nan
    actual = linear(x, tile(weight))
    assert np.isnan(actual[:, 66]).all()
    assert_same_bits(np.delete(actual, 66, axis=1), np.delete(clean, 66, axis=1))


@pytest.mark.parametrize("tokens", [0, 3])
def test_refuses_another_number_of_features(tokens):
    with pytest.raises(ValueError, match=r"linear: x has 41 features, the weight takes 40"):
        linear(np.zeros((tokens, 41), np.float32), tile(np.zeros((70, 40), np.float32)))


def test_tiles_hold_the_weight_and_zeros():
    _, weight = operands(1, 40, 70)
    tiles = tile(weight)
    assert tiles.values.shape == (2, 40, COLUMNS) and tiles.values.flags.c_contiguous
    columns = np.concatenate(list(tiles.values), axis=1)
    assert_same_bits(columns[:, :70].T.copy(), weight)
    assert not columns[:, 70:].any()


@pytest.mark.parametrize(("features", "outputs"), [(40, 70), (256, 64), (1, 1)])
def test_blocks_have_the_bits_of_a_product_of_their_rows(features, outputs):
    x, one = operands(12, features, outputs)
    _, another = operands(1, features, outputs)
    weights = [tile(one), tile(another), tile(one)]
    actual = block_products(x.reshape(3, ROWS, features), weights)
    assert actual.shape == (3, ROWS, outputs)
    for block, weight in enumerate(weights):
        rows = x[block * ROWS : (block + 1) * ROWS]
        assert_same_bits(actual[block].copy(), linear(rows, weight))
        assert_same_bits(actual[block, :1].copy(), linear(rows[:1], weight))
