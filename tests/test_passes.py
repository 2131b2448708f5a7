"""What a forward pass launches, kernel by kernel, and the shared experts' place behind the routed ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Built, build, build_drafter_beside, tiny_config
from helpers import assert_same_bits

from kdtree_nb.engine import Engine
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.weights import Weights
from kdtree_nb.kernels.launch import Kernel
from kdtree_nb.quantization import routed_experts

SIZES = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
"""Multiples of 16, as the kernels of tensor cores have them."""
ATTENTION = "dense_gemm rms_norm dense_gemm mla_inputs dense_gemm attend_split combine_splits dense_gemm dense_gemm"
MLP = "w4a16_gemm swiglu w4a16_gemm"
EXPERTS = "dense_gemm moe_route moe_sort moe_gate_up moe_down moe_sum"
SHARED = "dense_gemm swiglu dense_gemm"


def built(folder: Path, shared: int = 1, **storage: Any) -> Built:
    return build(folder / "tiny.kdtr", tiny_config(**SIZES, n_shared_experts=shared), seed=1, **storage)


def logits_of(path: Path, dtype: str, rows: int = 5) -> np.ndarray:
    """Of a chain, by the kernels in the emulator."""
    engine = Engine.load(path, "emulated", dtype=dtype)
    chain = [np.arange(first, first + rows, dtype=np.int32) for first in (7, -1, 0)]
    with engine.device.running():
        cache = LatentCache(engine.config, 64, engine.device, engine.model.weights.dtype)
        return engine.model.forward(*chain, cache).logits


def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from now on, as they are."""
    launched: list[str] = []
    launch = Kernel.__call__

    def recorded(kernel: Kernel, *args: Any, **options: Any) -> None:
        launched.append(kernel.name)
        launch(kernel, *args, **options)

    monkeypatch.setattr(Kernel, "__call__", recorded)
    return launched


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_draft_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, layers: int) -> None:
    """Nine for a layer and seven around them; what was committed takes four, however many layers there are."""
    target = built(tmp_path)
    build_drafter_beside(target, num_hidden_layers=layers, head_dim=8)
    engine = Engine.load(target.path, "emulated", dtype=dtype)
    attention, mlp = (
        "dense_gemm block_write block_attention dense_gemm add_norm",
        "w4a16_gemm swiglu w4a16_gemm add_norm",
    )
    draft = " ".join(["embed rms_norm", *[attention, mlp] * layers, "dense_gemm top_k_sums top_k dense_gemm condition"])
    observe = "dense_gemm rms_norm dense_gemm block_write"
    if dtype == "bfloat16":
        draft, observe = draft.replace("gemm", "mma"), f"to_bfloat16 {observe.replace('gemm', 'mma')}"
    root, features = np.array([5], np.int32), np.zeros((3, 2, target.config.hidden_size), np.float32)
    with engine.device.running():
        drafter = engine.drafter.start(LatentCache(engine.config, 64, engine.device, engine.model.weights.dtype))
        drafter.observe(features)
        drafter.propose_after(root)  # weights come at their first use
        launched = recorded_launches(monkeypatch)
        drafter.observe(features)
        assert launched == observe.split()
        launched.clear()
        drafter.propose_after(root)
        assert launched == draft.split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("storage", "shared"), [(dict(), ""), (dict(select=routed_experts), SHARED)], ids=["int4", "experts alone in int4"]
)
def test_a_pass_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, storage: dict[str, Any], shared: str
) -> None:
    """Nine for attention, one less without a rank of queries, three for an MLP, six for experts, one for each norm.

    Experts beside the others take one more, their second product: the first is the router's as well, and so is SwiGLU.
    """
    mlp = MLP if not storage else SHARED
    dense, sparse = [ATTENTION, "add_norm", mlp, "add_norm"], [ATTENTION, "add_norm", EXPERTS, "add_norm"]
    if shared:
        sparse[2] = EXPERTS.replace("moe_route", "moe_route dense_gemm")
    expected = " ".join(["embed", "rms_norm", *dense, *sparse, "dense_gemm"])
    if dtype == "bfloat16":
        for exact, mma in (("gemm", "mma"), ("moe_gate_up", "moe_gate_up_mma"), ("moe_down", "moe_down_mma")):
            expected = expected.replace(exact, mma)
    path = built(tmp_path, **storage).path
    launched = recorded_launches(monkeypatch)
    logits_of(path, dtype)
    of_weights = ("to_bfloat16",)  # at their first use
    assert [name for name in launched if name not in of_weights] == expected.split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_token_sorts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    path, whole = built(tmp_path).path, []
    for rows in (1, 2):
        launched = recorded_launches(monkeypatch)
        whole.append(logits_of(path, dtype, rows))
        assert launched.count("moe_sort") == rows - 1
    assert_same_bits(whole[1][:1], whole[0])


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts_behind_the_routed_ones_give_what_they_give_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    """One has the same bits; two are added one after the other, where one product took both."""
    path, _, reference = built(tmp_path, shared)
    behind = logits_of(path, "float32")
    weights = Engine.load(path, "emulated").model.weights
    at, config = "model.layers.1.mlp", tiny_config(**SIZES, n_shared_experts=shared)
    assert weights.shared_behind(at, config) == shared
    gate_up, down = weights.experts(at, config)
    one = f"{at}.shared_experts"
    gates, ups, downs = (reference[f"{one}.{which}_proj"] for which in ("gate", "up", "down"))
    for expert in range(shared):
        own = slice(32 * expert, 32 * (expert + 1))
        np.testing.assert_array_equal(gate_up.expert(6 + expert), np.concatenate([gates[own], ups[own]]))
        np.testing.assert_array_equal(down.expert(6 + expert), downs[:, own])
    monkeypatch.setattr(Weights, "shared_behind", lambda *args: 0)
    beside = logits_of(path, "float32")
    if shared == 1:
        assert_same_bits(behind, beside)
    np.testing.assert_allclose(behind, beside, rtol=0, atol=1e-5 * np.abs(beside).max())


def test_experts_that_are_not_stored_alike_stay_apart(tmp_path: Path) -> None:
    for name, storage, shared in (
        ("a", dict(select=routed_experts), 1),
        ("b", dict(storage="float32"), 1),
        ("c", {}, 0),
    ):
        (tmp_path / name).mkdir()
        path = built(tmp_path / name, shared, **storage).path
        weights = Engine.load(path, "emulated").model.weights
        assert weights.shared_behind("model.layers.1.mlp", Engine.load(path).config) == 0
