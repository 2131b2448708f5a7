"""Draft trees as facts/ddtree.md pins them, against brute force."""

import heapq
import itertools

import numpy as np
import pytest
from helpers import assert_same_bits, count_nodes, random_parents, root_path
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.reference.tree import DraftTree, ancestors, cache_commit, cut, tree_accept, tree_build, visibility

Ranks = tuple[int, ...]


# ---- build -----------------------------------------------------------------------------------------------------------


def best_prefixes(log_probs: np.ndarray, node_budget: int) -> list[Ranks]:
    """Every prefix, scored along its path in float32, sorted by (−score, path), the first ``node_budget``."""
    scored: list[tuple[float, Ranks]] = []
    level: list[tuple[np.float32, Ranks]] = [(np.float32(0), ())]
    for row in log_probs:
        finite = [rank for rank in range(len(row)) if row[rank] > -np.inf]
        level = [(score + row[rank], (*ranks, rank)) for score, ranks in level for rank in finite]
        scored += [(-float(score), ranks) for score, ranks in level]
    return [ranks for _, ranks in sorted(scored)[:node_budget]]


def rank_paths(tree: DraftTree, token_ids: np.ndarray) -> list[Ranks]:
    """The tree's nodes as paths of ranks, in the order of the nodes, the root left out."""
    paths: list[Ranks] = [()]
    for node in range(1, tree.num_nodes):
        parent = paths[tree.parents[node]]
        (rank,) = np.flatnonzero(token_ids[len(parent)] == tree.tokens[node])
        paths.append((*parent, int(rank)))
    return paths[1:]


def build(log_probs: np.ndarray, node_budget: int) -> tuple[list[Ranks], DraftTree]:
    """A tree over token ids V−1 … 0 turned round by the depth, so that rank, token and index never agree for long."""
    depth_limit, width = log_probs.shape
    token_ids = np.array([np.roll(np.arange(width)[::-1], depth) for depth in range(depth_limit)], np.int32)
    tree = tree_build(17, log_probs, token_ids.reshape(depth_limit, width), node_budget)
    return rank_paths(tree, token_ids), tree


def assert_well_formed(tree: DraftTree, node_budget: int) -> None:
    for column in (tree.tokens, tree.parents, tree.depths):
        assert column.dtype == np.int32 and column.shape == (node_budget + 1,)
    assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (17, -1, 0)
    nodes = np.arange(1, tree.num_nodes)
    assert (tree.parents[nodes] >= 0).all() and (tree.parents[nodes] < nodes).all()
    assert (tree.depths[nodes] == tree.depths[tree.parents[nodes]] + 1).all()
    for column in (tree.tokens, tree.parents, tree.depths):
        assert (column[tree.num_nodes :] == -1).all()


TIED = np.array([0, -0.5, -1, -1.5, -np.inf], np.float32)
ROUNDED = np.log(np.arange(1, 10) / 10).astype(np.float32)  # sums tie in real numbers, not in float32
SPREAD = np.random.default_rng(0).uniform(-20, 0, 256).astype(np.float32)


@st.composite
def marginals(draw: st.DrawFn, values: np.ndarray) -> np.ndarray:
    """Rows [L, K] of some of at most 256 values, up to 4 × 5, sorted."""
    depth_limit, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    indices = draw(st.binary(min_size=depth_limit * width, max_size=depth_limit * width))
    rows = values[[index % len(values) for index in indices]]
    return -np.sort(-rows.reshape(depth_limit, width), axis=1)


@pytest.mark.parametrize("values", [TIED, ROUNDED, SPREAD], ids=["ties", "rounding", "spread"])
def test_build_agrees_with_enumeration(values):
    @settings(max_examples=400, deadline=None)
    @given(log_probs=marginals(values), node_budget=st.integers(0, 40))
    def check(log_probs, node_budget):
        paths, tree = build(log_probs, node_budget)
        assert paths == best_prefixes(log_probs, node_budget)
        assert_well_formed(tree, node_budget)

    check()


