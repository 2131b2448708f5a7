"""Prompt look-up against a plain re-implementation; the oracle against its own description."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.engine import Oracle, PromptLookup
from kdtree_nb.engine.drafter import Proposal
from kdtree_nb.reference.tree import tree_build

VOCAB = 50


def assert_valid(proposal: Proposal, length: int, width: int, vocab_size: int) -> None:
    """What :class:`Drafter` promises, and what ``tree_build`` asks for."""
    log_probs, token_ids, _ = proposal
    assert (log_probs.dtype, token_ids.dtype) == (np.float32, np.int32)
    assert log_probs.shape == token_ids.shape == (length, width)
    assert (log_probs <= 0).all()
    assert (log_probs[:, :-1] >= log_probs[:, 1:]).all()
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()
    tree_build(0, log_probs, token_ids, 16)


# ---- prompt look-up --------------------------------------------------------------------------------------------------


def look_up(tokens: list[int], length: int, width: int, longest_match: int) -> list[list[tuple[int, float]]]:
    """For each position, tokens and their log-probabilities, as the docstring has it, one occurrence at a time."""
    votes: list[dict[int, float]] = [{} for _ in range(length)]
    for end in range(len(tokens) - 1):
        agreeing = 0
        while (
            agreeing < longest_match
            and agreeing <= end
            and tokens[end - agreeing] == tokens[len(tokens) - 1 - agreeing]
        ):
            agreeing += 1
        if agreeing:
            for depth, follower in enumerate(tokens[end + 1 : end + 1 + length]):
                votes[depth][follower] = votes[depth].get(follower, 0) + 2**agreeing
    rows = []
    for row in votes:
        best = sorted(row.items(), key=lambda vote: (-vote[1], vote[0]))[:width]
        rows.append([(token, math.log(count / (sum(row.values()) + 4))) for token, count in best])
    return rows


def candidates(proposal: Proposal) -> list[list[tuple[int, float]]]:
    """The entries above −inf, which come first in each row."""
    return [
        [(int(token), float(score)) for token, score in zip(tokens, scores, strict=True) if score > -np.inf]
        for scores, tokens in zip(*proposal[:2], strict=True)
    ]


@settings(max_examples=200, deadline=None)
@given(
    text=st.binary(min_size=1, max_size=60),
    alphabet=st.sampled_from([1, 2, 3, 5, 40]),
    length=st.integers(1, 9),
    width=st.integers(1, 5),
    longest_match=st.sampled_from([1, 2, 3, 12, 100]),
)
def test_prompt_lookup_is_its_description(text, alphabet, length, width, longest_match) -> None:
    tokens = np.array([byte % alphabet for byte in text], np.int32)
    before = tokens.copy()
    proposal = PromptLookup(length, width, longest_match).propose(tokens)
    assert_valid(proposal, length, width, VOCAB)
    np.testing.assert_array_equal(tokens, before)
    expected = look_up(tokens.tolist(), length, width, longest_match)
    actual = candidates(proposal)
    assert [[token for token, _ in row] for row in actual] == [[token for token, _ in row] for row in expected]
    for row, expected_row in zip(actual, expected, strict=True):
        np.testing.assert_allclose([score for _, score in row], [score for _, score in expected_row], rtol=1e-5)


@pytest.mark.parametrize("text", [[7], [1, 2, 3, 4], [5, 5, 5, 9]], ids=["one token", "nothing repeats", "new token"])
def test_prompt_lookup_without_an_earlier_occurrence_proposes_nothing(text: list[int]) -> None:
    log_probs, _, _ = PromptLookup().propose(np.array(text, np.int32))
    assert (log_probs == -np.inf).all()
    assert tree_build(text[-1], *PromptLookup().propose(np.array(text, np.int32))[:2], 16).num_nodes == 1


def test_prompt_lookup_continues_a_loop() -> None:
    loop = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 1], np.int32)
    log_probs, token_ids, _ = PromptLookup(length=4, width=3).propose(loop)
    assert token_ids[:, 0].tolist() == [2, 3, 1, 2]
    assert (log_probs[:, 0] > math.log(0.8)).all()
    assert (log_probs[:, 1:] == -np.inf).all()


def test_prompt_lookup_believes_the_longer_context() -> None:
    text = [8, 1, 5, 0, 9, 1, 6, 0, 7, 1, 6, 0, 8, 1]  # 1 was followed by 5 once, by 6 twice; [8, 1] by 5
    log_probs, token_ids, _ = PromptLookup(length=1, width=2).propose(np.array(text, np.int32))
    assert token_ids[0].tolist() == [5, 6]  # [0, 8, 1] does not occur before: 2² votes against 2 · 2¹
    np.testing.assert_allclose(np.exp(log_probs[0]), [4 / 12, 4 / 12], rtol=1e-6)


def test_few_votes_give_little_confidence() -> None:
    once = PromptLookup(length=1, width=1).propose(np.array([1, 2, 0, 1], np.int32))[0][0, 0]
    often = PromptLookup(length=1, width=1).propose(np.array([1, 2, 0, 1, 2, 3, 1, 2, 4, 1], np.int32))[0][0, 0]
    assert math.exp(once) == pytest.approx(2 / 6)
    assert math.exp(often) == pytest.approx(6 / 10)


def test_a_very_long_match_does_not_overflow() -> None:
    log_probs, _, _ = PromptLookup(longest_match=512).propose(np.full(3000, 7, np.int32))
    np.testing.assert_allclose(log_probs[:, 0], 0, atol=1e-6)


@pytest.mark.parametrize("bad", [dict(length=0), dict(width=0), dict(longest_match=0), dict(longest_match=513)])
def test_prompt_lookup_names_a_bad_argument(bad: dict[str, int]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"PromptLookup: .*{name}={value}.*expected 1 or more each"):
        PromptLookup(**bad)


# ---- oracle ----------------------------------------------------------------------------------------------------------

ANSWER = np.random.default_rng(0).integers(0, VOCAB, 1200)


def ranks_of_the_right_token(oracle: Oracle, answer: np.ndarray = ANSWER) -> np.ndarray:
    """Per position, the rank of the answer's token, or the width where it is missing."""
    ids = np.stack([oracle.propose(answer[:n])[1][0] for n in range(1, len(answer))])
    hits = ids == answer[1:, None]
    assert (hits.sum(axis=1) <= 1).all()
    return np.where(hits.any(axis=1), hits.argmax(axis=1), ids.shape[1])


