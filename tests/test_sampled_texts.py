"""Every decoder samples the target's distribution: whole texts of a small model against their exact probabilities.

The probability of a text is the product of the reference model's softmax along it, cut by top-k and top-p. The texts
of 500 seeds are counted against those of all texts of three tokens.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders import Built, build, tiny_config

from kdtree_nb.engine import Engine
from kdtree_nb.engine import rounds as decoding
from kdtree_nb.engine.drafter import Drafter, Proposal
from kdtree_nb.kernels.choose_tokens import Sampling
from kdtree_nb.reference.model import forward

VOCAB, LENGTH, SEEDS = 16, 3, 500
PROMPT = [5]
CHANCE = 1e-4
"""A right decoder's statistic is this improbable or more with one choice of seeds in 10,000."""
SETTINGS: dict[str, dict[str, Any]] = {
    "cooler": {"temperature": 0.7},
    "hotter": {"temperature": 1.3},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "top-k": {"temperature": 1.1, "top_k": 3},
}


class FewOfThem(Drafter):
    """Drafts five tokens for each of the next two positions, whether the target is likely to take them or not."""

    def propose(self, tokens: np.ndarray) -> Proposal:
        token_ids = np.stack([(np.arange(5) * 3 + shift + tokens[-1]) % VOCAB for shift in (1, 6)])
        log_probs = np.log([0.4, 0.2, 0.2, 0.1, 0.1])
        return Proposal(np.tile(log_probs.astype(np.float32), (2, 1)), token_ids.astype(np.int32))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    config = tiny_config(vocab_size=VOCAB, n_group=1, topk_group=1, max_position_embeddings=64)
    return build(tmp_path_factory.mktemp("model") / "tiny.kdtr", config, seed=3)


