"""One layer of Kimi K2 in its full size, with random weights: what no single GPU holds 61 times."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.bench.engines import pass_bytes
from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.inputs import random_tree
from kdtree_nb.bench.timing import microseconds, require_gpu
from kdtree_nb.bundle import Bundle
from kdtree_nb.bundle.format import DTYPES, Entry, entry
from kdtree_nb.config import ModelConfig, YarnScaling
from kdtree_nb.engine import Engine
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import NO_DRAFTER
from kdtree_nb.engine.rounds import Rounds
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, quantized_names, routed_experts

ROWS = (1, 9, 17, 33, 65)
CONTEXT, CALLS = 4096, 4
GPUS = 8
POOL = 1 << 26
"""Random numbers that windows are cut of: more than the largest weight has."""
KIMI_LAYERS = 61
KIMI_LAYER = ModelConfig(
    vocab_size=4096,  # the head and the embedding are no part of a layer
    hidden_size=7168,
    num_hidden_layers=1,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    first_k_dense_replace=0,
    max_position_embeddings=262_144,
    routed_scaling_factor=2.827,
    rope_theta=50000.0,
    rope_scaling=YarnScaling(64.0, 4096, mscale=1.0, mscale_all_dim=1.0),
)
LAYERS = {"kimi-k2": KIMI_LAYER}


class RandomBundle(Bundle):
    """Weights that no file holds: each is a window of one pool of random numbers, made when it is asked for.

    As in Kimi K2's checkpoints, the routed experts are INT4 and everything else is bfloat16.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.path, self.config, self.tokenizer = Path("random"), config, None
        self.entries = MappingProxyType(dict(_entries(config)))
        random = np.random.default_rng(seed)
        self._words = random.integers(-(2**31), 2**31, POOL, dtype=np.int32)
        self._normal = random.standard_normal(POOL, dtype=np.float32).astype(bfloat16)
        self._scales: dict[int, np.ndarray] = {}
        self._random = random

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor of deviation 1/√in, around 1 where it is a norm's; another at each call."""
        shape, dtype, *_ = self.entries[name]
        if name.endswith(".qw"):
            return self._window(self._words, shape)
        if name.endswith(".sc"):
            return self._window(self._scales_of(shape[1] * GROUP_SIZE), shape)
        values = self._window(self._normal, shape)
        if len(shape) == 1:
            return (np.float32(not name.endswith("bias")) + values.astype(np.float32) / 16).astype(DTYPES[dtype])
        return (values.astype(np.float32) / np.float32(np.sqrt(shape[1]))).astype(DTYPES[dtype])

    def _scales_of(self, in_features: int) -> np.ndarray:
        """A pool for every width, since there are too many experts to convert each; a code's deviation is 4.6."""
        if in_features not in self._scales:
            uniform = self._random.uniform(0.5, 1.5, POOL // 16) / (4.6 * np.sqrt(in_features))
            self._scales[in_features] = uniform.astype(bfloat16)
        return self._scales[in_features]

    def _window(self, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        start = int(self._random.integers(len(pool) - size + 1))
        return pool[start : start + size].reshape(shape)


def _entries(config: ModelConfig) -> Iterator[tuple[str, Entry]]:
    file, packed = Path("random"), quantized_names(config, routed_experts)
    for name, shape in config.weight_shapes().items():
        if name in packed:
            out_features, in_features = shape
            yield f"{name}.qw", entry((out_features, in_features // CODES_PER_WORD), "I32", file)
            yield f"{name}.sc", entry((out_features, in_features // GROUP_SIZE), "BF16", file)
        else:
            yield name, entry(shape, "BF16", file)


def config_of(name: str) -> ModelConfig:
    """The layer of that name.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name not in LAYERS:
        raise ValueError(f"bench model: --layer {name!r}, expected one of {', '.join(LAYERS)}")
    return LAYERS[name]


def measure(name: str, rows: Sequence[int], dtype: str, context: int = CONTEXT) -> Iterator[Measured]:
    """Time the layer over random trees behind a prefix: its two norms, attention, router and experts.

    The embedding's lookup and the final norm are in the figures, some microseconds; the head is not.

    Raises
    ------
    ValueError
        For an unknown layer, or without a GPU.
    """
    require_gpu()
    config, device, random = config_of(name), Device.named("cuda"), np.random.default_rng(0)
    bundle = RandomBundle(config)
    capacity = context + max(rows)
    model = Engine(bundle, None, capacity, device, dtype).model  # type: ignore[call-arg]
    rounds = Rounds(model, NO_DRAFTER, capacity)
    with device.running():
        rounds.begin(random.integers(config.vocab_size, size=context + 1, dtype=np.int32), 1)
    cache = rounds.cache
    stored = {name: entry for name, entry in bundle.entries.items() if name.startswith("model.layers.")}
    for count in rows:
        tree = random_tree(count, random)
        at = device.put(tree.parents), device.put(tree.depths), cache
        tokens = [device.put(random.integers(config.vocab_size, size=count, dtype=np.int32)) for _ in range(CALLS)]
        calls = [partial(model.forward, own, *at, logits_of=slice(0)) for own in tokens]
        needed = pass_bytes(config, stored, count, context, cache.rows.itemsize)
        yield Measured("layer", {"rows": count}, microseconds(calls), needed)


def passes_per_second(layer_microseconds: float, layers: int = KIMI_LAYERS, gpus: int = GPUS) -> float:
    """Passes of the whole model a second, on paper: 1 / (layer's time × layers / GPUs).

    As if every GPU held an equal share of each layer's weights and heads, and a layer's time fell by as much. With one
    row a pass is a token; with a tree it is τ tokens. Left out: two sums over all GPUs a layer; what does not fall
    with the share, which is the time of short kernels, norms, router and the latent projection that every GPU repeats;
    experts that lie unevenly; embedding, head and the drafter. The first layer, which is dense, counts as another
    sparse one. So it is an upper bound.
    """
    return 1e6 * gpus / (layer_microseconds * layers)