def best_conditioned(log_probs: np.ndarray, children: np.ndarray, node_budget: int) -> list[tuple[Ranks, Ranks]]:
    """As best_prefixes, children taken from the row of the last candidate: paths of ranks, and of candidates."""
    scored: list[tuple[float, Ranks, Ranks]] = []
    level: list[tuple[np.float32, Ranks, Ranks]] = [(np.float32(0), (), (0,))]
    for depth in range(len(log_probs)):
        level = [
            (score + log_prob, (*ranks, rank), (*path, int(children[depth, path[-1], rank])))
            for score, ranks, path in level
            for rank, log_prob in enumerate(log_probs[depth, path[-1]])
            if log_prob > -np.inf
        ]
        scored += [(-float(score), ranks, path[1:]) for score, ranks, path in level]
    return [(ranks, path) for _, ranks, path in sorted(scored)[:node_budget]]


@st.composite
def conditionals(draw: st.DrawFn, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [L, K, K] of some of at most 256 values, up to 4 × 4 × 4, sorted, and their candidates in any order."""
    depth_limit, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = depth_limit, width, width
    indices = draw(st.binary(min_size=depth_limit * width * width, max_size=depth_limit * width * width))
    rows = -np.sort(-values[[index % len(values) for index in indices]].reshape(shape), axis=2)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    children = rng.permuted(np.broadcast_to(np.arange(width), shape), axis=2).astype(np.int32)
    # What must not be read: rows of other parents than the root at depth 0, candidates of impossible children.
    rows[0, 1:] = np.nan
    children[rows == -np.inf] = -7
    children[0, 1:] = -7
    return rows, children


def distinct_ids(depth_limit: int, width: int) -> np.ndarray:
    return 3 + np.arange(depth_limit * width, dtype=np.int32).reshape(depth_limit, width)[::-1, ::-1]


@pytest.mark.parametrize("values", [TIED, ROUNDED, SPREAD], ids=["ties", "rounding", "spread"])
def test_build_with_children_agrees_with_enumeration(values):
    @settings(max_examples=400, deadline=None)
    @given(draft=conditionals(values), node_budget=st.integers(0, 40))
    def check(draft, node_budget):
        log_probs, children = draft
        token_ids = distinct_ids(*log_probs.shape[:2])
        tree = tree_build(17, log_probs, token_ids, node_budget, children)
        expected = best_conditioned(log_probs, children, node_budget)
        assert rank_paths(tree, token_ids) == [path for _, path in expected]
        assert_well_formed(tree, node_budget)

    check()


@settings(max_examples=200, deadline=None)
@given(log_probs=marginals(TIED), node_budget=st.integers(0, 40))
def test_marginals_are_conditionals_whose_rows_are_alike(log_probs, node_budget):
    depth_limit, width = log_probs.shape
    token_ids = distinct_ids(depth_limit, width)
    children = np.tile(np.arange(width, dtype=np.int32), (depth_limit, width, 1))
    expected = tree_build(17, log_probs, token_ids, node_budget)
    tree = tree_build(17, log_probs[:, None].repeat(width, axis=1), token_ids, node_budget, children)
    assert tree.num_nodes == expected.num_nodes
    for name in ("tokens", "parents", "depths"):
        assert_same_bits(getattr(tree, name), getattr(expected, name))


def test_a_child_is_ranked_by_its_own_parent():
    """Token 5 is followed by 8, token 6 by 7: the marginals of the second position know neither."""
    log_probs = np.log([[[0.6, 0.4]] * 2, [[0.9, 0.1], [0.8, 0.2]]]).astype(np.float32)
    children = np.array([[[0, 1]] * 2, [[1, 0], [0, 1]]], np.int32)
    tree = tree_build(17, log_probs, np.array([[5, 6], [7, 8]]), 6, children)  # .6, .54, .4, .32, .08, .06
    assert tree.tokens.tolist() == [17, 5, 8, 6, 7, 8, 7]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 3, 1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_conditionals_leave_the_root(shape):
    rows = np.zeros((*shape, shape[1]), np.float32)
    tree = tree_build(17, rows, np.zeros(shape, np.int32), 2, rows.astype(np.int32))
    assert tree.num_nodes == 1
    assert_well_formed(tree, 2)


def test_uniform_marginals_end_with_the_lexicographic_order():
    paths, _ = build(np.full((3, 4), np.log(0.25), np.float32), 6)
    assert paths == [(0,), (1,), (2,), (3,), (0, 0), (0, 1)]


def test_equal_scores_put_a_prefix_before_its_extensions():
    paths, tree = build(np.zeros((2, 2), np.float32), 6)
    assert paths == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4, 4]


STEEP = np.log([0.7, 0.15, 0.08, 0.04, 0.02, 0.01])


def test_scores_are_float32_sums_along_the_path():
    """Of the paths of three 0s and a 1, equal in real numbers, float32 drops (0, 0, 0, 1) and float64 (1, 0, 0, 0)."""
    log_probs = np.tile(STEEP.astype(np.float32), (4, 1))
    paths, _ = build(log_probs, 16)
    assert paths == best_prefixes(log_probs, 16)
    assert paths == [
        (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (0, 1), (1, 0), (2,),
        (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 2), (2, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0),
    ]  # fmt: skip
    assert set(best_prefixes(log_probs.astype(np.float64), 16)) - set(paths) == {(0, 0, 0, 1)}


def running_sum_prefixes(log_probs: np.ndarray, node_budget: int) -> list[Ranks]:
    """What public code does and we do not: a sibling's score made from its neighbour's."""
    frontier = [(-log_probs[0, 0], (0,))]
    chosen: list[Ranks] = []
    while len(chosen) < node_budget:
        negative_score, ranks = heapq.heappop(frontier)
        chosen.append(ranks)
        row, rank = log_probs[len(ranks) - 1], ranks[-1]
        if len(ranks) < len(log_probs):
            heapq.heappush(frontier, (negative_score - log_probs[len(ranks), 0], (*ranks, 0)))
        if rank + 1 < len(row):
            heapq.heappush(frontier, (negative_score + row[rank] - row[rank + 1], (*ranks[:-1], rank + 1)))
    return chosen


def test_running_sums_through_siblings_give_other_trees():
    steep = np.tile(STEEP.astype(np.float32), (4, 1))
    paths, _ = build(steep, 16)
    assert set(paths) == set(running_sum_prefixes(steep, 16))
    assert set(running_sum_prefixes(steep.astype(np.float64), 16)) - set(paths) == {(0, 0, 0, 1)}

    flatter = np.tile(np.log([0.7, 0.3]).astype(np.float32), (3, 1))
    paths, _ = build(flatter, 7)
    assert set(paths) - set(running_sum_prefixes(flatter, 7)) == {(0, 0, 1)}


@pytest.mark.parametrize(
    ("rows", "node_budget", "expected"),
    [
        pytest.param([[-0.1, -2, -3]], 2, [(0,), (1,)], id="L=1"),
        pytest.param([[-0.1], [-2], [-3]], 2, [(0,), (0, 0)], id="K=1"),
        pytest.param([[-0.1, -2], [-0.1, -2]], 0, [], id="B=0"),
        pytest.param([[-0.1, -2]], 5, [(0,), (1,)], id="B beyond what exists"),
        pytest.param([[0, -np.inf, -np.inf]] * 2, 5, [(0,), (0, 0)], id="[0, -inf, -inf], B=5"),
        pytest.param([[-0.1, -3], [-np.inf] * 2, [-0.1, -3]], 5, [(0,), (1,)], id="a row of -inf ends the depth"),
        pytest.param([[-np.inf] * 2, [-0.1, -3]], 3, [], id="nothing but the root"),
        pytest.param([[-0.0, 0.0], [0.0, -0.0]], 4, [(0,), (0, 0), (0, 1), (1,)], id="-0 ties with 0"),
        pytest.param([[-1e4, -1e4]], 2, [(0,), (1,)], id="improbable is not impossible"),
    ],
)
def test_corners(rows, node_budget, expected):
    log_probs = np.array(rows, np.float32)
    paths, tree = build(log_probs, node_budget)
    assert paths == expected == best_prefixes(log_probs, node_budget)
    assert tree.num_nodes == 1 + len(expected)
    assert_well_formed(tree, node_budget)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_marginals_leave_the_root(shape):
    tree = tree_build(17, np.zeros(shape, np.float32), np.zeros(shape, np.int32), 2)
    assert tree.num_nodes == 1
    assert_well_formed(tree, 2)


def test_a_small_budget_is_the_start_of_a_large_one():
    log_probs = -np.sort(-SPREAD[:16].reshape(4, 4), axis=1)
    _, large = build(log_probs, 50)
    for node_budget in range(50):
        _, small = build(log_probs, node_budget)
        for name in ("tokens", "parents", "depths"):
            assert_same_bits(getattr(small, name), getattr(large, name)[: node_budget + 1])


def test_token_id_zero_is_a_token():
    tree = tree_build(0, np.full((2, 2), -0.7, np.float32), np.array([[0, 5], [5, 0]]), 6)
    assert tree.tokens.tolist() == [0, 0, 5, 5, 0, 5, 0]
    assert tree.num_nodes == 7


def test_log_probs_are_taken_as_float32():
    """Two sums that differ in float64 alone tie, so the path decides."""
    rows = np.array([[-1.0, -1.0 - 1e-12]])
    tree = tree_build(17, rows, np.array([[3, 4]]), 2)
    assert tree.tokens.tolist() == [17, 3, 4]
    tree = tree_build(17, rows[:, ::-1], np.array([[4, 3]]), 2)  # ascends in float64, ties in float32
    assert tree.tokens.tolist() == [17, 4, 3]


@pytest.mark.parametrize(
    ("rows", "token_ids", "node_budget", "message"),
    [
        ([[-1, -2]], [[3, 4]], -1, r"tree_build: node_budget=-1, expected 0 or more"),
        ([[-1, -2]], [[3, 4, 5]], 2, r"tree_build: log_probs \[1, 2\] and token_ids \[1, 3\], expected the same"),
        ([-1, -2], [3, 4], 2, r"tree_build: log_probs \[2\] and token_ids \[2\], expected the same \[L, K\]"),
        ([[-1, np.nan]], [[3, 4]], 2, r"tree_build: log_probs hold NaN"),
        ([[0.25, -2]], [[3, 4]], 2, r"tree_build: log_probs reach 0\.25, expected at most 0"),
        ([[-1, -2], [-2, -1]], [[3, 4], [3, 4]], 2, r"tree_build: log_probs ascend within a row, expected the most"),
    ],
    ids=["budget", "shapes", "one axis", "NaN", "positive", "ascending"],
)  # fmt: skip
def test_build_refuses(rows, token_ids, node_budget, message):
    with pytest.raises(ValueError, match=message):
        tree_build(17, np.array(rows, np.float32), np.array(token_ids), node_budget)


GOOD = [[[-1, -2], [np.nan, 9]], [[-1, -2], [-1, -np.inf]]]


@pytest.mark.parametrize(
    ("log_probs", "token_ids", "children", "message"),
    [
        (GOOD, [[3, 4]] * 2, [[0, 1]] * 2, r"log_probs \[2, 2, 2\], children \[2, 2\] and token_ids \[2, 2\], ex"),
        (GOOD[0], [[3, 4]] * 2, [[[0, 1]] * 2] * 2, r"log_probs \[2, 2\], children \[2, 2, 2\] and token_ids \[2, 2\]"),
        (GOOD, [3, 4], [[[0, 1]] * 2] * 2, r"log_probs \[2, 2, 2\], children \[2, 2, 2\] and token_ids \[2\]"),
        (GOOD, [[3, 4]] * 2, [[[0, 1]] * 2, [[0, 1], [2, 0]]], r"children name candidates 0\.\.2, expected 0 to 1"),
        (GOOD, [[3, 4]] * 2, [[[0, -1]] * 2, [[0, 1]] * 2], r"children name candidates -1\.\.1, expected 0 to 1"),
        (GOOD, [[3, 4]] * 2, [[[0, 1]] * 2, [[1, 1]] * 2], r"children name a candidate twice in a row"),
        ([GOOD[0], GOOD[0]], [[3, 4]] * 2, [[[0, 1]] * 2] * 2, r"log_probs hold NaN"),
        ([[[0.5, -1]] * 2] * 2, [[3, 4]] * 2, [[[0, 1]] * 2] * 2, r"log_probs reach 0\.5, expected at most 0"),
        ([[[-1, -2]] * 2, [[-1, -2], [-2, -1]]], [[3, 4]] * 2, [[[0, 1]] * 2] * 2, r"log_probs ascend within a row"),
    ],
    ids=["children", "log_probs", "token_ids", "beyond", "below", "twice", "NaN", "positive", "ascending"],
)  # fmt: skip
def test_build_refuses_children(log_probs, token_ids, children, message):
    with pytest.raises(ValueError, match=f"tree_build: {message}"):
        tree_build(17, np.array(log_probs, np.float32), np.array(token_ids), 3, np.array(children))


def test_what_a_search_cannot_come_to_is_not_checked():
    children = np.array([[[0, 1], [9, 9]], [[0, 1], [1, 9]]])
    assert tree_build(17, np.array(GOOD, np.float32), np.array([[3, 4]] * 2), 9, children).num_nodes == 1 + 2 + 3


# ---- who sees whom ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(parents=random_parents(max_padding=3))
def test_visibility_is_the_climb_to_the_root(parents):
    expected = np.zeros((len(parents), len(parents)), bool)
    for node in range(count_nodes(parents)):
        expected[node, root_path(parents, node)] = True
    visible = visibility(parents)
    assert visible.dtype == bool
    np.testing.assert_array_equal(visible, expected)


@settings(max_examples=200, deadline=None)
@given(parents=random_parents(max_padding=3))
def test_ancestors_run_from_the_root_down(parents):
    paths = ancestors(parents)
    for node, row in enumerate(paths):
        path = root_path(parents, node) if node < count_nodes(parents) else []
        assert row.tolist() == path + [-1] * (paths.shape[1] - len(path))


def test_siblings_and_cousins_do_not_see_each_other():
    visible = visibility(np.array([-1, 0, 0, 1, 2]))
    np.testing.assert_array_equal(
        visible.astype(int),
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]],
    )


def test_a_chain_sees_what_a_causal_mask_shows():
    np.testing.assert_array_equal(visibility(np.arange(-1, 99)), np.tri(100, dtype=bool))


def test_padding_sees_nothing_and_is_seen_by_nobody():
    _, tree = build(np.array([[-0.1, -2]], np.float32), 5)
    visible = visibility(tree.parents)
    assert not visible[tree.num_nodes :].any()
    assert not visible[:, tree.num_nodes :].any()


def test_positions_follow_depths_not_slots():
    """Parents [−1, 0, 0, 1]: the two siblings stand at one position, and slot 3 at prefix_len + 2."""
    tree = tree_build(17, np.array([[-0.7, -0.7], [-0.7, -9]], np.float32), np.array([[1, 2], [3, 4]]), 3)
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert (40 + tree.depths).tolist() == [40, 41, 41, 42]


# ---- walk ------------------------------------------------------------------------------------------------------------


@st.composite
def drafts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, parents and targets over few token ids, 0 and −1 among them; siblings carry distinct tokens."""
    nodes = [(-1, 3)]
    for byte in draw(st.binary(max_size=16)):
        node = (byte // 4 % len(nodes), byte % 4)
        if node not in nodes:
            nodes.append(node)
    nodes += [(-1, -1)] * draw(st.integers(0, 3))
    parents, tokens = np.array(nodes, np.int32).T
    targets = np.frombuffer(draw(st.binary(min_size=len(nodes), max_size=len(nodes))), np.uint8)
    return tokens, parents, targets.astype(np.int32) % 5 - 1


@settings(max_examples=800, deadline=None)
@given(draft=drafts())
def test_walk_takes_the_longest_path_that_the_target_confirms(draft):
    tokens, parents, targets = draft
    confirmed = []
    for node in range(count_nodes(parents)):
        path = root_path(parents, node)
        if all(tokens[child] == targets[parent] for parent, child in itertools.pairwise(path)):
            confirmed.append(path)
    longest = max(confirmed, key=len)

    path, bonus = tree_accept(tokens, parents, targets)
    assert path.dtype == np.int32 and isinstance(bonus, int)
    assert path.tolist() == longest
    assert bonus == targets[longest[-1]]


@pytest.mark.parametrize("target", [0, -1])
def test_walk_cannot_reach_padding(target):
    """Padding's token is −1 and its parent −1; neither a target of 0 (the argmax of zeros) nor of −1 leads there."""
    tree = tree_build(17, np.array([[-0.1]], np.float32), np.array([[5]]), 4)
    for first in (target, 5):
        path, bonus = tree_accept(tree.tokens, tree.parents, np.array([first, target, target, target, target]))
        assert path.tolist() == [0, 1][: 2 if first == 5 else 1]
        assert bonus == target


def test_walk_does_not_return_to_the_root():
    """The root's parent is −1 and its token may be the target's choice: a walk only descends."""
    path, bonus = tree_accept(np.array([7, 8]), np.array([-1, 0]), np.array([7, 7]))
    assert (path.tolist(), bonus) == ([0], 7)


def test_walk_accepts_token_id_zero():
    path, bonus = tree_accept(np.array([0, 0, 0]), np.array([-1, 0, 1]), np.array([0, 0, 0]))
    assert (path.tolist(), bonus) == ([0, 1, 2], 0)


def parents_of(next_token: list[int], next_sibling: list[int]) -> np.ndarray:
    """From SGLang's links, first child and next sibling, to parents."""
    parents = np.full(len(next_token), -1)
    for parent, child in enumerate(next_token):
        while child != -1:
            parents[child] = parent
            child = next_sibling[child]
    return parents


def test_published_greedy_case():
    """SGLang's test of ``verify_tree_greedy``: two trees, accepted slots counted through both."""
    candidates = np.array([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]])
    next_token = [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]
    next_sibling = [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]
    target_predict = np.array([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]])
    accept_index, accepted, bonuses = np.full((2, 4), -1), [], []
    for tree in range(2):
        parents = parents_of(next_token[tree], next_sibling[tree])
        path, bonus = tree_accept(candidates[tree], parents, target_predict[tree])
        accept_index[tree, : len(path)] = 6 * tree + path
        accepted.append(len(path) - 1)
        bonuses.append(bonus)
    assert accept_index.tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]]
    assert (accepted, bonuses) == ([3, 2], [18, 18])


