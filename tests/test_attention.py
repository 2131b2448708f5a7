"""tree_attention: equal to the naive form, and a row's bits its own."""

from typing import NamedTuple

import numpy as np
import pytest
from helpers import assert_same_bits, count_nodes, random_parents, root_path
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.config import ModelConfig, YarnScaling
from kdtree_nb.reference import model
from kdtree_nb.reference.attention import SPLIT, tree_attention
from kdtree_nb.reference.norm import LATENT_EPS, rms_norm
from kdtree_nb.reference.rope import apply_rope, rope, softmax_scale

PREFIXES = [0, 1, 63, 64, 65, 200]


# ---- the naive form --------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One attention layer in float64, its output projection left out (an identity)."""

    config: ModelConfig
    own: dict[str, np.ndarray]

    def naive(self, x: np.ndarray) -> np.ndarray:
        """The last token's heads, from ``reference/model.py``: [heads, v]."""
        return model.attention(self.own, self.config, x)[-1].reshape(self.config.num_attention_heads, -1)

    def absorbed(self, prefix: np.ndarray, nodes: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Every node's heads through the latent cache: [N, heads, v]."""
        config, own = self.config, self.own
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        depths = np.array([len(root_path(parents, node)) - 1 for node in range(count_nodes(parents))])
        x = np.concatenate([prefix, nodes[: len(depths)]])
        positions = np.concatenate([np.arange(len(prefix)), len(prefix) + depths])

        compressed = x @ own["self_attn.kv_a_proj_with_mqa"].T
        latent = rms_norm(compressed[:, : config.kv_lora_rank], own["self_attn.kv_a_layernorm"], LATENT_EPS)
        k_rope = apply_rope(compressed[:, config.kv_lora_rank :], positions, rope(config))
        cache = np.full((len(prefix) + len(parents) + 5, config.latent_dim), np.nan)
        cache[: len(x)] = np.concatenate([latent, k_rope], axis=1)

        by_head = own["self_attn.kv_b_proj"].reshape(heads, -1, config.kv_lora_rank)
        absorb_key, expand_value = by_head[:, :nope], by_head[:, nope:]
        queries = (x @ own["self_attn.q_proj"].T).reshape(len(x), heads, -1)
        q_latent = np.einsum("nhd,hdc->nhc", queries[..., :nope], absorb_key)
        q_rope = apply_rope(queries[..., nope:], positions, rope(config))
        absorbed = np.full((len(parents), heads, config.latent_dim), np.nan)
        absorbed[: len(depths)] = np.concatenate([q_latent, q_rope], axis=2)[len(prefix) :]

        mixed = tree_attention(absorbed, cache, len(prefix), parents, config.kv_lora_rank, softmax_scale(config))
        return np.einsum("nhc,hvc->nhv", mixed, expand_value)


def layer(heads: int, kv_lora_rank: int, nope: int, rotated: int, value: int) -> Layer:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=value,
        intermediate_size=8,
        moe_intermediate_size=8,
        n_routed_experts=1,
        num_experts_per_tok=1,
        n_shared_experts=0,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        rope_scaling=YarnScaling(8, 64, mscale=1.0, mscale_all_dim=0.8),
    )
    rng = np.random.default_rng([heads, kv_lora_rank])
    shapes = {
        "self_attn.q_proj": (heads * config.qk_head_dim, 24),
        "self_attn.kv_a_proj_with_mqa": (config.latent_dim, 24),
        "self_attn.kv_b_proj": (heads * (nope + value), kv_lora_rank),
    }
    own = {name: rng.standard_normal(shape) / np.sqrt(shape[1]) * 1.5 for name, shape in shapes.items()}
    own["self_attn.kv_a_layernorm"] = rng.uniform(0.5, 1.5, kv_lora_rank)
    own["self_attn.o_proj"] = np.eye(heads * value)
    return Layer(config, own)


LAYERS = [layer(4, 32, 16, 8, 16), layer(1, 13, 6, 2, 5), layer(3, 37, 10, 6, 7)]


