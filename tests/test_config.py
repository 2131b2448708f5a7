"""The model's shape: what a Hugging Face ``config.json`` may say, and what it may not."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtree_nb.config import DrafterConfig, ModelConfig, YarnScaling, config_from_hf

# The sizes of Kimi K2. Its releases differ in rms_norm_eps, YaRN factors and the end-of-text id; these are one choice.
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "eos_token_id": 163586,
    "tie_word_embeddings": False,
}
SMALL = ModelConfig.from_hf(
    {
        **KIMI_K2,
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "eos_token_id": [1, 2],
    }
)


def changed(**fields: object) -> dict[str, Any]:
    return {**KIMI_K2, **fields}


def test_kimi_k2_is_read_whole() -> None:
    config = ModelConfig.from_hf(KIMI_K2)
    assert (config.qk_head_dim, config.latent_dim) == (192, 576)
    assert config.eos_token_ids == (163586,)
    assert config.rope_scaling == YarnScaling(32.0, 4096, 1.0, 1.0, 1.0, 1.0)
    shapes = config.weight_shapes()
    assert shapes["model.layers.0.mlp.down_proj"] == (7168, 18432)
    assert shapes["model.layers.60.mlp.experts.383.up_proj"] == (2048, 7168)
    assert shapes["model.layers.1.mlp.shared_experts.gate_proj"] == (2048, 7168)
    assert shapes["model.layers.1.mlp.gate.e_score_correction_bias"] == (384,)
    assert shapes["model.layers.1.self_attn.kv_b_proj"] == (64 * 256, 512)
    assert shapes["model.layers.1.self_attn.q_b_proj"] == (64 * 192, 1536)
    elements = sum(int.__mul__(*shape) if len(shape) == 2 else shape[0] for shape in shapes.values())
    assert round(elements / 1e9) == 1026  # "1T parameters"


def test_the_order_is_that_of_the_forward_pass() -> None:
    names = list(SMALL.weight_shapes())
    assert names[0] == "model.embed_tokens"
    assert names[-2:] == ["model.norm", "lm_head"]
    assert names.index("model.layers.0.mlp.down_proj") < names.index("model.layers.1.input_layernorm")
    assert [SMALL.is_dense(layer) for layer in range(2)] == [True, False]
    assert not [name for name in names if name.endswith(".weight")]


def test_what_a_config_leaves_out() -> None:
    assert "lm_head" not in dataclasses.replace(SMALL, tie_word_embeddings=True).weight_shapes()
    plain = dataclasses.replace(SMALL, q_lora_rank=None).weight_shapes()
    assert plain["model.layers.0.self_attn.q_proj"] == (64 * 192, 16)
    assert "model.layers.0.self_attn.q_a_proj" not in plain
    unshared = dataclasses.replace(SMALL, n_shared_experts=0).weight_shapes()
    assert not [name for name in unshared if "shared_experts" in name]
    doubled = dataclasses.replace(SMALL, n_shared_experts=2).weight_shapes()
    assert doubled["model.layers.1.mlp.shared_experts.up_proj"] == (4096, 16)


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, rope_scaling=None, q_lora_rank=None)])
@pytest.mark.parametrize("eos", [(), (3,), (3, 4)])
def test_a_config_comes_back_through_json(config: ModelConfig, eos: tuple[int, ...]) -> None:
    config = dataclasses.replace(config, eos_token_ids=eos)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_transformers_5_keeps_theta_and_scaling_elsewhere() -> None:
    hf = changed(rope_scaling=None, rope_theta=None)
    hf["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 50000, "factor": 32.0} | {
        key: value for key, value in KIMI_K2["rope_scaling"].items() if key != "type"
    }
    assert ModelConfig.from_hf(hf) == ModelConfig.from_hf(KIMI_K2)
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": 7}
    plain = ModelConfig.from_hf(hf)
    assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama', expected one of deepseek_v3, kimi_k2"),
        ({"model_type": None}, "model_type=None, expected one of"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax', expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method='greedy', expected 'noaux_tc'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias=True, expected False"),
        ({"rope_interleave": False}, "rope_interleave=False, expected True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2, expected 1"),
        ({"hidden_size": 0}, "hidden_size=0, expected a whole number from 1"),
        ({"hidden_size": -1}, "hidden_size=-1, expected a whole number from 1"),
        ({"hidden_size": 2**31}, "hidden_size=2147483648, expected a whole number"),
        ({"hidden_size": 7168.0}, r"hidden_size=7168\.0, expected a whole number"),
        ({"hidden_size": "7168"}, "hidden_size='7168', expected a whole number"),
        ({"hidden_size": True}, "hidden_size=True, expected a whole number"),
        ({"hidden_size": None}, "hidden_size=None, expected a whole number"),
        ({"q_lora_rank": 0}, "q_lora_rank=0, expected a whole number from 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1, expected a whole number from 0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63, expected an even number"),
        ({"n_group": 5}, "n_group=5, expected a divisor of n_routed_experts=384"),
        ({"topk_group": 2}, "topk_group=2, expected at most n_group=1"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok=385, expected at most the 384 experts of 1 groups"),
        ({"n_group": 96, "topk_group": 1}, "num_experts_per_tok=8, expected at most the 4 experts of 1 groups"),
        ({"n_routed_experts": 1025}, "n_routed_experts=1025, expected at most 1024, as the kernels take it"),
        ({"kv_lora_rank": 1025}, "kv_lora_rank=1025, expected at most 1024, as the kernels take it"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0, expected a number that float32 can add"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a number that float32 can add"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor=inf, expected a finite number"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor='2', expected a finite number"),
        ({"rope_theta": 10**400}, "rope_theta=1000+, expected a finite number"),
        ({"rope_theta": True}, "rope_theta=True, expected a finite number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1, expected true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', expected true or false"),
        ({"eos_token_id": 163840}, "eos_token_ids=163840, expected an id below vocab_size=163840"),
        ({"eos_token_id": [1, -1]}, "eos_token_ids=-1, expected an id below"),
        ({"eos_token_id": "1"}, "eos_token_ids='1', expected an id below"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\], expected an object or null"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn', expected an object or null"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type='linear', expected 'yarn' or none"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling lacks factor, original_max_position_embeddings"),
        ({"rope_scaling": {**KIMI_K2["rope_scaling"], "factor": None}}, "rope_scaling lacks factor"),
        ({"rope_scaling": {**KIMI_K2["rope_scaling"], "factor": 0}}, "factor=0, expected a number, 1e-12 to 1e12"),
        (
            {"rope_scaling": {**KIMI_K2["rope_scaling"], "factor": "32"}},
            "factor='32', expected a number, 1e-12 to 1e12",
        ),
        ({"rope_scaling": {**KIMI_K2["rope_scaling"], "mscale": -1}}, "mscale=-1, expected a finite number from 0"),
    ],
)
def test_what_a_config_may_not_say(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"config: .*{message}"):
        ModelConfig.from_hf(changed(**fields))


def test_missing_keys_are_named_together() -> None:
    hf = {name: value for name, value in KIMI_K2.items() if name not in ("vocab_size", "v_head_dim")}
    with pytest.raises(ValueError, match="config: missing vocab_size, v_head_dim"):
        ModelConfig.from_hf(hf)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([0, 1, 2**31]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=5,
)
paths = st.sampled_from([*KIMI_K2, "rope_parameters", "rope_interleave"]).map(lambda name: (name,)) | st.sampled_from(
    [("rope_scaling", name) for name in KIMI_K2["rope_scaling"]]
)


@given(paths, json_values)
def test_any_value_in_any_place_is_read_or_named(path: tuple[str, ...], value: object) -> None:
    hf = json.loads(json.dumps(KIMI_K2))
    parent = hf if len(path) == 1 else hf[path[0]]
    parent[path[-1]] = value
    try:
        config = ModelConfig.from_hf(hf)
    except ValueError as error:
        message = str(error)
    else:
        message = "config: "
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert message.startswith("config: ")


# --- A drafter's ------------------------------------------------------------------------------------------------------

# As z-lab writes them: a Qwen3Config, and what is DFlash's own.
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 512, "layer_types": None, "max_window_layers": 0}


def changed_drafter(dflash: Mapping[str, object] | None = None, **fields: object) -> dict[str, Any]:
    return {**DRAFTER, "dflash_config": {**DRAFTER["dflash_config"], **(dflash or {})}, **fields}


def test_a_drafter_of_z_lab_is_read_whole() -> None:
    config = DrafterConfig.from_hf(DRAFTER)
    assert config == DrafterConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        max_position_embeddings=40960,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        sliding_window=None,
        transition_rank=0,
        num_candidates=32,
    )
    shapes = config.weight_shapes()
    assert shapes["fc"] == (4096, 5 * 4096)
    assert shapes["layers.4.self_attn.q_proj"] == (32 * 128, 4096)
    assert shapes["layers.4.self_attn.v_proj"] == (8 * 128, 4096)
    assert shapes["layers.4.self_attn.k_norm"] == (128,)
    assert shapes["layers.0.mlp.down_proj"] == (4096, 12288)
    assert len(shapes) == 3 + 5 * 11 >= config.fewest_tensors
    elements = sum(int.__mul__(*shape) if len(shape) == 2 else shape[0] for shape in shapes.values())
    assert round(elements / 1e7) == 105  # "1B", without embedding and head, which are the target's


def test_a_transition_head_has_three_weights_more() -> None:
    config = DrafterConfig.from_hf(changed_drafter({"transition_rank": 64, "num_candidates": 8}))
    assert (config.transition_rank, config.num_candidates) == (64, 8)
    more = config.weight_shapes().items() - DrafterConfig.from_hf(DRAFTER).weight_shapes().items()
    assert dict(more) == {
        "transition.parent_table": (151936, 64),
        "transition.child_table": (151936, 64),
        "transition.gate": (64, 4096),
    }


@pytest.mark.parametrize("fields", [{}, WINDOWED, {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "head_dim": 64}])
@pytest.mark.parametrize("dflash", [{}, {"transition_rank": 3, "num_candidates": 256}])
def test_a_drafter_s_config_comes_back_through_json(fields: dict[str, Any], dflash: dict[str, Any]) -> None:
    config = DrafterConfig.from_hf(changed_drafter(dflash, **fields))
    hf = json.loads(json.dumps(config.to_hf()))
    assert DrafterConfig.from_hf(hf) == config_from_hf(hf) == config


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 4096}, None),  # Qwen3's window is off unless it is switched on
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        (WINDOWED, 512),
        ({**WINDOWED, "sliding_window": None}, None),
        ({**WINDOWED, "max_window_layers": 28, "layer_types": ["sliding_attention"] * 5}, 512),
    ],
)
def test_a_window_counts_where_transformers_says_so(fields: dict[str, object], window: int | None) -> None:
    hf = changed_drafter(**fields)
    if "use_sliding_window" not in fields:
        del hf["use_sliding_window"]
    assert DrafterConfig.from_hf(hf).sliding_window == window


def test_transformers_5_keeps_a_drafter_s_theta_elsewhere() -> None:
    hf = changed_drafter(rope_parameters={"rope_type": "default", "rope_theta": 1000000})
    del hf["rope_theta"]
    assert DrafterConfig.from_hf(hf) == DrafterConfig.from_hf(DRAFTER)


@pytest.mark.parametrize(
    ("dflash", "fields", "message"),
    [
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu', expected 'silu'"),
        ({}, {"attention_bias": True}, "attention_bias=True, expected False"),
        ({}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling\.type='yarn', expected none"),
        ({}, {"rope_parameters": {"rope_type": "linear"}}, r"rope_scaling\.type='linear', expected none"),
        ({}, {"rope_scaling": 3}, "rope_scaling=3, expected an object or null"),
        ({}, {"dflash_config": [1]}, r"dflash_config=\[1\], expected an object or null"),
        ({}, {"dflash_config": None}, "missing mask_token_id, target_layer_ids"),
        ({}, {"use_sliding_window": "yes"}, "use_sliding_window='yes', expected true or false"),
        ({}, {**WINDOWED, "max_window_layers": 3}, "max_window_layers=3, expected 0"),
        ({}, {**WINDOWED, "layer_types": ["full_attention"] * 5}, "layer_types=.*, expected 'sliding_attention' in"),
        ({}, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*, expected 'full_attention' in"),
        ({}, {"layer_types": 5}, "layer_types=5, expected"),
        ({}, {"hidden_size": 0}, "hidden_size=0, expected a whole number from 1"),
        ({}, {"hidden_size": 4096.0}, r"hidden_size=4096\.0, expected a whole number from 1"),
        ({}, {"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648, expected a whole number"),
        ({}, {"intermediate_size": None}, "intermediate_size=None, expected a whole number"),
        ({}, {"max_position_embeddings": True}, "max_position_embeddings=True, expected a whole number"),
        ({}, {"head_dim": 127}, "head_dim=127, expected an even number"),
        ({}, {"head_dim": 258}, "head_dim=258, expected at most 256, as the kernels take it"),
        ({}, {"num_key_value_heads": 5}, "num_key_value_heads=5, expected a divisor of num_attention_heads=32"),
        ({}, {**WINDOWED, "sliding_window": 0}, "sliding_window=0, expected a whole number from 1"),
        ({}, {**WINDOWED, "sliding_window": "512"}, "sliding_window='512', expected a whole number from 1"),
        ({}, {"block_size": 1}, "block_size=1, expected 2 to 64"),
        ({}, {"block_size": 65}, "block_size=65, expected 2 to 64"),
        ({}, {"block_size": [16]}, r"block_size=\[16\], expected a whole number"),
        ({}, {"rms_norm_eps": 0}, "rms_norm_eps=0, expected a number that float32 can add"),
        ({}, {"rms_norm_eps": 1e-60}, "rms_norm_eps=1e-60, expected a number that float32 can add"),
        ({}, {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6', expected a number"),
        ({}, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a number"),
        ({}, {"rope_theta": 1}, r"rope_theta=1\.0, expected a finite number above 1"),
        ({}, {"rope_theta": None}, "rope_theta=None, expected a finite number above 1"),
        ({}, {"rope_theta": float("inf")}, "rope_theta=inf, expected a finite number above 1"),
        ({}, {"rope_theta": 10**400}, "rope_theta=1000+, expected a finite number"),
        ({"mask_token_id": 151936}, {}, "mask_token_id=151936, expected an id below vocab_size=151936"),
        ({"mask_token_id": -1}, {}, "mask_token_id=-1, expected a whole number from 0"),
        ({"mask_token_id": "<mask>"}, {}, "mask_token_id='<mask>', expected a whole number"),
        (
            {"target_layer_ids": []},
            {},
            r"target_layer_ids=\(\), expected one layer or more, from 0, in ascending order",
        ),
        ({"target_layer_ids": [9, 1]}, {}, r"target_layer_ids=\(9, 1\), expected one layer"),
        ({"target_layer_ids": [1, 1]}, {}, r"target_layer_ids=\(1, 1\), expected one layer"),
        ({"target_layer_ids": [-1, 1]}, {}, r"target_layer_ids=\(-1, 1\), expected one layer"),
        ({"target_layer_ids": [1, "2"]}, {}, r"target_layer_ids=\(1, '2'\), expected one layer"),
        ({"target_layer_ids": [[1]]}, {}, r"target_layer_ids=\(\[1\],\), expected one layer"),
        ({"target_layer_ids": [True]}, {}, r"target_layer_ids=\(True,\), expected one layer"),
        ({"target_layer_ids": 3}, {}, "target_layer_ids=3, expected a list of layers"),
        ({"target_layer_ids": None}, {}, "target_layer_ids=None, expected a list of layers"),
        ({"transition_rank": -1}, {}, "transition_rank=-1, expected a whole number from 0"),
        ({"num_candidates": 0}, {}, "num_candidates=0, expected a whole number from 1"),
        ({"transition_rank": 257}, {}, "transition_rank=257, expected at most 256, as the kernels take it"),
        ({"num_candidates": 257}, {}, "num_candidates=257, expected at most 256, as the kernels take it"),
        ({"mask_token_id": 9}, {"vocab_size": 31}, "num_candidates=32, expected at most vocab_size=31"),
    ],
)
def test_what_a_drafter_s_config_may_not_say(dflash: dict, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config: {message}"):
        DrafterConfig.from_hf(changed_drafter(dflash, **fields))


@pytest.mark.parametrize("layers", [3, None, [1, 2], "12", {1: 2}])
def test_layers_are_a_tuple(layers: object) -> None:
    with pytest.raises(ValueError, match=r"config: target_layer_ids=.*, expected one layer or more"):
        dataclasses.replace(DrafterConfig.from_hf(DRAFTER), target_layer_ids=layers)


def test_a_drafter_s_missing_keys_are_named_together() -> None:
    hf = changed_drafter()
    del hf["block_size"], hf["head_dim"], hf["dflash_config"]["mask_token_id"]
    with pytest.raises(ValueError, match=r"^config: missing head_dim, block_size, mask_token_id$"):
        DrafterConfig.from_hf(hf)


def test_which_config_it_is() -> None:
    assert config_from_hf(DRAFTER) == DrafterConfig.from_hf(DRAFTER)
    assert config_from_hf(KIMI_K2) == ModelConfig.from_hf(KIMI_K2)
    assert config_from_hf(SMALL.to_hf()) == SMALL
    with pytest.raises(ValueError, match="config: model_type='qwen3', expected one of deepseek_v3, kimi_k2"):
        config_from_hf({name: value for name, value in DRAFTER.items() if name != "dflash_config"})
    with pytest.raises(ValueError, match="config: missing vocab_size, hidden_size"):
        config_from_hf({"dflash_config": ""})


def test_a_drafter_says_what_it_is() -> None:
    assert str(DrafterConfig.from_hf(DRAFTER)) == (
        "drafter of 15 tokens, 5 layers, hidden 4096, vocabulary 151936, reads layers 1, 9, 17, 25, 33 of a target"
    )


drafter_paths = st.sampled_from([*DRAFTER, "rope_parameters"]).map(lambda name: (name,)) | st.sampled_from(
    [("dflash_config", name) for name in ("mask_token_id", "target_layer_ids", "transition_rank", "num_candidates")]
)


@given(drafter_paths, json_values, st.booleans())
def test_any_value_in_any_place_of_a_drafter_s_is_read_or_named(
    path: tuple[str, ...], value: object, windowed: bool
) -> None:
    hf = json.loads(json.dumps(changed_drafter(**(WINDOWED if windowed else {}))))
    parent = hf if len(path) == 1 else hf[path[0]]
    parent[path[-1]] = value
    try:
        config = config_from_hf(hf)
    except ValueError as error:
        message = str(error)
    else:
        message = "config: "
        assert config_from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert message.startswith("config: ")
