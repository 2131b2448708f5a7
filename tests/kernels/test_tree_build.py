"""Draft trees: the specification's to the bit, in every corner of its order."""

import numpy as np
import pytest
from helpers import assert_same_bits

from kdtree_nb.kernels.tree_build import MAX_BUDGET, tree_build
from kdtree_nb.reference.tree import DraftTree, cut
from kdtree_nb.reference.tree import tree_build as specification


def run(
    device, log_probs, node_budget, children=None, token_ids=None, root: int = 17, costs=None, gain=1.0
) -> DraftTree:
    log_probs = np.asarray(log_probs, np.float32)
    if token_ids is None:
        token_ids = ids_of(*log_probs.shape[:2])
    arrays = device.put([root], np.int32), device.put(log_probs), device.put(token_ids, np.int32)
    tree = tree_build(
        *arrays,
        node_budget,
        None if children is None else device.put(children, np.int32),
        None if costs is None else device.put(costs, np.float32),
        gain,
    )
    return on_host(device, tree)


def on_host(device, tree: DraftTree) -> DraftTree:
    columns = (device.host(column) for column in (tree.tokens, tree.parents, tree.depths, tree.scores))
    return DraftTree(*columns, *(int(device.host(size)[0]) for size in (tree.num_nodes, tree.paying)))


def ids_of(length: int, width: int) -> np.ndarray:
    """Other ids at every depth, so that rank, token and index never agree for long; 0 is among them."""
    return np.array([np.roll(np.arange(width)[::-1], depth) for depth in range(length)], np.int32).reshape(
        length, width
    )


def check(device, log_probs, node_budget, children=None) -> DraftTree:
    log_probs = np.asarray(log_probs, np.float32)
    tree = run(device, log_probs, node_budget, children)
    possible = np.where(np.isnan(log_probs), np.float32(-np.inf), log_probs)  # the device takes NaN for that
    with np.errstate(over="ignore"):
        expected = specification(17, possible, ids_of(*log_probs.shape[:2]), node_budget, children)
    assert_same_tree(tree, expected)
    return tree


def assert_same_tree(tree: DraftTree, expected: DraftTree) -> None:
    assert (tree.num_nodes, tree.paying) == (expected.num_nodes, expected.paying)
    for name in ("tokens", "parents", "depths", "scores"):
        assert_same_bits(getattr(tree, name), getattr(expected, name))


def random_conditionals(rng: np.random.Generator, values: np.ndarray, length: int, width: int):
    """Rows of some of the values, the candidates of each in any order; what must not be read is out of range."""
    shape = length, width, width
    log_probs = -np.sort(-rng.choice(values, shape).astype(np.float32), axis=2)
    children = rng.permuted(np.broadcast_to(np.arange(width, dtype=np.int32), shape), axis=2)
    log_probs[:1, 1:] = np.nan
    children[log_probs == -np.inf] = children[:1, 1:] = 0x7F7F7F7F
    return log_probs, children


