"""The transition head: within a bound of its formula in float64, in the order of its own values."""

import numpy as np
import pytest
from helpers import assert_conditionals, assert_same_bits, random_draft

from kdtree_nb.kernels.transition import MAX_K, MAX_RANK, condition
from kdtree_nb.kernels.tree_build import tree_build
from kdtree_nb.reference.transition import condition as specification
from kdtree_nb.reference.tree import tree_build as tree_specification

NOTHING = (2, 0), (2, 0), (2, 4), (9, 4), (9, 4)


def run(device, *draft) -> tuple[np.ndarray, np.ndarray]:
    conditionals, children = condition(*map(device.put, draft))
    return device.host(conditionals), device.host(children)


def check(device, *draft) -> tuple[np.ndarray, np.ndarray]:
    actual = run(device, *draft)
    assert_conditionals(actual, *draft)
    return actual


def test_random_drafts(device):
    """Any size, scores from none to strong; rounded log-probabilities tie, and low ones are none."""
    rng = np.random.default_rng(0)
    for case in range(60):
        log_probs, *rest = random_draft(rng, *rng.integers(1, [6, 40, 40]), scale=[0, 0.1, 1, 5][case % 4])
        log_probs = np.minimum(np.round(log_probs, [0, 1, 6][case % 3]), -0.0625)
        log_probs[log_probs < rng.uniform(-9, -1)] = -np.inf
        check(device, log_probs, *rest)


@pytest.mark.parametrize(
    ("length", "width", "rank"),
    [
        (1, 1, 1), (1, 5, 3), (3, 1, 2), (2, 7, 0), (2, 9, 1), (3, 31, 31), (2, 32, 32), (2, 33, 33), (2, 8, MAX_RANK),
        (2, MAX_K, 64), (0, 3, 2),
    ],
)  # fmt: skip
def test_corner_sizes(device, length, width, rank):
    check(device, *random_draft(np.random.default_rng(width), length, width, rank))


def test_corner_of_no_candidates(device):
    for array in run(
        device, *(np.zeros(shape, np.int32 if at == 1 else np.float32) for at, shape in enumerate(NOTHING))
    ):
        assert array.shape == (2, 0, 0)


def test_corner_of_ties(device):
    """Equal log-probabilities, tokens of equal rows: every parent ranks the candidates in their order."""
    log_probs = np.full((3, 40), -4, np.float32)
    tables = np.ones((3, 4), np.float32), np.ones((40, 4), np.float32), np.ones((40, 4), np.float32)
    _, children = check(device, log_probs, np.tile(np.arange(40, dtype=np.int32), (3, 1)), *tables)
    assert (children == np.arange(40)).all()