def assert_equals_naive(attention: Layer, prefix_len: int, parents: np.ndarray) -> None:
    rng = np.random.default_rng(prefix_len)
    prefix, nodes = rng.standard_normal((prefix_len, 24)), rng.standard_normal((len(parents), 24))
    actual = attention.absorbed(prefix, nodes, parents)
    count = count_nodes(parents)
    for node in range(count):
        expected = attention.naive(np.concatenate([prefix, nodes[root_path(parents, node)]]))
        assert np.abs(actual[node] - expected).max() <= 1e-12
    assert not actual[count:].any()


@pytest.mark.parametrize("attention", LAYERS, ids=["heads=4", "heads=1", "odd sizes"])
@pytest.mark.parametrize("prefix_len", PREFIXES)
def test_one_node_equals_the_naive_form(prefix_len, attention):
    assert_equals_naive(attention, prefix_len, np.array([-1]))


@pytest.mark.parametrize("attention", LAYERS, ids=["heads=4", "heads=1", "odd sizes"])
@pytest.mark.parametrize(("prefix_len", "length"), [(0, 130), (1, 3), (60, 9), (64, 5), (65, 5), (200, 5)])
def test_a_chain_equals_the_naive_form(prefix_len, length, attention):
    assert_equals_naive(attention, prefix_len, chain(length))


@settings(max_examples=60, deadline=None)
@given(
    attention=st.sampled_from(LAYERS),
    prefix_len=st.sampled_from([*PREFIXES, 58, 126]),
    parents=random_parents(max_nodes=12, max_padding=3),
)
def test_a_tree_equals_the_naive_form_on_each_path(attention, prefix_len, parents):
    assert_equals_naive(attention, prefix_len, parents)


# ---- the same bits however a row was decoded -------------------------------------------------------------------------


class Rows(NamedTuple):
    """Tokens of a text in float32: keys [n, kv_lora + rope] and queries [n, heads, kv_lora + rope]."""

    keys: np.ndarray
    queries: np.ndarray

    def at(self, rows: slice | list[int]) -> "Rows":
        return Rows(self.keys[rows], self.queries[rows])


def attend(prefix: np.ndarray, nodes: Rows, parents: np.ndarray, kv_lora_rank: int) -> np.ndarray:
    """Attention of nodes behind a prefix of keys. All that they must not read is NaN: padding, unused cache rows."""
    cache = np.full((len(prefix) + len(parents) + 3, prefix.shape[1]), np.nan, np.float32)
    cache[: len(prefix)] = prefix
    cache[len(prefix) : len(prefix) + len(nodes.keys)] = nodes.keys
    queries = np.full((len(parents), *nodes.queries.shape[1:]), np.nan, np.float32)
    queries[: len(nodes.queries)] = nodes.queries
    return tree_attention(queries, cache, len(prefix), parents, kv_lora_rank, 0.2)


def chain(length: int) -> np.ndarray:
    return np.arange(-1, length - 1)


SIZES = [(4, 32, 8), (1, 13, 4), (3, 37, 6), (1, 1, 2), (16, 128, 64)]
"""Heads, kv_lora, rope."""


def random_rows(size: tuple[int, int, int], count: int) -> Rows:
    heads, kv_lora_rank, rotated = size
    rng = np.random.default_rng(count)
    keys = rng.standard_normal((count, kv_lora_rank + rotated)).astype(np.float32)
    return Rows(keys, rng.standard_normal((count, heads, kv_lora_rank + rotated)).astype(np.float32))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_alone_in_a_chunk_and_in_a_prompt(size):
    """140 tokens: one prompt, two chunks cut anywhere, and one at a time."""
    text, kv_lora_rank = random_rows(size, 140), size[1]
    prompt = attend(text.keys[:0], text, chain(140), kv_lora_rank)
    for cut in (1, 2, 63, 64, 65, 127, 128, 129, 139):
        first = attend(text.keys[:0], text.at(slice(cut)), chain(cut), kv_lora_rank)
        second = attend(text.keys[:cut], text.at(slice(cut, None)), chain(140 - cut), kv_lora_rank)
        assert_same_bits(np.concatenate([first, second]), prompt)
    for row in range(140):
        assert_same_bits(attend(text.keys[:row], text.at([row]), chain(1), kv_lora_rank)[0], prompt[row])


