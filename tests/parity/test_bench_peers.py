"""What bench times of other people does the same work, or as much of it."""

import numpy as np
import torch
from builders import tiny_config

from kdtree_nb.bench import attention, model
from kdtree_nb.bench.inputs import random_tree
from kdtree_nb.reference.attention import tree_attention
from kdtree_nb.reference.tree import visibility


def test_torch_attends_as_the_reference_does() -> None:
    random = np.random.default_rng(0)
    parents, _ = random_tree(17, random)
    queries = random.standard_normal((17, 4, attention.LATENT), np.float32)
    cache = random.standard_normal((40 + 17, attention.LATENT), np.float32)
    mask = np.zeros((17, 1, 57), np.float32)
    mask[:, 0, 40:][~visibility(parents)] = -np.inf
    found = attention.attend(*map(torch.from_numpy, (queries * np.float32(attention.SCALE), cache, mask)))
    expected = tree_attention(queries, cache, 40, parents, attention.KV_LORA, attention.SCALE)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_transformers_writes_what_it_is_asked_for() -> None:
    """The function asserts the number of tokens."""
    assert model.transformers_tokens_per_second(tiny_config(), 12, "cpu") > 0
