"""Pairing: by question, of any order, antisymmetric; and what is said where two sides are not quite comparable."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.records import make_record
from tests.trainer.report.folders import make_evaluation, make_records
from trainer.eval.run_files import Differing
from trainer.eval.statistics import Interval, compare, judged
from trainer.report.comparison import Comparison, Ending, Side, SideError, compare_sides
from trainer.rollout.episodes import EpisodeRecord

OUTCOMES = ("correct", "wrong", "out_of_budget", "failed")


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[list[EpisodeRecord], list[EpisodeRecord]]:
    """Two evaluations of which each may lack questions of the other, with failed episodes, in any order."""
    sides: tuple[list[EpisodeRecord], list[EpisodeRecord]] = ([], [])
    for i in range(draw(st.integers(1, 24))):
        shared = {"hardness": draw(st.sampled_from(("easy", "hard", ""))), "question": f"how many, {i}?"}
        database = draw(st.sampled_from("abcd"))
        for side in draw(st.sampled_from(((0,), (1,), (0, 1), (0, 1), (0, 1)))) if i else (0, 1):
            outcome = draw(st.sampled_from(OUTCOMES)) if i else "wrong"
            numbers = {"steps": draw(st.integers(0, 9)), "tokens": draw(st.integers(0, 99)), "prompt_tokens": 9}
            sides[side].append(make_record(f"q{i}", outcome, database, **shared | numbers))
    for records in sides:
        draw(st.randoms(use_true_random=False)).shuffle(records)
    return sides


def side(name: str, records: Sequence[EpisodeRecord], **fields: object) -> Side:
    return Side(name, list(records), replace(make_evaluation(name, make_records([True])), **fields))  # type: ignore[arg-type]


def mirrored(one: Interval, other: Interval) -> bool:
    return (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)


@settings(deadline=None)
@given(evaluations())
def test_swapped_sides_negate_every_difference(sides: tuple[list[EpisodeRecord], list[EpisodeRecord]]) -> None:
    a, b = (side(name, records) for name, records in zip("ab", sides, strict=True))
    there, back = compare_sides(a, b), compare_sides(b, a)
    assert (there.a, there.b) == (back.b, back.a)
    groups = [("success", there.success, back.success)]
    for by in ("by_difficulty", "by_family", "by_database", "failures"):
        left, right = getattr(there, by), getattr(back, by)
        assert left.keys() == right.keys()
        groups += [(name, left[name], right[name]) for name in left]
    for name, one, other in groups:
        assert (one.a, one.b) == (other.b, other.a), name
        assert one.difference.mean == pytest.approx(-other.difference.mean)
        assert mirrored(one.difference.interval, other.difference.interval), name
    for name, mean in there.means.items():
        assert mean.mean == pytest.approx(-back.means[name].mean)
        assert mirrored(mean.interval, back.means[name].interval), name
    assert [f.question_id for f in there.gained] == [f.question_id for f in back.lost]
    assert [(f.a, f.b) for f in there.lost] == [(f.b, f.a) for f in back.gained]


@settings(deadline=None)
@given(evaluations(), st.randoms(use_true_random=False))
def test_the_order_of_the_files_does_not_matter(
    sides: tuple[list[EpisodeRecord], list[EpisodeRecord]], shuffled: random.Random
) -> None:
    expected = compare_sides(side("a", sides[0]), side("b", sides[1]))
    for records in sides:
        shuffled.shuffle(records)
    assert compare_sides(side("a", sides[0]), side("b", sides[1])) == expected


@settings(deadline=None)
@given(evaluations())
def test_each_question_is_paired_once_or_counted_as_left_out(
    sides: tuple[list[EpisodeRecord], list[EpisodeRecord]],
) -> None:
    found = compare_sides(side("a", sides[0]), side("b", sides[1]))
    usual = compare(*sides)
    paired = found.success.difference
    assert (paired.n, paired.better, paired.worse) == (usual.n, usual.better, usual.worse)
    assert (len(found.gained), len(found.lost)) == (paired.better, paired.worse)
    for facts, records in ((found.a, sides[0]), (found.b, sides[1])):
        assert facts.judged == len(judged(records)) == paired.n + facts.unmatched
        assert facts.failed == len(records) - facts.judged
    assert sum(group.difference.n for group in found.by_database.values()) == paired.n
    assert sum(kind.b for kind in found.failures.values()) == paired.n - found.success.b.successes
    left_out = found.a.unmatched or found.b.unmatched
    assert bool(left_out) == any(w.startswith("not the same questions") for w in found.warnings)


def compared(a: Sequence[EpisodeRecord], b: Sequence[EpisodeRecord]) -> Comparison:
    return compare_sides(side("a", a), side("b", b))


def test_success_steps_tokens_and_endings_of_a_made_up_case() -> None:
    a = make_records([True] * 4 + [False] * 12)
    b = make_records([True] * 3 + [False] + [True] * 4 + [False] * 8, tokens=30)
    found = compared(a, b)
    assert (found.success.a.success_rate, found.success.b.success_rate) == (0.25, 7 / 16)
    assert (found.success.difference.better, found.success.difference.worse) == (4, 1)
    assert {name: (g.a.successes, g.b.successes, g.difference.n) for name, g in found.by_difficulty.items()} == {
        "easy": (4, 3, 4),
        "medium": (0, 4, 4),
        "hard": (0, 0, 4),
        "extra": (0, 0, 4),
    }
    assert list(found.by_database) == ["db0", "db1", "db2", "db3"]
    assert (found.means["tokens"].before, found.means["tokens"].mean) == (10, 20)
    assert found.means["steps"].mean == pytest.approx(-2 * 3 / 16)
    assert {kind: (k.a, k.b) for kind, k in found.failures.items()} == {"gave_up": (12, 9)}
    (lost,) = found.lost
    assert (lost.question_id, lost.database, lost.difficulty) == ("q003", "db3", "easy")
    assert lost.a == Ending("correct", "", 2, "ANSWER 17")
    assert lost.b == Ending("wrong", "gave_up", 4, "ANSWER 17")
    assert found.warnings == []


def test_tokens_are_compared_where_both_sides_counted_them() -> None:
    records = make_records([True, False])
    known = {"reward", "steps", "tokens", "prompt_tokens", "parse_rate"}
    assert compared(records, records).means.keys() == known
    scripted = make_records([True, False], prompt_tokens=None)
    assert compared(scripted, records).means.keys() == known - {"tokens", "prompt_tokens"}


def test_flipped_questions_come_in_turn_from_each_database() -> None:
    databases = ["x"] * 3 + ["y", "z"]
    a = [make_record(f"q{i}", "wrong", db) for i, db in enumerate(databases)]
    b = [make_record(f"q{i}", "correct", db) for i, db in enumerate(databases)]
    assert [flip.database for flip in compared(a, b).gained] == ["x", "y", "z", "x", "x"]


def test_a_question_of_another_database_or_text_is_another_question() -> None:
    a = [make_record("1", "wrong"), make_record("2", "wrong"), make_record("3", "wrong")]
    b = [make_record("1"), make_record("2", question="another"), make_record("3", "correct", "other")]
    found = compared(a, b)
    assert (found.success.difference.n, found.a.mismatched, found.b.mismatched) == (1, 2, 2)
    assert "2 have one id but another text or database" in found.warnings[0]
    with pytest.raises(SideError, match=r"in common \(2 have the same id but another text or database\)"):
        compared(a[1:], b[1:])


def test_nothing_in_common_is_refused_with_what_each_was_played_on_and_the_fix() -> None:
    spider = side("a", make_records([True, True]), data="spider:PATH")
    other = side("b", [make_record("other")], split="train")
    with pytest.raises(SideError) as refused:
        compare_sides(spider, other)
    said = str(refused.value)
    assert "a was judged on 2 of spider:PATH, split eval and b was judged on 1 of synthetic, split train" in said
    assert "sqlenv evaluate --policy POLICY --data DATA --split SPLIT --episodes N --episodes_out FILE.jsonl" in said


def test_an_other_answer_mode_or_name_of_the_data_is_said_and_an_unknown_one_is_not_guessed() -> None:
    records = make_records([True, False])
    a, b = side("a", records), side("b", records, answer_mode="sql", data="synthetic:1")
    judge, data = compare_sides(a, b).warnings
    assert judge.startswith("A answers as value, B as sql (--answer_mode): they are not judged alike")
    assert "A synthetic, split eval; B synthetic:1, split eval" in data
    bare = Side("bare", records, notes=("nothing is known",))
    assert compare_sides(bare, b).warnings == ["nothing is known"]


def test_settings_and_flags_that_differ_are_listed_once_and_only_where_both_are_known() -> None:
    records = make_records([True, False])
    a = Side("a", records, settings={"step_budget": 5, "few_shot": 0}, flags={"step_budget": 5, "beta": 0.0, "seed": 1})
    b = Side("b", records, settings={"step_budget": 9}, flags={"step_budget": 9, "beta": 0.1, "seed": 1})
    found = compare_sides(a, b)
    assert found.settings == [Differing("step_budget", 5, 9)]
    assert found.warnings == ["they were not played alike: step_budget"]
    assert found.flags == [Differing("beta", 0.0, 0.1)]
    assert compare_sides(a, replace(b, flags={})).flags == []