def assert_nodes_equal_their_paths(size: tuple[int, int, int], prefix_len: int, parents: np.ndarray) -> None:
    """Each node of a tree against its path as a chain, and against itself alone once that path was committed."""
    count, kv_lora_rank = count_nodes(parents), size[1]
    text = random_rows(size, prefix_len + count)
    prefix, nodes = text.keys[:prefix_len], text.at(slice(prefix_len, None))
    tree = attend(prefix, nodes, parents, kv_lora_rank)
    assert not tree[count:].any()
    for node in range(count):
        path = root_path(parents, node)
        assert_same_bits(attend(prefix, nodes.at(path), chain(len(path)), kv_lora_rank)[-1], tree[node])
        committed = np.concatenate([prefix, nodes.keys[path[:-1]]])
        assert_same_bits(attend(committed, nodes.at([node]), chain(1), kv_lora_rank)[0], tree[node])


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    prefix_len=st.sampled_from([*PREFIXES, 58, 61, 120, 127, 128]),
    parents=random_parents(max_nodes=16, max_padding=3),
)
def test_in_a_tree_in_a_chain_and_alone(size, prefix_len, parents):
    assert_nodes_equal_their_paths(size, prefix_len, parents)


def test_a_path_longer_than_a_split():
    """A chain of 90 with short branches, from a prefix that ends inside a split: paths in one, two and three."""
    assert_nodes_equal_their_paths((2, 24, 8), 50, np.concatenate([chain(90), [0, 0, 12, 14, 15, 76, 89, 89, -1, -1]]))


@pytest.mark.parametrize("size", [(1, 1, 2), (2, 24, 8)], ids=str)
def test_a_long_prefix(size):
    """From 15 splits into the 16th: a library's own sum of that many terms takes another order than that of 15."""
    assert_nodes_equal_their_paths(size, 15 * SPLIT - 20, chain(30))


@pytest.mark.parametrize("prefix_len", PREFIXES)
def test_where_queries_and_cache_lie_does_not_matter(prefix_len):
    """A layer's slice of the whole cache, and queries that lie head by head, as their projection leaves them."""
    rng = np.random.default_rng(0)
    parents = np.array([-1, 0, 0, 1, 2])
    queries = rng.standard_normal((5, 3, 29)).astype(np.float32)
    cache = rng.standard_normal((prefix_len + 5, 29)).astype(np.float32)
    expected = tree_attention(queries, cache, prefix_len, parents, 23, 0.2)

    by_head = np.ascontiguousarray(queries.swapaxes(0, 1)).swapaxes(0, 1)
    assert_same_bits(tree_attention(by_head, cache, prefix_len, parents, 23, 0.2), expected)
    wide = np.full((2, 300, 40), np.nan, np.float32)
    wide[1, : len(cache), 7:36] = cache
    assert_same_bits(tree_attention(queries, wide[1, :, 7:36], prefix_len, parents, 23, 0.2), expected)


# ---- what a row must not see -----------------------------------------------------------------------------------------


def row_attention(keys: np.ndarray, query: np.ndarray, kv_lora_rank: int, scale: float) -> np.ndarray:
    scores = query @ keys.T * scale  # [heads, keys]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ keys[:, :kv_lora_rank] / weights.sum(axis=1, keepdims=True)


@settings(max_examples=60, deadline=None)
@given(parents=random_parents(max_nodes=10), prefix_len=st.sampled_from([0, 1, 62, 64, 130]), poison=st.integers(0, 9))
def test_a_node_moves_its_descendants_only(parents, prefix_len, poison):
    """A node turned to NaN reaches itself and what grows on it: no sibling, no cousin, no ancestor."""
    poison %= len(parents)
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((len(parents), 2, 15)).astype(np.float32)
    cache = rng.standard_normal((prefix_len + len(parents), 15)).astype(np.float32)
    clean = tree_attention(queries, cache, prefix_len, parents, 11, 0.3)
    cache[prefix_len + poison] = np.nan
    moved = tree_attention(queries, cache, prefix_len, parents, 11, 0.3)
    for node in range(len(parents)):
        if poison in root_path(parents, node):
            assert np.isnan(moved[node]).all()
        else:
            assert_same_bits(moved[node], clean[node])


