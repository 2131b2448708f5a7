"""The target's choice: argmax with ties to the lowest id, or the specification's own sample."""

from fractions import Fraction
from importlib.resources import files

import numpy as np
import pytest
from helpers import assert_same_bits

from kdtree_nb.kernels.choose_tokens import Sampling, choose_tokens
from kdtree_nb.kernels.launch import Kernel
from kdtree_nb.reference import sampling

VOCABS = [1, 2, 255, 256, 257, 1013, 40_000]


def run(
    device, logits, prefix_len: int = 0, depths=None, temperature: float = 0.0, seed: int = 0, **cut: float
) -> np.ndarray:
    depths = np.arange(len(logits)) if depths is None else depths
    arrays = device.put(logits, np.float32), device.put([prefix_len], np.int32), device.put(depths, np.int32)
    how = device.put(Sampling(temperature, seed, **cut).words())
    targets = device.host(choose_tokens(*arrays, how))
    assert (targets.dtype, targets.shape) == (np.int32, (len(logits),))
    return targets


# ---- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [*VOCABS, 163_840])
def test_greedy_is_the_argmax(device, vocab):
    """Few values, so that most rows have ties; the best token first, last and anywhere."""
    rng = np.random.default_rng(vocab)
    logits = rng.integers(0, 50, (6, vocab)).astype(np.float32)
    logits[1, 0] = logits[2, -1] = logits[3, vocab // 2] = 60
    assert_same_bits(run(device, logits), logits.argmax(axis=1).astype(np.int32))


def test_greedy_ties_go_to_the_lowest_id(device):
    rows = np.full((5, 700), -1.0)
    rows[1, [650, 300, 301]] = 2
    rows[2, [257, 256, 512]] = 2
    rows[3] = -np.inf
    rows[4] = -np.inf
    rows[4, [699, 698]] = -1e30
    assert run(device, rows).tolist() == [0, 300, 256, 0, 698]


def test_greedy_passes_over_nan(device):
    rows = np.array([[np.nan, 1, 3, np.nan, 2], [0, np.nan, np.nan, np.nan, np.nan]])
    assert run(device, rows).tolist() == [2, 0]


# ---- sampled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.3, 1.0, 1e9])
@pytest.mark.parametrize("vocab", VOCABS)
def test_samples_are_those_of_the_specification(device, vocab, temperature):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (40, vocab)).astype(np.float32)
    logits[1, 1::2] = -np.inf
    logits[2, 1:] = -1e4
    depths, seed = rng.integers(0, 33, 40), int(rng.integers(2**63))
    targets = run(device, logits, 1000, depths, temperature, seed)
    assert_same_bits(targets, sampling.choose_tokens(logits, 1000 + depths, temperature, seed))


def test_samples_of_a_real_vocabulary(device):
    logits = np.random.default_rng(0).normal(0, 1, (3, 163_840)).astype(np.float32)
    expected = sampling.choose_tokens(logits, np.arange(3), 1.0, 5)
    assert_same_bits(run(device, logits, temperature=1.0, seed=5), expected)


def test_random_numbers_are_numpys_to_the_bit(device, tmp_path):
    """The kernel's own function, called by a kernel that returns what it gives."""
    source = files("kdtree_nb.kernels").joinpath("choose_tokens.cu").read_text()
    draw = """
        extern "C" __global__ void draw(unsigned long long seed, const long long* positions, double* numbers)
        {
            numbers[threadIdx.x] = uniform(seed, positions[threadIdx.x]);
        }"""
    path = tmp_path / "draw.cu"
    path.write_text(source + draw)
    positions = np.array([0, 1, 2, 63, 1000, 2**31 - 2, 2**31, 2**40])
    for seed in (0, 1, 7, 2**31, 2**40 + 3, 2**64 - 1):
        numbers = device.empty(len(positions), np.float64)
        Kernel(path, "draw")((1,), (len(positions),), (np.uint64(seed), device.put(positions), numbers))
        assert_same_bits(device.host(numbers), sampling.uniform(seed, positions))


