"""The transition head against its formula in float64, and the trees that grow from it."""

import numpy as np
import pytest
from helpers import assert_conditionals, assert_same_bits, random_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.reference.transition import condition
from kdtree_nb.reference.tree import tree_build


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    decimals=st.sampled_from([0, 1, 6]),
    cut=st.floats(-8, 0),
    seed=st.integers(0, 2**32 - 1),
)
def test_against_the_formula(sizes, scale, decimals, cut, seed):
    """Rounded log-probabilities tie, those below the cut are none."""
    log_probs, *rest = random_draft(np.random.default_rng(seed), *sizes, scale)
    log_probs = np.minimum(np.round(log_probs, decimals), -0.0625)  # rounded up they may sum to more than 1
    log_probs[log_probs < cut] = -np.inf
    assert_conditionals(condition(log_probs, *rest), log_probs, *rest)


def test_an_example_by_hand():
    """Parent 5 prefers token 8, parent 6 token 7; a tenth of the mass lies on tokens that are no candidates."""
    log_probs = np.log([[0.5, 0.25], [0.6, 0.3]]).astype(np.float32)
    parent_table, child_table = np.zeros((9, 2), np.float32), np.zeros((9, 2), np.float32)
    parent_table[5], parent_table[6] = [2, 0], [0, 2]
    silu = 2 / (1 + np.exp(-2.0))
    child_table[8, 0] = child_table[7, 1] = np.log(4) / silu  # a factor of 4
    conditionals, children = condition(
        log_probs, np.array([[5, 6], [7, 8]]), np.zeros((2, 2), np.float32), parent_table, child_table
    )
    np.testing.assert_allclose(
        np.exp(conditionals),
        [[[0.5, 0.25], [0, 0]], [np.array([1.2, 0.6]) / 1.9, np.array([2.4, 0.3]) / 2.8]],
        rtol=1e-6,
    )
    assert children.tolist() == [[[0, 1], [0, 1]], [[1, 0], [0, 1]]]


def test_gates_move_the_parent():
    log_probs, token_ids, gates, parent_table, child_table = random_draft(np.random.default_rng(0), 3, 6, 4)
    moved = parent_table + gates[1]
    expected = condition(log_probs[:2], token_ids[:2], np.zeros((2, 4), np.float32), moved, child_table)
    actual = condition(log_probs[:2], token_ids[:2], gates[:2], parent_table, child_table)
    np.testing.assert_allclose(actual[0][1], expected[0][1], rtol=1e-5)


def test_scores_of_zero_leave_the_marginals():
    log_probs, token_ids, gates, parent_table, child_table = random_draft(np.random.default_rng(2), 4, 7, 3)
    conditionals, children = condition(log_probs, token_ids, gates, parent_table, 0 * child_table)
    assert (children == np.arange(7)).all()
    np.testing.assert_allclose(conditionals[1:], log_probs[1:, None].repeat(7, axis=1), atol=1e-6)
    tree = tree_build(17, conditionals, token_ids, 20, children)
    assert tree.tokens.tolist() == tree_build(17, log_probs, token_ids, 20).tokens.tolist()


@pytest.mark.parametrize("score", [-200, -30, 30, 200])
def test_scores_whose_exponential_overflows(score):
    """With all of the mass on the candidates a common score drops out; otherwise it moves mass from or to the rest."""
    tables = np.zeros((2, 1), np.float32), np.full((3, 1), 200, np.float32), np.full((3, 1), score / 200, np.float32)
    for rows in ([[0, -np.inf]] * 2, [[-1, -2]] * 2):
        log_probs, token_ids = np.array(rows, np.float32), np.array([[1, 2]] * 2)
        actual = condition(log_probs, token_ids, *tables)
        assert np.isfinite(actual[0][1, 0, 0])
        inside = np.exp(log_probs[1].astype(np.float64)).sum()
        log_z = np.logaddexp(score + np.log(inside), np.log(1 - inside) if inside < 1 else -np.inf)
        np.testing.assert_allclose(actual[0][1, 0], log_probs[1] + score - log_z, rtol=1e-5, atol=1e-6)


def test_tokens_of_what_is_no_candidate_are_not_looked_up():
    log_probs, token_ids, *tables = random_draft(np.random.default_rng(3), 3, 5, 4)
    log_probs[:, 3:] = -np.inf
    expected = condition(log_probs, token_ids, *tables)
    token_ids[:, 3:] = 10**6
    for actual, same in zip(condition(log_probs, token_ids, *tables), expected, strict=True):
        assert_same_bits(actual, same)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_candidates(shape):
    conditionals, children = condition(
        np.zeros(shape, np.float32), np.zeros(shape, int), np.zeros((shape[0], 4)), np.zeros((9, 4)), np.zeros((9, 4))
    )
    assert conditionals.shape == children.shape == (*shape, shape[1])


def test_a_tree_takes_what_the_head_gives():
    """It passes the tree's checks, and gives another tree than the marginals."""
    log_probs, token_ids, *tables = random_draft(np.random.default_rng(4), 5, 8, 4, 2)
    log_probs[2, 5:] = -np.inf
    conditionals, children = condition(log_probs, token_ids, *tables)
    tree = tree_build(17, conditionals, token_ids, 40, children)
    assert tree.num_nodes == 41
    assert tree.tokens.tolist() != tree_build(17, log_probs, token_ids, 40).tokens.tolist()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (2, 4), (2, 5), (9, 5), (9, 5)), r"log_probs \[2, 3\] and token_ids \[2, 4\], expected the same"),
        (((3,), (3,), (2, 5), (9, 5), (9, 5)), r"log_probs \[3\] and token_ids \[3\], expected the same \[L, K\]"),
        (((2, 3), (2, 3), (3, 5), (9, 5), (9, 5)), r"gates \[3, 5\], expected \[2, rank\]"),
        (((2, 3), (2, 3), (2, 5), (9, 4), (9, 4)), r"parent_table \[9, 4\] and child_table \[9, 4\], .*\[V, 5\]"),
        (((2, 3), (2, 3), (2, 5), (9, 5), (8, 5)), r"parent_table \[9, 5\] and child_table \[8, 5\], .*\[V, 5\]"),
    ],
)
def test_refuses(shapes, message):
    with pytest.raises(ValueError, match=f"condition: {message}"):
        condition(*(np.zeros(shape, int if at == 1 else np.float32) for at, shape in enumerate(shapes)))
