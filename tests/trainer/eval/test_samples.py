"""pass@k against the chance that it estimates, and votes by what answers are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.types import ActionType
from tests.trainer.records import make_record
from trainer.eval.summaries import agreeing, pass_at_k, sampled_success, typed_key
from trainer.rollout.episodes import EpisodeRecord, Outcome


def answered(question: str, text: str, outcome: Outcome = Outcome.WRONG, db_id: str = "db") -> EpisodeRecord:
    turn = {"action_type": ActionType.ANSWER.value, "argument": text, "error": ""}
    return make_record(question, outcome.value, db_id, turns=[turn])


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_it_is_the_share_of_subsets_with_a_right_sample(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    subsets = list(combinations(samples, k))
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1)])
def test_what_is_not_defined_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Oslo, Rome", "rome,  OSLO"),
        ("42", "42.0"),
        ("1,234", "1234"),
        ("a | 1\nb | 2", "b | 2.0\nA | 1"),
        ("[]", "[]"),
    ],
)
def test_the_same_values_are_one_vote(one: str, other: str) -> None:
    assert typed_key(answered("q", one)) == typed_key(answered("q", other))


@pytest.mark.parametrize(("one", "other"), [("Oslo", "Oslo, Oslo"), ("1", "01a"), ("a | b", "b | a"), ("", "[]")])
def test_other_values_are_another_vote(one: str, other: str) -> None:
    assert typed_key(answered("q", one)) != typed_key(answered("q", other))


def test_the_answer_of_most_wins_and_of_equals_the_first() -> None:
    samples = [answered("q", text) for text in ("1", "2", "2.0", "3")]
    assert agreeing(samples, typed_key) == samples[1:3]
    assert agreeing([samples[0], samples[3]], typed_key) == samples[:1]
    silent = make_record("q", "out_of_budget")
    assert agreeing([silent, silent, samples[3]], typed_key) == samples[3:]
    assert agreeing([silent], typed_key) == []


def test_an_evaluation_with_samples() -> None:
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    first = [answered("a", text, right if text == "1" else wrong, "x") for text in ("1", "1", "2", "3")]
    second = [answered("b", text, right if text == "7" else wrong, "y") for text in ("5", "5", "7")]
    failed = make_record("b", "failed", "y")
    sampled = sampled_success([*first, *second, failed])
    assert sampled is not None
    assert (sampled.questions, sampled.samples) == (2, 4)
    assert {k: rate.rate for k, rate in sampled.pass_at.items()} == {
        1: pytest.approx((2 / 4 + 1 / 3) / 2),
        2: pytest.approx((5 / 6 + 2 / 3) / 2),
        4: pytest.approx(1.0),
    }
    assert sampled.voted.rate == pytest.approx(0.5)
    assert sampled_success(first[:1]) is None
