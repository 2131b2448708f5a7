"""The experts on tensor cores: the exact sum within a bound, the same bits for a token in whatever company."""

import numpy as np
import pytest
from helpers import assert_same_bits
from ml_dtypes import bfloat16

from kdtree_nb.kernels.moe import Experts
from kdtree_nb.kernels.moe_mma import (
    DOWN,
    FEW,
    GATE_UP,
    Geometry,
    TiledExperts,
    down_products,
    gate_up_products,
    geometry_of,
    launch,
    moe_mma,
    tile_experts,
)
from kdtree_nb.kernels.moe_pairs import sort_pairs
from kdtree_nb.quantization import pack

from .experts import random_experts, random_layer, random_routing, token_by_token
from .processors import PROCESSORS
from .products import EPSILON, mma_roundings

BF16 = 2.0**-8
"""Largest relative error of one rounding to bfloat16."""


def random_x(rng: np.random.Generator, rows: int, in_features: int) -> np.ndarray:
    return rng.standard_normal((rows, in_features)).astype(bfloat16)


def put(device, experts: Experts) -> TiledExperts:
    return tile_experts(device.put(experts.values), device.put(experts.scales))


def bfloat16_layer(rng, experts, hidden, width) -> tuple[Experts, Experts]:
    return random_layer(rng, experts, hidden, width, bfloat16)


def run(device, x, expert_ids, weights, gate_up, down) -> np.ndarray:
    arrays = device.put(x), device.put(expert_ids), device.put(weights)
    return device.host(moe_mma(*arrays, put(device, gate_up), put(device, down)))


