"""The INT4 group format: the words of the facts, the library's own bits, and the faults that users have met."""

from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ml_dtypes import bfloat16, finfo
from safetensors import safe_open
from test_bundle import CONFIG, random_weights

from kdtree_nb.quantization import (
    GROUP_SIZE,
    RULES,
    QuantizedWeight,
    dequantize,
    pack,
    quantize,
    quantize_weights,
    quantized_names,
    routed_experts,
    unpack,
)

FIXTURE = Path(__file__).parents[1] / "golden" / "fixtures" / "compressed_tensors.safetensors"


def fixture(case: str) -> dict[str, np.ndarray]:
    with safe_open(FIXTURE, framework="numpy") as file:
        return {
            name.removeprefix(f"{case}."): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 (no mapping)
            if name.startswith(f"{case}.")
        }


# --- Packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "word"),
    [
        (list(range(-8, 0)), 0x76543210),
        (list(range(8)), 0xFEDCBA98),
        ([7, 0, 2, 2, 0, -2, -2, -8], 0x0668AA8F),
        ([0] * 8, 0x88888888),
    ],
)
def test_the_words_of_the_facts(codes: list[int], word: int) -> None:
    packed = pack(np.array([codes], np.int8))
    assert packed.dtype == np.int32
    assert packed.view(np.uint32).tolist() == [[word]]
    assert unpack(packed, 8).tolist() == [codes]


def test_element_i_sits_in_bits_4i_of_its_word() -> None:
    for i in range(16):
        codes = np.full((1, 16), -8, np.int8)
        codes[0, i] = 7
        words = pack(codes).view(np.uint32)[0].tolist()
        assert words[i // 8] == 0xF << 4 * (i % 8)
        assert words[1 - i // 8] == 0


def test_a_ragged_tail_is_padded_with_raw_zero_and_trimmed_by_the_shape() -> None:
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 0, -1, -2]], np.int8)
    packed = pack(codes)
    assert packed.shape == (1, 2)
    assert packed.view(np.uint32)[0, 1] == 0x67
    assert unpack(packed, 16)[0, 10:].tolist() == [-8] * 6
    assert_same_bits(unpack(packed, 10), codes)
    for in_features in (8, 17):
        with pytest.raises(ValueError, match=rf"unpack: in_features={in_features} does not fit 2 words of 8 codes"):
            unpack(packed, in_features)


