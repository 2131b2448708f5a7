"""One layer of Kimi K2 in its full size, with random weights: what no single GPU holds 61 times."""

import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

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
from kdtree_nb.engine.rounds import Rounds, prefill
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, quantized_names, routed_experts

ROWS = (1, 9, 17, 33, 65)
CONTEXT, CALLS = 4096, 4
GPUS = 8
POOL = 1 << 23
"""Random numbers of each kind."""
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
    """Weights that no file holds: each is cut out of a pool of random numbers when it is asked for.

    As in Kimi K2's checkpoints, the routed experts are INT4 and everything else is bfloat16. To an upload, each tensor
    is a file of its own.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.path, self.config, self.tokenizer = Path("random"), config, None
        self.entries = MappingProxyType(dict(_entries(config)))
        random = np.random.default_rng(0)
        self._pools: dict[tuple[str, int], np.ndarray] = {}
        for name, stored in self.entries.items():
            key = _kind(name, stored.shape)
            if key not in self._pools:
                self._pools[key] = _numbers(*key, random).astype(DTYPES[stored.dtype])

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor; where it is larger than its pool, it repeats."""
        shape, *_ = self.entries[name]
        return np.resize(np.roll(self._pools[_kind(name, shape)], -_start(name, POOL)), shape)

    def place(self, name: str) -> tuple[Path, int]:
        """As :meth:`Bundle.place`."""
        return self.entries[name].file, 0

    def read_into(self, out: np.ndarray, file: Path, begin: int) -> None:
        """As :meth:`Bundle.read_into`: other bytes for each tensor and place, the same each time."""
        name = str(file)
        data = self._pools[_kind(name, self.entries[name].shape)].view(np.uint8)
        start = _start(f"{name} {begin}", (len(data) - len(out)) // 16 + 1) * 16
        out[:] = data[start : start + len(out)]


def _kind(name: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Which pool a tensor is of: its numbers' distribution, and the columns that their size depends on."""
    if len(shape) == 1:
        return "bias" if name.endswith("bias") else "norm", 0
    if name.endswith(".qw"):
        return "codes", 0
    return "scales" if name.endswith(".sc") else "weight", shape[1]


def _numbers(kind: str, width: int, random: np.random.Generator) -> np.ndarray:
    """A pool; outputs have deviation 1, so a weight's numbers 1/√in, and scales by as much less as codes have more."""
    if kind == "codes":
        return random.integers(-(2**31), 2**31, POOL, dtype=np.int32)
    if kind == "scales":
        return random.uniform(0.5, 1.5, POOL) / (4.6 * np.sqrt(width * GROUP_SIZE))
    if kind == "norm":
        return random.uniform(0.5, 1.5, POOL)
    return random.standard_normal(POOL, np.float32) / (16 if kind == "bias" else np.float32(np.sqrt(width)))


def _start(name: str, choices: int) -> int:
    return zlib.crc32(name.encode()) % choices


def _entries(config: ModelConfig) -> Iterator[tuple[str, Entry]]:
    packed = quantized_names(config, routed_experts)
    for name, shape in config.weight_shapes().items():
        parts = [(name, shape, "BF16")]
        if name in packed:
            out_features, in_features = shape
            codes = f"{name}.qw", (out_features, in_features // CODES_PER_WORD), "I32"
            parts = [codes, (f"{name}.sc", (out_features, in_features // GROUP_SIZE), "BF16")]
        for stored, its_shape, dtype in parts:
            yield stored, entry(its_shape, dtype, Path(stored))


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
    engine = Engine(bundle, None, capacity, device, dtype)
    engine.preload()
    model, cache = engine.model, Rounds(engine.model, NO_DRAFTER, capacity).cache
    with device.running():
        prefill(model, cache, random.integers(config.vocab_size, size=context, dtype=np.int32))
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
