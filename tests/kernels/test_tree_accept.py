"""The walk through a verified tree: the specification's, padded, and never into padding."""

import numpy as np
import pytest

from kdtree_nb.kernels.tree_accept import tree_accept
from kdtree_nb.reference.tree import tree_accept as specification


def run(device, tokens, parents, targets, max_path: int = 40) -> tuple[list[int], list[int]]:
    """Accepted nodes, and the tokens that are committed."""
    arrays = (device.put(column, np.int32) for column in (tokens, parents, targets))
    path, committed, length = (device.host(array) for array in tree_accept(*arrays, max_path))
    assert path.dtype == committed.dtype == np.int32
    assert path.shape == committed.shape == (max_path,)
    (count,) = length.tolist()
    assert (path[count:] == -1).all() and (committed[count:] == -1).all()
    return path[:count].tolist(), committed[:count].tolist()


def expected(tokens, parents, targets) -> tuple[list[int], list[int]]:
    path, bonus = specification(*(np.asarray(column) for column in (tokens, parents, targets)))
    return path.tolist(), [*np.asarray(tokens)[path[1:]].tolist(), bonus]


def random_draft(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Up to 200 nodes over few token ids, 0 and −1 among the targets; padding after them."""
    nodes, spread = {(-1, 3): None}, rng.integers(1, 200)
    for _ in range(rng.integers(0, 200)):
        nodes[int(rng.integers(max(0, len(nodes) - spread), len(nodes))), int(rng.integers(0, 4))] = None
    columns = list(nodes) + [(-1, -1)] * rng.integers(0, 40)
    parents, tokens = np.array(columns, np.int32).T
    targets = rng.integers(-1, 5, len(columns))
    if rng.integers(2):  # most nodes have a child that their target confirms
        targets[parents[1 : len(nodes)]] = tokens[1 : len(nodes)]
    return tokens, parents, targets


def test_against_the_specification(device):
    rng, longest = np.random.default_rng(0), 0
    for _ in range(300):
        draft = random_draft(rng)
        walk = run(device, *draft, max_path=202)
        assert walk == expected(*draft)
        longest = max(longest, len(walk[0]))
    assert longest > 20


def test_a_path_through_1025_nodes(device):
    tokens, parents = np.arange(1025), np.arange(-1, 1024)
    path, committed = run(device, tokens, parents, tokens + 1, max_path=1025)
    assert path == list(range(1025)) and committed == list(range(1, 1026))


@pytest.mark.parametrize(
    ("tokens", "parents", "targets", "path", "bonus"),
    [
        ([0, 1, 2, 3, 4, 5], [-1, 0, 1, 0, 3, 4], [3, 18, 18, 4, 5, 18], [0, 3, 4, 5], 18),
        ([7, 8, 9, 10, 11, 12], [-1, 0, 1, 2, 0, 4], [11, 18, 18, 18, 12, 18], [0, 4, 5], 18),
        ([9], [-1], [4], [0], 4),
        ([9, 1, 2], [-1, 0, 0], [5, 1, 2], [0], 5),
        ([9, -1, -1], [-1, -1, -1], [0, 0, 0], [0], 0),
        ([9, -1, -1], [-1, -1, -1], [-1, -1, -1], [0], -1),
        ([0, 0, -1], [-1, 0, -1], [0, 0, 0], [0, 1], 0),
        ([5, 0, -1, -1], [-1, 0, -1, -1], [0, -1, 0, 0], [0, 1], -1),
        ([9, 9, 9], [-1, 0, 1], [9, 9, 9], [0, 1, 2], 9),
        ([9, 4, 4], [-1, 0, 0], [4, 6, 7], [0, 1], 6),
        ([9, 1, 2, 3, 1], [-1, 0, 0, 1, 2], [2, 0, 1, 0, 8], [0, 2, 4], 8),
    ],
    ids=[
        "a public case", "another", "the root alone", "all rejected", "target 0 and padding", "target -1 and padding",
        "token 0 is a token", "target -1 deeper", "one token all along", "two children with one token", "a gap",
    ],
)  # fmt: skip
def test_cases(device, tokens, parents, targets, path, bonus):
    assert run(device, tokens, parents, targets) == (path, [*np.array(tokens)[path[1:]].tolist(), bonus])
    assert expected(tokens, parents, targets)[0] == path


def test_no_node_behind_the_last_is_read(device):
    """Where one would match: a smaller tree in the arrays of a larger one."""
    columns = (device.put(column, np.int32)[:2] for column in ([9, 4, 7, 7], [-1, 0, 1, 1], [4, 7, 0, 0]))
    path, committed, length = map(device.host, tree_accept(*columns, 3))
    assert (path.tolist(), committed.tolist(), length.tolist()) == ([0, 1, -1], [4, 7, -1], [2])


@pytest.mark.parametrize("max_path", [1, 2, 3, 4, 5])
def test_a_path_is_cut_where_there_is_no_room(device, max_path):
    """What is committed stays the target's text: a draft that has no room becomes the bonus token."""
    tokens, parents, targets = [5, 6, 7, 8], [-1, 0, 1, 2], [6, 7, 8, 9]
    count = min(max_path, 4)
    assert run(device, tokens, parents, targets, max_path) == (list(range(count)), [6, 7, 8, 9][:count])


def test_numpy_arrays_take_the_specification():
    columns = [np.array(column, np.int32) for column in ([9, 1, 2, 3], [-1, 0, 0, 1], [1, 3, 0, 4])]
    path, tokens, length = tree_accept(*columns, 10)
    assert (path.tolist(), tokens.tolist(), length.tolist()) == ([0, 1, 3], [1, 3, 4], [3])


def test_refuses(device):
    def accept(tokens: int, parents: int, targets: int, max_path: int = 3, dtype: type = np.int32):
        columns = (device.empty(rows, dtype) for rows in (tokens, parents, targets))
        return tree_accept(*columns, max_path)

    with pytest.raises(
        ValueError, match=r"tree_accept: tokens \[3\], parents \[4\], targets \[3\], expected the same \[N\]"
    ):
        accept(3, 4, 3)
    with pytest.raises(ValueError, match=r"tree_accept: max_path=0, expected 1 or more"):
        accept(3, 3, 3, 0)
    with pytest.raises(ValueError, match=r"tree_accept: tokens \[0\], .*expected"):
        accept(0, 0, 0)
    with pytest.raises(TypeError, match=r"tree_accept: .*'tokens' is int64"):
        accept(3, 3, 3, dtype=np.int64)