@given(hnp.arrays(np.int8, st.tuples(st.integers(0, 5), st.integers(1, 50)), elements=st.integers(-8, 7)))
def test_codes_come_back(codes: np.ndarray) -> None:
    packed = pack(codes)
    assert packed.shape == (codes.shape[0], -(-codes.shape[1] // 8))
    assert_same_bits(unpack(packed, codes.shape[1]), codes)


@given(hnp.arrays(np.int32, st.tuples(st.integers(1, 4), st.integers(1, 6))))
def test_words_come_back(words: np.ndarray) -> None:
    assert_same_bits(pack(unpack(words, words.shape[1] * 8)), words)


def test_packing_takes_wider_integers_and_strided_arrays() -> None:
    codes = np.arange(-8, 8).repeat(4).reshape(4, 16)
    expected = pack(codes.astype(np.int8))
    assert_same_bits(pack(codes), expected)
    assert_same_bits(pack(np.asfortranarray(codes)), expected)
    assert_same_bits(unpack(np.repeat(expected, 2, axis=1)[:, ::2], 16), codes.astype(np.int8))


@pytest.mark.parametrize("code", [-9, 8, 200])
def test_a_code_outside_the_range_is_refused(code: int) -> None:
    with pytest.raises(ValueError, match=r"pack: codes span .*, expected -8\.\.7"):
        pack(np.array([[0, code]], np.int16))


# --- Bit for bit what the compressed-tensors library makes -----------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["normal", "wide", "special"])
def test_every_bit_is_the_librarys(case: str, dtype: str) -> None:
    library = fixture(f"{case}.{dtype}")
    quantized = quantize(library["weight"])
    assert_same_bits(quantized.scales, library["weight_scale"])
    assert_same_bits(quantized.qweight, library["weight_packed"])
    assert_same_bits(unpack(library["weight_packed"], quantized.shape[1]), library["codes"])
    assert_same_bits(pack(library["codes"]), library["weight_packed"])
    values = dequantize(QuantizedWeight(library["weight_packed"], library["weight_scale"]))
    assert (values.astype(library["weight"].dtype) == library["dequantized"]).all()
    assert list(quantized.shape) == library["weight_shape"].tolist()


def test_a_ragged_tail_is_the_librarys() -> None:
    library = fixture("ragged")
    assert_same_bits(pack(library["codes"]), library["weight_packed"])
    assert_same_bits(unpack(library["weight_packed"], library["codes"].shape[1]), library["codes"])


# --- Groups that went wrong for someone ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_zeros_comes_back_as_zeros(rule: str, dtype: type) -> None:
    quantized = quantize(np.zeros((2, 64), dtype), rule)
    assert (quantized.qweight.view(np.uint32) == 0x88888888).all()
    assert (quantized.scales == finfo(dtype).eps).all()
    assert (dequantize(quantized) == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_1e_6_survives(rule: str, dtype: type) -> None:
    weight = np.full((1, 32), 1e-6, dtype)
    error = np.abs(dequantize(quantize(weight, rule)) - weight.astype(np.float32))
    assert error.max() <= 1e-6 / 13  # half a step of minmax; a scale that became 0 or eps would be off by all of it


def test_half_precision_scales_are_stored_and_half_precision_weights_are_refused() -> None:
    """1e-6 / 7.5 is below float16's normal range: such weights are quantised in bfloat16 or float32."""
    with pytest.raises(ValueError, match=r"weight 'w' is float16 \[1, 32\], expected float32 or bfloat16"):
        quantize(np.full((1, 32), 1e-6, np.float16), name="w")
    scales = np.array([[2.0**-24]], np.float16)  # its smallest number of all
    codes = np.array([[-8, 7] * 16], np.int8)
    values = dequantize(QuantizedWeight(pack(codes), scales))
    assert (values == codes * np.float32(2.0**-24)).all()


def test_code_minus_8_and_its_neighbours_come_back() -> None:
    codes = np.array([[-8, -7, 7, -8, -6, 2, 3, -2] * 4], np.int8)
    scales = np.ones((1, 1), np.float32)
    assert dequantize(QuantizedWeight(pack(codes), scales)).tolist() == codes.tolist()
    weight = codes.astype(np.float32) * 7.5 / 8  # the largest magnitude, 7.5, sets the scale to 1
    assert unpack(quantize(weight).qweight, 32).min() == -8
    assert unpack(quantize(weight, "amax7").qweight, 32).min() == -7


def test_ties_go_to_the_even_code_after_clipping() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :10] = [-7.5, 7.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5, -6.5]
    quantized = quantize(weight)
    assert quantized.scales.tolist() == [[1.0]]
    assert unpack(quantized.qweight, 32)[0, :10].tolist() == [-8, 7, 0, 2, 2, 0, -2, -2, 6, -6]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_finite_shows_in_its_own_group_only(rule: str, dtype: type, bad: float) -> None:
    weight = np.random.default_rng(0).normal(size=(3, 96)).astype(dtype)
    healthy = dequantize(quantize(weight, rule))
    weight[1, 40] = bad
    quantized = quantize(weight, rule)
    assert not np.isfinite(quantized.scales[1, 1])
    with np.errstate(invalid="ignore"):  # 0 · inf
        sick = dequantize(quantized)
    assert not np.isfinite(sick[1, 32:64]).all()
    sick[1, 32:64] = healthy[1, 32:64]
    assert_same_bits(sick, healthy)


def test_a_nan_scale_reaches_only_its_own_output() -> None:
    quantized = quantize(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32))
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    healthy = x @ dequantize(quantized).T
    scales = quantized.scales.copy()
    scales[2, 1] = np.nan
    y = x @ dequantize(QuantizedWeight(quantized.qweight, scales)).T
    assert np.isnan(y[:, 2]).all()
    assert_same_bits(np.delete(y, 2, axis=1), np.delete(healthy, 2, axis=1))


# --- Shapes and dtypes that are refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qweight", "scales", "message"),
    [
        ((4, 16), (4, 2), r"scales are \[4, 2\], expected \[4, 4\] for shape \[4, 128\] and group_size=32"),  # 64
        ((4, 16), (4, 8), r"scales are \[4, 8\], expected \[4, 4\]"),  # 16: the group is smaller than declared
        ((4, 16), (4, 3), r"scales are \[4, 3\], expected \[4, 4\]"),
        ((4, 16), (4, 1), r"scales are \[4, 1\], expected \[4, 4\]"),
        ((4, 16), (3, 4), r"scales are \[3, 4\], expected \[4, 4\]"),
        ((4, 16), (4, 4, 1), r"scales are \[4, 4, 1\], expected \[4, 4\]"),
        ((4, 16), (16,), r"scales are \[16\], expected \[4, 4\]"),
        ((4, 897), (4, 224), "in_features=7176 is not a multiple of group_size=32"),
        ((64,), (2,), r"qweight is int32 \[64\], expected int32 \[out, in/8\]"),
        ((2, 4, 16), (2, 4, 4), r"qweight is int32 \[2, 4, 16\], expected"),
    ],
)
def test_shapes_that_do_not_belong_together(qweight: tuple[int, ...], scales: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"weight 'model\.w': {message}"):
        QuantizedWeight(np.zeros(qweight, np.int32), np.ones(scales, bfloat16), "model.w")


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.int8, ">i4", np.float32])
def test_words_of_another_dtype_are_refused(dtype: type | str) -> None:
    with pytest.raises(ValueError, match=r"qweight is .*, expected int32"):
        QuantizedWeight(np.zeros((2, 4), dtype), np.ones((2, 1), np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ">f4"])