def test_a_sample_belongs_to_its_position(device):
    """Not to its row, to the rows beside it or to how positions are split into prefix and depth."""
    logits = np.random.default_rng(1).standard_normal((40, 1013)).astype(np.float32)
    whole = run(device, logits, 100, temperature=0.8, seed=3)
    assert len(set(whole.tolist())) > 30
    for row in (0, 1, 17, 39):
        assert run(device, logits[row : row + 1], 100 + row, [0], 0.8, 3).tolist() == [whole[row]]
    assert_same_bits(run(device, logits[::-1], 90, np.arange(49, 9, -1), 0.8, 3), whole[::-1].copy())
    assert len(set(run(device, np.tile(logits[:1], (9, 1)), 9, np.full(9, 2), 0.8).tolist())) == 1


@pytest.mark.parametrize("impossible", [-np.inf, -1e4])
def test_an_impossible_token_is_never_chosen(device, impossible):
    logits = np.random.default_rng(2).standard_normal((300, 600)).astype(np.float32)
    logits[:, :100] = logits[:, 200:210] = logits[:, 500:] = impossible
    targets = run(device, logits, temperature=1.0)
    assert ((targets >= 100) & (targets < 500) & ~((targets >= 200) & (targets < 210))).all()
    logits[:] = impossible
    only = np.arange(300) * 7 % 600
    logits[np.arange(300), only] = 0
    assert_same_bits(run(device, logits, temperature=1.0), only.astype(np.int32))


def test_nor_where_a_sum_rounds_to_the_random_number(device):
    """A thread sums its own stretch, then walks it from the sum of those before: the two need not round alike.

    Token 0 weighs 1, and 63 tokens of the next stretch so little that 1 + each of them is 1 again, though their sum
    is more; the last of that stretch is impossible. Three tokens further on are weighed so that the random number
    falls between 1 and 1 plus that sum.
    """
    vocab, stretch, temperature = 256 * 64, 64, 1.0
    number = float(sampling.uniform(0, np.array([0]))[0])
    row = np.full(vocab, -np.inf, np.float32)
    row[0], row[stretch : 2 * stretch - 1] = 0, -37.5
    tiny = float(np.exp(np.float64(-37.5)))
    assert 1 + tiny == 1
    before, after = Fraction(1), Fraction(1) + 63 * Fraction(tiny)
    wanted = (before + after) / 2 / Fraction(number) - after  # what the tokens further on weigh
    for token in range(200 * stretch, 200 * stretch + 3):
        row[token] = np.log(float(wanted))
        if np.exp(np.float64(row[token])) > wanted:
            row[token] = np.nextafter(row[token], np.float32(-np.inf))
        wanted -= Fraction(float(np.exp(np.float64(row[token]))))
    (target,) = run(device, row[None], temperature=temperature)
    assert row[target] > -np.inf


# ---- top-k and top-p -------------------------------------------------------------------------------------------------

CUTS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 254},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1 - 2.0**-53},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.3},
]


def assert_specified(device, logits, temperature: float, **cut: float) -> None:
    """The same tokens, and so the same tokens kept: a random number above all but the last of those finds it."""
    for seed in (3, 2**63):
        expected = sampling.choose_tokens(logits, 50 + np.arange(len(logits)), temperature, seed, **cut)
        assert_same_bits(run(device, logits, 50, None, temperature, seed, **cut), expected)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 255, 257, 1013])
def test_cuts_are_those_of_the_specification(device, vocab, cut):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (24, vocab)).astype(np.float32)
    logits[1] = 0.5
    logits[2] = rng.integers(0, 2, vocab)  # half of them tie
    logits[3] = rng.choice([-0.0, 0.0, 1.0], vocab)
    logits[4] = rng.choice([-np.inf, np.nan, -1.0, -2.0], vocab)
    logits[5] = -np.inf
    logits[6] = np.nan
    logits[7, :-1] = -np.inf
    logits[8, :-1] = np.nan
    logits[9, vocab // 2] = np.inf
    logits[10] = np.linspace(-1e4, 1e4, vocab)
    logits[11] = rng.normal(0, 1e-6, vocab)
    logits[12] = rng.integers(-3, 3, vocab)
    assert_specified(device, logits, 0.8, **cut)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.3, 1e9])
