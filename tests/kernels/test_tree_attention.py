"""Attention of a tree's nodes: the exact softmax within a bound; the same bits alone, in a prompt, chain or tree."""

import numpy as np
import pytest
from helpers import assert_same_bits, root_path

from kdtree_nb.kernels.tree_attention import MAX_KV_LORA, SPLIT, tree_attention
from kdtree_nb.reference.attention import tree_attention as specification

from .products import EPSILON

SCALE = 0.3


def depths_of(parents: np.ndarray) -> np.ndarray:
    return np.array(
        [len(root_path(parents, node)) - 1 if node == 0 or parents[node] >= 0 else -1 for node in range(len(parents))]
    )


def random_tree(rng, nodes: int, spread: int = 5) -> np.ndarray:
    """Parents; the smaller the spread, the deeper the tree."""
    return np.array([-1, *(rng.integers(max(0, node - spread), node) for node in range(1, nodes))], np.int32)


def random_cache(rng, rows: int, latent: int, capacity: int) -> np.ndarray:
    """Latent rows; NaN in those that no token has."""
    cache = np.full((capacity, latent), np.nan, np.float32)
    cache[:rows] = rng.standard_normal((rows, latent))
    return cache


def run(device, queries, cache, prefix_len, parents, kv_lora, scale: float = SCALE) -> np.ndarray:
    columns = (device.put(column, np.int32) for column in ([prefix_len], parents, depths_of(np.asarray(parents))))
    output = tree_attention(device.put(queries), device.put(cache), *columns, kv_lora, scale)
    assert output.shape == (*queries.shape[:2], kv_lora)
    return device.host(output)


def check(output, queries, cache, prefix_len, parents, kv_lora, scale: float = SCALE) -> None:
    """Against the softmax in float64.

    A score is a sum of latent terms; its error, twice, is the relative one of its weight. A weight goes through two
    more exponentials at the end of each tile of 64 keys, and the sums have one rounding a key.
    """
    cache, queries = cache.astype(np.float64), queries.astype(np.float64)
    for node, parent in enumerate(parents):
        if node and parent < 0:
            assert (output[node] == 0).all()
            continue
        keys = cache[[*range(prefix_len), *(prefix_len + ancestor for ancestor in root_path(parents, node))]]
        scores = scale * queries[node] @ keys.T  # [heads, keys]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        size = (scale * np.abs(queries[node]) @ np.abs(keys).T).max(axis=1, keepdims=True)
        roundings = 2 * (keys.shape[1] + 3) * size + 2 * len(keys) + len(keys) // 8 + 20
        bound = EPSILON * roundings * (weights @ np.abs(keys[:, :kv_lora]))
        excess = np.abs(output[node] - weights @ keys[:, :kv_lora]) - bound
        assert excess.max() <= 0, f"node {node}: {excess.max()} beyond the bound"


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_lora", "rope", "prefix_len"),
    [
        (1, 1, 1, 1, 0),
        (1, 8, 24, 8, 5),
        (9, 7, 24, 0, 33),
        (17, 9, 20, 6, 100),
        (6, 64, 16, 4, 63),
        (40, 2, 12, 4, 500),
        (5, 3, 257, 7, 511),
        (3, 2, 512, 64, 1030),
        (2, 1, MAX_KV_LORA, 64, 70),
    ],
)
def test_against_the_exact_softmax(device, nodes, heads, kv_lora, rope, prefix_len):
    rng = np.random.default_rng(nodes)
    parents = random_tree(rng, nodes)
    queries = rng.standard_normal((nodes, heads, kv_lora + rope)).astype(np.float32)
    cache = random_cache(rng, prefix_len + nodes, kv_lora + rope, prefix_len + nodes + 3)
    output = run(device, queries, cache, prefix_len, parents, kv_lora)
    check(output, queries, cache, prefix_len, parents, kv_lora)
    expected = specification(queries, np.nan_to_num(cache), prefix_len, parents, kv_lora, SCALE)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("spread", [5, 2000])
