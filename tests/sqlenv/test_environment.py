"""The front door: the same methods here and on a server, and a sentence for whoever holds them wrongly."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sqlenv
from env_server.cache import CACHE_VARIABLE
from env_server.client.errors import ClientError
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.errors import ClosedError, DataError, EpisodeOverError, NoEpisodeError, SQLEnvError
from tests.env_server.conftest import RunningServer, settings
from tests.env_server.serving import action
from tests.integration.service import write_data

ROOT = Path(__file__).parents[2]
PLAYED = ("DESCRIBE pets", "SAMPLE pets", "QUERY SELECT nothing", "QUERY SELECT COUNT(*) AS n FROM pets", "ANSWER 5")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="module")
def folder(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(pets, tmp_path_factory.mktemp("pets"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(settings(tmp_path_factory.mktemp("server"), token="geheim"), load_dataset(str(folder)))
    yield running
    running.stop()


@pytest.fixture(params=["here", "server"])
def env(
    request: pytest.FixtureRequest, folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sqlenv.Environment]:
    monkeypatch.setenv("SQLENV_TOKEN", "geheim")
    with sqlenv.make(folder if request.param == "here" else f"ws://{server.address}") as environment:
        yield environment


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders.csv"
    path.write_text("customer,amount\nAnn,3.5\nBob,10.25\n", encoding="utf-8")
    return path


def test_an_episode_in_five_lines(env: sqlenv.Environment) -> None:
    env.reset(question_id="cats")
    env.describe("pets")
    env.query("SELECT COUNT(*) FROM pets WHERE species = 'cat'")
    env.answer(2)
    assert str(env).endswith("(+0.15)\nCOUNT(*)\n2\n\n> ANSWER 2 (+0.98)\nThe answer is correct.")
    assert (env.done, env.observations[-1].verdict) == (True, sqlenv.Verdict.CORRECT)
    assert env.reward == pytest.approx(0.98 + 0.15)


def test_its_observations_are_those_of_the_environment(env: sqlenv.Environment, environment: SQLEnvironment) -> None:
    expected = [environment.reset(question_id="cats", episode_id="e"), *(environment.step(action(t)) for t in PLAYED)]
    assert env.reset(question_id="cats", episode_id="e") == expected[0]
    by_method = [env.describe("pets"), env.sample("pets"), env.query("SELECT nothing"), env.step(PLAYED[3])]
    assert [*by_method, env.step(sqlenv.SQLAction(action_type="ANSWER", argument="5"))] == expected[1:]
    assert list(env.observations) == expected
    components = env.observations[1].reward_components
    assert components is not None
    assert (components.step_cost, components.success) == (-0.02, 0.02)
    assert (expected[0].reward_components, expected[0].verdict) == (None, None)


def test_words_stand_for_enums(env: sqlenv.Environment, folder: Path) -> None:
    held_out = {question.text for question in load_dataset(str(folder)).select(sqlenv.Split.EVAL)}
    assert {env.reset(split="EVAL").question for _ in range(8)} <= held_out != set()
    with pytest.raises(SQLEnvError, match=r"split is 'test': use one of 'train', 'eval', 'all'$"):
        env.reset(split="test")
    assert env.sample("pets").step_count == 1, "the episode is as it was"


MISUSES: list[tuple[Callable[[Any], object], str]] = [
    (lambda env: env.step(42), "step takes an action such as 'QUERY SELECT 1', not 42, of type int"),
    (lambda env: env.query(None), "query takes SQL, not None, of type NoneType"),
    (lambda env: env.describe(["pets"]), r"describe takes a table's name, not \['pets'\], of type list"),
    (lambda env: env.answer((1, 2)), r"answer takes a number or text .* not \(1, 2\), of type tuple"),
    (lambda env: env.answer(True), "answer takes .* not True, of type bool"),
    (lambda env: env.reset("eval"), "reset takes seed=NUMBER, not 'eval', of type str"),
    (lambda env: env.reset(question_id=5), "reset takes question_id=TEXT, not 5, of type int"),
]


@pytest.mark.parametrize(("misuse", "says"), MISUSES)
def test_a_value_of_the_wrong_type(env: sqlenv.Environment, misuse: Callable[[Any], object], says: str) -> None:
    env.reset(question_id="cats")
    with pytest.raises(TypeError, match=says):
        misuse(env)
    assert len(env.observations) == 1


@pytest.mark.parametrize(
    ("number", "said"), [(2.5, "2.5"), (np.float64(2.5), "2.5"), (np.float32(0.1), "0.1"), (np.int64(7), "7")]
)
def test_an_answer_is_any_number_as_a_person_writes_it(env: sqlenv.Environment, number: Any, said: str) -> None:
    env.reset(seed=np.int64(1))
    assert env.answer(number).action_history == [f"ANSWER {said}"]


def test_a_call_out_of_turn(env: sqlenv.Environment) -> None:
    assert repr(env).endswith(": no episode>")
    assert str(env) == repr(env)
    assert env._repr_html_() is None
    with pytest.raises(NoEpisodeError, match=r"call env\.reset\(\) first"):
        env.query("SELECT 1")
    env.reset(question_id="cats")
    env.answer("2")
    with pytest.raises(EpisodeOverError, match=r"env\.reset\(\) starts another one"):
        env.step("QUERY SELECT 1")
    env.close()
    env.close()
    with pytest.raises(ClosedError, match="this environment is closed: make another one"):
        env.reset()
    with pytest.raises(ClosedError, match="this environment is closed"):
        env.describe("pets")
    assert repr(env).endswith(": closed>")


def test_a_mistake_of_an_agent_is_an_observation(env: sqlenv.Environment) -> None:
    env.reset(question_id="cats")
    assert env.step("DANCE").error.startswith("unknown action 'DANCE'; use one of DESCRIBE")
    assert env.step("").error.startswith("unknown action ''")
    assert str(env.describe("dogs")) == "> DESCRIBE dogs (-0.02)\nError: no such table: dogs. Tables: owners, pets"


def test_a_notebook_shows_tables(env: sqlenv.Environment) -> None:
    env.reset(question_id="cats")
    env.query("SELECT '<b>' AS word, 1 AS n")
    html = env._repr_html_()
    assert html is not None
    assert "<strong>How many cats are there?</strong>" in html
    assert "<th>word</th><th>n</th>" in html
    assert "<td>&lt;b&gt;</td><td>1</td>" in html


def test_the_data_is_here_or_on_the_server(env: sqlenv.Environment, server: RunningServer) -> None:
    if server.address in repr(env):
        with pytest.raises(SQLEnvError, match="the questions stay on"):
            _ = env.dataset
        with pytest.raises(SQLEnvError, match="asks its own questions"):
            env.reset(question="How many?")
    else:
        assert len(env.dataset.questions) == 4


def test_a_question_of_ones_own(folder: Path) -> None:
    with sqlenv.make(folder) as env:
        env.reset(question="Who is older than 5?")
        env.query("SELECT name FROM pets WHERE age > 5")
        last = env.answer("Rex, Max")
        assert (last.verdict, last.result) == (sqlenv.Verdict.UNJUDGED, "The answer is not judged.")
        assert env.observations[1].reward_components == sqlenv.RewardComponents(
            step_cost=-0.02, success=0.02, new_information=0.01, operational=0.01, total=0.01
        )
        with pytest.raises(SQLEnvError, match="question_id, seed and split choose among the questions of the data"):
            env.reset(question="Who?", question_id="cats")
        with pytest.raises(SQLEnvError, match="leave them out"):
            env.reset(question="Who?", split="eval")
        assert env.reset(question_id="cats").question == "How many cats are there?"


def test_a_file_is_looked_around_in(orders: Path) -> None:
    with sqlenv.make(orders) as env:
        assert str(env.reset()) == "No question: look around\nTables: orders"
        assert env.query("SELECT SUM(amount) AS total FROM orders").result == "total\n13.75"
        assert env.reset(question="Who spent most?").question == "Who spent most?"


def test_a_sqlite_file_and_a_folder_without_questions(pets_file: Path, orders: Path, tmp_path: Path) -> None:
    with sqlenv.make(str(pets_file)) as env:
        assert env.reset().schema_info == "Tables: owners, pets"
    shutil.copy(pets_file, tmp_path)
    with sqlenv.make(tmp_path) as env:
        with pytest.raises(DataError, match="there are 2 databases; say which one"):
            env.reset()
        assert env.reset(database="pets").schema_info == "Tables: owners, pets"
        with pytest.raises(DataError, match="there is no database 'dogs'"):
            env.reset(database="dogs", question="How many?")


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"data": 3}, TypeError, "make takes the name of a data set, a path or a URL, not 3, of type int"),
        ({"data": "missing.csv"}, DataError, "missing.csv does not exist"),
        ({"data": "missing"}, DataError, "'missing' names no data set and no folder"),
        ({"settings": {"step_budget": 5}}, TypeError, r"make takes settings=sqlenv\.EnvSettings\(\.\.\.\), not"),
        ({"answer_mode": "prose"}, SQLEnvError, "answer_mode is 'prose': use one of 'value', 'sql'"),
        ({"token": "geheim"}, SQLEnvError, "token is for servers"),
        ({"data": "ws://localhost:1", "answer_mode": "sql"}, SQLEnvError, "the server decides answer_mode"),
        ({"data": "ws://localhost:1"}, ClientError, "Is it running, and is the port right"),
    ],
)
def test_what_cannot_be_made(arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        sqlenv.make(**arguments)


def test_an_answer_may_be_a_query(folder: Path) -> None:
    limits = sqlenv.EnvSettings(step_budget=2)
    with sqlenv.make(folder, answer_mode="sql", settings=limits) as env:
        assert env.reset(question_id="cats").budget_remaining == 2
        assert env.answer("SELECT COUNT(*) FROM pets WHERE species = 'cat'").verdict == "correct"


IMPORT = """
import sys, sqlenv
def heavy(): return sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:]))
print(heavy())
assert set(sqlenv.__all__) <= set(dir(sqlenv))
for name in sqlenv.__all__: getattr(sqlenv, name)
sqlenv.make().close()
print(heavy())
"""


def test_importing_it_loads_nothing_heavy(generated_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even pydantic; and all that it offers, and an environment, come without what serves and trains."""
    monkeypatch.setenv(CACHE_VARIABLE, str(generated_cache))
    asked = ("torch", "transformers", "trl", "fastapi", "uvicorn", "apsw", "sqlglot", "pydantic", "websockets", "rich")
    done = subprocess.run([sys.executable, "-c", IMPORT, *asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['apsw', 'pydantic', 'sqlglot']"]


def test_a_name_that_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="module 'sqlenv' has no attribute 'mke'"):
        _ = sqlenv.mke  # type: ignore[attr-defined]