def test_corner_of_ties_beside_what_is_no_candidate(device):
    log_probs = np.float32([[-1, -2, -np.inf], [-np.inf, -1, -1], [-1, -np.inf, -1], [-np.inf] * 3])
    tables = np.ones((4, 2), np.float32), np.ones((9, 2), np.float32), np.ones((9, 2), np.float32)
    token_ids = np.where(log_probs > -np.inf, 3, 0x7F7F7F7F).astype(np.int32)  # out of range where it is not read
    conditionals, children = run(device, log_probs, token_ids, *tables)
    assert children[1].tolist() == [[1, 2, 0], [1, 2, 0], [0, 1, 2]]
    assert children[2].tolist() == [[0, 1, 2], [0, 2, 1], [0, 2, 1]]
    assert (conditionals > -np.inf).sum(axis=2).tolist() == [[2, 0, 0], [2, 2, 0], [0, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("score", [-200, -30, 30, 200])
def test_corner_of_scores_whose_exponential_overflows(device, score):
    tables = np.zeros((2, 1), np.float32), np.full((3, 1), 200, np.float32), np.full((3, 1), score / 200, np.float32)
    for row in ([0, -np.inf], [-1, -2]):
        draft = np.float32([row] * 2), np.array([[1, 2]] * 2, np.int32), *tables
        for actual, expected in zip(run(device, *draft), specification(*draft), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_corner_of_nan(device):
    """In a marginal, a parent's row, a child's row: −inf, and nothing else is moved."""
    log_probs, token_ids, gates, parent_table, child_table = random_draft(np.random.default_rng(5), 3, 6, 4)
    without = log_probs.copy()
    without[1, 2] = without[2, 4] = -np.inf
    expected = run(device, without, token_ids, gates, parent_table, child_table)
    broken = log_probs.copy()
    broken[1, 2] = broken[2, 4] = np.nan
    for actual, same in zip(run(device, broken, token_ids, gates, parent_table, child_table), expected, strict=True):
        assert_same_bits(actual, same)

    for value in (np.nan, np.inf, -np.inf):
        for table, token in ((parent_table, token_ids[1, 3]), (child_table, token_ids[2, 4])):
            row, table[token] = table[token].copy(), value
            conditionals, children = run(device, log_probs, token_ids, gates, parent_table, child_table)
            table[token] = row
            assert (conditionals <= 0).all() and (conditionals[..., 1:] <= conditionals[..., :-1]).all()
            assert (np.sort(children, axis=2) == np.arange(6)).all()


def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    """Not on other depths, nor on what its parent's siblings are."""
    log_probs, token_ids, *tables = random_draft(np.random.default_rng(6), 5, 40, 33)
    whole = run(device, log_probs, token_ids, *tables)
    for depth in range(1, 5):
        rows = slice(depth - 1, depth + 1)
        part = run(device, log_probs[rows], token_ids[rows], tables[0][rows], *tables[1:])
        for actual, of_whole in zip(part, whole, strict=True):
            assert_same_bits(actual[1], of_whole[depth])
    log_probs[1, 1:], token_ids[1] = -np.inf, token_ids[1, 0]
    alone = run(device, log_probs[1:3], token_ids[1:3], tables[0][1:3], *tables[1:])
    for actual, of_whole in zip(alone, whole, strict=True):
        assert_same_bits(actual[1, 0], of_whole[2, 0])


def test_any_order_of_threads(device):
    draft = [*map(device.put, random_draft(np.random.default_rng(7), 3, 40, 40))]
    device.every_schedule(lambda: condition(*draft))


def test_the_tree_of_its_conditionals_is_the_specification_s(device):
    rng = np.random.default_rng(8)
    draft = [*map(device.put, random_draft(rng, 7, 32, 16, 2))]
    conditionals, children = condition(*draft)
    tree = tree_build(device.put([17], np.int32), conditionals, draft[1], 64, children)
    host = [device.host(array) for array in (conditionals, draft[1], children)]
    expected = tree_specification(17, host[0], host[1], 64, host[2])
    for name in ("tokens", "parents", "depths"):
        assert_same_bits(device.host(getattr(tree, name)), getattr(expected, name))


def test_numpy_arrays_take_the_specification():
    draft = random_draft(np.random.default_rng(9), 3, 6, 4)
    for actual, expected in zip(condition(*draft), specification(*draft), strict=True):
        assert_same_bits(actual, expected)


def test_refuses(device):
    def refused(error: type[Exception], message: str, *shapes: tuple[int, ...], dtype: type = np.float32) -> None:
        dtypes = np.float32, np.int32, np.float32, dtype, np.float32
        with pytest.raises(error, match=f"condition: {message}"):
            condition(*map(device.empty, shapes, dtypes))

    refused(ValueError, r"log_probs \[2, 3\] and token_ids \[2, 4\]", (2, 3), (2, 4), (2, 5), (9, 5), (9, 5))
    refused(ValueError, r"gates \[3, 5\], expected \[2, rank\]", (2, 3), (2, 3), (3, 5), (9, 5), (9, 5))
    refused(ValueError, r"parent_table \[9, 4\] and", (2, 3), (2, 3), (2, 5), (9, 4), (9, 5))
    refused(ValueError, "K=257, expected at most 256", (2, 257), (2, 257), (2, 5), (9, 5), (9, 5))
    refused(ValueError, "rank=257, expected at most 256", (2, 3), (2, 3), (2, 257), (9, 257), (9, 257))
    refused(TypeError, ".*'parent_table' is float64", (2, 3), (2, 3), (2, 5), (9, 5), (9, 5), dtype=np.float64)
