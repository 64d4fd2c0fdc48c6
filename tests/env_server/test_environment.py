"""Whole episodes on a small database: the semantics of the four actions, the budget, the end, and no gold leak."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.actions import HISTORY_CHARS, JudgeJob
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Gold, Split
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.episode import LONGEST_TEXT, Scores
from env_server.errors import (
    DataError,
    EpisodeOverError,
    NoEpisodeError,
    SQLEnvError,
    StalePlanError,
    UnknownQuestionError,
)
from env_server.reward import wrong_total_bound
from env_server.service.app import create_app
from env_server.service.settings import ServiceSettings
from env_server.settings import MAX_ARGUMENT_CHARS, EnvSettings, SandboxSettings
from env_server.sql.pool import DatabasePool, QueryJob
from env_server.sql.sandbox import limit_memory
from env_server.types import AnswerMode, SQLAction, SQLObservation, Verdict


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
    described = act(environment, "describe PETS")
    assert "species TEXT" in described.result
    assert "species TEXT" in described.schema_info
    queried = act(environment, "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'")
    assert queried.result.splitlines()[-1] == "2"
    assert queried.metadata["reward_components"]["progress"] == pytest.approx(0.15)
    answered = act(environment, "ANSWER 2")
    assert (answered.done, answered.metadata["verdict"]) == (True, "correct")
    assert answered.reward == pytest.approx(1.0 - 0.02)
    history = ["DESCRIBE PETS", "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'", "ANSWER 2"]
    assert answered.action_history == history


def test_a_wrong_answer_ends_the_episode(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    answered = act(environment, "ANSWER 3")
    assert (answered.done, answered.metadata["verdict"]) == (True, "wrong")
    assert answered.reward < 0


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


BIG = 1_000_000


def big_arguments(number: int) -> list[str]:
    """Arguments of a megabyte, each another one: many words, many symbols, letters that fold, one word."""
    words = ("a, ", "(*)", "İSTANBUL ", "x", "'", "/* */", "é\n")
    return [f"SELECT {number + place} " + word * (BIG // len(word)) for place, word in enumerate(words)]


@pytest.mark.parametrize("kind", ["DESCRIBE", "SAMPLE", "QUERY", "ANSWER", "DANCE"])
def test_an_argument_that_is_too_long_is_an_error_that_costs_a_step(environment: SQLEnvironment, kind: str) -> None:
    environment.reset(question_id="cats")
    argument = "2" * (MAX_ARGUMENT_CHARS + 1)
    first, again = (environment.step(SQLAction(action_type=kind, argument=argument)) for _ in range(2))
    assert (bool(first.error), first.result, first.done, first.step_count) == (True, "", False, 1)
    assert len(first.error) < 1_000
    assert [first.reward, again.reward] == pytest.approx([-0.02, -0.05])
    assert [len(entry) for entry in again.action_history] == [HISTORY_CHARS] * 2
    accepted = environment.step(SQLAction(action_type=kind, argument=f"  {argument[1:]}  "))
    assert accepted.error != first.error
    assert accepted.reward >= again.reward


def test_megabytes_take_no_time_and_are_not_kept(environment: SQLEnvironment) -> None:
    environment.reset(question_id="cats")
    arguments = [*big_arguments(0), *big_arguments(10)]
    actions = [SQLAction(action_type="QUERY", argument=argument) for argument in arguments[:13]]
    actions.append(SQLAction(action_type="é" * BIG, argument=""))
    tracemalloc.start()
    try:
        began = time.process_time()
        last = [environment.step(action) for action in actions][-1]
        taken = time.process_time() - began
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / len(actions) < 0.05  # before there was a bound: 0.5 s
    assert kept < BIG / 10
    assert (last.step_count, len(str(last)) < 10_000) == (14, True)


@pytest.mark.parametrize(
    ("last", "verdict", "terminal"), [("QUERY SELECT 14", "out_of_budget", 0.0), ("ANSWER 2", "correct", 1.0)]
)
def test_the_last_step_of_the_budget(environment: SQLEnvironment, last: str, verdict: str, terminal: float) -> None:
    environment.reset(question_id="cats")
    observations = [act(environment, text) for text in [*(f"QUERY SELECT {i}" for i in range(14)), last]]
    assert [o.done for o in observations] == [False] * 14 + [True]
    assert observations[-1].metadata["verdict"] == verdict
    assert observations[-1].metadata["reward_components"]["terminal"] == terminal


def test_a_step_outside_an_episode_raises_and_changes_nothing(environment: SQLEnvironment) -> None:
    with pytest.raises(NoEpisodeError):
        act(environment, "DESCRIBE pets")
    environment.reset(question_id="cats")
    act(environment, "ANSWER 2")
    before = environment.state
    with pytest.raises(EpisodeOverError, match="call reset"):
        act(environment, "DESCRIBE pets")
    assert environment.state == before


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


SIZES = [
    f"CASE WHEN octet_length({name}) > 300000 THEN '(' || octet_length({name}) || ' bytes)' ELSE {name} END AS {name}"
    for name in ('"owner_id"', '"name"', '"city"')
]
SAMPLED = 'FROM main."owners" NOT INDEXED LIMIT 3'


@pytest.mark.parametrize("mode", AnswerMode)
def test_a_step_needs_at_most_one_query_or_verdict(pets: Dataset, pets_pool: DatabasePool, mode: AnswerMode) -> None:
    needs = {
        "DESCRIBE pets": None,
        "SAMPLE owners": QueryJob("pets", f"SELECT * {SAMPLED}", 3, f"SELECT {', '.join(SIZES)} {SAMPLED}"),
        "SAMPLE dragons": None,
        "QUERY SELECT 1": QueryJob("pets", "SELECT 1", 20),
        "QUERY": None,
        "ANSWER": None,
        "DANCE": None,
        "ANSWER SELECT 2": JudgeJob(pets.question("cats"), "SELECT 2") if mode is AnswerMode.SQL else None,
    }
    environment = SQLEnvironment(pets, pets_pool, answer_mode=mode)
    environment.reset(question_id="cats")
    for text, job in needs.items():
        kind, _, argument = text.partition(" ")
        assert environment.plan(SQLAction(action_type=kind, argument=argument)).job == job, text


def test_a_broken_file_is_the_callers_error(tmp_path: Path, pets: Dataset) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(pets.databases["pets"].read_bytes())
    with closing(DatabasePool({"pets": path}, EnvSettings().sandbox, max_idle=0)) as pool:
        environment = SQLEnvironment(pets, pool)
        environment.reset(question_id="cats")
        path.write_bytes(b"no database at all" * 100)
        with pytest.raises(DataError):
            act(environment, "QUERY SELECT 1")
        assert environment.state.step_count == 0, "the step is not taken"
        with pytest.raises(DataError):
            SQLEnvironment(pets, DatabasePool({"pets": path}, EnvSettings().sandbox)).reset(question_id="cats")


def test_unknown_questions_and_empty_splits_are_refused(pets: Dataset, pets_pool: DatabasePool) -> None:
    with pytest.raises(UnknownQuestionError, match=r"'nope'.*cats"):
        SQLEnvironment(pets, pets_pool).reset(question_id="nope")
    train_only = replace(pets, questions=tuple(pets.select(Split.TRAIN)))
    with pytest.raises(SQLEnvError, match="no usable question in split 'eval'"):
        SQLEnvironment(train_only, pets_pool).reset(split=Split.EVAL)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("SELECT SUM(species = 'cat') FROM pets", "correct"),
        ("SELECT COUNT(*) FROM pets", "wrong"),
        ("SELECT pet_id FROM pets", "wrong"),
        ("2", "wrong"),
        ("DROP TABLE pets", "wrong"),
    ],
)
def test_sql_mode_judges_the_rows_of_the_submitted_query(
    pets: Dataset, pets_pool: DatabasePool, text: str, verdict: str
) -> None:
    environment = SQLEnvironment(pets, pets_pool, answer_mode=AnswerMode.SQL)
    environment.reset(question_id="cats")
    assert act(environment, f"ANSWER {text}").metadata["verdict"] == verdict


def test_the_seed_decides_the_question(environment: SQLEnvironment) -> None:
    draws = [environment.reset(seed=seed).question for seed in range(20)]
    assert draws == [environment.reset(seed=seed).question for seed in range(20)]
    assert len(set(draws)) > 1
    only = {environment.reset(seed=seed, split=Split.EVAL).question for seed in range(10)}
    assert only == {"How many pets of each species are there?"}


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
@settings(max_examples=30)
def test_the_same_actions_give_the_same_bytes(pets: Dataset, actions: list[str]) -> None:
    def replay() -> list[str]:
        with closing(DatabasePool(pets.databases, EnvSettings().sandbox)) as pool:
            environment = SQLEnvironment(pets, pool)
            observations = [environment.reset(question_id="oslo")]
            while not observations[-1].done and len(observations) <= len(actions):
                observations.append(act(environment, actions[len(observations) - 1]))
            return [observation.model_dump_json() for observation in observations]

    assert replay() == replay()


@pytest.mark.parametrize("mode", AnswerMode)
def test_nothing_of_the_gold_is_visible(pets: Dataset, pets_pool: DatabasePool, mode: AnswerMode) -> None:
    """Plants unmistakable gold and looks at all that an agent, or the state endpoint, can see."""
    planted = replace(
        pets.question("cats"),
        question_id="q1",
        gold_sql="SELECT 'xyzzy-rows' -- plugh-sql",
        gold=Gold((("xyzzy-rows",),), ordered=False),
        family="families-are-not-shown",
        evidence="meow",
    )
    environment = SQLEnvironment(replace(pets, questions=(planted,)), pets_pool, answer_mode=mode)
    first = environment.reset()
    assert first.question == "How many cats are there?\nHint: meow"
    seen = [first.model_dump_json()]
    for text in [*ACTIONS[:-1], "SAMPLE pets", "ANSWER something else"]:
        last = act(environment, text)
        seen += [last.model_dump_json(), environment.state.model_dump_json()]
    for secret in ("xyzzy", "plugh", "families-are-not-shown", "gold"):
        assert secret not in "\n".join(seen).lower()
    assert set(last.metadata) == {"reward_components", "verdict"}
    assert set(environment.state.model_dump()) == {"episode_id", "step_count"}


@pytest.mark.parametrize("mode", list(AnswerMode))
def test_a_question_without_a_gold_is_not_judged(pets: Dataset, pets_pool: DatabasePool, mode: AnswerMode) -> None:
    asked = replace(pets.questions[0], question_id="typed", gold_sql="", gold=Gold((), False))
    environment = SQLEnvironment(replace(pets, questions=(asked,)), pets_pool, answer_mode=mode)
    environment.reset(question_id="typed")
    seen = act(environment, "QUERY SELECT 1")
    assert seen.reward == pytest.approx(0.01)
    assert seen.metadata["reward_components"]["progress"] == 0.0
    assert act(environment, "ANSWER").error == "ANSWER needs the answer"
    last = act(environment, "ANSWER SELECT 1")
    assert (last.done, last.verdict, last.result) == (True, Verdict.UNJUDGED, "The answer is not judged.")
    assert last.reward == -0.02


EPISODES = st.lists(st.tuples(st.sampled_from(("cats", "species")), st.lists(st.sampled_from(ACTIONS), max_size=6)))


def play(environment: SQLEnvironment, question: str, actions: Sequence[str]) -> list[SQLObservation]:
    observations = [environment.reset(question_id=question, episode_id="e")]
    for text in actions:
        if not observations[-1].done:
            observations.append(act(environment, text))
    return observations


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EPISODES)
def test_episodes_are_the_same_with_cached_scores(
    environment: SQLEnvironment, pets: Dataset, pets_pool: DatabasePool, episodes: list[tuple[str, list[str]]]
) -> None:
    scores = Scores()
    for question, actions in episodes:
        assert play(SQLEnvironment(pets, pets_pool, scores=scores), question, actions) == play(
            environment, question, actions
        )


def test_a_score_is_computed_once_unless_its_text_is_long(pets: Dataset, pets_pool: DatabasePool) -> None:
    scores = Scores()
    for _ in range(3):
        queries = [f"QUERY SELECT COUNT(*){' ' * blanks}FROM pets" for blanks in (1, 2, LONGEST_TEXT)]
        play(SQLEnvironment(pets, pets_pool, scores=scores), "cats", [*queries, "ANSWER 2"])
    assert (len(scores.phi), len(scores.judgements)) == (2, 1)
    assert scores.judgements.score("cats", "2", pytest.fail).correct


def make_factory(dataset: Dataset, settings: EnvSettings, _: Path) -> None:
    EnvironmentFactory(dataset, settings).close()


def make_app(dataset: Dataset, _settings: EnvSettings, _: Path) -> None:
    create_app(ServiceSettings(), dataset)


def load(_: Dataset, settings: EnvSettings, folder: Path) -> None:
    with pytest.raises(DataError):
        load_dataset(str(folder), settings=settings)


@pytest.fixture
def unbounded() -> Iterator[None]:
    apsw.hard_heap_limit(0)
    yield
    limit_memory(SandboxSettings())


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize("make", [make_factory, make_app, load])
def test_whoever_runs_sql_bounds_the_memory_of_the_process(
    make: Callable[[Dataset, EnvSettings, Path], None], pets: Dataset, tmp_path: Path
) -> None:
    settings = EnvSettings()
    make(pets, settings, tmp_path)
    assert apsw.hard_heap_limit(-1) == settings.sandbox.heap_bytes
