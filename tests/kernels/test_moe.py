"""The experts of a layer: against a loop over tokens, and to the bit against the kernels of one product at a time."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.config.model import MAX_EXPERTS
from kdtree_nb.kernels.dense_gemm import dense_gemm
from kdtree_nb.kernels.moe import Experts, moe
from kdtree_nb.kernels.swiglu import swiglu
from kdtree_nb.kernels.w4a16_gemm import w4a16_gemm

from .experts import random_experts, random_layer, random_routing, token_by_token

DTYPES = [np.float32, bfloat16, np.float16]


def put(device, experts: Experts) -> Experts:
    return Experts(device.put(experts.values), None if experts.scales is None else device.put(experts.scales))


def run(device, x, expert_ids, weights, gate_up, down) -> np.ndarray:
    arrays = device.put(x), device.put(expert_ids), device.put(weights)
    return device.host(moe(*arrays, put(device, gate_up), put(device, down)))


def kernel_by_kernel(device, x, expert_ids, weights, gate_up, down) -> np.ndarray:
    """What moe has to give to the bit: each pair alone through the kernels of one product, added in float32."""
    gate_up, down = put(device, gate_up), put(device, down)

    def product(rows, weight: Experts, expert: int):
        if weight.scales is None:
            return dense_gemm(rows, weight.values[expert])
        return w4a16_gemm(rows, weight.values[expert], weight.scales[expert])

    y = np.zeros(x.shape, np.float32)
    for token in range(len(x)):
        row = device.put(x[token : token + 1])
        for expert, weight in zip(expert_ids[token], weights[token], strict=True):
            activation = swiglu(product(row, gate_up, expert))
            y[token] += weight * device.host(product(activation, down, expert))[0]
    return y


# Relative to the largest element: two products, whose bounds are in products.py, and a SwiGLU of a few roundings.
CLOSE = 3e-6


@pytest.mark.parametrize("packed", [True, False], ids=["int4", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_weight(device, dtype, packed):
    rng = np.random.default_rng(0)
    layer = random_layer(rng, 5, 96, 64, dtype, packed)
    x, routing = rng.standard_normal((11, 96)).astype(np.float32), random_routing(rng, 11, 5, 3)
    y = run(device, x, *routing, *layer)
    exact = token_by_token(x, *routing, *layer)
    np.testing.assert_allclose(y, exact, rtol=0, atol=CLOSE * np.abs(exact).max())
    assert_same_bits(y, kernel_by_kernel(device, x, *routing, *layer))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    [
        (1, 1, 1, 32, 32),
        (1, 7, 7, 32, 32),
        (13, 3, 2, 64, 32),
        (8, 8, 1, 32, 96),
        (33, 6, 4, 288, 160),
        (70, 2, 1, 32, 64),
    ],
)
def test_shapes(device, tokens, experts, top_k, hidden, width):
    rng = np.random.default_rng(tokens)
    layer = random_layer(rng, experts, hidden, width)
    x, routing = rng.standard_normal((tokens, hidden)).astype(np.float32), random_routing(rng, tokens, experts, top_k)
    y = run(device, x, *routing, *layer)
    exact = token_by_token(x, *routing, *layer)
    np.testing.assert_allclose(y, exact, rtol=0, atol=CLOSE * np.abs(exact).max())


def test_floats_of_any_size(device):
    """Neither hidden size nor width is a multiple of anything; gate and up are packed, down is not."""
    rng = np.random.default_rng(1)
    layer = random_experts(rng, 4, 2 * 19, 45, packed=False), random_experts(rng, 4, 45, 19, packed=False)
    x, routing = rng.standard_normal((7, 45)).astype(np.float32), random_routing(rng, 7, 4, 2)
    assert_same_bits(run(device, x, *routing, *layer), kernel_by_kernel(device, x, *routing, *layer))
    mixed = random_experts(rng, 4, 2 * 19, 64), random_experts(rng, 4, 64, 19, bfloat16, packed=False)
    x = rng.standard_normal((7, 64)).astype(np.float32)
    assert_same_bits(run(device, x, *routing, *mixed), kernel_by_kernel(device, x, *routing, *mixed))


def test_whole_numbers_give_the_specification_to_the_bit(device):
    """Gates so large that their sigmoid is 1: no sum needs rounding."""
    rng = np.random.default_rng(2)
    gate_up, down = (Experts(rng.integers(-2, 3, shape).astype(np.float32)) for shape in ((6, 10, 12), (6, 12, 5)))
    gate_up.values[:, :5] = 64
    x, (expert_ids, _) = rng.integers(1, 3, (20, 12)).astype(np.float32), random_routing(rng, 20, 6, 3)
    weights = np.exp2(rng.integers(-2, 3, (20, 3))).astype(np.float32)
    expected = token_by_token(x, expert_ids, weights, gate_up, down).astype(np.float32)
    assert_same_bits(run(device, x, expert_ids, weights, gate_up, down), expected)


def test_any_routing(device):
    """Tokens may even choose one expert several times over; experts without a token are never read: they hold NaN."""
    rng = np.random.default_rng(3)
    layer = [put(device, experts) for experts in random_layer(rng, 9, 32, 32)]
    for _ in range(40):
        tokens, top_k, spread = rng.integers([0, 1, 1], [41, 5, 10])
        x = rng.standard_normal((tokens, 32)).astype(np.float32)
        expert_ids = rng.permutation(9)[rng.integers(0, spread, (tokens, top_k))].astype(np.int32)
        weights = rng.uniform(-1, 1, (tokens, top_k)).astype(np.float32)
        chosen = np.isin(np.arange(9), expert_ids)
        scales = [device.put(np.where(chosen[:, None, None], device.host(part.scales), np.nan)) for part in layer]
        parts = [Experts(part.values, scale) for part, scale in zip(layer, scales, strict=True)]
        y = device.host(moe(device.put(x), device.put(expert_ids), device.put(weights), *parts))
        assert y.shape == x.shape and not np.isnan(y).any()
        for token in range(0, tokens, 7):
            alone = moe(*(device.put(a[token : token + 1]) for a in (x, expert_ids, weights)), *layer)
            assert_same_bits(device.host(alone)[0], y[token])


def test_a_token_does_not_depend_on_the_tokens_beside_it(device):
    rng = np.random.default_rng(4)
    layer = [put(device, experts) for experts in random_layer(rng, 6, 64, 64)]
    x, expert_ids = rng.standard_normal((64, 64)).astype(np.float32), rng.integers(0, 6, (64, 2)).astype(np.int32)
    weights = rng.random((64, 2), np.float32)
    inputs = [device.put(array) for array in (x, expert_ids, weights)]
    whole = device.host(moe(*inputs, *layer))
    for rows in [*range(1, 20), 31, 32, 33, 63]:
        assert_same_bits(device.host(moe(*(array[:rows] for array in inputs), *layer)), whole[:rows])
    order = rng.permutation(64)
    shuffled = moe(*(device.put(array[order]) for array in (x, expert_ids, weights)), *layer)
    assert_same_bits(device.host(shuffled), whole[order])


def test_experts_are_added_in_the_order_of_the_choice(device):
    """1e8 + 1 − 1e8 is 0 in float32, 1e8 − 1e8 + 1 is 1: the order of a token's experts decides."""
    down = Experts(np.array([1e8, 1, -1e8], np.float32).reshape(3, 1, 1))
    gate_up = Experts(np.ones((3, 2, 1), np.float32))
    one = 1 / (1 + np.exp(np.float32(-1)))  # SwiGLU of gate 1 and up 1
    orders = np.array([[0, 1, 2], [0, 2, 1], [2, 0, 1], [1, 0, 2]], np.int32)
    weights = np.full((4, 3), 1 / one, np.float32)
    y = run(device, np.ones((4, 1), np.float32), orders, weights, gate_up, down)
    np.testing.assert_allclose(y[:, 0], [0, 1, 1, 0], atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 8, 50])