def test_scales_of_another_dtype_are_refused(dtype: type | str) -> None:
    with pytest.raises(ValueError, match=r"scales are .*, expected float32, bfloat16 or float16"):
        QuantizedWeight(np.zeros((2, 4), np.int32), np.ones((2, 1), dtype))


def test_weights_that_are_refused() -> None:
    for weight, message in (
        (np.zeros((2, 7176), np.float32), "in_features=7176 is not a multiple of group_size=32"),
        (np.zeros((2, 16), np.float32), "in_features=16 is not a multiple of group_size=32"),
        (np.zeros(32, np.float32), r"is float32 \[32\], expected float32 or bfloat16 \[out_features, in_features\]"),
        (np.zeros((2, 2, 32), np.float32), r"is float32 \[2, 2, 32\], expected"),
        (np.zeros((2, 32), np.float64), r"is float64 \[2, 32\], expected"),
        (np.zeros((2, 32), np.int8), r"is int8 \[2, 32\], expected"),
    ):
        with pytest.raises(ValueError, match=rf"quantize: weight 'w'.* {message}"):
            quantize(weight, name="w")
    with pytest.raises(ValueError, match="quantize: rule='best', expected one of minmax, amax7, mse"):
        quantize(np.zeros((2, 32), np.float32), "best")


@pytest.mark.parametrize("rule", RULES)
def test_no_outputs_are_no_fault(rule: str) -> None:
    quantized = quantize(np.zeros((0, 64), np.float32), rule)
    assert quantized.shape == (0, 64)
    assert dequantize(quantized).shape == (0, 64)


# --- Properties ------------------------------------------------------------------------------------------------------

weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 96])),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
).map(lambda weight: weight.astype(np.float32))
dtypes = st.sampled_from([np.dtype(np.float32), np.dtype(bfloat16)])
rules = st.sampled_from(RULES)


def squared_errors(weight: np.ndarray, rule: str) -> np.ndarray:
    """float32 [out, groups], summed as the search sums them."""
    difference = dequantize(quantize(weight, rule)) - weight.astype(np.float32)
    return np.square(difference.reshape(weight.shape[0], -1, GROUP_SIZE)).sum(axis=2)


@given(weights, dtypes, rules)
@settings(deadline=None)
def test_codes_and_scales_are_in_range(weight: np.ndarray, dtype: np.dtype, rule: str) -> None:
    quantized = quantize(weight.astype(dtype), rule)
    assert quantized.scales.dtype == dtype
    assert (quantized.scales > 0).all()
    assert np.isfinite(quantized.scales.astype(np.float32)).all()
    if rule == "amax7":
        normal = np.abs(weight).reshape(weight.shape[0], -1, GROUP_SIZE).max(axis=2, keepdims=True) > 1e-30
        codes = unpack(quantized.qweight, weight.shape[1]).reshape(weight.shape[0], -1, GROUP_SIZE)
        assert (codes >= -7)[np.broadcast_to(normal, codes.shape)].all()