@settings(max_examples=150, deadline=None)
@given(log_probs=marginals(TIED), node_budget=st.integers(0, 30), data=st.data())
def test_walk_finds_every_node_that_the_build_placed(log_probs, node_budget, data):
    _, tree = build(log_probs, node_budget)
    node = data.draw(st.integers(0, tree.num_nodes - 1))
    route = root_path(tree.parents, node)
    targets = np.full(node_budget + 1, -1)
    targets[route[:-1]] = tree.tokens[route[1:]]
    path, _ = tree_accept(tree.tokens, tree.parents, targets)
    assert path.tolist() == route
    assert len(path) == tree.depths[node] + 1


# ---- commit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_len", [0, 3])
@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 3], [0, 2, 5], [0, 1, 2, 4, 5, 6], [0, 6]])
def test_commit_moves_the_accepted_rows_and_nothing_else(path, prefix_len):
    """Moves overlap: [0, 2, 3] reads row 2, which it also writes."""
    cache = np.arange(2 * 12 * 5, dtype=np.float32).reshape(2, 12, 5)
    expected = cache.copy()
    for slot, node in enumerate(path):
        expected[:, prefix_len + slot] = cache[:, prefix_len + node]
    cache_commit(cache, prefix_len, np.array(path, np.int32))
    assert_same_bits(cache, expected)