def test_all_tokens_to_the_last_of_384_experts(device, tokens):
    rng = np.random.default_rng(5)
    gate_up, down = random_layer(rng, 384, 32, 32)
    x = rng.standard_normal((tokens, 32)).astype(np.float32)
    expert_ids, weights = np.full((tokens, 1), 383, np.int32), np.ones((tokens, 1), np.float32)
    exact = token_by_token(x, expert_ids, weights, gate_up, down)
    for part in (gate_up, down):
        part.scales[:383] = np.nan
    y = run(device, x, expert_ids, weights, gate_up, down)
    np.testing.assert_allclose(y, exact, rtol=0, atol=CLOSE * np.abs(exact).max())


def test_top_8_of_384_experts(device):
    rng = np.random.default_rng(6)
    layer = random_layer(rng, 384, 32, 32)
    x, routing = rng.standard_normal((40, 32)).astype(np.float32), random_routing(rng, 40, 384, 8)
    exact = token_by_token(x, *routing, *layer)
    np.testing.assert_allclose(run(device, x, *routing, *layer), exact, rtol=0, atol=CLOSE * np.abs(exact).max())


def test_more_tokens_than_a_grid_is_high(device):
    """384 experts of width 1: a token's result is the SwiGLU of its number, by the factor of its expert."""
    tokens = 65_537
    x = (np.arange(tokens) % 50 / np.float32(10) - 2).astype(np.float32)[:, None]
    expert_ids = (np.arange(tokens, dtype=np.int32) % 384)[:, None]
    gate_up = Experts(np.ones((384, 2, 1), np.float32))
    down = Experts(np.arange(1, 385, dtype=np.float32).reshape(384, 1, 1))
    y = run(device, x, expert_ids, np.ones((tokens, 1), np.float32), gate_up, down)
    exact = (expert_ids + 1) * x.astype(np.float64) ** 2 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(y, exact, rtol=1e-6)