@given(weights, st.sampled_from(["minmax", "amax7"]))
@settings(deadline=None)
def test_the_error_is_at_most_half_a_step(weight: np.ndarray, rule: str) -> None:
    quantized = quantize(weight, rule)
    step = np.repeat(quantized.scales, GROUP_SIZE, axis=1)
    usable = step > 1e-30  # where the scale is a normal number
    error = np.abs(dequantize(quantized) - weight)
    assert (error[usable] <= 0.5001 * step[usable]).all()


@given(weights, dtypes)
@settings(deadline=None)
def test_the_search_is_never_worse_than_the_rules(weight: np.ndarray, dtype: np.dtype) -> None:
    weight = np.clip(weight, -1e15, 1e15).astype(dtype)  # squares stay finite
    best = squared_errors(weight, "mse")
    for rule in ("minmax", "amax7"):
        assert (best <= squared_errors(weight, rule)).all()


@given(weights, dtypes, rules)
@settings(deadline=None)
def test_a_rows_result_depends_on_that_row_alone(weight: np.ndarray, dtype: np.dtype, rule: str) -> None:
    weight = weight.astype(dtype)
    together = quantize(weight, rule)
    for row in range(weight.shape[0]):
        alone = quantize(weight[row : row + 1], rule)
        assert_same_bits(alone.qweight[0], together.qweight[row])
        assert_same_bits(alone.scales[0], together.scales[row])


def test_on_normal_weights_the_search_wins_clearly() -> None:
    weight = np.random.default_rng(0).normal(size=(5000, 32)).astype(np.float32)
    errors = {rule: squared_errors(weight, rule) for rule in RULES}
    assert (errors["mse"] <= np.minimum(errors["minmax"], errors["amax7"])).all()  # to the last bit, in 5,000 groups
    mean = {rule: error.mean() for rule, error in errors.items()}
    assert mean["mse"] < 0.95 * mean["minmax"] < mean["amax7"]


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("rule", ["amax7", "mse"])
def test_a_weight_on_the_grid_comes_back_exactly(rule: str, dtype: type) -> None:
    codes = np.random.default_rng(0).integers(-7, 8, (4, 64))
    codes[:, ::32] = 7
    weight = (codes * 2.0**-5).astype(dtype)
    assert (dequantize(quantize(weight, rule)) == weight).all()


def test_float32_scales_dequantise_to_one_rounding() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).repeat(2)[None]
    scales = np.array([[0.1]], np.float32)
    assert_same_bits(dequantize(QuantizedWeight(pack(codes), scales)), codes.astype(np.float32) * np.float32(0.1))
    kept = QuantizedWeight(pack(codes), scales)
    assert kept.dequantized is kept.dequantized


# --- Which weights of a model ----------------------------------------------------------------------------------------


def test_what_is_quantised_and_what_never_is() -> None:
    names = quantized_names(CONFIG)
    assert len(names) == 3 * (1 + CONFIG.n_routed_experts + 1)  # the dense layer, the experts, the shared expert
    assert all(name.rsplit(".", 1)[1] in ("gate_proj", "up_proj", "down_proj") for name in names)
    assert not [name for name in names if "self_attn" in name or name.endswith(".mlp.gate")]
    shapes = CONFIG.weight_shapes()
    assert all(shapes[name] == shape for name, shape in names.items())
    assert list(quantized_names(CONFIG, routed_experts)) == [name for name in names if ".experts." in name]


def test_quantize_weights_gives_both_faces_of_one_model() -> None:
    weights = random_weights()
    dequantized, packed = quantize_weights(weights, CONFIG)
    assert dequantized.keys() == weights.keys()
    for name, weight in weights.items():
        if name in quantized_names(CONFIG):
            assert name not in packed
            quantized = QuantizedWeight(packed[f"{name}.qw"], packed[f"{name}.sc"], name)
            assert quantized.shape == weight.shape
            assert_same_bits(dequantized[name], dequantize(quantized))
        else:
            assert packed[name] is dequantized[name] is weight


def test_missing_weights_are_named() -> None:
    weights = random_weights()
    del weights["model.layers.0.mlp.up_proj"]
    with pytest.raises(ValueError, match=r"1 weights are missing, the first is 'model\.layers\.0\.mlp\.up_proj'"):
        quantize_weights(weights, CONFIG)