VALUES = {
    "ties": np.array([0, -0.5, -1, -1.5, -np.inf], np.float32),
    "rounding": np.log(np.arange(1, 10) / 10).astype(np.float32),
    "spread": np.random.default_rng(0).uniform(-20, 0, 256).astype(np.float32),
    "flat": np.array([-1, -1 - 2.0**-23, -1 - 2.0**-22], np.float32),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_against_the_specification(device, values):
    rng = np.random.default_rng(1)
    for _ in range(300):
        log_probs = rng.choice(values, rng.integers(1, [7, 8]))
        check(device, -np.sort(-log_probs, axis=1), int(rng.integers(0, 81)))


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_children_against_the_specification(device, values):
    rng = np.random.default_rng(2)
    for _ in range(150):
        log_probs, children = random_conditionals(rng, values, *rng.integers(1, [7, 8]))
        check(device, log_probs, int(rng.integers(0, 81)), children)


@pytest.mark.parametrize("node_budget", [31, 64, 256, MAX_BUDGET])
@pytest.mark.parametrize("kind", ["spread", "flat"])
def test_budgets_with_children(device, kind, node_budget):
    width = min(node_budget, 256)
    log_probs, children = random_conditionals(np.random.default_rng(node_budget), VALUES[kind], 8, width)
    assert check(device, log_probs, node_budget, children).num_nodes == 1 + node_budget


def test_marginals_are_conditionals_whose_rows_are_alike(device):
    rng = np.random.default_rng(3)
    for values in VALUES.values():
        log_probs = -np.sort(-rng.choice(values, (4, 33)), axis=1)
        children = np.tile(np.arange(33), (4, 33, 1))
        assert_same_tree(run(device, log_probs[:, None].repeat(33, axis=1), 100, children), run(device, log_probs, 100))


@pytest.mark.parametrize("node_budget", [31, 32, 33, 63, 64, 255, 256, 511, MAX_BUDGET])
@pytest.mark.parametrize("kind", ["drafter", "uniform"])
def test_budgets(device, kind, node_budget):
    """32 positions with min(B, 1024) ranks each; uniform ones make every score of a depth a tie."""
    rng = np.random.default_rng(node_budget)
    width = node_budget if kind == "drafter" else 6
    logits = rng.normal(0, 4, (32, width)) if kind == "drafter" else np.zeros((32, width))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    check(device, -np.sort(-log_probs.astype(np.float32), axis=1), node_budget)


@pytest.mark.parametrize("node_budget", [32, 33, 64, 65, MAX_BUDGET])
@pytest.mark.parametrize("kind", ["ties", "one score"])
def test_ties_in_every_bucket(device, kind, node_budget):
    """Few scores, so that most steps find ties in a bucket and between buckets; or one: paths alone decide."""
    values = VALUES["ties"][1:4] if kind == "ties" else np.zeros(1, np.float32)
    log_probs, children = random_conditionals(np.random.default_rng(node_budget), values, 5, 33)
    check(device, log_probs, node_budget, children)
    check(device, -np.sort(-np.random.default_rng(node_budget).choice(values, (5, 33)), axis=1), node_budget)


@pytest.mark.parametrize("length", [1, 15, 17])
def test_tables_that_do_not_fit_in_shared_memory(device, length):
    """Of a row 16, 1 and none of its 256 ranks lie there."""
    log_probs, children = random_conditionals(np.random.default_rng(length), VALUES["flat"], length, 256)
    assert check(device, log_probs, 700, children).depths.max() == min(length, 2)


def test_the_deepest_and_the_widest(device):
    """A chain of 32 nodes, then a frontier that grows with every node."""
    assert check(device, np.zeros((32, 1)), 40).num_nodes == 33
    assert check(device, np.zeros((1, 1500)), MAX_BUDGET).num_nodes == MAX_BUDGET + 1
    deep = check(device, np.tile(np.float32([-1e-3, -5]), (600, 1)), 700)
    assert deep.depths.max() == 600


@pytest.mark.parametrize(
    ("rows", "node_budget", "nodes"),
    [
        ([[-0.1, -2, -3]], 2, 2),
        ([[-0.1], [-2], [-3]], 2, 2),
        ([[-0.1, -2], [-0.1, -2]], 0, 0),
        ([[-0.1, -2]], 5, 2),
        ([[0, -np.inf, -np.inf]] * 2, 5, 2),
        ([[-0.1, -3], [-np.inf] * 2, [-0.1, -3]], 5, 2),
        ([[-np.inf] * 2, [-0.1, -3]], 3, 0),
        ([[-0.0, 0.0], [0.0, -0.0]], 4, 4),
        ([[-1e4, -1e4]], 2, 2),
        ([[-3e38, -3.2e38], [-3e38, -3.2e38]], 9, 2),
        ([[np.log(0.25)] * 4] * 3, 6, 6),
        (np.log([[0.7, 0.15, 0.08, 0.04, 0.02, 0.01]] * 4), 16, 16),
        ([[-1, -1, -1.5], [-0.5, -1, -np.inf], [-0.5, -0.5, -2]], 80, 3 + 3 * 2 + 3 * 2 * 3),
        ([[-0.5] * 40] * 2, 200, 200),
        ([[-0.5, -1, np.nan], [-0.5, np.nan, np.nan]], 9, 4),
        (np.zeros((0, 3)), 2, 0),
        (np.zeros((2, 0)), 2, 0),
    ],
    ids=[
        "L=1", "K=1", "B=0", "B beyond what exists", "[0, -inf, -inf], B=5", "a row of -inf", "nothing but the root",
        "-0 ties with 0", "improbable", "scores that overflow", "uniform 3x4", "float32 sums",
        "ties at all depths", "more than a warp", "NaN", "L=0", "K=0",
    ],
)  # fmt: skip
def test_corners(device, rows, node_budget, nodes):
    """Those of both tests take every branch, few enough for compute-sanitizer: -k "cuda and corner"."""
    assert check(device, rows, node_budget).num_nodes == 1 + nodes


@pytest.mark.parametrize(
    ("rows", "children", "node_budget", "nodes"),
    [
        ([[[-0.1, -2]] * 2], [[[1, 0]] * 2], 5, 2),
        ([[[-0.1]], [[-2]], [[-3]]], [[[0]]] * 3, 2, 2),
        ([[[-0.1, -2]] * 2] * 2, [[[1, 0]] * 2] * 2, 0, 0),
        (
            [[[-0.5, -0.5]] * 2, [[-1, -1], [-1, -np.inf]], [[-1, -2], [-np.inf] * 2]],
            [[[1, 0], [0, 1]]] * 3, 20, 2 + 3 + 4,
        ),
        ([[[-0.5, -0.5]] * 2, [[np.nan] * 2, [-1, np.nan]]], [[[1, 0]] * 2] * 2, 20, 3),
        ([[[-np.inf] * 2, [-1, -2]]] * 2, [[[1, 0]] * 2] * 2, 3, 0),
        ([[[-0.5] * 40] * 40] * 2, [[list(range(39, -1, -1))] * 40] * 2, 200, 200),
        (np.zeros((0, 3, 3)), np.zeros((0, 3, 3)), 2, 0),
        (np.zeros((2, 0, 0)), np.zeros((2, 0, 0)), 2, 0),
    ],
    ids=["L=1", "K=1", "B=0", "ties", "NaN", "nothing but the root", "more than a warp", "L=0", "K=0"],
)  # fmt: skip
def test_corners_with_children(device, rows, children, node_budget, nodes):
    assert check(device, rows, node_budget, np.array(children)).num_nodes == 1 + nodes


@pytest.mark.parametrize("node_budget", [1, 15, 16, 17, 31, 32, 33, 64, 300, MAX_BUDGET])
def test_costs(device, node_budget):
    """Straight, in stairs, flat, and in no order: the search may end early, with all that pays of the whole search."""
    rng, nodes = np.random.default_rng(node_budget), np.arange(node_budget + 1)
    paying = []
    for row in range(12):
        log_probs = -np.sort(rng.exponential(3, (6, 40)), axis=1).astype(np.float32)
        straight = 1 + nodes * rng.choice([0.001, 0.01, 0.1])
        kinds = straight, straight[nodes // 16 * 16], np.ones(len(nodes)), rng.uniform(1, 2, len(nodes))
        costs = kinds[row % 4].astype(np.float32)
        for gain in (1.0, 0.6, 1.15):
            tree = run(device, log_probs, node_budget, costs=costs, gain=gain)
            expected = specification(17, log_probs, ids_of(6, 40), node_budget, costs=costs, gain=gain)
            assert tree.paying == expected.paying <= tree.num_nodes
            found = expected.first(tree.num_nodes)
            for name, padding in (("tokens", -1), ("parents", -1), ("depths", -1), ("scores", -np.inf)):
                column = getattr(tree, name)
                assert_same_bits(column[: tree.num_nodes], getattr(found, name))
                assert (column[tree.num_nodes :] == padding).all()
        paying.append(tree.paying)
    assert max(paying) == 1 + node_budget and (node_budget < 15 or min(paying) < 1 + node_budget)


def test_a_search_that_cannot_pay_ends(device):
    """Behind its end lies what would pay, were it a probability: a search that went on would find it."""
    log_probs = np.full((1, 64), -9, np.float32)
    log_probs[0, 32:] = 9
    steep = 1 + np.arange(65)
    assert run(device, log_probs, 64, costs=np.ones(65)).paying == 65
    ended = run(device, log_probs, 64, costs=steep)
    assert (ended.num_nodes, ended.paying) == (8, 1)  # it looks every 8 nodes


def test_nan_counts_as_impossible(device):
    log_probs = np.float32([[-0.5, -1, -np.inf, -np.inf], [-0.5, -1, -2, -np.inf], [-np.inf] * 4])
    expected = check(device, log_probs, 20)
    assert_same_tree(run(device, np.where(log_probs == -np.inf, np.nan, log_probs), 20), expected)
    assert run(device, np.full((2, 2), np.nan), 3).parents.tolist() == [-1] * 4


def test_no_row_behind_the_last_is_read(device):
    """Where it would be a good one: positions beyond the drafter's block."""
    log_probs, token_ids = device.put(np.full((4, 3), -0.5), np.float32), device.put(ids_of(4, 3))
    tree = tree_build(device.put([17], np.int32), log_probs[:2], token_ids[:2], 20)
    assert device.host(tree.num_nodes).tolist() == [1 + 3 + 9]
    assert device.host(tree.depths).max() == 2


def test_token_id_zero_is_a_token_and_not_padding(device):
    tree = run(device, np.full((2, 2), -0.7), 8, token_ids=[[0, 5], [5, 0]], root=0)
    assert tree.tokens.tolist() == [0, 0, 5, 5, 0, 5, 0, -1, -1]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2, -1, -1]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 2, -1, -1]


