"""Plain decoding on a CPU beside its floor: what BLAS takes for the products of a token's weights, and nothing else."""

import re
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kdtree_nb.engine import Engine

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
Product = tuple[np.ndarray, np.ndarray]
"""One row float32 [..., 1, in] and a weight [..., in, out]."""


class CpuDecoding(NamedTuple):
    """Milliseconds a token: the floor, and plain decoding."""

    floor: float
    decode: float

    @property
    def ratio(self) -> float:
        """How many times the floor decoding takes."""
        return self.decode / self.floor


def measure(engine: Engine, prompt: str | list[int], new_tokens: int = 64, repeats: int = 7) -> CpuDecoding:
    """The medians of repeated measurements; floor and decoding take turns, so that a busy moment hits them alike.

    Both run with as many threads as BLAS has: ``OPENBLAS_NUM_THREADS=1`` in the environment makes it one.

    Raises
    ------
    ValueError
        If the engine does not run on the CPU.
    """
    if engine.device.name != "cpu":
        raise ValueError(f"bench cpu: device={engine.device.name!r}, expected 'cpu'")
    products = list(floor_products(engine))
    engine.generate(prompt, "ar", max_new_tokens=new_tokens)  # loads the experts of this text
    floors, decodes = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        for token in range(new_tokens):
            for x, weight in products[token % len(products)]:
                x @ weight
        floors.append((time.perf_counter() - started) / new_tokens)
        generation = engine.generate(prompt, "ar", max_new_tokens=new_tokens)
        decodes.append(generation.decode_seconds / generation.target_forwards)
    return CpuDecoding(1e3 * statistics.median(floors), 1e3 * statistics.median(decodes))


def floor_products(engine: Engine) -> Iterator[list[Product]]:
    """The products of one token after another, in float32, until every routed expert had its turn.

    A token has all of the model's matrices, those of ``kv_b_proj`` head by head as absorbed attention has them, and
    of the routed experts as many as it chooses; embedding a token is no product.
    """
    config, random = engine.config, np.random.default_rng(0)
    every: list[tuple[int | None, Product]] = []
    for name, shape in config.weight_shapes().items():
        if len(shape) == 1 or (name == "model.embed_tokens" and not config.tie_word_embeddings):
            continue
        expert = _EXPERT.search(name)
        matrix = engine.model.weights.matrix(name)
        matrices = [matrix.T]
        if name.endswith("kv_b_proj"):
            by_head = matrix.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
            matrices = [keys, values.swapaxes(1, 2)]
        for weight in matrices:
            x = random.standard_normal((*weight.shape[:-2], 1, weight.shape[-2]), np.float32)
            every.append((int(expert[1]) if expert else None, (x, np.ascontiguousarray(weight))))
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    for first in range(0, experts, chosen):
        own = {expert % experts for expert in range(first, first + chosen)}
        yield [product for expert, product in every if expert is None or expert in own]