@settings(max_examples=200, deadline=None)
@given(parents=random_parents(), data=st.data())
def test_commit_leaves_the_sequence_that_plain_decoding_would(parents, data):
    path = root_path(parents, data.draw(st.integers(0, len(parents) - 1)))
    cache = np.random.default_rng(0).standard_normal((3, 4 + len(parents), 2))
    prefix, nodes = cache[:, :4].copy(), cache[:, 4:].copy()
    cache_commit(cache, 4, np.array(path))
    assert_same_bits(cache[:, : 4 + len(path)], np.concatenate([prefix, nodes[:, path]], axis=1))


def test_commit_into_a_view_of_one_layer():
    rows = np.arange(24.0).reshape(8, 3)
    cache_commit(rows[None], 2, np.array([0, 2, 3]))
    assert rows[:, 0].tolist() == [0, 3, 6, 12, 15, 15, 18, 21]


def test_features_and_cache_follow_one_path():
    """Accepted [0, 2, 5]: the drafter's features are those rows, not the first three."""
    parents = np.array([-1, 0, 0, 1, 1, 2])
    tokens = np.array([9, 1, 2, 3, 4, 5])
    path, bonus = tree_accept(tokens, parents, np.array([2, 0, 5, 0, 0, 6]))
    assert (path.tolist(), bonus) == ([0, 2, 5], 6)
    features = 10.0 * np.arange(6)[:, None]
    assert features[path].tolist() == [[0], [20], [50]]
    cache = np.arange(6.0).reshape(1, 6, 1)
    cache_commit(cache, 0, path)
    assert cache[0, :3, 0].tolist() == [0, 2, 5]