def test_cuts_at_any_temperature(device, temperature):
    logits = np.random.default_rng(1).normal(0, 2, (8, 1013)).astype(np.float32)
    for cut in ({"top_k": 5}, {"top_p": 0.7}, {"top_k": 500, "top_p": 0.7}):
        assert_specified(device, logits, temperature, **cut)


@pytest.mark.parametrize("cut", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 163_839, "top_p": 0.999}], ids=str)
def test_cuts_of_a_real_vocabulary(device, cut):
    rng = np.random.default_rng(2)
    logits = np.stack([rng.normal(0, 2, 163_840), rng.integers(0, 3, 163_840), np.zeros(163_840)]).astype(np.float32)
    assert_specified(device, logits, 1.0, **cut)


def test_a_cut_keeps_what_it_should_and_all_of_it(device):
    """Every kept token comes up in 120 draws, no other does; ties by the lower id, wherever a thread's stretch ends."""
    row = np.full(700, -3.0)
    row[[650, 300, 301, 5]] = 2
    row[[256, 512, 255]] = 1.5
    rows = np.tile(row, (120, 1))
    for top_k, kept in ((1, [5]), (3, [5, 300, 301]), (5, [5, 255, 300, 301, 650])):
        assert sorted(set(run(device, rows, temperature=1.0, top_k=top_k).tolist())) == kept
    equal = np.zeros((120, 16))
    for top_p, kept in ((1e-9, 1), (0.25, 4), (0.26, 5), (0.9375, 15), (0.94, 16)):
        assert sorted(set(run(device, equal, temperature=1.0, top_p=top_p).tolist())) == list(range(kept))
    assert sorted(set(run(device, equal, temperature=1.0, top_k=8, top_p=0.5).tolist())) == [0, 1, 2, 3]


def test_weights_are_rounded_to_the_nearest_unit(device):
    """A token and three equal ones: top_p is a third of a unit above the share of the first two, so a third is kept.

    Were weights rounded down, that share would grow by more than this, and two be enough.
    """
    tie = next(x for x in np.arange(-0.7, -0.6, 1e-3, np.float32) if 0.6 < np.exp(float(x)) * 2**40 % 1 < 0.9)
    one, mass = 2**40, round(np.exp(float(tie)) * 2**40)
    top_p = (one + mass + 1 / 3) / (one + 3 * mass)
    assert top_p * (one + 3 * mass) > one + mass
    assert top_p * (one + 3 * (mass - 1)) < one + (mass - 1)
    row = np.array([0, tie, tie, tie], np.float32)
    assert sorted(set(run(device, np.tile(row, (60, 1)), temperature=1.0, top_p=top_p).tolist())) == [0, 1, 2]


@pytest.mark.parametrize("cut", [{"top_k": 9}, {"top_p": 0.8}], ids=str)
def test_a_cut_does_not_depend_on_the_rows_beside_it(device, cut):
    logits = np.random.default_rng(3).normal(0, 2, (12, 517)).astype(np.float32)
    whole = run(device, logits, 100, None, 0.9, 3, **cut)
    for row in (0, 5, 11):
        assert run(device, logits[row : row + 1], 100 + row, [0], 0.9, 3, **cut).tolist() == [whole[row]]
    backwards = run(device, logits[::-1], 90, np.arange(21, 9, -1), 0.9, 3, **cut)
    assert_same_bits(backwards, whole[::-1].copy())


def test_temperature_0_takes_no_notice_of_a_cut(device):
    logits = np.random.default_rng(4).integers(0, 9, (5, 300)).astype(np.float32)
    assert_same_bits(run(device, logits, top_k=3, top_p=0.5), logits.argmax(axis=1).astype(np.int32))