def test_siblings_do_not_see_each_other():
    """Parents [−1, 0, 0]: another token at one sibling changes that sibling and not a bit of the other."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((3, 2, 10)).astype(np.float32)
    cache = rng.standard_normal((8, 10)).astype(np.float32)
    before = tree_attention(queries, cache, 5, np.array([-1, 0, 0]), 6, 0.3)
    cache[5 + 1] += 1
    after = tree_attention(queries, cache, 5, np.array([-1, 0, 0]), 6, 0.3)
    assert_same_bits(after[[0, 2]], before[[0, 2]])
    assert (after[1] != before[1]).any()


@pytest.mark.parametrize("prefix_len", PREFIXES)
def test_a_query_of_nan_stays_alone(prefix_len):
    rng = np.random.default_rng(0)
    parents = np.array([-1, 0, 1, 1, 0])
    queries = rng.standard_normal((5, 2, 10)).astype(np.float32)
    cache = rng.standard_normal((prefix_len + 5, 10)).astype(np.float32)
    clean = tree_attention(queries, cache, prefix_len, parents, 6, 0.3)
    queries[1] = np.nan
    moved = tree_attention(queries, cache, prefix_len, parents, 6, 0.3)
    assert np.isnan(moved[1]).all()
    assert_same_bits(np.delete(moved, 1, axis=0), np.delete(clean, 1, axis=0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("prefix_len", [0, 70])
def test_padding_gives_zeros(prefix_len, dtype):
    queries = np.full((6, 2, 10), np.nan, dtype)
    cache = np.full((prefix_len + 6, 10), np.nan, dtype)
    queries[:2], cache[: prefix_len + 2] = 0.5, 0.25
    output = tree_attention(queries, cache, prefix_len, np.array([-1, 0, -1, -1, -1, -1]), 6, 0.3)
    assert output.dtype == dtype and output.shape == (6, 2, 6)
    np.testing.assert_allclose(output[:2], 0.25, rtol=1e-6)
    assert_same_bits(output[2:], np.zeros((4, 2, 6), dtype))


def test_a_node_without_a_prefix_sees_itself():
    queries, cache = np.ones((1, 3, 7), np.float32), np.arange(7, dtype=np.float32)[None]
    output = tree_attention(queries, cache, 0, np.array([-1]), 5, 0.3)
    assert (output == np.arange(5)).all()


def test_scores_far_apart_and_far_from_zero():
    """No overflow, and the softmax is that of the differences."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((2, 2, 10))
    cache = rng.standard_normal((90, 10))
    cache[:, 0] += 5
    parents = np.array([-1, 0])
    for factor in (1e3, -1e3):
        with np.errstate(all="raise", under="ignore"):
            output = tree_attention(factor * queries, cache, 88, parents, 6, 1.0)
        for node in range(2):
            expected = row_attention(cache[: 89 + node], factor * queries[node], 6, 1.0)
            np.testing.assert_allclose(output[node], expected, atol=1e-10)


def test_float32_is_float64_rounded():
    rng = np.random.default_rng(0)
    queries, cache = rng.standard_normal((3, 4, 40)), rng.standard_normal((203, 40))
    parents = np.array([-1, 0, 0])
    exact = tree_attention(queries, cache, 200, parents, 32, 0.2)
    rounded = tree_attention(queries.astype(np.float32), cache.astype(np.float32), 200, parents, 32, 0.2)
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, exact, atol=5e-6)


@pytest.mark.parametrize("heads", [1, 3])
def test_every_visible_key_counts_once(heads):
    """Zero queries weigh all keys alike: the output is their mean, at every length up to a second split."""
    cache = np.random.default_rng(0).standard_normal((2 * SPLIT + 5, 9))
    for prefix_len in range(2 * SPLIT + 4):
        output = tree_attention(np.zeros((1, heads, 9)), cache, prefix_len, np.array([-1]), 7, 1.0)
        mean = cache[: prefix_len + 1, :7].mean(axis=0)
        np.testing.assert_allclose(output[0], np.tile(mean, (heads, 1)), atol=1e-14)
