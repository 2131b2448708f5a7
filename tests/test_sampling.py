"""From logits to tokens: ties, extremes, seeds, and the distribution that samples follow."""

import math

import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from kdtree_nb.reference import sampling
from kdtree_nb.reference.sampling import choose_tokens, log_softmax, top_k, uniform

LARGEST = 1 - 2.0**-53
"""The largest random number there is."""

EXTREMES = st.sampled_from([-np.inf, -1e4, -1.0, -1e-8, 0.0, 1e-8, 1.0, 1e4])


@st.composite
def logits(draw: st.DrawFn) -> np.ndarray:
    """float32 [L, V]: ordinary ones, ties, and extremes; each row has a finite one."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 9)))
    values = draw(st.sampled_from([EXTREMES, st.floats(-30, 30, width=32), st.integers(-2, 2).map(float)]))
    rows = draw(st_numpy.arrays(np.float32, shape, elements=values, fill=st.nothing()))
    rows[np.isinf(rows).all(axis=1), 0] = 0
    return rows


# ---- log-probabilities -----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(logits())
def test_log_softmax(rows):
    actual = log_softmax(rows)
    assert actual.dtype == np.float32
    assert (actual <= 0).all()
    for row, result in zip(rows.astype(float), actual, strict=True):
        largest = row.max()
        exact = row - largest - math.log(math.fsum(np.exp(row - largest)))
        np.testing.assert_allclose(result, exact, rtol=1e-6, atol=1e-6)


def test_log_softmax_never_rounds_above_zero():
    """One certain token: the logarithm of a sum of 1 + ε must not come out as a positive log-probability."""
    rows = np.random.default_rng(0).uniform(-90, -10, (2000, 64)).astype(np.float32)
    rows[:, 5] = 0
    for dtype in (np.float32, np.float64):
        assert log_softmax(rows.astype(dtype)).max() <= 0


@settings(max_examples=200, deadline=None)
@given(rows=logits(), data=st.data())
def test_top_k_sorts_by_probability_then_token_id(rows, data):
    k = data.draw(st.integers(1, rows.shape[1]))
    log_probs, token_ids = top_k(rows, k)
    assert (log_probs.dtype, token_ids.dtype) == (np.float32, np.int32)
    assert log_probs.shape == token_ids.shape == (len(rows), k)
    everything = log_softmax(rows)
    for row, values, ids in zip(everything, log_probs, token_ids, strict=True):
        best = sorted(range(len(row)), key=lambda token, row=row: (-row[token], token))[:k]
        assert ids.tolist() == best
        assert values.tolist() == row[best].tolist()


def test_top_k_ties_go_to_the_lower_token_id():
    _, token_ids = top_k(np.array([[1, 3, 2, 3, 1, 3, 2], [0] * 7], np.float32), 5)
    assert token_ids.tolist() == [[1, 3, 5, 2, 6], [0, 1, 2, 3, 4]]


def test_top_k_ties_are_those_of_the_rounded_log_probabilities():
    """Two logits that differ, one float32 log-probability: the tree sees a tie, so the lower id is first."""
    rows = np.array([[0, 1e-9, -1e-9, -5]], np.float32)
    log_probs, token_ids = top_k(rows, 4)
    assert log_probs[0, 0] == log_probs[0, 1] == log_probs[0, 2]
    assert token_ids.tolist() == [[0, 1, 2, 3]]


def test_top_k_of_the_whole_vocabulary():
    rows = np.random.default_rng(0).standard_normal((3, 131)).astype(np.float32)
    log_probs, token_ids = top_k(rows, 131)
    assert (np.sort(token_ids, axis=1) == np.arange(131)).all()
    np.testing.assert_allclose(np.exp(log_probs, dtype=float).sum(axis=1), 1, rtol=1e-6)


def test_top_k_of_extremes():
    log_probs, token_ids = top_k(np.array([[-np.inf, 1e4, -1e4, -np.inf]], np.float32), 4)
    assert token_ids.tolist() == [[1, 2, 0, 3]]
    assert log_probs.tolist() == [[0, -2e4, -np.inf, -np.inf]]


@pytest.mark.parametrize("k", [-1, 0, 8])
def test_top_k_refuses(k):
    with pytest.raises(ValueError, match=rf"top_k: k={k}, expected 1 to the vocabulary's 7"):
        top_k(np.zeros((2, 7), np.float32), k)


# ---- the target's choice ---------------------------------------------------------------------------------------------


def test_greedy_is_the_argmax_and_ties_go_to_the_lowest_id():
    rows = np.array([[0, 2, 1, 2], [0, 0, 0, 0], [-np.inf, -1e4, -np.inf, -1e4], [-3, -3, -3, 0]], np.float32)
    chosen = choose_tokens(rows, np.arange(4))
    assert chosen.dtype == np.int32
    assert chosen.tolist() == [1, 0, 1, 3]
    assert choose_tokens(rows, np.arange(4), seed=5).tolist() == chosen.tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-12, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    rows = np.random.default_rng(0).uniform(-50, 50, (200, 33)).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        chosen = choose_tokens(rows, np.arange(200), temperature)
    assert chosen.dtype == np.int32
    assert (chosen == rows.argmax(axis=1)).all()


def test_a_huge_temperature_is_uniform():
    chosen = choose_tokens(np.tile(np.float32([0, 10, 20, 30]), (2000, 1)), np.arange(2000), 1e9)
    assert chi_squared(np.bincount(chosen, minlength=4), np.full(4, 500.0)) < CHI_SQUARED_999[3]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_choice_does_not_depend_on_the_rows_beside_it(temperature):
    rng = np.random.default_rng(0)
    rows, positions = rng.standard_normal((40, 1013)).astype(np.float32), np.arange(100, 140)
    whole = choose_tokens(rows, positions, temperature, seed=3)
    assert len(set(whole.tolist())) > 30
    for row in range(40):
        alone = slice(row, row + 1)
        assert_same_bits(choose_tokens(rows[alone], positions[alone], temperature, seed=3), whole[alone])
    order = rng.permutation(40)
    assert_same_bits(choose_tokens(rows[order], positions[order], temperature, seed=3), whole[order])
    wide = np.full((40, 1100), np.nan, np.float32)
    wide[:, :1013] = rows
    assert_same_bits(choose_tokens(wide[:, :1013], positions, temperature, seed=3), whole)


def test_nodes_at_one_position_share_their_random_number():
    rows = np.tile(np.random.default_rng(0).standard_normal(50).astype(np.float32), (30, 1))
    assert len(set(choose_tokens(rows, np.full(30, 9), 1.0).tolist())) == 1
    assert len(set(choose_tokens(rows, np.arange(30), 1.0).tolist())) > 5


def test_seeds_give_different_texts():
    rows = np.zeros((64, 1000), np.float32)
    texts = {tuple(choose_tokens(rows, np.arange(64), 1.0, seed).tolist()) for seed in range(20)}
    assert len(texts) == 20


CHI_SQUARED_999 = {3: 16.27, 7: 24.32, 15: 37.70, 63: 103.44}
"""Degrees of freedom → what chance exceeds once in a thousand."""


def chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    return float((np.square(counts - expected) / expected).sum())


ROW = np.array([0.0, 1.5, -2.0, 0.3, 2.5, -1.0, 0.0, 1.0], np.float32)
SAMPLES = 12000


def sampled_counts(temperature: float, seed: int) -> np.ndarray:
    chosen = choose_tokens(np.tile(ROW, (SAMPLES, 1)), np.arange(SAMPLES), temperature, seed)
    return np.bincount(chosen, minlength=len(ROW))


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_samples_follow_the_softmax(temperature):
    """12000 positions; the bound is one that a temperature 10 % off fails by far."""
    weights = np.exp(ROW / temperature, dtype=float)
    expected = SAMPLES * weights / weights.sum()
    assert chi_squared(sampled_counts(temperature, seed=1), expected) < CHI_SQUARED_999[7]
    for wrong in (0.9 * temperature, 1.1 * temperature):
        assert chi_squared(sampled_counts(wrong, seed=1), expected) > 2 * CHI_SQUARED_999[7]


@pytest.mark.parametrize("neighbour", ["next position", "next seed"])
def test_neighbours_are_independent(neighbour):
    """Counts of pairs of eighths of [0, 1), each random number in one pair."""
    if neighbour == "next position":
        first, second = uniform(4, np.arange(20000)).reshape(-1, 2).T
    else:
        first, second = (uniform(seed, np.arange(10000)) for seed in (4, 5))
    pairs = np.bincount((8 * first).astype(int) * 8 + (8 * second).astype(int), minlength=64)
    assert chi_squared(pairs, np.full(64, 10000 / 64)) < CHI_SQUARED_999[63]


def test_every_position_and_seed_has_its_own_number_below_one():
    numbers = np.array([uniform(seed, np.arange(300)) for seed in (*range(12), 2**32, 2**64 - 1)])
    assert numbers.dtype == np.float64
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == numbers.size
    assert uniform(0, np.array([], int)).shape == (0,)


def philox(counter: int, key: int) -> float:
    """Philox 4×64-10 and NumPy's way from its first word to [0, 1)."""
    mask = 2**64 - 1
    words = [counter & mask, counter >> 64, 0, 0]
    low, high = key & mask, key >> 64
    for _ in range(10):
        first, third = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(third >> 64) ^ words[1] ^ low, third & mask, (first >> 64) ^ words[3] ^ high, first & mask]
        low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
    return (words[0] >> 11) * 2.0**-53