def activations_and_error(row: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SwiGLU in float64, and how far the kernel's bfloat16 may be from it.

    |silu'| is at most 1.1; exp, sum, quotient and two products are less than 16 roundings; then comes the last one.
    """
    gate, up = np.split(weight @ row, 2)
    gate_error, up_error = np.split(mma_roundings(len(row)) * EPSILON * (np.abs(weight) @ np.abs(row)), 2)
    silu = gate / (1 + np.exp(-gate))
    before = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error + 16 * EPSILON * np.abs(silu * up)
    return silu * up, before + BF16 * (np.abs(silu * up) + before)


def assert_within_bound(y, x, expert_ids, weights, gate_up, down) -> None:
    """Against float64, each rounding of the kernel at its largest: sums, activations, the sum over the choice."""
    assert y.dtype == np.float32
    assert y.shape == x.shape
    for token, row in enumerate(x.astype(np.float64)):
        exact, error, size = np.zeros((3, x.shape[1]))
        for expert, weight in zip(expert_ids[token], weights[token].astype(np.float64), strict=True):
            matrix = down.expert(expert).astype(np.float64)
            act, act_error = activations_and_error(row, gate_up.expert(expert).astype(np.float64))
            of_down = mma_roundings(len(act)) * EPSILON * (np.abs(matrix) @ (np.abs(act) + act_error))
            of_down += np.abs(matrix) @ act_error
            exact += weight * (matrix @ act)
            error += np.abs(weight) * of_down
            size += np.abs(weight) * (np.abs(matrix @ act) + of_down)
        excess = np.abs(y[token] - exact) - error - (len(expert_ids[token]) + 1) * EPSILON * size
        assert excess.max() <= 0, f"token {token}: {excess.max()} beyond the bound"


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    [
        (1, 1, 1, 32, 32),
        (1, 7, 7, 32, 32),
        (13, 3, 2, 64, 32),
        (8, 8, 1, 32, 96),
        (33, 6, 4, 288, 160),
        (70, 2, 1, 32, 64),
        (3, 4, 2, 1056, 352),
    ],
)
def test_shapes(device, tokens, experts, top_k, hidden, width):
    rng = np.random.default_rng(tokens)
    layer = bfloat16_layer(rng, experts, hidden, width)
    x, routing = random_x(rng, tokens, hidden), random_routing(rng, tokens, experts, top_k)
    assert_within_bound(run(device, x, *routing, *layer), x, *routing, *layer)


@pytest.mark.parametrize(("hidden", "width"), [(32, 32), (352, 1056)])
def test_gate_up(device, hidden, width):
    """The first product alone: what SwiGLU gives, rounded to bfloat16."""
    rng = np.random.default_rng(20)
    gate_up = random_experts(rng, 3, 2 * width, hidden, bfloat16)
    x, (expert_ids, _) = random_x(rng, 11, hidden), random_routing(rng, 11, 3, 2)
    blocks = sort_pairs(device.put(expert_ids), 3, 8)
    geometry = GATE_UP.geometry(len(x))
    act = device.host(gate_up_products(device.put(x), expert_ids.shape, blocks, put(device, gate_up), geometry))
    for pair, expert in enumerate(expert_ids.ravel()):
        row, weight = x[pair // 2].astype(np.float64), gate_up.expert(expert).astype(np.float64)
        exact, error = activations_and_error(row, weight)
        assert (np.abs(act[pair].view(bfloat16).astype(np.float64) - exact) <= error).all()


@pytest.mark.parametrize(("hidden", "width"), [(1, 32), (7, 96), (33, 64), (129, 1056), (255, 32), (256, 352)])
def test_down(device, hidden, width):
    """The second product alone, with outputs that have no halves: within the bound of its sums."""
    rng = np.random.default_rng(hidden)
    down = random_experts(rng, 3, hidden, width, bfloat16)
    act, (expert_ids, _) = random_x(rng, 22, width), random_routing(rng, 11, 3, 2)
    blocks = sort_pairs(device.put(expert_ids), 3, 8)
    bits = device.put(act.view(np.uint16))
    outputs = device.host(down_products(bits, blocks, put(device, down), DOWN.geometry(len(expert_ids))))
    for pair, expert in enumerate(expert_ids.ravel()):
        row, weight = act[pair].astype(np.float64), down.expert(expert).astype(np.float64)
        bound = mma_roundings(width) * EPSILON * (np.abs(weight) @ np.abs(row))
        assert (np.abs(outputs[pair] - weight @ row) <= bound).all()


def test_one_hot_rows_read_every_code_with_every_scale(device):
    """Row i of the identity gives column i of its expert, exactly."""
    codes = (np.arange(128)[:, None] // 4 + np.arange(64)) % 16 - 8
    scales = (np.arange(256).reshape(128, 2) % 128 + 128) * np.exp2(np.arange(256).reshape(128, 2) % 9 - 4.0)
    shape = (2, 64, -1)  # experts
    down = Experts(pack(codes.astype(np.int8)).reshape(shape), scales.astype(bfloat16).reshape(shape))
    blocks = sort_pairs(device.put(np.repeat([[1], [0]], 64, axis=0), np.int32), 2, 8)
    rows = device.put(np.tile(np.eye(64, dtype=bfloat16), (2, 1)).view(np.uint16))
    outputs = device.host(down_products(rows, blocks, put(device, down), DOWN.geometry(len(rows))))
    np.testing.assert_array_equal(outputs, np.concatenate([down.expert(1).T, down.expert(0).T]))


def test_whole_numbers_give_the_specification_to_the_bit(device):
    """Gates so large that their sigmoid is 1, activations of a few bits: no sum needs rounding."""
    rng = np.random.default_rng(2)

    def whole(out_features, in_features):
        codes = rng.integers(-1, 2, (6 * out_features, in_features)).astype(np.int8)
        scales = np.ones((6, out_features, in_features // 32), bfloat16)
        return codes.reshape(6, out_features, in_features), scales

    gate_up_codes, gate_up_scales = whole(2 * 64, 96)
    gate_up_codes[:, :64] = 0
    gate_up_codes[:, :64, 0] = 4  # with x = 32 there, every gate is 128
    gate_up_codes[:, 64:] *= rng.random((6, 64, 96)) < 0.1
    down_codes, down_scales = whole(96, 64)
    down = Experts(pack(down_codes.reshape(-1, 64)).reshape(6, 96, -1), down_scales)
    x, (expert_ids, _) = rng.integers(-1, 2, (20, 96)).astype(bfloat16), random_routing(rng, 20, 6, 3)
    x[:, 0] = 32
    gate_up_codes[:, 64:, 0] = 0
    gate_up = Experts(pack(gate_up_codes.reshape(-1, 96)).reshape(6, 128, -1), gate_up_scales)
    weights = np.exp2(rng.integers(-2, 3, (20, 3))).astype(np.float32)
    expected = token_by_token(x, expert_ids, weights, gate_up, down).astype(np.float32)
    assert len(set(expected.ravel())) > 100
    assert_same_bits(run(device, x, expert_ids, weights, gate_up, down), expected)


def test_any_routing(device):
    """Tokens may choose one expert several times over; experts without a token are never read: they hold NaN."""
    rng = np.random.default_rng(3)
    layer = bfloat16_layer(rng, 9, 32, 32)
    tiled = [put(device, experts) for experts in layer]
    for _ in range(25):
        tokens, top_k, spread = rng.integers([0, 1, 1], [41, 5, 10])
        x = random_x(rng, tokens, 32)
        expert_ids = rng.permutation(9)[rng.integers(0, spread, (tokens, top_k))].astype(np.int32)
        weights = rng.uniform(-1, 1, (tokens, top_k)).astype(np.float32)
        chosen = np.isin(np.arange(9), expert_ids)[:, None, None]
        poisoned = [Experts(part.values, np.where(chosen, part.scales, bfloat16(np.nan))) for part in layer]
        y = run(device, x, expert_ids, weights, *poisoned)
        assert_within_bound(y, x, expert_ids, weights, *layer)
        for token in range(0, tokens, 7):
            alone = moe_mma(*(device.put(a[token : token + 1]) for a in (x, expert_ids, weights)), *tiled)
            assert_same_bits(device.host(alone)[0], y[token])


@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (1120, 32)])
def test_a_token_does_not_depend_on_the_tokens_beside_it(device, hidden, width):
    rng = np.random.default_rng(4)
    layer = [put(device, experts) for experts in bfloat16_layer(rng, 6, hidden, width)]
    x, expert_ids = random_x(rng, 70, hidden), rng.integers(0, 6, (70, 2)).astype(np.int32)
    arrays = x, expert_ids, rng.random((70, 2), np.float32)
    whole = device.host(moe_mma(*map(device.put, arrays), *layer))
    for rows in [*range(1, 12), 31, 32, 63, 64, 65]:
        assert_same_bits(device.host(moe_mma(*(device.put(a[:rows]) for a in arrays), *layer)), whole[:rows])
    order = rng.permutation(70)
    assert_same_bits(device.host(moe_mma(*(device.put(a[order]) for a in arrays), *layer)), whole[order])


@pytest.mark.parametrize("parts", [2, 8])
def test_no_geometry_changes_a_bit(device, parts):
    """Of those with the same parts: tiles of a block, stages that are more or fewer than a part's steps."""
    rng = np.random.default_rng(5)
    layer = [put(device, experts) for experts in bfloat16_layer(rng, 3, 544, 288)]
    arrays = device.put(random_x(rng, 9, 544)), *map(device.put, random_routing(rng, 9, 3, 2))
    first, *others = (
        device.host(launch(*arrays, *layer, Geometry(parts, *up), Geometry(parts, *down)))
        for up, down in [((1, 8, 6), (4, 8, 2)), ((4, 8, 3), (8, 8, 3)), ((8, 8, 2), (1, 8, 5)), (FEW, FEW)]
    )
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("plan", [GATE_UP, DOWN])
def test_geometry_follows_tokens_and_blocks_but_parts_do_not(plan):
    """One token of Moonlight's makes 264 and 192 blocks of 64 outputs, one of Kimi K2's 512 and 896."""
    few = Geometry(plan.parts, *FEW)
    assert [geometry_of(plan, 1, 6, out) for out in (2816, 2048)] == [few, few]
    assert [geometry_of(plan, 1, 8, out) for out in (4096, 7168)] == [plan.geometry(1)] * 2
    found = {geometry_of(plan, tokens, 6 * tokens, 2048) for tokens in range(1, 100)}
    assert found == {few, *(plan.geometry(tokens) for tokens in range(4, 100))}
    least = min(processor.shared_bytes for processor in PROCESSORS.values())
    assert all(geometry.parts == plan.parts and geometry.shared_bytes <= least for geometry in found)


def test_the_order_depends_on_the_parts(device):
    """If it did not, the test above would see nothing."""
    rng = np.random.default_rng(5)
    layer = [put(device, experts) for experts in bfloat16_layer(rng, 3, 544, 288)]
    arrays = device.put(random_x(rng, 9, 544)), *map(device.put, random_routing(rng, 9, 3, 2))
    few, many = Geometry(2, 4, 8, 3), Geometry(8, 4, 8, 3)
    expected = device.host(launch(*arrays, *layer, few, few))
    for up, down in ((many, few), (few, many)):
        assert (device.host(launch(*arrays, *layer, up, down)) != expected).any()


def test_experts_are_added_in_the_order_of_the_choice(device):
    """1e8 + 1 − 1e8 is 0 in float32, 1e8 − 1e8 + 1 is 1: the order of a token's experts decides."""
    one = np.zeros((3, 32, 32), np.int8)
    one[:, 0, 0] = 1
    scales = np.ones((3, 32, 1), bfloat16)
    down = Experts(pack(one.reshape(96, 32)).reshape(3, 32, 4), scales)
    twice = [np.concatenate([part, part], axis=1) for part in down]
    x = np.zeros((4, 32), bfloat16)
    x[:, 0] = 64  # gate and up, whose SwiGLU is 4096
    orders = np.array([[0, 1, 2], [0, 2, 1], [2, 0, 1], [1, 0, 2]], np.int32)
    weights = (np.array([1e8, 1, -1e8], np.float32) / 4096)[orders]
    y = run(device, x, orders, weights, Experts(*twice), down)
    np.testing.assert_array_equal(y[:, 0], [0, 1, 1, 0])


@pytest.mark.parametrize("tokens", [1, 8, 50])
def test_all_tokens_to_the_last_of_384_experts(device, tokens):
    rng = np.random.default_rng(6)
    layer = bfloat16_layer(rng, 384, 32, 32)
    x, expert_ids, weights = random_x(rng, tokens, 32), np.full((tokens, 1), 383, np.int32), np.ones((tokens, 1))
    poisoned = [Experts(part.values, part.scales.copy()) for part in layer]
    for part in poisoned:
        part.scales[:383] = np.nan
    weights = weights.astype(np.float32)
    assert_within_bound(run(device, x, expert_ids, weights, *poisoned), x, expert_ids, weights, *layer)


def test_top_8_of_384_experts(device):
    rng = np.random.default_rng(7)
    layer = bfloat16_layer(rng, 384, 32, 32)
    x, routing = random_x(rng, 40, 32), random_routing(rng, 40, 384, 8)
    assert_within_bound(run(device, x, *routing, *layer), x, *routing, *layer)


def test_more_than_2_31_weights(device):
    """The last of 1,024 experts, with 2^31 weights before it; all that is not zero is its own."""
    width, hidden, layer = 1024, 1088, []
    for out_features, in_features in ((2 * width, hidden), (hidden, width)):
        tiles, steps = -(-out_features // 128) * 8, in_features // 64
        codes = device.sparse((1024, tiles, steps, 32, 4), np.int32)
        scales = device.sparse((1024, tiles, steps, 8, 2), np.int32)
        codes[-1] = -0x66666667  # 0x99999999: eight times the code 1
        scales[-1] = 0x3D003D00  # twice 2^-5
        layer.append(TiledExperts(codes, scales, (1024, out_features, in_features)))
    assert 1024 * 2 * width * hidden > 2**31
    x = np.full((1, hidden), 2.0**-4, bfloat16)
    y = device.host(moe_mma(device.put(x), device.put([[1023]], np.int32), device.put([[1]], np.float32), *layer))
    gate = hidden * 2.0**-9
    activation = np.float32(gate * gate / (1 + np.exp(-gate))).astype(bfloat16).astype(np.float32)
    np.testing.assert_array_equal(y, np.full((1, hidden), activation * (width / 32)))


def test_a_nan_token_reaches_only_itself(device):
    """Also where its row shares a block with others, and where half a step is missing."""
    rng = np.random.default_rng(8)
    layer = bfloat16_layer(rng, 2, 96, 32)
    x, routing = random_x(rng, 6, 96), random_routing(rng, 6, 2, 2)
    expected = run(device, x, *routing, *layer)
    x[3] = np.nan
    y = run(device, x, *routing, *layer)
    assert np.isnan(y[3]).all()
    assert_same_bits(np.delete(y, 3, 0), np.delete(expected, 3, 0))


def test_a_nan_scale_reaches_only_its_expert_and_its_output(device):
    rng = np.random.default_rng(9)
    gate_up, down = bfloat16_layer(rng, 3, 64, 32)
    x, expert_ids = random_x(rng, 9, 64), (np.arange(9, dtype=np.int32) % 3)[:, None]
    weights = np.ones((9, 1), np.float32)
    expected = run(device, x, expert_ids, weights, gate_up, down)
    down.scales[1, 50, 0] = np.nan
    hit = (expert_ids == 1) & (np.arange(64) == 50)
    y = run(device, x, expert_ids, weights, gate_up, down)
    np.testing.assert_array_equal(np.isnan(y), hit)
    np.testing.assert_array_equal(y[~hit], expected[~hit])
    gate_up.scales[2, 63, 1] = np.nan
    np.testing.assert_array_equal(np.isnan(run(device, x, expert_ids, weights, gate_up, down)), hit | (expert_ids == 2))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0)])