@pytest.fixture(scope="module")
def engine(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its forward pass remembers what came of the same rows behind the same latents: thousands of texts share most."""
    engine = Engine.load(built.path, "cpu")
    compute, known = engine.model.forward, {}

    def remembering(tokens, parents, depths, cache, taps=(), logits_of=slice(None)):
        committed = int(cache.length[0])
        own = slice(committed, committed + len(tokens))
        given = (cache.rows[:, :committed], tokens, parents, depths)
        key = (*(array.tobytes() for array in given), str(logits_of))
        if key not in known:
            result = compute(tokens, parents, depths, cache, taps, logits_of)
            known[key] = result, cache.rows[:, own].copy()
        result, cache.rows[:, own] = known[key]
        return result

    engine.model.forward = remembering  # type: ignore[method-assign]
    return engine


def sample(engine: Engine, decoder: str, seed: int, node_budget: int = 30, **setting: Any) -> tuple[int, ...]:
    run = engine.generate(PROMPT, decoder, node_budget, LENGTH, seed=seed, drafter=FewOfThem(), **setting)
    return tuple(run.tokens)


# ---- the exact distribution ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logits_after(built: Built) -> Callable[[tuple[int, ...]], np.ndarray]:
    starts = [start for length in range(LENGTH) for start in itertools.product(range(VOCAB), repeat=length)]
    last = {start: forward(built.weights, built.config, np.array([*PROMPT, *start]))[-1] for start in starts}
    return last.__getitem__


def probabilities(logits: np.ndarray, temperature: float, top_k: int = VOCAB, top_p: float = 1.0) -> np.ndarray:
    """The softmax of what is kept; no cut may be a close call, as the engine's logits differ by up to 5e-6."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    ranked = np.argsort(-weights)
    gaps = -np.diff(np.log(weights[ranked]))
    kept = ranked[:top_k]
    shares = weights[kept].cumsum() / weights[kept].sum()
    if top_p < 1:
        assert np.abs(shares - top_p).min() > 1e-5
        kept = kept[: 1 + np.count_nonzero(shares < top_p)]
    if len(kept) < VOCAB:
        assert gaps[len(kept) - 1] > 1e-5
    result = np.zeros(VOCAB)
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def text_probabilities(logits_after: Callable, **setting: Any) -> np.ndarray:
    """[VOCAB, VOCAB, VOCAB]: of each text."""
    result = np.ones(())
    for length in range(LENGTH):
        starts = itertools.product(range(VOCAB), repeat=length)
        steps = np.array([probabilities(logits_after(start), **setting) for start in starts])
        result = result[..., None] * steps.reshape((VOCAB,) * (length + 1))
    return result


def chance_of(texts: list[tuple[int, ...]], expected: np.ndarray) -> float:
    """How improbable counts are that are so far, by χ², from what is expected, or farther.

    Texts are counted from the most probable down; those that five or more are not expected of, several together.
    """
    counts = np.zeros(expected.shape, int)
    np.add.at(counts, tuple(np.array(texts).T), 1)
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(-expected, axis=None)
    observed, wanted, left = [0], [0.0], float(len(texts))
    for count, mean in zip(counts.ravel()[order], len(texts) * expected.ravel()[order], strict=True):
        if wanted[-1] >= 5 and left >= 5:
            observed.append(0)
            wanted.append(0.0)
        observed[-1] += count
        wanted[-1] += mean
        left -= mean
    assert len(wanted) >= 20
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    return chi_squared_tail(statistic, len(wanted) - 1)


def chi_squared_tail(statistic: float, degrees: int) -> float:
    """P(χ² ≥ statistic): Q(a, x) of a = degrees / 2, by Q(a + 1, x) = Q(a, x) + xᵃ e⁻ˣ / Γ(a + 1)."""
    x = statistic / 2
    a, tail = (1.0, math.exp(-x)) if degrees % 2 == 0 else (0.5, math.erfc(math.sqrt(x)))
    while a < degrees / 2:
        tail += math.exp(a * math.log(x) - x - math.lgamma(a + 1))
        a += 1
    return tail


@pytest.mark.parametrize(
    ("degrees", "statistic", "tail"), [(1, 3.841, 0.05), (3, 16.266, 0.001), (10, 23.209, 0.01), (63, 103.442, 0.001)]
)
def test_the_tail_is_that_of_tables(degrees: int, statistic: float, tail: float) -> None:
    assert chi_squared_tail(statistic, degrees) == pytest.approx(tail, rel=2e-3)


# ---- right decoders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_texts_follow_the_targets_distribution(engine: Engine, logits_after: Callable, setting: dict) -> None:
    expected = text_probabilities(logits_after, **setting)
    assert expected.sum() == pytest.approx(1)
    texts = {d: [sample(engine, d, seed, **setting) for seed in range(SEEDS)] for d in ("ar", "ddtree")}
    for decoder in texts:
        assert chance_of(texts[decoder], expected) > CHANCE
    assert texts["ar"] == texts["ddtree"]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_seed_gives_one_text_whatever_the_decoder_and_budget(engine: Engine, setting: dict) -> None:
    for seed in range(2000, 2020):
        expected = sample(engine, "ar", seed, **setting)
        for decoder, node_budget in (("chain", 1), ("chain", 9), *(("ddtree", budget) for budget in (0, 1, 5, 272))):
            assert sample(engine, decoder, seed, node_budget, **setting) == expected


def test_trees_are_accepted_in_whole_in_part_and_not_at_all(engine: Engine) -> None:
    """Else the texts would say little of trees. A tree whose path is accepted to its end leaves one forward pass."""
    runs = [engine.generate(PROMPT, "ddtree", 30, LENGTH, 1.1, seed, drafter=FewOfThem()).rounds for seed in range(100)]
    first = [rounds[0].accepted for rounds in runs]
    assert min(first.count(accepted) for accepted in (0, 1, 2)) >= 5


# ---- wrong ones ------------------------------------------------------------------------------------------------------

CHOOSE = decoding.choose_tokens


def temperature_twice(logits, prefix_len, depths, how):
    temperature = how.view(np.float64)[0]
    return CHOOSE(logits / np.float32(temperature), prefix_len, depths, how)


def child_shares_its_parents_number(logits, prefix_len, depths, how):
    return CHOOSE(logits, prefix_len, np.maximum(depths - 1, 0), how)


def top_p_before_the_temperature(logits, prefix_len, depths, how):
    (temperature, top_p), seed = how.view(np.float64)[[0, 3]], int(how[1])
    order = np.argsort(-logits, axis=1)
    p = np.exp(np.take_along_axis(logits, order, axis=1).astype(float))
    p /= p.sum(axis=1, keepdims=True)
    dropped = np.empty(p.shape, bool)
    np.put_along_axis(dropped, order, p.cumsum(axis=1) - p >= top_p, axis=1)
    whole = Sampling(temperature, seed).words()
    return CHOOSE(np.where(dropped, np.float32(-np.inf), logits), prefix_len, depths, whole)


def one_token_more(logits, prefix_len, depths, how):
    return CHOOSE(logits, prefix_len, depths, how + np.array([0, 0, 1, 0], np.uint64))


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("cooler", temperature_twice),
        ("hotter", child_shares_its_parents_number),
        ("top-p", top_p_before_the_temperature),
        ("top-k", one_token_more),
    ],
)
def test_a_wrong_sampler_is_seen(engine, logits_after, setting, wrong, monkeypatch) -> None:
    setting = SETTINGS[setting]
    monkeypatch.setattr(decoding, "choose_tokens", wrong)
    texts = [sample(engine, "ddtree", seed, **setting) for seed in range(SEEDS // 2)]
    assert chance_of(texts, text_probabilities(logits_after, **setting)) < CHANCE / 100