def test_random_numbers_are_philox_at_the_position_plus_one():
    """What a kernel has to compute: NumPy's generator raises its counter before its first block."""
    for seed in (0, 7, 2**40 + 3):
        positions = np.array([0, 1, 1000, 2**31])
        assert uniform(seed, positions).tolist() == [philox(int(position) + 1, seed) for position in positions]


# ---- the ends of the distribution ------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """Set every random number to one value."""

    def draw(number: float) -> None:
        monkeypatch.setattr(sampling, "uniform", lambda seed, positions: np.full(len(positions), number))

    return draw


@pytest.mark.parametrize("vocab", [1, 2, 3, 257, 1013])
def test_the_largest_random_number_chooses_the_last_token(vocab, drawn):
    """Also where the sum of the probabilities rounds to something other than 1."""
    drawn(LARGEST)
    rows = np.random.default_rng(vocab).standard_normal((300, vocab)).astype(np.float32)
    totals = np.exp(log_softmax(rows.astype(float))).cumsum(axis=1)[:, -1]
    assert vocab < 100 or ((totals < 1).any() and (totals > 1).any())
    assert (choose_tokens(rows, np.arange(300), 1.0) == vocab - 1).all()


def test_the_smallest_random_number_chooses_the_first_token(drawn):
    drawn(0.0)
    rows = np.random.default_rng(0).standard_normal((300, 257)).astype(np.float32)
    assert (choose_tokens(rows, np.arange(300), 1.0) == 0).all()


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, LARGEST])
@pytest.mark.parametrize("impossible", [-np.inf, -1e4])
def test_an_impossible_token_is_never_chosen(number, impossible, drawn):
    """Probability 0 at either end of the vocabulary, and all tokens but one."""
    drawn(number)
    rows = np.random.default_rng(0).standard_normal((100, 40)).astype(np.float32)
    rows[:, :7] = rows[:, 30:] = impossible
    chosen = choose_tokens(rows, np.arange(100), 1.0)
    assert ((chosen >= 7) & (chosen < 30)).all()
    rows[:] = impossible
    rows[np.arange(100), np.arange(100) % 40] = 0
    assert (choose_tokens(rows, np.arange(100), 1.0) == np.arange(100) % 40).all()