def test_nothing_to_add(device, tokens, top_k):
    rng = np.random.default_rng(10)
    x, routing = random_x(rng, tokens, 32), (np.zeros((tokens, top_k), dtype) for dtype in (np.int32, np.float32))
    y = run(device, x, *routing, *bfloat16_layer(rng, 3, 32, 64))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, np.zeros((tokens, 32)))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (5, 3)])
def test_what_other_experts_gave_is_added_last(device, tokens, top_k):
    rng = np.random.default_rng(11)
    layer = [put(device, experts) for experts in bfloat16_layer(rng, 5, 64, 32)]
    x, routing = random_x(rng, tokens, 64), random_routing(rng, tokens, 5, top_k)
    shared = rng.standard_normal((tokens, 64)).astype(np.float32)
    arrays = [device.put(array) for array in (x, *routing)]
    y = moe_mma(*arrays, *layer, device.put(shared))
    assert_same_bits(device.host(y), device.host(moe_mma(*arrays, *layer)) + shared)


def test_any_order_of_threads(device):
    rng = np.random.default_rng(11)
    layer = [put(device, experts) for experts in bfloat16_layer(rng, 3, 352, 32)]
    arrays = [device.put(random_x(rng, 13, 352)), *map(device.put, random_routing(rng, 13, 3, 2))]
    device.every_schedule(lambda: [moe_mma(*arrays, *layer)])