def test_1025_rows(device, spread):
    """A deep tree, a flat one."""
    rng = np.random.default_rng(spread)
    parents = random_tree(rng, 1025, spread)
    queries = rng.standard_normal((1025, 1, 6)).astype(np.float32)
    cache = random_cache(rng, 1025 + 70, 6, 1100)
    output = run(device, queries, cache, 70, parents, 4)
    for node in (0, 1, 441, 442, 800, 1024):
        path = root_path(parents, node)
        own = np.concatenate([cache[:70], cache[70 + np.array(path)]])
        check(output[path], queries[path], own, 70, np.arange(-1, len(path) - 1), 4)


def test_a_real_layer(device):
    """Kimi K2's 64 heads of 512 + 64, a tree of 65 rows behind 9,000 tokens."""
    if device.is_emulated:
        pytest.skip("takes a GPU some milliseconds, the emulator minutes")
    rng = np.random.default_rng(0)
    parents = random_tree(rng, 65)
    queries = rng.standard_normal((65, 64, 576)).astype(np.float32)
    cache = random_cache(rng, 9065, 576, 9100)
    check(run(device, queries, cache, 9000, parents, 512, 0.07), queries, cache, 9000, parents, 512, 0.07)


EDGES = [0, 1, 62, 63, 64, 65, 126, 127, 128, 447, 448, 449, 510, 511, 512, 513, 575, 576, 1020, 1023, 1024]
_prompts: dict[bool, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}


@pytest.fixture
def prompt(device):
    """A prompt of 1,025 tokens as one chain: queries, cache and outputs; two heads of 6 + 2."""
    if device.is_emulated not in _prompts:
        rng = np.random.default_rng(1)
        queries, cache = rng.standard_normal((1025, 2, 8)).astype(np.float32), random_cache(rng, 1025, 8, 1100)
        _prompts[device.is_emulated] = queries, cache, run(device, queries, cache, 0, np.arange(-1, 1024), 6)
    return _prompts[device.is_emulated]


def test_a_prompt_of_1025_tokens(prompt):
    queries, cache, outputs = prompt
    for position in EDGES:
        check(outputs[position : position + 1], queries[position : position + 1], cache, position, np.array([-1]), 6)


def test_a_token_has_the_same_bits_alone_and_in_a_prompt(device, prompt):
    """Behind every prefix whose end lies at, before or after the edge of a tile or a split."""
    queries, cache, outputs = prompt
    for position in EDGES:
        alone = run(device, queries[position : position + 1], cache, position, [-1], 6)
        assert_same_bits(alone[0], outputs[position])


def test_and_in_a_chain(device, prompt):
    queries, cache, outputs = prompt
    for prefix_len in EDGES[:-2]:
        chain = slice(prefix_len, prefix_len + 5)
        assert_same_bits(run(device, queries[chain], cache, prefix_len, np.arange(-1, 4), 6), outputs[chain])


def test_and_in_a_tree(device, prompt):
    """Where its path lies scattered between others' rows, which hold NaN, and padding follows."""
    queries, cache, outputs = prompt
    rng = np.random.default_rng(2)
    for prefix_len in EDGES[:-2]:
        parents = random_tree(rng, 9, 4)
        path = root_path(parents, 8)
        parents = np.append(parents, [-1, -1])
        tree_cache, tree_queries = cache.copy(), np.full((11, 2, 8), np.nan, np.float32)
        tree_cache[prefix_len:] = np.nan
        for depth, node in enumerate(path):
            tree_cache[prefix_len + node] = cache[prefix_len + depth]
            tree_queries[node] = queries[prefix_len + depth]
        output = run(device, tree_queries, tree_cache, prefix_len, parents, 6)
        assert_same_bits(output[path], outputs[prefix_len : prefix_len + len(path)])
        assert (output[9:] == 0).all()


def test_capacity_and_the_other_heads_do_not_matter(device, prompt):
    queries, cache, outputs = prompt
    larger = np.full((2 * SPLIT + 1700, 8), np.nan, np.float32)
    larger[:600] = cache[:600]
    alone = run(device, queries[599:600], larger, 599, [-1], 6)
    assert_same_bits(alone[0], outputs[599])
    for head in range(2):
        one = run(device, queries[599:600, head : head + 1].copy(), cache[:600], 599, [-1], 6)
        assert_same_bits(one[0, 0], outputs[599, head])
    many = np.tile(queries[599:600], (1, 9, 1))
    assert_same_bits(run(device, many, cache, 599, [-1], 6)[0], np.tile(outputs[599], (9, 1)))


