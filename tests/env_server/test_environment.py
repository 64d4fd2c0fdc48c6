"""Whole episodes on a small database: the semantics of the four actions, the budget, the end, and no gold leak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.environment import SQLEnvironment
from env_server.errors import (
    DataError,
    EpisodeOverError,
    NoEpisodeError,
    SQLEnvError,
    StalePlanError,
    UnknownQuestionError,
)
from env_server.jobs import JudgeJob, QueryJob
from env_server.reward import wrong_total_bound
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode, SQLAction, SQLObservation


def act(environment: SQLEnvironment, text: str) -> SQLObservation:
    kind, _, argument = text.partition(" ")
    return environment.step(SQLAction(action_type=kind, argument=argument))


def test_reset_shows_the_question_and_the_table_names_and_nothing_else(environment: SQLEnvironment) -> None:
    observation = environment.reset(question_id="cats", episode_id="e1")
    assert observation.question == "How many cats are there?"
    assert observation.schema_info == "Tables: owners, pets"
    assert observation.budget_remaining == 15
    assert (observation.result, observation.error, observation.done, observation.metadata) == ("", "", False, {})
    assert environment.state.model_dump() == {"episode_id": "e1", "step_count": 0}


def test_an_episode_played_well(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    described = act(environment, "DESCRIBE pets")
    assert "species TEXT" in described.result
    assert "species TEXT" in described.schema_info
    queried = act(environment, "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'")
    assert queried.result.splitlines()[-1] == "2"
    assert queried.metadata["reward_components"]["progress"] == pytest.approx(0.15)
    answered = act(environment, "ANSWER 2")
    assert answered.done
    assert answered.metadata["verdict"] == "correct"
    assert answered.reward == pytest.approx(1.0 - 0.02)
    assert answered.action_history == [
        "DESCRIBE pets",
        "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'",
        "ANSWER 2",
    ]


def test_a_wrong_answer_ends_the_episode(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    answered = act(environment, "ANSWER 3")
    assert answered.done
    assert answered.metadata["verdict"] == "wrong"
    assert answered.reward < 0


def test_action_types_are_case_insensitive(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    assert act(environment, "describe PETS").error == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("DESCRIBE dragons", "owners, pets"),
        ("SAMPLE dragons", "owners, pets"),
        ("DESCRIBE", "needs a table name"),
        ("QUERY", "needs a SQL query"),
        ("ANSWER", "needs the answer"),
        ("DANCE pets", "DESCRIBE, SAMPLE, QUERY, ANSWER"),
        ("QUERY DELETE FROM pets", ""),
        ("QUERY SELECT wings FROM pets", "no such column: wings"),
    ],
)
def test_a_mistake_is_an_observation_that_costs_a_step(environment: SQLEnvironment, text: str, says: str) -> None:
    environment.reset(question_id="cats")
    observation = act(environment, text)
    assert says in observation.error
    assert observation.error
    assert "\n" not in observation.error
    assert observation.result == ""
    assert not observation.done
    assert observation.step_count == 1
    assert observation.reward == pytest.approx(-0.02)


def test_the_budget_ends_the_episode_with_terminal_reward_zero(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    observations = [act(environment, f"QUERY SELECT {i}") for i in range(15)]
    assert [o.done for o in observations] == [False] * 14 + [True]
    assert observations[-1].metadata["verdict"] == "out_of_budget"
    assert observations[-1].metadata["reward_components"]["terminal"] == 0.0


def test_an_answer_on_the_last_step_counts(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    for i in range(14):
        act(environment, f"QUERY SELECT {i}")
    assert act(environment, "ANSWER 2").metadata["verdict"] == "correct"


def test_a_step_after_the_end_raises_and_changes_nothing(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    act(environment, "ANSWER 2")
    before = environment.state
    with pytest.raises(EpisodeOverError, match="call reset"):
        act(environment, "DESCRIBE pets")
    assert environment.state == before


def test_a_step_before_reset_raises(environment: SQLEnvironment) -> None:
    with pytest.raises(NoEpisodeError):
        act(environment, "DESCRIBE pets")


def test_planning_changes_nothing_and_a_step_is_taken_once(environment: SQLEnvironment) -> None:
    first = environment.reset(question_id="cats")
    action = SQLAction(action_type="describe", argument=" pets ")
    environment.plan(SQLAction(action_type="ANSWER", argument="2"))
    planned = environment.plan(action)
    assert environment.plan(action) == planned
    assert environment.state.step_count == first.step_count
    observation = environment.apply(planned)
    assert observation.action_history == ["DESCRIBE pets"]
    with pytest.raises(StalePlanError):
        environment.apply(planned)
    assert environment.state.step_count == 1
    late = environment.plan(action)
    environment.reset(question_id="cats")
    with pytest.raises(StalePlanError):
        environment.apply(late)


def test_a_step_needs_at_most_one_query_or_verdict(pets: Dataset) -> None:
    pool = DatabasePool(pets.databases, EnvSettings().sandbox)
    needs = {
        "DESCRIBE pets": None,
        "SAMPLE owners": QueryJob("pets", 'SELECT * FROM main."owners" NOT INDEXED LIMIT 3', 3),
        "SAMPLE dragons": None,
        "QUERY SELECT 1": QueryJob("pets", "SELECT 1", 20),
        "QUERY": None,
        "ANSWER": None,
        "DANCE": None,
    }
    verdicts = {AnswerMode.VALUE: None, AnswerMode.SQL: JudgeJob(pets.question("cats"), "SELECT 2")}
    for mode, verdict in verdicts.items():
        environment = SQLEnvironment(pets, pool, answer_mode=mode)
        environment.reset(question_id="cats")
        for text, job in {**needs, "ANSWER SELECT 2": verdict}.items():
            kind, _, argument = text.partition(" ")
            assert environment.plan(SQLAction(action_type=kind, argument=argument)).job == job, text
    pool.close()


def test_a_broken_file_is_the_callers_error(tmp_path: Path, pets: Dataset) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(pets.databases["pets"].read_bytes())
    pool = DatabasePool({"pets": path}, EnvSettings().sandbox, max_idle=0)
    environment = SQLEnvironment(pets, pool)
    environment.reset(question_id="cats")
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(DataError):
        act(environment, "QUERY SELECT 1")
    assert environment.state.step_count == 0, "the step is not taken"
    with pytest.raises(DataError):
        SQLEnvironment(pets, DatabasePool({"pets": path}, EnvSettings().sandbox)).reset(question_id="cats")
    pool.close()


def test_unknown_questions_and_empty_splits_are_refused(pets: Dataset) -> None:
    pool = DatabasePool(pets.databases, EnvSettings().sandbox)
    environment = SQLEnvironment(pets, pool)
    with pytest.raises(UnknownQuestionError, match=r"'nope'.*cats"):
        environment.reset(question_id="nope")
    train_only = Dataset("train only", pets.select(Split.TRAIN), pets.databases)  # type: ignore[arg-type]
    with pytest.raises(SQLEnvError, match="no usable question in split 'eval'"):
        SQLEnvironment(train_only, pool).reset(split=Split.EVAL)
    pool.close()


def test_the_seed_decides_the_question(environment: SQLEnvironment) -> None:
    draws = [environment.reset(seed=seed).question for seed in range(20)]
    assert draws == [environment.reset(seed=seed).question for seed in range(20)]
    assert len(set(draws)) > 1
    only = {environment.reset(seed=seed, split=Split.EVAL).question for seed in range(10)}
    assert only == {"How many pets of each species are there?"}


def test_sql_mode_judges_the_rows_of_the_submitted_query(pets: Dataset) -> None:
    pool = DatabasePool(pets.databases, EnvSettings().sandbox)
    environment = SQLEnvironment(pets, pool, answer_mode=AnswerMode.SQL)
    for text, verdict in [
        ("SELECT SUM(species = 'cat') FROM pets", "correct"),
        ("SELECT COUNT(*) FROM pets", "wrong"),
        ("SELECT pet_id FROM pets", "wrong"),
        ("2", "wrong"),
        ("DROP TABLE pets", "wrong"),
    ]:
        environment.reset(question_id="cats")
        assert act(environment, f"ANSWER {text}").metadata["verdict"] == verdict, text
    pool.close()


def test_evidence_is_shown_with_the_question(pets: Dataset) -> None:
    question = Question(
        "q", "How heavy?", "pets", "SELECT 1", Hardness.EASY, Split.TRAIN, Gold(((1,),), False), evidence="in kg"
    )
    pool = DatabasePool(pets.databases, EnvSettings().sandbox)
    environment = SQLEnvironment(Dataset("d", (question,), pets.databases), pool)
    assert environment.reset().question == "How heavy?\nHint: in kg"
    pool.close()


ACTIONS = [
    "DESCRIBE pets",
    "SAMPLE owners",
    "QUERY SELECT COUNT(*) FROM pets",
    "QUERY SELECT name FROM pets ORDER BY age DESC LIMIT 1",
    "QUERY SELECT T1.name FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id WHERE T2.city = 'Oslo'",
    "QUERY SELECT 1; DROP TABLE pets",
    "QUERY SELECT",
    "DANCE",
    "DESCRIBE",
    "ANSWER wrong",
]


@given(st.sampled_from(["cats", "oldest", "oslo", "species"]), st.lists(st.sampled_from(ACTIONS), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_wrong_answer_never_pays(environment: SQLEnvironment, question_id: str, actions: list[str]) -> None:
    environment.reset(question_id=question_id)
    total = 0.0
    for text in actions:
        observation = act(environment, text)
        total += observation.reward
        if observation.done:
            break
    assert total <= wrong_total_bound(EnvSettings().reward, 15) + 1e-9


@given(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_the_same_actions_give_the_same_bytes(pets: Dataset, actions: list[str]) -> None:
    def replay() -> list[str]:
        pool = DatabasePool(pets.databases, EnvSettings().sandbox)
        environment = SQLEnvironment(pets, pool)
        seen = [environment.reset(question_id="oslo").model_dump_json()]
        for text in actions:
            observation = act(environment, text)
            seen.append(observation.model_dump_json())
            if observation.done:
                break
        pool.close()
        return seen

    assert replay() == replay()


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


def test_nothing_of_the_gold_is_visible(pets_file: Any) -> None:
    """Plants unmistakable gold and walks every field that an agent, or the state endpoint, can see."""
    secret_sql, secret_value = "SELECT 'xyzzy-gold' -- plugh-sql", "xyzzy-gold"
    question = Question(
        question_id="q1",
        text="What is the secret?",
        db_id="pets",
        gold_sql=secret_sql,
        hardness=Hardness.EASY,
        split=Split.TRAIN,
        gold=Gold(((secret_value,),), ordered=False),
        family="families-are-not-shown",
    )
    pool = DatabasePool({"pets": pets_file}, EnvSettings().sandbox)
    for mode in AnswerMode:
        environment = SQLEnvironment(Dataset("d", (question,), {"pets": pets_file}), pool, answer_mode=mode)
        seen: list[Any] = [json.loads(environment.reset().model_dump_json())]
        for text in [*ACTIONS[:-1], "SAMPLE pets", "ANSWER something else"]:
            seen.append(json.loads(act(environment, text).model_dump_json()))
            seen.append(json.loads(environment.state.model_dump_json()))
        visible = "\n".join(strings(seen))
        for secret in ("xyzzy", "plugh", "families-are-not-shown"):
            assert secret not in visible
        final = seen[-2]
        assert set(final["metadata"]) == {"reward_components", "verdict"}
        assert set(seen[-1]) == {"episode_id", "step_count"}
        assert "gold" not in visible.lower()
    pool.close()