def test_numpy_arrays_take_the_specification():
    rng = np.random.default_rng(12)
    layer = bfloat16_layer(rng, 5, 64, 96)
    x, routing = random_x(rng, 11, 64), random_routing(rng, 11, 5, 3)
    tiled = [tile_experts(*part) for part in layer]
    y, shared = moe_mma(x, *routing, *tiled), rng.standard_normal(x.shape).astype(np.float32)
    assert_within_bound(y, x, *routing, *layer)
    assert_same_bits(moe_mma(x, *routing, *tiled, shared), y + shared)


@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (2, 64), (130, 96), (255, 352), (256, 64)])
def test_tiled_experts_hold_the_experts(out_features, in_features):
    experts = random_experts(np.random.default_rng(13), 3, out_features, in_features, bfloat16)
    tiled = tile_experts(*experts)
    assert tiled.shape == (3, out_features, in_features)
    for expert in range(3):
        assert_same_bits(tiled.expert(expert), experts.expert(expert))


def test_gate_and_up_of_an_activation_share_a_tile():
    """Activation 25 of 64, input 75: tile 3, row 1, its gate below and its up above; step 1, first group, pair 1."""
    codes = np.zeros((2, 128, 128), np.int8)
    codes[1, 25, 75], codes[1, 64 + 25, 75] = 5, 3
    tiled = tile_experts(pack(codes.reshape(256, 128)).reshape(2, 128, 16), np.ones((2, 128, 4), bfloat16))
    words = tiled.codes.view(np.uint32)
    assert np.argwhere(words != 0x88888888).tolist() == [[1, 3, 1, 4 * 1 + 1, 0], [1, 3, 1, 4 * 1 + 1, 1]][:2]
    assert [int(word) for word in words[1, 3, 1, 5, :2]] == [0x88888888 + (5 << 20), 0x88888888 + (3 << 20)]