def test_rounds_follow_each_other():
    """Everything rejected, then [0, 2, 3], then everything rejected: the cache holds the committed tokens in order."""
    cache = np.full((1, 16, 1), -1.0)
    committed = [100.0]
    for path in ([0], [0, 2, 3], [0]):
        nodes = committed[-1] + np.arange(4.0)  # node 0 is the last committed token
        cache[0, len(committed) - 1 : len(committed) + 3, 0] = nodes
        cache_commit(cache, len(committed) - 1, np.array(path))
        committed += [*nodes[path[1:]], 10 * nodes[path[-1]]]
    assert cache[0, : len(committed) - 1, 0].tolist() == committed[:-1]


@pytest.mark.parametrize("width_of_parents", [(), (3,)], ids=["marginals", "conditionals"])
@pytest.mark.parametrize("most_depth", [-1, 0, 2, 9])
@pytest.mark.parametrize("chain", [False, True])
def test_where_a_round_wants_nodes(width_of_parents: tuple[int, ...], most_depth: int, chain: bool) -> None:
    log_probs = -np.arange(4 * 3 * (3 if width_of_parents else 1), dtype=np.float32).reshape(4, *width_of_parents, 3)
    found = cut(log_probs, most_depth, chain)
    assert found.dtype == np.float32
    for place, value in np.ndenumerate(log_probs):
        assert found[place] == (value if place[0] < most_depth and not (chain and place[-1]) else -np.inf)
