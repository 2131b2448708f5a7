"""Tree attention on tensor cores: the exact softmax within a bound; a row's bits do not depend on how it runs."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import assert_same_bits, root_path
from ml_dtypes import bfloat16

from kdtree_nb.config.model import MAX_KV_LORA
from kdtree_nb.kernels import tree_attention_mma as module
from kdtree_nb.kernels.launch import processor_of
from kdtree_nb.kernels.tree_attention_mma import (
    HOPPER,
    MAX_PATH,
    SPLIT_TILES,
    TILE,
    Geometry,
    geometry_of,
    launch,
    tree_attention_mma,
)

from .processors import PROCESSORS
from .products import EPSILON
from .test_tree_attention import depths_of, random_tree

SCALE = 0.3
SHORT = {
    "warps": Geometry(rows=16, min_splits=3, max_splits=3),
    "warpgroups": Geometry(rows=64, min_splits=3, max_splits=3, warpgroups=True),
}
"""Splits of one tile up to 192 keys, of two up to 384, and so on."""


@pytest.fixture(params=SHORT)
def short(request, device) -> Geometry:
    """Either kernel, where there are the instructions for it."""
    if request.param == "warpgroups" and not device.is_emulated and processor_of(device.empty(1)).capability != HOPPER:
        pytest.skip("warpgroup products are Hopper's")
    return SHORT[request.param]


def random_rows(rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(bfloat16)


def random_cache(rng, rows: int, latent: int, capacity: int) -> np.ndarray:
    """Latent rows; NaN in those that no token has."""
    cache = np.full((capacity, latent), np.nan, bfloat16)
    cache[:rows] = random_rows(rng, rows, latent)
    return cache


def run(device, queries, cache, prefix_len, parents, kv_lora, scale: float = SCALE, geometry: Geometry | None = None):
    """With the geometry that is the function's own, or a given one."""
    columns = (device.put(column, np.int32) for column in ([prefix_len], parents, depths_of(np.asarray(parents))))
    args = (device.put(queries), device.put(cache), *columns, kv_lora, scale)
    output = launch(*args, geometry) if geometry else tree_attention_mma(*args)
    assert output.shape == (*queries.shape[:2], kv_lora)
    return device.host(output).view(bfloat16)