@pytest.mark.parametrize(
    ("qweight", "scales", "message"),
    [
        ((2, 4, 897), (2, 4, 224), r"qweight \[2, 4, 897\] and scales \[2, 4, 224\], .* multiple of group_size=32"),
        ((2, 4, 16), (2, 4, 2), r"qweight \[2, 4, 16\] and scales \[2, 4, 2\], expected \[experts, out, in/8\] and"),
        ((4, 16), (4, 4), r"qweight \[4, 16\] and scales \[4, 4\]"),
        ((3, 4, 16), (2, 4, 4), r"qweight \[3, 4, 16\] and scales \[2, 4, 4\]"),
    ],
    ids=["K = 7176", "groups of 64", "two axes", "another expert"],
)
def test_tile_experts_refuses_shapes(device, qweight, scales, message):
    with pytest.raises(ValueError, match=f"tile_experts: {message}"):
        tile_experts(device.empty(qweight, np.int32), device.empty(scales, np.uint16))


def test_refuses_what_it_would_misread(device):
    rng = np.random.default_rng(15)
    gate_up, down = (put(device, experts) for experts in bfloat16_layer(rng, 3, 64, 96))
    x, (expert_ids, weights) = device.put(random_x(rng, 4, 64)), map(device.put, random_routing(rng, 4, 3, 2))
    with pytest.raises(TypeError, match=r"tile_experts: qweight is float32, expected int32: experts that are not INT4"):
        tile_experts(device.empty((3, 64, 96), np.float32), device.empty((3, 64, 3), np.uint16))
    with pytest.raises(TypeError, match=r"tile_experts: scales is float32, expected bfloat16 \(or its bits"):
        tile_experts(device.empty((3, 64, 8), np.int32), device.empty((3, 64, 2), np.float32))
    with pytest.raises(TypeError, match=r"moe_mma: down is Experts, expected INT4 weights from tile_experts; others"):
        moe_mma(x, expert_ids, weights, gate_up, Experts(device.empty((3, 64, 96), np.float32)))
    with pytest.raises(ValueError, match=r"moe_mma: x \[4, 32\], expected \[rows, 64\]"):
        moe_mma(x[:, :32], expert_ids, weights, gate_up, down)
    with pytest.raises(TypeError, match=r"moe_mma: x is float32, expected bfloat16"):
        moe_mma(device.empty((4, 64), np.float32), expert_ids, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"moe_mma: down \(3, 192, 64\) does not fit gate_up \(3, 192, 64\)"):
        moe_mma(x, expert_ids, weights, gate_up, gate_up)
    with pytest.raises(ValueError, match=r"moe_mma: expert_ids \[3, 2\] and weights \[4, 2\], expected \[4, top_k\]"):
        moe_mma(x, expert_ids[:3], weights, gate_up, down)
    with pytest.raises(ValueError, match=r"moe_gate_up_mma: .*'x'.*expected C-contiguous"):
        moe_mma(x[::2], expert_ids[:2], weights[:2], gate_up, down)
    with pytest.raises(TypeError, match=r"moe_sort: .*'expert_ids' is int64"):
        moe_mma(x, expert_ids.astype(np.int64), weights, gate_up, down)