def test_siblings_do_not_see_each_other(device):
    """Each row's NaN reaches the node itself and its descendants: exactly those that see it."""
    rng = np.random.default_rng(3)
    parents = np.array([-1, 0, 0, 1, 1, 2, 5], np.int32)
    queries, cache = rng.standard_normal((7, 2, 8)).astype(np.float32), random_cache(rng, 67, 8, 70)
    expected = run(device, queries, cache, 60, parents, 6)
    for node in range(7):
        changed = cache.copy()
        changed[60 + node] = np.nan
        output = run(device, queries, changed, 60, parents, 6)
        sees = np.array([node in root_path(parents, row) for row in range(7)])
        assert np.isnan(output[sees]).all()
        assert_same_bits(output[~sees], expected[~sees])


def test_a_nan_query_reaches_its_own_head_only(device):
    rng = np.random.default_rng(4)
    queries, cache = rng.standard_normal((3, 9, 8)).astype(np.float32), random_cache(rng, 103, 8, 110)
    expected = run(device, queries, cache, 100, [-1, 0, 0], 6)
    queries[1, 4, 7] = np.nan
    output = run(device, queries, cache, 100, [-1, 0, 0], 6)
    hit = np.zeros((3, 9), bool)
    hit[1, 4] = True
    assert np.isnan(output[hit]).all()
    assert_same_bits(output[~hit], expected[~hit])


def test_rows_that_see_nothing_are_zeros(device):
    """Padding, whatever its queries and its cache rows hold."""
    rng = np.random.default_rng(5)
    queries, cache = np.full((6, 2, 8), np.nan, np.float32), random_cache(rng, 602, 8, 610)
    queries[:2] = rng.standard_normal((2, 2, 8))
    parents = [-1, 0, -1, -1, -1, -1]
    output = run(device, queries, cache, 600, parents, 6)
    assert (output[2:] == 0).all() and not np.isnan(output).any()
    check(output, queries, cache, 600, parents, 6)


def test_large_scores(device):
    """The largest is taken away before an exponential, across tiles and splits as well."""
    rng = np.random.default_rng(6)
    cache, queries = random_cache(rng, 1201, 8, 1201), rng.standard_normal((1, 3, 8)).astype(np.float32)
    for best in (0, 63, 64, 700, 1200):
        cache[best] = 40 * queries[0, 0] / np.linalg.norm(queries[0, 0])
        output = run(device, queries, cache, 1200, [-1], 6, scale=60.0)
        assert np.isfinite(output).all()
        np.testing.assert_allclose(output[0, 0], cache[best, :6], rtol=1e-6)


@pytest.mark.parametrize("keys", [1, 64, 65, 512, 513, 1100])
def test_no_preference_gives_the_mean(device, keys):
    """Queries of zeros; values that are whole numbers, so that the sum over the keys is exact."""
    rng = np.random.default_rng(keys)
    cache = rng.integers(-99, 99, (keys, 8)).astype(np.float32)
    output = run(device, np.zeros((1, 2, 8), np.float32), cache, keys - 1, [-1], 6)
    mean = cache[:, :6].sum(axis=0) / np.float32(keys)
    assert_same_bits(output[0], np.tile(mean, (2, 1)))


def test_the_scale_covers_both_parts_of_a_score(device):
    rng = np.random.default_rng(7)
    queries, cache = rng.standard_normal((2, 2, 8)).astype(np.float32), random_cache(rng, 12, 8, 12)
    half, double = (
        run(device, factor * queries, cache, 10, [-1, 0], 6, 0.5 / factor)
        for factor in (np.float32(0.5), np.float32(2))
    )
    assert_same_bits(half, double)