# ---- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"top_k": 9}, {"top_p": 0.5}], ids=str)
def test_any_order_of_threads(device, cut):
    arrays = device.put(np.random.default_rng(3).integers(0, 9, (5, 700)), np.float32), device.put([3], np.int32)
    depths = device.put(np.arange(5), np.int32)
    for temperature in (0.0, 1.0):
        how = device.put(Sampling(temperature, **cut).words())
        device.every_schedule(lambda how=how: [choose_tokens(*arrays, depths, how)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_and_nan(device, temperature):
    inf, nan = np.inf, np.nan
    rows = [[-inf] * 4, [nan] * 4, [nan, 0, nan, -inf], [1, inf, 5, inf], [-inf, nan, inf, nan], [-inf, -inf, nan, -9]]
    assert run(device, rows, temperature=temperature).tolist() == [0, 0, 1, 1, 2, 3]


def test_padding_is_drawn_like_the_root(device):
    logits = np.random.default_rng(4).standard_normal((3, 50)).astype(np.float32)
    logits[2] = logits[0]
    targets = run(device, logits, 0, [0, 1, -1], 1.0)
    assert targets[2] == targets[0]


def test_no_rows(device):
    assert run(device, np.zeros((0, 7))).shape == (0,)


def test_numpy_arrays_take_the_specification():
    logits, depths = (
        np.random.default_rng(5).standard_normal((3, 50)).astype(np.float32),
        np.array([0, 1, -1], np.int32),
    )
    for cut in ((), (3, 0.5)):
        targets = choose_tokens(logits, np.array([9], np.int32), depths, Sampling(0.7, 4, *cut).words())
        assert_same_bits(targets, sampling.choose_tokens(logits, np.array([9, 10, 9]), 0.7, 4, *cut))


def test_any_whole_number_is_a_top_k(device):
    """Also one that no 64 bits hold; a seed may take all of them."""
    logits = np.random.default_rng(6).standard_normal((9, 300)).astype(np.float32)
    expected = sampling.choose_tokens(logits, np.arange(9), 1.0, 2**64 - 1)
    for top_k in (300, 2**31, 2**63 - 1, 2**63, 2**70):
        assert_same_bits(run(device, logits, temperature=1.0, seed=2**64 - 1, top_k=top_k), expected)


def test_refuses(device):
    def choose(logits: tuple, depths: int, temperature: float = 0.0, dtype: type = np.float32, **cut: float):
        arrays = device.empty(logits, dtype), device.empty(1, np.int32), device.empty(depths, np.int32)
        return choose_tokens(*arrays, device.put(Sampling(temperature, **cut).words()))

    with pytest.raises(
        ValueError, match=r"choose_tokens: logits \[2, 7\] and depths \[3\], expected \[N, vocab\] and \[N\]"
    ):
        choose((2, 7), 3)
    with pytest.raises(ValueError, match=r"choose_tokens: logits \[2\] and depths \[2\]"):
        choose((2,), 2)
    for temperature in (-1.0, np.nan, np.inf):
        with pytest.raises(
            ValueError, match=rf"choose_tokens: temperature={temperature}, expected 0 or more, and finite"
        ):
            choose((2, 7), 2, temperature)
    for top_k, top_p in ((-1, 0.5), (2, 0.0), (2, 1.1), (2, np.nan)):
        with pytest.raises(ValueError, match=rf"choose_tokens: top_k={top_k}, top_p={top_p}, expected 0 or more, and"):
            choose((2, 7), 2, 1.0, top_k=top_k, top_p=top_p)
    for how in (np.zeros(3, np.uint64), np.zeros(4, np.float64), np.zeros((1, 4), np.uint64)):
        with pytest.raises(ValueError, match=r"choose_tokens: sampling .*, expected Sampling.words\(\), uint64 \[4\]"):
            choose_tokens(device.empty((2, 7), np.float32), device.empty(1, np.int32), device.empty(2, np.int32), how)
    with pytest.raises(TypeError, match=r"choose_tokens: .*'logits' is float64"):
        choose((2, 7), 2, dtype=np.float64)
