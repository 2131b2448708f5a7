"""The most probable tokens: the order that the kernel's own log-probabilities define, and those within a bound."""

import numpy as np
import pytest
from helpers import assert_same_bits

from kdtree_nb.kernels.top_k import MAX_K, SEGMENT, top_k
from kdtree_nb.reference.sampling import top_k as specification

from .products import EPSILON


def run(device, logits, k) -> tuple[np.ndarray, np.ndarray]:
    log_probs, token_ids = top_k(device.put(logits, np.float32), k)
    return device.host(log_probs), device.host(token_ids)


def exact(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64, of rows with a finite logit."""
    shifted = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def check(device, logits: np.ndarray, k: int) -> None:
    """Against the exact values, and every rule on the order."""
    log_probs, token_ids = run(device, logits, k)
    assert (log_probs.dtype, token_ids.dtype) == (np.float32, np.int32)
    assert log_probs.shape == token_ids.shape == (len(logits), k)
    vocab = logits.shape[1]
    chosen = np.take_along_axis(exact(logits), token_ids, axis=1)
    roundings = (
        -(-min(vocab, SEGMENT) // 1024) + 5 + 32 + 6
    )  # of a thread's sum, a warp's, the block's; the exponential
    if vocab > SEGMENT:
        roundings += -(-vocab // (32 * SEGMENT)) + 5 + 7  # of a lane's sum of segments, the warp's; another exponential
    tolerance = EPSILON * (roundings + 4 * np.abs(chosen, where=np.isfinite(chosen), out=np.zeros(chosen.shape)))
    possible = chosen > -np.inf
    assert (np.abs(log_probs[possible] - chosen[possible]) <= tolerance[possible]).all()
    assert (log_probs[~possible] == -np.inf).all() and (log_probs <= 0).all()
    for row, values, ids in zip(logits, log_probs, token_ids, strict=True):
        assert len(set(ids.tolist())) == k
        assert sorted(zip(-values, ids, strict=True)) == list(zip(-values, ids, strict=True))
        left = np.delete(row, ids)
        assert not len(left) or left.max() <= row[ids[-1]] or np.isclose(left.max(), row[ids[-1]], rtol=0, atol=1e-6)


EXTREMES = [-np.inf, -1e4, -90, -1, -1e-8, 0, 1e-8, 1, 90, 1e4]


def test_any_logits(device):
    """Ordinary ones, ties, and extremes; each row has a finite one."""
    rng = np.random.default_rng(7)
    for case in range(240):
        shape = rng.integers([0, 1], [4, 71])
        kinds = rng.normal(0, 5, shape), rng.choice([-2, -1, 0, 1], shape), rng.choice(EXTREMES, shape)
        logits = kinds[case % 3].astype(np.float32)
        logits[np.isinf(logits).all(axis=1), 0] = 0
        check(device, logits, int(rng.integers(1, shape[1] + 1)))


@pytest.mark.parametrize(
    ("length", "vocab", "k"),
    [(1, 1, 1), (2, 1024, 1024), (3, 1025, 256), (2, 5003, 1000), (1, 32_000, 1), (1, 163_840, 256), (0, 50, 5)],
)
def test_sizes(device, length, vocab, k):
    logits = np.random.default_rng(vocab).normal(0, 3, (length, vocab)).astype(np.float32)
    check(device, logits, k)
    np.testing.assert_array_equal(run(device, logits, k)[1], specification(logits, k)[1])


@pytest.mark.parametrize(("vocab", "k"), [(9, 5), (700, 256), (163_840, 256)])
def test_ties_go_to_the_lowest_ids(device, vocab, k):
    """All alike; and few values, so that many more than k tie at the end of the list."""
    log_probs, token_ids = run(device, np.zeros((1, vocab)), k)
    assert token_ids.tolist() == [list(range(k))]
    np.testing.assert_allclose(log_probs, -np.log(vocab), rtol=1e-6)
    logits = np.random.default_rng(0).integers(0, 4, (2, vocab)).astype(np.float32)
    np.testing.assert_array_equal(run(device, logits, k)[1], specification(logits, k)[1])


def test_ties_are_those_of_the_rounded_log_probabilities(device):
    """Two logits that differ, one float32 log-probability: the tree sees a tie, so the lower id is first."""
    log_probs, token_ids = run(device, [[0, 1e-9, -1e-9, -5]], 4)
    assert log_probs[0, 0] == log_probs[0, 1] == log_probs[0, 2]
    assert token_ids.tolist() == [[0, 1, 2, 3]]
    assert run(device, [[0, 1e-9, -1e-9, -5]], 2)[1].tolist() == [[0, 1]]


def test_minus_zero_ties_with_zero(device):
    log_probs, token_ids = run(device, [[-np.inf, 0.0, -0.0, -np.inf]], 2)
    assert token_ids.tolist() == [[1, 2]] and log_probs[0, 0] == log_probs[0, 1]


def test_a_smaller_k_is_the_start_of_a_larger_one(device):
    logits = np.random.default_rng(1).integers(-9, 9, (3, 300)).astype(np.float32)
    whole = run(device, logits, 300)
    for k in (1, 2, 31, 32, 33, 127, 128, 129, 256, 299):
        for part, of_whole in zip(run(device, logits, k), whole, strict=True):
            assert_same_bits(part, of_whole[:, :k].copy())


def test_extremes(device):
    log_probs, token_ids = run(device, [[-np.inf, 1e4, -1e4, -np.inf]], 4)
    assert token_ids.tolist() == [[1, 2, 0, 3]]
    assert log_probs.tolist() == [[0, -2e4, -np.inf, -np.inf]]
    log_probs, token_ids = run(device, [[3.4e38, -3.4e38, 0]], 3)
    assert token_ids.tolist() == [[0, 2, 1]] and log_probs.tolist() == [[0, np.float32(-3.4e38), -np.inf]]


def test_one_token_that_is_certain(device):
    """The logarithm of a sum of 1 + ε must not come out as a positive log-probability."""
    logits = np.random.default_rng(2).uniform(-90, -10, (20, 64)).astype(np.float32)
    logits[:, 5] = 0
    log_probs, token_ids = run(device, logits, 3)
    assert (token_ids[:, 0] == 5).all() and log_probs.max() <= 0


def test_nan_counts_as_impossible(device):
    logits = np.random.default_rng(3).normal(0, 1, (2, 40)).astype(np.float32)
    logits[0, [0, 7, 39]] = -np.inf
    expected = run(device, logits, 40)
    logits[0, [0, 7, 39]] = np.nan
    for actual, same in zip(run(device, logits, 40), expected, strict=True):
        assert_same_bits(actual, same)
    assert expected[1][0, -3:].tolist() == [0, 7, 39]


def test_rows_without_a_finite_logit(device):
    """Nothing that a tree would take for a node, and no id that does not exist."""
    logits = np.stack([np.full(7, np.nan), np.full(7, -np.inf), np.r_[np.inf, np.zeros(6)]])
    log_probs, token_ids = run(device, logits, 5)
    assert (log_probs == -np.inf).all()
    assert token_ids.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    logits = np.random.default_rng(4).normal(0, 2, (16, 2000)).astype(np.float32)
    logits[3] = np.nan
    whole = run(device, logits, 40)
    for row in (0, 2, 4, 15):
        for alone, of_whole in zip(run(device, logits[row : row + 1], 40), whole, strict=True):
            assert_same_bits(alone[0], of_whole[row])


@pytest.mark.parametrize("vocab", [SEGMENT - 1, SEGMENT, SEGMENT + 1, SEGMENT + 200, 3 * SEGMENT])
@pytest.mark.parametrize("kind", ["spread", "ties", "ascending", "descending"])
def test_segments(device, kind, vocab):
    """Rows of one, and of several, of which the last is shorter than k; the best are anywhere, or in one segment."""
    spread = np.random.default_rng(vocab).normal(0, 3, (2, vocab)).astype(np.float32)
    logits = {
        "spread": spread,
        "ties": np.round(spread / 4),
        "ascending": np.sort(spread, axis=1),
        "descending": -np.sort(-spread, axis=1),
    }[kind]
    check(device, logits, 256)
    if kind in ("spread", "ties"):  # of sorted ones neighbours round to ties here and not there
        np.testing.assert_array_equal(run(device, logits, 256)[1], specification(logits, 256)[1])


def test_ties_across_segments(device):
    """The best on both sides of each cut, then equals everywhere: the lowest ids are on the first side."""
    logits = np.zeros((1, 2 * SEGMENT + 5), np.float32)
    best = [SEGMENT - 1, SEGMENT, 2 * SEGMENT - 1, 2 * SEGMENT, 2 * SEGMENT + 4]
    logits[0, best] = 1
    assert run(device, logits, 9)[1].tolist() == [[*best, 0, 1, 2, 3]]
    logits[0, :SEGMENT] = [np.nan, -np.inf] * (SEGMENT // 2)
    log_probs, token_ids = run(device, logits, 9)
    assert token_ids.tolist() == [[*best[1:], *range(SEGMENT + 1, SEGMENT + 6)]]
    np.testing.assert_allclose(log_probs, exact(np.nan_to_num(logits, nan=-np.inf))[[0], token_ids], rtol=1e-5)


def test_rows_of_segments_without_a_finite_logit(device):
    logits = np.zeros((3, SEGMENT + 9), np.float32)
    logits[0], logits[1], logits[2, SEGMENT + 3] = np.nan, -np.inf, np.inf
    log_probs, token_ids = run(device, logits, 12)
    assert (log_probs == -np.inf).all()
    assert token_ids.tolist() == [list(range(12))] * 3


def test_a_row_of_segments_does_not_depend_on_the_rows_beside_it(device):
    logits = np.random.default_rng(8).normal(0, 2, (5, SEGMENT + 700)).astype(np.float32)
    whole = run(device, logits, 70)
    for row in (0, 3, 4):
        for alone, of_whole in zip(run(device, logits[row : row + 1], 70), whole, strict=True):
            assert_same_bits(alone[0], of_whole[row])
    for part, of_whole in zip(run(device, logits, 31), whole, strict=True):
        assert_same_bits(part, of_whole[:, :31].copy())


@pytest.mark.parametrize(("length", "vocab"), [(3, 2100), (2, SEGMENT + 100)])
def test_any_order_of_threads(device, length, vocab):
    logits = device.put(np.random.default_rng(5).integers(-50, 50, (length, vocab)) / 7, np.float32)
    device.every_schedule(lambda: top_k(logits, 300))


def test_numpy_arrays_take_the_specification():
    logits = np.random.default_rng(6).normal(0, 1, (3, 20)).astype(np.float32)
    for actual, expected in zip(top_k(logits, 7), specification(logits, 7), strict=True):
        assert_same_bits(actual, expected)


def test_refuses(device):
    for vocab, k, most in ((7, 0, 7), (7, -1, 7), (7, 8, 7), (2000, MAX_K + 1, MAX_K)):
        with pytest.raises(ValueError, match=rf"top_k: k={k}, expected 1 to {most}"):
            top_k(device.empty((2, vocab), np.float32), k)
    with pytest.raises(ValueError, match=r"top_k: logits \[7\], expected \[L, vocab\]"):
        top_k(device.empty(7, np.float32), 1)
    with pytest.raises(TypeError, match=r"top_k: .*'logits' is float64"):
        top_k(device.empty((2, 7), np.float64), 1)