@pytest.mark.parametrize(
    "rows", [[[-3, -2, -1]] * 3, [[5, 4, 3]] * 3, [[np.inf, 1, -1]] * 3], ids=["ascending", "positive", "inf"]
)
def test_what_is_no_distribution_still_gives_a_tree(device, rows):
    """The device does not check its input; the walk and the attention after it need a tree all the same."""
    tree = run(device, rows, 30)
    nodes = np.arange(1, tree.num_nodes)
    assert (tree.parents[nodes] >= 0).all() and (tree.parents[nodes] < nodes).all()
    assert (tree.depths[nodes] == tree.depths[tree.parents[nodes]] + 1).all()
    assert len(set(zip(tree.parents[nodes].tolist(), tree.tokens[nodes].tolist(), strict=True))) == len(nodes)


def test_any_order_of_threads_with_children(device):
    rows = random_conditionals(np.random.default_rng(4), VALUES["ties"][:4], 5, 40)
    log_probs, children = map(device.put, rows)
    root, token_ids = device.put([3], np.int32), device.put(ids_of(5, 40))

    def build():
        tree = tree_build(root, log_probs, token_ids, 100, children)
        return tree.tokens, tree.parents, tree.depths, tree.num_nodes

    device.every_schedule(build)


def test_any_order_of_threads(device):
    log_probs = -np.sort(np.random.default_rng(1).integers(0, 5, (5, 40)) / 2, axis=1)
    arrays = device.put([3], np.int32), device.put(log_probs, np.float32), device.put(ids_of(5, 40))

    def build():
        tree = tree_build(*arrays, 100)
        return tree.tokens, tree.parents, tree.depths, tree.num_nodes

    device.every_schedule(build)


