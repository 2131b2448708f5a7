"""Each pair in one block of its expert, as few blocks as it takes, in any order of threads."""

import numpy as np
import pytest

from kdtree_nb.config.model import MAX_EXPERTS
from kdtree_nb.kernels.moe_pairs import check_routing, sort_pairs, sum_pairs

from .experts import random_routing


def assert_sorted(device, expert_ids: np.ndarray, experts: int, rows: int = 8) -> None:
    """Against what the words say: an expert with n pairs has ⌈n / rows⌉ blocks, together, filled from the front."""
    blocks = sort_pairs(device.put(expert_ids), experts, rows)
    of_blocks, pairs, count = (device.host(array) for array in blocks)
    needed = -(-np.bincount(expert_ids.ravel(), minlength=experts) // rows)
    assert count.tolist() == [needed.sum()]
    assert len(of_blocks) >= needed.sum()
    np.testing.assert_array_equal(of_blocks[: count[0]], np.repeat(np.arange(experts), needed))
    for expert in range(experts):
        found = pairs[: count[0]][of_blocks[: count[0]] == expert].ravel()
        of_expert = np.flatnonzero(expert_ids.ravel() == expert)
        np.testing.assert_array_equal(np.sort(found[: len(of_expert)]), of_expert)
        assert (found[len(of_expert) :] == -1).all()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (1, 384, 8), (64, 384, 8), (50, 33, 6), (9, 1024, 3)]
)
def test_random_routing(device, tokens, experts, top_k, rows):
    expert_ids, _ = random_routing(np.random.default_rng(tokens), tokens, experts, top_k)
    assert_sorted(device, expert_ids, experts, rows)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 1300])
def test_all_tokens_to_the_last_expert(device, tokens):
    """More pairs than threads, blocks just full and not."""
    assert_sorted(device, np.full((tokens, 1), 40, np.int32), 41)


def test_the_memory_is_enough_where_each_expert_has_one_pair_too_many(device):
    """One pair an expert, then 8 more for each: two blocks each, all that there is room for."""
    expert_ids = np.repeat(np.arange(5, dtype=np.int32), 9)[:, None]
    assert_sorted(device, expert_ids, 5)
    assert len(sort_pairs(device.put(expert_ids), 5, 8).experts) == 10


def test_any_order_of_threads(device):
    expert_ids, _ = random_routing(np.random.default_rng(1), 20, 70, 4)
    ids = device.put(expert_ids)

    def sorted_within_blocks():
        blocks = sort_pairs(ids, 70, 8)
        count = int(device.host(blocks.num_blocks)[0])
        by_expert = [np.sort(device.host(blocks.pairs)[:count], axis=1), device.host(blocks.experts)[:count]]
        return [device.put(array) for array in by_expert]

    device.every_schedule(sorted_within_blocks)


@pytest.mark.parametrize("top_k", [1, 6, 12, 13, 25])
@pytest.mark.parametrize("hidden", [1, 31, 256, 7168])
def test_sum_in_the_order_of_the_choice(device, hidden, top_k):
    rng = np.random.default_rng(hidden)
    outputs, weights = rng.standard_normal((5 * top_k, hidden)).astype(np.float32), rng.random((5, top_k), np.float32)
    expected = np.zeros((5, hidden), np.float32)
    for choice in range(top_k):
        expected += outputs.reshape(5, top_k, hidden)[:, choice] * weights[:, choice, None]
    np.testing.assert_array_equal(device.host(sum_pairs(device.put(outputs), device.put(weights))), expected)
    shared = rng.standard_normal((5, hidden)).astype(np.float32)
    y = sum_pairs(device.put(outputs), device.put(weights), device.put(shared))
    np.testing.assert_array_equal(device.host(y), expected + shared)


def test_refuses(device):
    with pytest.raises(ValueError, match=r"moe_sort: 1025 experts, expected at most 1024"):
        sort_pairs(device.put([[0]], np.int32), MAX_EXPERTS + 1, 8)
    x, one, four = np.zeros((4, 8)), np.zeros((4, 1), np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"name: expert_ids \[4\] and weights \[4\], expected \[4, top_k\]"):
        check_routing("name", x, four, four, None)
    with pytest.raises(ValueError, match=r"name: shared \[4, 7\], expected \[4, 8\]"):
        check_routing("name", x, one, one, np.zeros((4, 7), np.float32))