def test_prefix_length_is_read_from_device_memory(device):
    """Prefix, tree and cache change in place, on the device; the arguments stay."""
    rng = np.random.default_rng(8)
    queries, cache = (device.put(rng.standard_normal(shape), np.float32) for shape in ((4, 2, 8), (700, 8)))
    prefix_len, parents, depths = (device.put(column, np.int32) for column in ([0], [-1] * 4, [-1] * 4))
    for new_prefix, new_parents in (
        (3, [-1, 0, 1, 2]),
        (600, [-1, 0, 0, 1]),
        (511, [-1, 0, -1, -1]),
        (5, [-1, 0, 0, 0]),
    ):
        prefix_len[:], parents[:] = new_prefix, device.put(new_parents, np.int32)
        depths[:] = device.put(depths_of(np.array(new_parents)), np.int32)
        output = tree_attention(queries, cache, prefix_len, parents, depths, 6, SCALE)
        check(device.host(output), device.host(queries), device.host(cache), new_prefix, np.array(new_parents), 6)


def test_any_order_of_threads(device):
    rng = np.random.default_rng(9)
    parents = random_tree(rng, 7)
    queries, cache = (device.put(rng.standard_normal(shape), np.float32) for shape in ((7, 9, 40), (620, 40)))
    columns = [device.put(column, np.int32) for column in ([600], parents, depths_of(parents))]
    device.every_schedule(lambda: [tree_attention(queries, cache, *columns, 32, SCALE)])


def test_rows_in_several_launches(device, monkeypatch):
    rng = np.random.default_rng(3)
    parents, queries = random_tree(rng, 11), rng.standard_normal((11, 3, 16)).astype(np.float32)
    cache = random_cache(rng, 600, 16, 600)
    at_once = run(device, queries, cache, 520, parents, 12)
    monkeypatch.setattr("kdtree_nb.kernels.tree_attention.SCRATCH_BYTES", 4 * 2 * 3 * 12 * 4)  # four rows
    assert_same_bits(run(device, queries, cache, 520, parents, 12), at_once)


def test_no_rows(device):
    assert run(device, np.zeros((0, 2, 8), np.float32), np.zeros((9, 8), np.float32), 3, np.zeros(0), 6).shape == (
        0,
        2,
        6,
    )


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(10)
    queries, cache = rng.standard_normal((3, 2, 8)).astype(np.float32), random_cache(rng, 73, 8, 80)
    parents = np.array([-1, 0, 0], np.int32)
    output = tree_attention(queries, cache, np.array([70], np.int32), parents, depths_of(parents), 6, SCALE)
    check(output, queries, cache, 70, parents, 6)


def test_refuses(device):
    def attend(queries: tuple, cache: tuple, parents: int, depths: int, kv_lora: int = 6, dtype: type = np.float32):
        columns = (device.empty(rows, np.int32) for rows in (1, parents, depths))
        return tree_attention(device.empty(queries, dtype), device.empty(cache, np.float32), *columns, kv_lora, SCALE)

    with pytest.raises(ValueError, match=r"tree_attention: queries \[3, 2, 8\], cache \[9, 7\], .* do not fit"):
        attend((3, 2, 8), (9, 7), 3, 3)
    with pytest.raises(ValueError, match=r"tree_attention: .* cache \[2, 9, 8\]"):
        attend((3, 2, 8), (2, 9, 8), 3, 3)
    with pytest.raises(ValueError, match=r"tree_attention: .* parents \[4\], depths \[3\] do not fit"):
        attend((3, 2, 8), (9, 8), 4, 3)
    with pytest.raises(ValueError, match=r"tree_attention: .* parents \[3\], depths \[4\] do not fit"):
        attend((3, 2, 8), (9, 8), 3, 4)
    with pytest.raises(ValueError, match=r"tree_attention: queries \[3, 8\]"):
        attend((3, 8), (9, 8), 3, 3)
    for kv_lora in (0, 9):
        with pytest.raises(ValueError, match=rf"tree_attention: kv_lora_rank={kv_lora}, expected 1 to 8"):
            attend((3, 2, 8), (9, 8), 3, 3, kv_lora)
    with pytest.raises(ValueError, match=r"tree_attention: kv_lora_rank=1025, expected 1 to 1024"):
        attend((3, 2, 1100), (9, 1100), 3, 3, 1025)
    with pytest.raises(TypeError, match=r"attend_split: .*'queries' is float64"):
        attend((3, 2, 8), (9, 8), 3, 3, dtype=np.float64)