def test_a_random_number_at_a_boundary_chooses_the_token_above(drawn):
    """Token t owns [sum of those before it, that plus its own): with four equal ones, 0.25 is token 1's."""
    for number, token in ((0.25 - 2.0**-54, 0), (0.25, 1), (0.5 - 2.0**-53, 1), (0.5, 2), (0.75, 3)):
        drawn(number)
        assert choose_tokens(np.zeros((1, 4), np.float32), np.array([0]), 1.0).tolist() == [token]


# ---- top-k and top-p -------------------------------------------------------------------------------------------------

TOP_P = (5e-324, 0.1, 0.5, 0.8, 0.999999, 1 - 2.0**-53, 1.0)


def kept_tokens(row: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    """One token at a time, with Python's whole numbers, most probable first."""
    highest = float(max(row))
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))[: top_k or None]
    masses = [round(math.exp((float(row[token]) - highest) / temperature) * 2**40) for token in ranked]
    kept, mass = [], 0
    while len(kept) < len(ranked) and (top_p == 1 or float(mass) < top_p * float(sum(masses))):
        mass += masses[len(kept)]
        kept.append(ranked[len(kept)])
    return kept


def support(row: list[float] | np.ndarray, temperature: float = 1.0, **cut: float) -> list[int]:
    """Every token that 400 draws give."""
    rows = np.tile(np.asarray(row, np.float32), (400, 1))
    return sorted(set(choose_tokens(rows, np.arange(400), temperature, **cut).tolist()))


