"""The order of questions: TRL's own, the same on every rank and after every restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from trainer.config import ConfigError, EpisodeArguments
from trainer.training.questions import EpochOrder, QuestionFilter, fold_of

HARDNESS = [Hardness.EASY, Hardness.MEDIUM, Hardness.HARD, Hardness.EXTRA]


def questions(count: int) -> list[Question]:
    gold = Gold(rows=((1,),), ordered=False)
    return [
        Question(f"q{i}", f"question {i}", "d", "SELECT 1", HARDNESS[i % 4], Split.TRAIN, gold) for i in range(count)
    ]


@given(count=st.integers(4, 20), groups=st.integers(1, 4), seed=st.integers(0, 9), asked=st.lists(st.integers(0, 12)))
def test_epochs_are_trls_wherever_a_run_begins(count: int, groups: int, seed: int, asked: list[int]) -> None:
    ids = [f"q{i}" for i in range(count)]
    sampler = RepeatSampler(ids, mini_repeat_count=1, batch_size=groups, repeat_count=1, shuffle=True, seed=seed)
    theirs = [ids[index] for _ in range(14) for index in sampler]
    order = EpochOrder(ids, seed)
    for batch in asked:
        drawn = order.draw(batch, groups)
        assert list(drawn[:groups]) == theirs[batch * groups : (batch + 1) * groups]
        assert sorted(drawn) == sorted(ids), "the others stand ready, each once"


def dataset_of(asked: Sequence[Question]) -> Dataset:
    return Dataset("some", tuple(asked), {question.db_id: Path("/nowhere") for question in asked})


@given(levels=st.sets(st.sampled_from(HARDNESS), min_size=1), count=st.integers(4, 12))
def test_questions_of_a_level_are_all_that_have_it_in_their_order(levels: set[Hardness], count: int) -> None:
    asked = questions(count)
    kept = QuestionFilter(tuple(sorted(levels))).asked(dataset_of(asked), "here")
    assert kept == [question for question in asked if question.hardness in levels]


def test_levels_without_a_question_are_refused_with_what_there_is() -> None:
    some = [question for question in questions(8) if question.hardness is not Hardness.HARD]
    hard = QuestionFilter((Hardness.HARD,))
    with pytest.raises(ConfigError) as refusal:
        hard.asked(dataset_of(some), "spider:here")
    assert str(refusal.value) == (
        "--difficulty hard leaves no training question of spider:here, which has 2 easy, 2 medium, 2 extra"
    )
    assert hard.asked(dataset_of([]), "here") == [], "whoever wants questions says so"


def in_databases(count: int) -> list[Question]:
    return [
        replace(question, question_id=f"{db} {question.question_id}", db_id=f"shop_{db}")
        for db in range(count)
        for question in questions(4)
    ]


@given(databases=st.integers(1, 30), count=st.integers(1, 5))
def test_folds_deal_databases_out_whole_and_none_twice(databases: int, count: int) -> None:
    asked = in_databases(databases)
    filters = [QuestionFilter(folds=frozenset((number,)), of_folds=count) for number in range(1, count + 1)]
    dealt = [[question for question in asked if each.admits(question)] for each in filters]
    assert sorted(q.question_id for part in dealt for q in part) == sorted(q.question_id for q in asked)
    assert all(len(part) == 4 * len({question.db_id for question in part}) for part in dealt)
    assert QuestionFilter(folds=frozenset(range(1, count + 1)), of_folds=count).asked(dataset_of(asked), "") == asked


def test_a_fold_without_a_database_is_named() -> None:
    (missing,) = {1, 2} - {fold_of("d", 2)}
    with pytest.raises(ConfigError, match=f"with --folds {missing}/2 leaves no training question of here"):
        QuestionFilter(folds=frozenset((missing,)), of_folds=2).asked(dataset_of(questions(4)), "here")


@pytest.mark.parametrize(
    ("flag", "kept"),
    [(None, ({1}, 1)), ("1/1", ({1}, 1)), ("2/3", ({2}, 3)), ("1,2/3", ({1, 2}, 3)), (" 1, 3 / 3", ({1, 3}, 3))],
)
def test_folds_are_read(flag: str | None, kept: tuple[set[int], int]) -> None:
    numbers, count = EpisodeArguments(folds=flag).kept_folds
    assert (set(numbers), count) == kept


@pytest.mark.parametrize("flag", ["", "1", "/3", "1,/3", "0/3", "4/3", "1/0", "-1/3", "a/3", "1/3/3", "1.5/3"])
def test_folds_that_are_none_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--folds"):
        EpisodeArguments(folds=flag)