@pytest.mark.parametrize("packed", [True, False], ids=["int4", "float"])
def test_more_than_2_31_weights(device, packed):
    """The last of 1,024 experts, with 2^31 weights before it; all that is not zero is its own."""
    width, hidden, layer = 1024, 1056, []
    for out_features, in_features in ((2 * width, hidden), (hidden, width)):
        if packed:
            values = device.sparse((1024, out_features, in_features // 8), np.int32)
            layer.append(Experts(values, device.sparse((1024, out_features, in_features // 32), np.float16)))
            layer[-1].values[-1] = -0x66666667  # 0x99999999: eight times the code 1
            layer[-1].scales[-1] = 2.0**-5
        else:
            layer.append(Experts(device.sparse((1024, out_features, in_features), np.float16)))
            layer[-1].values[-1] = 2.0**-5
    assert 1024 * 2 * width * hidden > 2**31
    x = np.full((1, hidden), 2.0**-4, np.float32)
    y = device.host(moe(device.put(x), device.put([[1023]], np.int32), device.put([[1]], np.float32), *layer))
    gate = hidden * 2.0**-9
    np.testing.assert_allclose(y, np.full((1, hidden), gate * gate / (1 + np.exp(-gate)) * width / 32), rtol=1e-5)


def test_a_nan_token_reaches_only_itself(device):
    """Also where its row shares a block with others."""
    rng = np.random.default_rng(7)
    layer = random_layer(rng, 2, 32, 32)
    x, routing = rng.standard_normal((6, 32)).astype(np.float32), random_routing(rng, 6, 2, 2)
    expected = run(device, x, *routing, *layer)
    x[3, 5] = np.nan
    y = run(device, x, *routing, *layer)
    assert np.isnan(y[3]).all()
    assert_same_bits(np.delete(y, 3, 0), np.delete(expected, 3, 0))


def test_a_nan_scale_reaches_only_its_expert_and_its_output(device):
    rng = np.random.default_rng(8)
    gate_up, down = random_layer(rng, 3, 64, 32)
    x, expert_ids = rng.standard_normal((9, 64)).astype(np.float32), (np.arange(9, dtype=np.int32) % 3)[:, None]
    weights = np.ones((9, 1), np.float32)
    expected = run(device, x, expert_ids, weights, gate_up, down)
    down.scales[1, 50, 0] = np.nan
    hit = (expert_ids == 1) & (np.arange(64) == 50)
    y = run(device, x, expert_ids, weights, gate_up, down)
    np.testing.assert_array_equal(np.isnan(y), hit)
    np.testing.assert_array_equal(y[~hit], expected[~hit])
    gate_up.scales[2, 63, 1] = np.nan
    np.testing.assert_array_equal(np.isnan(run(device, x, expert_ids, weights, gate_up, down)), hit | (expert_ids == 2))


def test_tokens_that_lie_apart(device):
    rng = np.random.default_rng(9)
    layer = [put(device, experts) for experts in random_layer(rng, 3, 32, 32)]
    wide = np.full((10, 80), np.nan, np.float32)
    wide[:, 40:72] = rng.standard_normal((10, 32))
    routing = [device.put(array) for array in random_routing(rng, 10, 3, 2)]
    expected = moe(device.put(wide[:, 40:72]), *routing, *layer)
    assert_same_bits(device.host(moe(device.put(wide)[:, 40:72], *routing, *layer)), device.host(expected))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (5, 3)])
def test_what_other_experts_gave_is_added_last(device, tokens, top_k):
    rng = np.random.default_rng(11)
    layer = [put(device, experts) for experts in random_layer(rng, 5, 64, 32)]
    x, routing = rng.standard_normal((tokens, 64)).astype(np.float32), random_routing(rng, tokens, 5, top_k)
    shared = rng.standard_normal((tokens, 64)).astype(np.float32)
    arrays = [device.put(array) for array in (x, *routing)]
    y = moe(*arrays, *layer, device.put(shared))
    assert_same_bits(device.host(y), device.host(moe(*arrays, *layer)) + shared)


def test_no_tokens(device):
    rng = np.random.default_rng(10)
    y = run(device, np.zeros((0, 32), np.float32), *random_routing(rng, 0, 3, 2), *random_layer(rng, 3, 32, 64))
    assert (y.dtype, y.shape) == (np.float32, (0, 32))


def test_any_order_of_threads(device):
    rng = np.random.default_rng(11)
    layer = [put(device, experts) for experts in random_layer(rng, 5, 64, 32)]
    x, routing = device.put(rng.random((13, 64), np.float32)), [device.put(a) for a in random_routing(rng, 13, 5, 2)]
    device.every_schedule(lambda: [moe(x, *routing, *layer)])


@pytest.mark.parametrize("packed", [True, False], ids=["int4", "float"])
def test_numpy_arrays_take_the_specification(packed):
    rng = np.random.default_rng(12)
    layer = random_layer(rng, 5, 64, 96, bfloat16, packed)
    x, routing = rng.standard_normal((11, 64)).astype(np.float32), random_routing(rng, 11, 5, 3)
    y, exact = moe(x, *routing, *layer), token_by_token(x, *routing, *layer)
    assert_same_bits(moe(x, *routing, *layer, x), y + x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, exact, rtol=0, atol=CLOSE * np.abs(exact).max())


FLOAT, WORDS = np.float32, np.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=(4, 32)), r"x \[4, 32\], expected \[rows, 64\]"),
        (dict(x=(64,)), r"x \[64\], expected \[rows, 64\]"),
        (dict(x=(4, 1, 64)), r"x \[4, 1, 64\], expected \[rows, 64\]"),
        (dict(expert_ids=(3, 2)), r"expert_ids \[3, 2\] and weights \[4, 2\], expected \[4, top_k\]"),
        (dict(weights=(4, 3)), r"expert_ids \[4, 2\] and weights \[4, 3\], expected \[4, top_k\]"),
        (
            dict(gate_up=(3, 192, 8), gate_up_scales=(3, 192, 1)),
            r"gate_up \[3, 192, 8\] with scales \[3, 192, 1\], expected",
        ),
        (dict(gate_up=(3, 192, 9), gate_up_scales=(3, 192, 2)), r"gate_up \[3, 192, 9\] .* multiple of group_size=32"),
        (dict(gate_up_scales=(2, 192, 2)), r"gate_up \[3, 192, 8\] with scales \[2, 192, 2\]"),
        (
            dict(gate_up=(3, 193, 8), gate_up_scales=(3, 193, 2)),
            r"down \[3, 64, 12\] does not fit gate_up \[3, 193, 8\]",
        ),
        (dict(gate_up=(192, 8)), r"gate_up \[192, 8\], expected three axes"),
        (
            dict(down=(2, 64, 12), down_scales=(2, 64, 3)),
            r"down \[2, 64, 12\] does not fit gate_up \[3, 192, 8\] and x \[4",
        ),
        (dict(down=(3, 32, 12), down_scales=(3, 32, 3)), r"down \[3, 32, 12\] does not fit"),
        (dict(down=(3, 64, 8), down_scales=(3, 64, 2)), r"down \[3, 64, 8\] does not fit"),
        (dict(down_scales=(3, 64, 6)), r"down \[3, 64, 12\] with scales \[3, 64, 6\]"),
    ],
)
def test_refuses_shapes(device, changes, message):
    shapes = dict(x=(4, 64), expert_ids=(4, 2), weights=(4, 2), gate_up=(3, 192, 8), gate_up_scales=(3, 192, 2))
    shapes |= dict(down=(3, 64, 12), down_scales=(3, 64, 3)) | changes
    arrays = {
        name: device.empty(shape, WORDS if name in ("expert_ids", "gate_up", "down") else FLOAT)
        for name, shape in shapes.items()
    }
    gate_up = Experts(arrays["gate_up"], arrays["gate_up_scales"])
    with pytest.raises(ValueError, match=f"moe: {message}"):
        moe(
            arrays["x"],
            arrays["expert_ids"],
            arrays["weights"],
            gate_up,
            Experts(arrays["down"], arrays["down_scales"]),
        )