def test_numpy_arrays_take_the_specification():
    log_probs = np.log(np.float32([[0.7, 0.3], [0.6, 0.4]]))
    tree = tree_build(np.array([17], np.int32), log_probs, ids_of(2, 2), 5)
    expected = specification(17, log_probs, ids_of(2, 2), 5)
    assert tree.num_nodes == expected.num_nodes and tree.tokens.tolist() == expected.tokens.tolist()


def test_refuses(device):
    def build(log_probs: tuple, token_ids: tuple, node_budget: int, dtype: type = np.float32):
        tables = device.empty(log_probs, dtype), device.empty(token_ids, np.int32)
        return tree_build(device.empty(1, np.int32), *tables, node_budget)

    with pytest.raises(
        ValueError, match=r"tree_build: log_probs \[1, 2\] and token_ids \[1, 3\], expected the same \[L, K\]"
    ):
        build((1, 2), (1, 3), 2)
    with pytest.raises(
        ValueError, match=r"tree_build: log_probs \[2\] and token_ids \[2\], expected the same \[L, K\]"
    ):
        build((2,), (2,), 2)
    children, tables = (
        device.empty((1, 2, 2), np.int32),
        [device.empty((1, 2), dtype) for dtype in (np.float32, np.int32)],
    )
    with pytest.raises(
        ValueError, match=r"tree_build: log_probs \[1, 2\], children \[1, 2, 2\] and token_ids \[1, 2\]"
    ):
        tree_build(device.empty(1, np.int32), *tables, 2, children)
    for budget in (-1, MAX_BUDGET + 1):
        with pytest.raises(ValueError, match=rf"tree_build: node_budget={budget}, expected 0 to 1024"):
            build((1, 2), (1, 2), budget)
    with pytest.raises(TypeError, match=r"tree_build: .*'log_probs' is float64"):
        build((1, 2), (1, 2), 2, np.float64)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("left", [-3, 0, 1, 2, 5, 100])
@pytest.mark.parametrize("budget", [0, 3, 40])
def test_what_may_be_committed_still_bounds_the_depth(device, left, chain, budget):
    """And a chain has one node at each depth: as if nothing else had been proposed."""
    rng = np.random.default_rng(left + 10)
    log_probs, children = random_conditionals(rng, np.log(np.float32([0.5, 0.25, 0.125])), 6, 5)
    token_ids = ids_of(6, 5)
    for proposed, of in ((log_probs, children), (log_probs[:, 0], None)):
        arrays = device.put([17], np.int32), device.put(proposed), device.put(token_ids, np.int32), budget
        of_device = None if of is None else device.put(of, np.int32)
        tree = tree_build(*arrays, of_device, left=device.put([left], np.int32), chain=chain)
        tree = on_host(device, tree)
        assert_same_tree(tree, specification(17, cut(proposed, left - 1, chain), token_ids, budget, of))
        assert tree.num_nodes <= (1 + min(max(left - 1, 0), 6) if chain else budget + 1)
