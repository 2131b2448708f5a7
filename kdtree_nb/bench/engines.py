"""The engine that is measured: what it continues, and the bytes that one of its passes cannot do without."""

from collections.abc import Mapping

import numpy as np

from kdtree_nb.bundle.format import Entry
from kdtree_nb.config import ModelConfig
from kdtree_nb.engine import Engine
from kdtree_nb.golden import held_out_prompts
from kdtree_nb.quantization import routed_experts

CACHE_ELEMENT = {"float32": 4, "bfloat16": 2}
"""Bytes of a value of the latent cache, by what the engine computes in."""
EMBEDDING = "model.embed_tokens"


def prompt_of(engine: Engine, tokens: int) -> np.ndarray:
    """The first tokens int32 [tokens] of the held-out texts beside the bundle; random ones where there are too few."""
    beside = engine.bundle.path.parent / "prompts.json"
    found: list[int] = []
    if beside.is_file() and engine.tokenizer is not None:
        texts = [text for domain in held_out_prompts(beside.parent).values() for text in domain]
        found = engine.tokenizer.encode("\n".join(texts)).ids[:tokens]
    if len(found) < tokens:
        found = np.random.default_rng(0).integers(engine.config.vocab_size, size=tokens).tolist()
    return np.array(found, np.int32)


def expected_experts(experts: int, top_k: int, rows: int) -> float:
    """How many experts of a layer so many rows choose, each independently and without preference."""
    return float(experts * (1 - (1 - top_k / experts) ** rows))


def pass_bytes(config: ModelConfig, stored: Mapping[str, Entry], rows: int, context: int, cache_element: int) -> float:
    """The cost model of a pass: every weight once as it is stored, of the routed experts those that are expected.

    The rows' own embeddings count, not the table, unless the head shares it; of the cache what the layers read.

    Parameters
    ----------
    stored
        A bundle's entries.
    rows, context : int
        Tokens of the pass, and committed tokens before them.
    cache_element : int
        Bytes of a value of the latent cache.
    """
    routed = sum(entry.nbytes for name, entry in stored.items() if routed_experts(name))
    others = sum(entry.nbytes for name, entry in stored.items() if not routed_experts(name))
    table = stored[EMBEDDING].nbytes if EMBEDDING in stored and not config.tie_word_embeddings else 0
    share = expected_experts(config.n_routed_experts, config.num_experts_per_tok, rows) / config.n_routed_experts
    cache = config.num_hidden_layers * (context + rows) * config.latent_dim * cache_element
    return others - table + table * rows / config.vocab_size + routed * share + cache
