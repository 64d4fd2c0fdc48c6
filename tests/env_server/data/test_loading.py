"""Data sets by name, where generated ones are kept, and what odd and broken databases come to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import platformdirs
import pytest

from env_server.cache import CACHE_VARIABLE, Cache, default_cache_dir
from env_server.data.loading import is_folder, is_named, load_dataset
from env_server.data.synthetic import KIND
from env_server.dataset import Split
from env_server.environment import EnvironmentFactory
from env_server.errors import DataError
from env_server.settings import DisplaySettings, EnvSettings, SandboxSettings
from env_server.types import AnswerMode, SQLAction
from tests.env_server.data.folders import add_database, spider_entry, write_entries

OwnFolder = Callable[..., Path]


@pytest.fixture
def own_folder(tmp_path: Path) -> OwnFolder:
    """Makes a folder of one's own: a database from a script, and one question for each gold query."""

    def make(script: str, *golds: str, name: str = "own", db_name: str = "shop.sqlite") -> Path:
        add_database(tmp_path / name, db_name, script)
        write_entries(tmp_path / name, [{"question": "Which?", "sql": sql} for sql in golds])
        return tmp_path / name

    return make


def test_generated_data_are_split_by_database_and_kept_under_their_seed(
    own_folder: OwnFolder, generated_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is a data set before it is a folder."""
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t", name="synthetic")
    monkeypatch.chdir(folder.parent)
    assert len(load_dataset("./synthetic", cache_dir=generated_cache).questions) == 1
    first, again = (load_dataset(name, cache_dir=generated_cache) for name in ("synthetic", "synthetic:0"))
    other = load_dataset(" synthetic : 7 ", cache_dir=generated_cache)
    assert again == first
    assert (first.name, first.excluded) == ("synthetic", ())
    for seed, dataset in ((0, first), (7, other)):
        folder = Cache(generated_cache).path(KIND, f"synthetic-seed{seed}")
        assert {path.parent for path in dataset.databases.values()} == {folder}
        train, evaluation = ({q.db_id for q in dataset.select(split)} for split in (Split.TRAIN, Split.EVAL))
        assert train
        assert evaluation
        assert train.isdisjoint(evaluation)
    assert [q.gold_sql for q in other.questions] != [q.gold_sql for q in first.questions]


SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) SELECT max(i) FROM n"


def test_settings_answer_mode_and_progress_reach_the_curation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_database(tmp_path, "data/database/t.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2), (3);")
    golds = ("SELECT a FROM t", "SELECT a FROM people", "SELECT count(*) FROM t", SLOW)
    write_entries(tmp_path, [spider_entry("t", query=sql) for sql in golds], "data/train_spider.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = EnvSettings(display=DisplaySettings(max_rows=2))
    seen: list[tuple[int, int]] = []
    small = load_dataset("spider:~/data", settings=settings, progress=lambda *counts: seen.append(counts))
    assert [e.reason.value for e in small.excluded] == ["gold_too_large", "gold_fails"]
    assert seen == [(4, 4)]
    typed = load_dataset("spider:~/data", settings=settings, answer_mode=AnswerMode.SQL)
    assert [e.detail for e in typed.excluded] == ["missing: no such table: people"]
    sandbox = SandboxSettings(vm_steps=10_000, heap_bytes=SandboxSettings().heap_bytes // 2)
    short = load_dataset("spider:~/data", settings=EnvSettings(sandbox=sandbox))
    assert [e.reason.value for e in short.excluded] == ["gold_fails", "gold_too_slow"]
    assert apsw.hard_heap_limit(-1) == sandbox.heap_bytes
    load_dataset("spider:~/data")  # bounds the memory of this process as before


def test_a_folder_of_ones_own_by_name_and_by_path(
    own_folder: OwnFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t")
    monkeypatch.chdir(folder.parent)
    for spec in (str(folder), f"{folder}/", f"./{folder.name}", folder.name):
        assert load_dataset(spec, cache_dir=tmp_path / "cache").name == folder.name


SPECS = ["", " ", "nothing", "spider", "spider:", "spider: ", "bird:", "Synthetic", "/some/path", "./nowhere", "x:y"]


@pytest.mark.parametrize("spec", SPECS)
def test_an_unknown_name_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(DataError) as raised:
        load_dataset(spec)
    assert repr(spec) in str(raised.value)
    assert "synthetic[:SEED], scrambled[:SEED], spider:PATH, bird:PATH, or the PATH of a folder" in str(raised.value)


def test_a_name_is_a_folder_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="'file' names no data set and no folder"):
        load_dataset("file")


@pytest.mark.parametrize(
    ("spec", "named"),
    [("synthetic", True), ("synthetic:7", True), ("spider:x", True), ("spider", False), ("shop", False)],
)
def test_the_name_of_a_data_set_counts_whatever_folders_there_are(
    spec: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / spec).mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_named(spec) is named
    assert is_folder(spec) is not named


@pytest.mark.parametrize("spec", ["synthetic:x", "scrambled:-1", "synthetic:1.5", "synthetic:²"])
def test_a_seed_is_a_whole_number(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a whole number"):
        load_dataset(spec, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["synthetic", "scrambled", "shop"])
def test_a_cache_that_cannot_be_written_names_the_variable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "t.csv").write_text("a,b\n1,2\n")
    write_entries(tmp_path / "shop", [{"question": "What is b?", "sql": "SELECT b FROM t"}])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=CACHE_VARIABLE) as raised:
        load_dataset(name, cache_dir=tmp_path / "file")
    assert str(tmp_path / "file") in str(raised.value)


def test_the_cache_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    users = Path(platformdirs.user_cache_dir("sqlenv"))
    for value, expected in ((str(tmp_path / "mine"), tmp_path / "mine"), ("", users)):
        monkeypatch.setenv(CACHE_VARIABLE, value)
        assert default_cache_dir() == expected
    monkeypatch.delenv(CACHE_VARIABLE)
    assert default_cache_dir() == users


WEIRD = """we"ird . na'me 😀"""
QUOTED = '"' + WEIRD.replace('"', '""') + '"'


@pytest.mark.parametrize(
    ("script", "gold", "rows", "seen"),
    [
        (
            """CREATE TABLE t (a); INSERT INTO t VALUES (1), (2); CREATE VIEW v AS SELECT 2 * a AS b FROM t;
            CREATE VIEW broken AS SELECT * FROM nowhere;""",
            "SELECT sum(b) FROM v",
            ((6,),),
            {
                "": "Tables: t, v, broken",
                "SAMPLE v": "b\n2\n4",
                "SAMPLE broken": "not found: no such table: main.nowhere",
            },
        ),
        (
            """CREATE TABLE t (a); INSERT INTO t VALUES (1);
            CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END;""",
            "SELECT a FROM t",
            ((1,),),
            {"": "Tables: t", "SAMPLE t": "a\n1"},
        ),
        (
            """CREATE VIRTUAL TABLE f USING fts5(body); INSERT INTO f VALUES ('hello world'), ('bye');
            CREATE VIRTUAL TABLE r USING rtree(id, low, high); INSERT INTO r VALUES (1, 2.0, 3.0);""",
            "SELECT body FROM f WHERE f MATCH 'hello'",
            (("hello world",),),
            {
                "": "Tables: f, r",
                "SAMPLE r": "id | low | high\n1 | 2.0 | 3.0",
                "QUERY SELECT count(*) FROM f": "count(*)\n2",
            },
        ),
        (
            f"""CREATE TABLE {QUOTED} ("a b" INT, "c.d" TEXT, "😀" TEXT, "select" INT);
            INSERT INTO {QUOTED} VALUES (1, 'x', 'y', 3);""",
            f'SELECT "a b", "c.d", "😀", "select" FROM {QUOTED}',
            ((1, "x", "y", 3),),
            {
                "": f"Tables: {WEIRD}",
                f"SAMPLE {WEIRD}": "a b | c.d | 😀 | select\n1 | x | y | 3",
                f"SAMPLE {QUOTED}": "a b | c.d | 😀 | select\n1 | x | y | 3",
            },
        ),
        (
            "CREATE TABLE t (a TEXT); INSERT INTO t VALUES (CAST(x'636166e9' AS TEXT));",
            "SELECT a FROM t",
            (("caf\ufffd",),),
            {"SAMPLE t": "a\ncaf\ufffd"},
        ),
        (
            "PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (a TEXT); INSERT INTO t VALUES ('é😀');",
            "SELECT a FROM t",
            (("é😀",),),
            {"SAMPLE t": "a\né😀"},
        ),
        (
            "PRAGMA journal_mode = WAL; CREATE TABLE t (a); INSERT INTO t VALUES (5);",
            "SELECT a FROM t",
            ((5,),),
            {"SAMPLE t": "a\n5"},
        ),
    ],
    ids=["views", "triggers", "virtual tables", "odd names", "no UTF-8", "UTF-16", "WAL mode, closed"],
)
def test_odd_databases_are_played(
    own_folder: OwnFolder, script: str, gold: str, rows: tuple[object, ...], seen: dict[str, str]
) -> None:
    folder = own_folder(script, gold, name="my 'own' 😀", db_name='shop "1" . 😀.db')
    dataset = load_dataset(str(folder))
    assert list(dataset.databases) == ['shop "1" . 😀']
    assert dataset.questions[0].gold.rows == rows
    with EnvironmentFactory(dataset) as factory:
        environment = factory.make()
        assert environment.reset().schema_info == seen.pop("", "Tables: t")
        for text, expected in seen.items():
            kind, _, argument = text.partition(" ")
            observation = environment.step(SQLAction(action_type=kind, argument=argument))
            assert (observation.result or observation.error) == expected


def test_a_damaged_database_is_told(own_folder: OwnFolder) -> None:
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t")
    content = (folder / "shop.sqlite").read_bytes()
    (folder / "shop.sqlite").write_bytes(content[:100] + bytes(len(content) - 100))
    with pytest.raises(DataError) as raised:
        load_dataset(str(folder))
    assert "no usable question. 1 of 1 are left out as no_database" in str(raised.value)
    assert "shop.sqlite cannot be opened as a SQLite database: database disk image is malformed" in str(raised.value)


def test_a_folder_of_data_may_be_the_cache_directory_too(own_folder: OwnFolder) -> None:
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t")
    first, second = (load_dataset(str(folder), cache_dir=folder) for _ in range(2))
    assert first == second
    assert list(second.databases) == ["shop"]


def test_answers_hide_the_gold_sql_and_nothing_else(own_folder: OwnFolder, tmp_path: Path) -> None:
    script = "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2.5)"
    spec = str(own_folder(script, "SELECT max(a) FROM t", "SELECT count(*) FROM t"))
    whole, hidden = (load_dataset(name, cache_dir=tmp_path / "cache") for name in (spec, f"answers:{spec}"))
    assert [question.gold_sql for question in hidden.questions] == ["", ""]
    assert all(question.judged for question in hidden.questions)
    assert [(q.question_id, q.gold, q.hardness, q.split) for q in hidden.questions] == [
        (q.question_id, q.gold, q.hardness, q.split) for q in whole.questions
    ]
    with pytest.raises(DataError, match="sql mode"):
        load_dataset(f"answers:{spec}", answer_mode=AnswerMode.SQL, cache_dir=tmp_path / "cache")