def test_refuses_what_it_would_misread(device):
    rng = np.random.default_rng(13)
    gate_up, down = (put(device, experts) for experts in random_layer(rng, 2, 32, 32))
    x, (expert_ids, weights) = device.empty((4, 32), FLOAT), map(device.put, random_routing(rng, 4, 2, 1))
    with pytest.raises(TypeError, match=r"moe: an experts' scales is float64, expected float32, bfloat16"):
        moe(x, expert_ids, weights, Experts(gate_up.values, gate_up.scales.astype(np.float64)), down)
    with pytest.raises(TypeError, match=r"moe_gate_up: .*'weights' is int64"):
        moe(x, expert_ids, weights, Experts(gate_up.values.astype(np.int64), gate_up.scales), down)
    with pytest.raises(TypeError, match=r"moe: an experts' weight is int32, expected float32, bfloat16"):
        moe(x, expert_ids, weights, Experts(device.empty((2, 64, 32), np.int32)), down)
    with pytest.raises(TypeError, match=r"moe_sort: .*'expert_ids' is int64"):
        moe(x, expert_ids.astype(np.int64), weights, gate_up, down)
    shifted = device.empty(gate_up.values.size + 1, np.int32)[1:].reshape(gate_up.values.shape)
    with pytest.raises(ValueError, match=r"moe_gate_up: .*'weights' is not aligned to 16 bytes"):
        moe(x, expert_ids, weights, Experts(shifted, gate_up.scales), down)
    many = (
        Experts(device.empty((MAX_EXPERTS + 1, 2, 32), FLOAT)),
        Experts(device.empty((MAX_EXPERTS + 1, 32, 1), FLOAT)),
    )
    with pytest.raises(ValueError, match=r"moe_sort: 1025 experts, expected at most 1024"):
        moe(x, expert_ids, weights, *many)