@settings(max_examples=300, deadline=None)
@given(
    rows=logits(),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from(TOP_P) | st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_a_sample_is_drawn_from_what_is_kept(rows, temperature, top_k, top_p, seed):
    chosen = choose_tokens(rows, np.arange(len(rows)), temperature, seed, top_k, top_p)
    for row, token, number in zip(rows, chosen, uniform(seed, np.arange(len(rows))), strict=True):
        kept = sorted(kept_tokens(row, temperature, top_k, top_p))
        weights = [math.exp((float(row[t]) - float(row.max())) / temperature) for t in kept]
        before = [math.fsum(weights[:i]) for i in range(len(kept) + 1)]
        assert token in kept
        at = kept.index(token)
        assert before[at] * (1 - 1e-12) <= number * before[-1] <= before[at + 1] * (1 + 1e-12)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_the_kept_are_the_fewest_that_reach_top_p(top_p):
    """Of exact probabilities, to within 163,840 units."""
    for row in np.random.default_rng(0).normal(0, 3, (200, 300)).astype(np.float32):
        kept = kept_tokens(row, 1.0, top_p=top_p)
        p = np.exp(row.astype(float) - math.log(math.fsum(np.exp(row.astype(float)))))
        assert math.fsum(p[kept]) > top_p - 2e-7
        assert math.fsum(p[kept[:-1]]) < top_p + 2e-7
        assert p[kept].min() >= np.delete(p, kept).max()


def test_top_k_keeps_exactly_k_and_ties_at_its_edge_by_the_lower_id():
    row = [3.0, 1.0, 3.0, 2.0, 2.0, 2.0, -np.inf]
    for k, kept in ((1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 5])):
        assert support(row, top_k=k) == kept
    assert support([0.0, -0.0, -0.0, 0.0], top_k=2) == [0, 1]
    for all_of_them in (0, 6, 7, 2**31):
        assert support(row, top_k=all_of_them) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_the_token_that_crosses_and_ties_by_the_lower_id():
    for top_p, kept in ((5e-324, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        assert support([1.5] * 4, top_p=top_p) == list(range(kept))
    assert support([1.5] * 5, top_p=0.8) == [0, 1, 2, 3]  # 0.8 × 5 rounds to 4
    assert support([0, 5, 9, 5, 5], top_p=0.999) == [1, 2, 3, 4]
    assert support([0, 5, 9, 5, 5], top_p=0.96) == [1, 2]


def test_top_p_is_of_what_top_k_kept():
    row = np.log([3, 1, 4, 2])
    assert support(row, top_p=0.55) == [0, 2]
    assert support(row, top_p=0.55, top_k=2) == [2]  # 4 of 7
    assert support(row, top_p=0.6, top_k=2) == [0, 2]


def test_top_p_is_of_the_probabilities_at_the_temperature():
    row = np.log([4.0, 2.0, 1.0, 1.0])
    assert support(row, 0.5, top_p=0.8) == [0, 1]  # 16 and 4 of 22
    assert support(row, 1.0, top_p=0.8) == [0, 1, 2]
    assert support(row, 1e9, top_p=0.8) == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_samples_follow_the_softmax_of_the_kept(cut):
    kept = kept_tokens(ROW, 1.2, **cut)
    assert 3 <= len(kept) <= 4
    chosen = choose_tokens(np.tile(ROW, (SAMPLES, 1)), np.arange(SAMPLES), 1.2, 1, **cut)
    counts = np.bincount(chosen, minlength=len(ROW))
    assert counts.sum() == counts[kept].sum()
    weights = np.exp(ROW[kept] / 1.2, dtype=float)
    assert chi_squared(counts[kept], SAMPLES * weights / weights.sum()) < CHI_SQUARED_999[3]


def test_temperature_0_takes_no_notice_of_top_k_and_top_p():
    rows = np.random.default_rng(0).integers(0, 9, (20, 33)).astype(np.float32)
    expected = choose_tokens(rows, np.arange(20))
    for cut in ({"top_k": 2}, {"top_p": 0.1}, {"top_k": 3, "top_p": 0.5}):
        assert_same_bits(choose_tokens(rows, np.arange(20), **cut), expected)


def test_the_most_probable_alone_is_greedy():
    rows = np.random.default_rng(0).integers(0, 9, (50, 33)).astype(np.float32)
    expected = rows.argmax(axis=1).astype(np.int32)
    for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "top_p": 0.5}):
        assert_same_bits(choose_tokens(rows, np.arange(50), 2.0, **cut), expected)


@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 2, "top_p": 0.7}], ids=str)
@pytest.mark.filterwarnings("error")
def test_infinite_logits_and_nan(cut):
    inf, nan = np.inf, np.nan
    rows = [[-inf] * 4, [nan] * 4, [nan, 0, nan, -inf], [1, inf, 5, inf], [-inf, nan, inf, nan], [-inf, -inf, nan, -9]]
    chosen = choose_tokens(np.array(rows, np.float32), np.arange(6), 1.0, **cut)
    assert chosen.tolist() == [0, 0, 1, 1, 2, 3]