def check(output, queries, cache, prefix_len, parents, kv_lora, scale: float = SCALE) -> None:
    """Against the softmax in float64.

    A weight is rounded to bfloat16, half a unit of 2^-8, before it multiplies its value, and the same in the sum of
    weights: this moves the result r by at most 2^-9 of the mean of |v - r|. So does the result's own rounding, of |r|.
    The rest is fp32: an mma of 16 products may lose as much as 4 roundings (see test_w4a16_mma.py). A score is a chain
    of them and three roundings more, and its error, twice, is the relative one of its weight. A sum has 4 mma a tile
    and a product with a factor; each factor is an exponential, with the error of a score; there are as many splits
    as tiles at most.
    """
    assert output.dtype == bfloat16
    cache, queries, output = (array.astype(np.float64) for array in (cache, queries, output))
    for node, parent in enumerate(parents):
        if node and parent < 0:
            assert (output[node] == 0).all()
            continue
        keys = cache[[*range(prefix_len), *(prefix_len + ancestor for ancestor in root_path(parents, node))]]
        scores = scale * queries[node] @ keys.T  # [heads, keys]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        size = (scale * np.abs(queries[node]) @ np.abs(keys).T).max(axis=1, keepdims=True)
        exact, magnitude = weights @ keys[:, :kv_lora], weights @ np.abs(keys[:, :kv_lora])
        tiles = -(-len(keys) // TILE)
        roundings = 2 * (4 * keys.shape[1] // 16 + 3) * size + 2 * tiles * (16 + 4) + 20
        bound = 2.0**-9 * 1.01 * (magnitude + 2 * np.abs(exact)) + EPSILON * roundings * magnitude
        excess = np.abs(output[node] - exact) - bound
        assert excess.max() <= 0, f"node {node}: {excess.max()} beyond the bound"


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_lora", "rope", "prefix_len"),
    [
        (1, 1, 16, 16, 0),
        (1, 3, 64, 16, 63),
        (9, 3, 64, 16, 33),
        (6, 64, 64, 16, 64),
        (7, 8, 64, 16, 190),
        (5, 19, 48, 32, 130),
        (40, 2, 64, 16, 500),
        (3, 40, 16, 16, 2047),
        (3, 64, 512, 64, 127),
    ],
)
def test_against_the_exact_softmax(device, short, nodes, heads, kv_lora, rope, prefix_len):
    rng = np.random.default_rng(nodes)
    parents = random_tree(rng, nodes)
    queries = random_rows(rng, nodes, heads, kv_lora + rope)
    cache = random_cache(rng, prefix_len + nodes, kv_lora + rope, prefix_len + nodes + 3)
    for geometry in (None, short):
        output = run(device, queries, cache, prefix_len, parents, kv_lora, geometry=geometry)
        check(output, queries, cache, prefix_len, parents, kv_lora)


@pytest.mark.parametrize("spread", [5, 2000])
def test_1025_rows(device, spread):
    """A deep tree, a flat one."""
    rng = np.random.default_rng(spread)
    parents = random_tree(rng, 1025, spread)
    queries, cache = random_rows(rng, 1025, 1, 32), random_cache(rng, 1025 + 70, 32, 1100)
    output = run(device, queries, cache, 70, parents, 16)
    for node in (0, 1, 441, 442, 800, 1024):
        path = root_path(parents, node)
        own = np.concatenate([cache[:70], cache[70 + np.array(path)]])
        check(output[path], queries[path], own, 70, np.arange(-1, len(path) - 1), 16)


def test_a_real_layer(device):
    """Kimi K2's 64 heads of 512 + 64, a tree of 65 rows behind 9,000 tokens."""
    if device.is_emulated:
        pytest.skip("takes a GPU some milliseconds, the emulator minutes")
    rng = np.random.default_rng(0)
    parents = random_tree(rng, 65)
    queries, cache = random_rows(rng, 65, 64, 576), random_cache(rng, 9065, 576, 9100)
    check(run(device, queries, cache, 9000, parents, 512, 0.07), queries, cache, 9000, parents, 512, 0.07)


EDGES = [0, 1, 62, 63, 64, 65, 126, 127, 128, 191, 192, 193, 255, 256, 383, 384, 385, 447, 511, 512, 575, 576, 577]
_prompts: dict[tuple[bool, Geometry], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}


@pytest.fixture
def prompt(device, short):
    """A prompt of 600 tokens as one chain: queries, cache and outputs; two heads of 16 + 16."""
    key = device.is_emulated, short
    if key not in _prompts:
        rng = np.random.default_rng(1)
        queries, cache = random_rows(rng, 600, 2, 32), random_cache(rng, 600, 32, 640)
        outputs = run(device, queries, cache, 0, np.arange(-1, 599), 16, geometry=short)
        _prompts[key] = queries, cache, outputs
    return _prompts[key]


def test_a_prompt(prompt):
    queries, cache, outputs = prompt
    for position in EDGES:
        check(outputs[position : position + 1], queries[position : position + 1], cache, position, np.array([-1]), 16)


def test_a_token_has_the_same_bits_alone_and_in_a_prompt(device, short, prompt):
    """Behind every prefix whose end lies at, before or after the edge of a tile or of a split."""
    queries, cache, outputs = prompt
    for position in EDGES:
        alone = run(device, queries[position : position + 1], cache, position, [-1], 16, geometry=short)
        assert_same_bits(alone[0], outputs[position])


def test_and_in_a_chain(device, short, prompt):
    queries, cache, outputs = prompt
    for prefix_len in EDGES:
        chain = slice(prefix_len, prefix_len + 5)
        output = run(device, queries[chain], cache, prefix_len, np.arange(-1, 4), 16, geometry=short)
        assert_same_bits(output, outputs[chain])


def test_and_in_hundreds_of_trees(device, short, prompt):
    """Where its path lies scattered between others' rows, which hold NaN, and padding follows."""
    queries, cache, outputs = prompt
    rng = np.random.default_rng(2)
    for prefix_len in [*EDGES, *rng.integers(0, 200, 180)]:
        nodes = rng.integers(1, 10)
        parents = random_tree(rng, nodes, rng.integers(1, 10))
        path = root_path(parents, rng.integers(nodes))
        parents = np.append(parents, [-1, -1])
        tree_cache, tree_queries = cache.copy(), np.full((nodes + 2, 2, 32), np.nan, bfloat16)
        tree_cache[prefix_len:] = np.nan
        for depth, node in enumerate(path):
            tree_cache[prefix_len + node] = cache[prefix_len + depth]
            tree_queries[node] = queries[prefix_len + depth]
        output = run(device, tree_queries, tree_cache, prefix_len, parents, 16, geometry=short)
        assert_same_bits(output[path], outputs[prefix_len : prefix_len + len(path)])
        assert (output[-2:] == 0).all()


def test_other_heads_and_capacity_do_not_matter(device, short, prompt):
    queries, cache, outputs = prompt
    larger = np.full((9000, 32), np.nan, bfloat16)
    larger[:600] = cache[:600]
    alone = run(device, queries[590:591], larger, 590, [-1], 16, geometry=short)
    assert_same_bits(alone[0], outputs[590])
    for head in range(2):
        one = run(device, queries[590:591, head : head + 1].copy(), cache, 590, [-1], 16, geometry=short)
        assert_same_bits(one[0, 0], outputs[590, head])


@pytest.mark.parametrize("short", ["warps"], indirect=True)
@pytest.mark.parametrize(("rows", "stages"), [(32, 2), (64, 2), (16, 1), (64, 1)])
def test_neither_heads_nor_tiles_of_a_block_change_a_bit(device, short, prompt, rows, stages):
    queries, cache, outputs = prompt
    for prefix_len in (0, 60, 191, 400):
        chain = slice(prefix_len, prefix_len + 9)
        many = np.concatenate([np.repeat(queries[chain], 20, axis=1), np.full((9, 1, 32), np.nan, bfloat16)], axis=1)
        output = run(
            device, many, cache, prefix_len, np.arange(-1, 8), 16, geometry=short._replace(rows=rows, stages=stages)
        )
        assert_same_bits(output[:, :40], np.repeat(outputs[chain], 20, axis=1))


def test_splits_follow_from_nothing_but_the_position():
    """Neither from the number of nodes nor from that of heads."""
    for processor in PROCESSORS.values():
        found = {
            geometry_of(nodes, heads, 576, processor)[1:3] for nodes in range(1, 200) for heads in range(1, 130, 7)
        }
        assert len(found) == 1


def test_the_order_depends_on_the_splits(device, short, prompt):
    """If it did not, the tests above would see less."""
    queries, cache, outputs = prompt
    chain = slice(400, 420)
    few = run(device, queries[chain], cache, 400, np.arange(-1, 19), 16, geometry=short._replace(max_splits=1))
    assert (few != outputs[chain]).any()


def test_siblings_do_not_see_each_other(device, short):
    """Each row's NaN reaches the node itself and its descendants: exactly those that see it."""
    rng = np.random.default_rng(3)
    parents = np.array([-1, 0, 0, 1, 1, 2, 5], np.int32)
    queries, cache = random_rows(rng, 7, 2, 32), random_cache(rng, 67, 32, 70)
    expected = run(device, queries, cache, 60, parents, 16, geometry=short)
    for node in range(7):
        changed = cache.copy()
        changed[60 + node] = np.nan
        output = run(device, queries, changed, 60, parents, 16, geometry=short)
        sees = np.array([node in root_path(parents, row) for row in range(7)])
        assert np.isnan(output[sees]).all()
        assert_same_bits(output[~sees], expected[~sees])


def test_a_nan_query_reaches_its_own_head_only(device, short):
    rng = np.random.default_rng(4)
    queries, cache = random_rows(rng, 3, 9, 32), random_cache(rng, 203, 32, 210)
    expected = run(device, queries, cache, 200, [-1, 0, 0], 16, geometry=short)
    queries[1, 4, 7] = np.nan
    output = run(device, queries, cache, 200, [-1, 0, 0], 16, geometry=short)
    hit = np.zeros((3, 9), bool)
    hit[1, 4] = True
    assert np.isnan(output[hit]).all()
    assert_same_bits(output[~hit], expected[~hit])


def test_rows_that_see_nothing_are_zeros(device, short):
    """Padding, whatever its queries and its cache rows hold."""
    rng = np.random.default_rng(5)
    queries, cache = np.full((6, 2, 32), np.nan, bfloat16), random_cache(rng, 602, 32, 610)
    queries[:2] = random_rows(rng, 2, 2, 32)
    parents = [-1, 0, -1, -1, -1, -1]
    output = run(device, queries, cache, 600, parents, 16, geometry=short)
    assert (output[2:] == 0).all()
    check(output, queries, cache, 600, parents, 16)


def test_large_scores(device, short):
    """The largest is taken away before an exponential, across tiles and splits as well."""
    rng = np.random.default_rng(6)
    cache, queries = random_cache(rng, 601, 32, 601), random_rows(rng, 1, 3, 32)
    for best in (0, 63, 64, 300, 600):
        cache[best] = 40 * queries[0, 0] / np.linalg.norm(queries[0, 0].astype(np.float32)).astype(bfloat16)
        output = run(device, queries, cache, 600, [-1], 16, scale=60.0, geometry=short)
        assert np.isfinite(output.astype(np.float32)).all()
        assert_same_bits(output[0, 0], cache[best, :16])


def test_scores_that_rise_from_tile_to_tile(device, short):
    """Slowly or fast in one head; the other has the bits that it has alone."""
    rng = np.random.default_rng(11)
    cache, queries = random_cache(rng, 900, 32, 900), random_rows(rng, 1, 2, 32)
    rise = np.linspace(0, 12, 900)[:, None] * (queries[0, 0] / np.linalg.norm(queries[0, 0].astype(np.float32)))
    cache = (cache.astype(np.float32) + rise).astype(bfloat16)
    queries[0, 1] = 0.5 * queries[0, 1] - (0.5 * rise[899] / 12).astype(bfloat16)
    both = {}
    for splits in (1, 3):
        geometry = short._replace(min_splits=splits, max_splits=splits)
        for factor in (1, 4):
            given = queries * np.array([[factor], [1]], bfloat16)
            both[factor] = run(device, given, cache, 899, [-1], 16, geometry=geometry)
            check(both[factor], given, cache, 899, np.array([-1]), 16)
        alone = run(device, queries[:, 1:].copy(), cache, 899, [-1], 16, geometry=geometry)
        for output in both.values():
            assert_same_bits(output[0, 1], alone[0, 0])


@pytest.mark.parametrize("keys", [1, 64, 65, 128, 129, 500])
def test_no_preference_gives_the_mean(device, short, keys):
    """Queries of zeros; values that are whole numbers, so that the sum over the keys is exact."""
    rng = np.random.default_rng(keys)
    cache = rng.integers(-99, 99, (keys, 32)).astype(bfloat16)
    output = run(device, np.zeros((1, 2, 32), bfloat16), cache, keys - 1, [-1], 16, geometry=short)
    mean = cache[:, :16].astype(np.float32).sum(axis=0) / np.float32(keys)
    assert_same_bits(output[0], np.tile(mean.astype(bfloat16), (2, 1)))


def test_the_scale_covers_both_parts_of_a_score(device):
    rng = np.random.default_rng(7)
    queries, cache = random_rows(rng, 2, 2, 32), random_cache(rng, 12, 32, 12)
    half, double = (
        run(device, bfloat16(factor) * queries, cache, 10, [-1, 0], 16, 0.5 / factor) for factor in (0.5, 2.0)
    )
    assert_same_bits(half, double)


def test_prefix_length_is_read_from_device_memory(device):
    """Prefix, tree and cache change in place, on the device; the arguments stay."""
    rng = np.random.default_rng(8)
    queries, cache = (device.put(random_rows(rng, *shape)) for shape in ((4, 2, 32), (700, 32)))
    prefix_len, parents, depths = (device.put(column, np.int32) for column in ([0], [-1] * 4, [-1] * 4))
    for new_prefix, new_parents in (
        (3, [-1, 0, 1, 2]),
        (600, [-1, 0, 0, 1]),
        (511, [-1, 0, -1, -1]),
        (5, [-1, 0, 0, 0]),
    ):
        prefix_len[:], parents[:] = new_prefix, device.put(new_parents, np.int32)
        depths[:] = device.put(depths_of(np.array(new_parents)), np.int32)
        output = device.host(tree_attention_mma(queries, cache, prefix_len, parents, depths, 16, SCALE)).view(bfloat16)
        on_host = (device.host(array).view(bfloat16) for array in (queries, cache))
        check(output, *on_host, new_prefix, np.array(new_parents), 16)


def test_any_order_of_threads(device, short):
    rng = np.random.default_rng(9)
    parents = random_tree(rng, 7)
    queries, cache = (device.put(random_rows(rng, *shape)) for shape in ((7, 9, 80), (320, 80)))
    columns = [device.put(column, np.int32) for column in ([300], parents, depths_of(parents))]
    device.every_schedule(lambda: [launch(queries, cache, *columns, 64, SCALE, short)])


def test_rows_in_several_launches(device, monkeypatch):
    rng = np.random.default_rng(3)
    parents, queries = random_tree(rng, 11), random_rows(rng, 11, 3, 32)
    cache = random_cache(rng, 300, 32, 300)
    at_once = run(device, queries, cache, 220, parents, 16)
    monkeypatch.setattr("kdtree_nb.kernels.tree_attention_mma.SCRATCH_BYTES", 4 * 3 * 3 * 16 * 4)  # four rows
    assert_same_bits(run(device, queries, cache, 220, parents, 16), at_once)


def test_no_rows(device):
    output = run(device, np.zeros((0, 2, 32), bfloat16), np.zeros((9, 32), bfloat16), 3, np.zeros(0), 16)
    assert output.shape == (0, 2, 16)


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(10)
    queries, cache = random_rows(rng, 3, 2, 24), random_cache(rng, 73, 24, 80)
    parents = np.array([-1, 0, 0], np.int32)
    output = tree_attention_mma(queries, cache, np.array([70], np.int32), parents, depths_of(parents), 20, SCALE)
    check(output, queries, cache, 70, parents, 20)


@pytest.mark.parametrize(
    ("kernel", "name", "value"),
    [
        (module._attend_split, "TILE", TILE),
        (module._attend_split, "MAX_PATH", MAX_PATH),
        (module._attend_split, "THREADS", module.THREADS),
        (module._combine_splits, "SPLIT_TILES", SPLIT_TILES),
    ],
)
def test_the_source_names_the_same_sizes(kernel, name, value):
    (found,) = re.findall(rf"constexpr int {name} = (\d+)", kernel.source.text)
    assert int(found) == value


@pytest.fixture
def with_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warpgroup products wherever a GPU has them, whatever is installed here."""
    monkeypatch.setattr(module, "find_nvrtc", lambda: True)
    geometry_of.cache_clear()
    yield
    geometry_of.cache_clear()


@pytest.mark.usefixtures("with_nvrtc")
@pytest.mark.parametrize(
    ("processor", "kv_lora"),
    [*((name, 512) for name in PROCESSORS), ("H200", 16), ("H200", 528), ("H200", MAX_KV_LORA)],
)
def test_a_block_fits(processor: str, kv_lora: int) -> None:
    for nodes in (1, 65):
        for heads in (1, 17, 33, 128):
            geometry = geometry_of(nodes, heads, kv_lora + 64, PROCESSORS[processor])
            assert geometry.shared_bytes(kv_lora + 64) <= PROCESSORS[processor].shared_bytes
            assert geometry.warpgroups == (processor == "H200" and kv_lora <= 512 and heads > 16)


def test_refuses(device):
    def attend(queries: tuple, cache: tuple, parents: int, depths: int, kv_lora: int = 16, dtype: type = np.uint16):
        columns = (device.empty(rows, np.int32) for rows in (1, parents, depths))
        return tree_attention_mma(
            device.empty(queries, dtype), device.empty(cache, np.uint16), *columns, kv_lora, SCALE
        )

    with pytest.raises(ValueError, match=r"tree_attention_mma: queries \[3, 2, 32\], cache \[9, 48\], .* do not fit"):
        attend((3, 2, 32), (9, 48), 3, 3)
    with pytest.raises(ValueError, match=r"tree_attention_mma: .* parents \[4\], depths \[3\] do not fit"):
        attend((3, 2, 32), (9, 32), 4, 3)
    with pytest.raises(ValueError, match=r"tree_attention_mma: .* parents \[3\], depths \[4\] do not fit"):
        attend((3, 2, 32), (9, 32), 3, 4)
    with pytest.raises(ValueError, match=r"tree_attention_mma: queries \[3, 32\]"):
        attend((3, 32), (9, 32), 3, 3)
    for latent, kv_lora in ((32, 0), (32, 8), (32, 48), (40, 16)):
        with pytest.raises(ValueError, match=rf"tree_attention_mma: kv_lora_rank={kv_lora} of {latent}, expected mult"):
            attend((3, 2, latent), (9, latent), 3, 3, kv_lora)
    with pytest.raises(ValueError, match=r"tree_attention_mma: 1026 nodes, expected 0 to 1025"):
        attend((MAX_PATH + 2, 2, 32), (1100, 32), MAX_PATH + 2, MAX_PATH + 2)
    with pytest.raises(TypeError, match=r"tree_attention_mma: queries is float32, expected bfloat16"):
        attend((3, 2, 32), (9, 32), 3, 3, dtype=np.float32)