@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("width", [1, 4])
def test_oracle_hits_as_often_as_it_says(hit_rate: float, width: int) -> None:
    ranks = ranks_of_the_right_token(Oracle(ANSWER, VOCAB, length=1, width=width, hit_rate=hit_rate))
    count, elsewhere = len(ranks), (1 - hit_rate) / width
    for rank, probability in enumerate([hit_rate, *[elsewhere] * width]):
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs((ranks == rank).sum() - count * probability) <= 4 * spread


@pytest.mark.parametrize("hit_rate", [0.0, 0.04, 0.5, 1.0])
@pytest.mark.parametrize("width", [1, 2, 7, VOCAB - 1])
def test_oracle_proposals_are_valid(hit_rate: float, width: int) -> None:
    oracle = Oracle(ANSWER[:30], VOCAB, length=5, width=width, hit_rate=hit_rate)
    for n in (1, 20, 28, 30, 40):  # also beyond the answer's end
        proposal = oracle.propose(np.resize(ANSWER, n))
        assert_valid(proposal, 5, width, VOCAB)
        for row in proposal[1]:
            assert len(set(row.tolist())) == width


def test_what_an_oracle_does_at_a_position_depends_on_seed_and_position_alone() -> None:
    oracle = Oracle(ANSWER, VOCAB, length=6, seed=3)
    _, ahead, _ = oracle.propose(ANSWER[:40])
    for depth in range(6):
        np.testing.assert_array_equal(oracle.propose(ANSWER[: 40 + depth])[1][0], ahead[depth])
    np.testing.assert_array_equal(oracle.propose(np.zeros(40, np.int32))[1], ahead)
    np.testing.assert_array_equal(Oracle(ANSWER, VOCAB, length=6, seed=3).propose(ANSWER[:40])[1], ahead)
    assert not np.array_equal(Oracle(ANSWER, VOCAB, length=6, seed=4).propose(ANSWER[:40])[1], ahead)


def test_an_oracle_that_is_always_right() -> None:
    _, token_ids, _ = Oracle(ANSWER, VOCAB, length=9, hit_rate=1).propose(ANSWER[:100])
    np.testing.assert_array_equal(token_ids[:, 0], ANSWER[100:109])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(width=0), "width=0, expected 1 or more"),
        (dict(width=VOCAB), f"width={VOCAB}, expected 1 or more and below vocab_size={VOCAB}"),
        (dict(hit_rate=1.5), "hit_rate=1.5, expected 0 to 1"),
        (dict(hit_rate=-0.1), "hit_rate=-0.1, expected 0 to 1"),
        (dict(hit_rate=float("nan")), "hit_rate=nan, expected 0 to 1"),
    ],
)
def test_oracle_names_a_bad_argument(bad: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Oracle: {message}"):
        Oracle(ANSWER, VOCAB, **bad)
