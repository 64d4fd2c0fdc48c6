"""Data sets by name, where generated ones are kept, and what odd and broken databases come to."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import platformdirs
import pytest

from env_server.cache import CACHE_VARIABLE, default_cache_dir
from env_server.data.loading import load_dataset
from env_server.data.synthetic import GENERATOR_VERSION
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from env_server.errors import DataError
from env_server.settings import DisplaySettings, EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode, SQLAction

OwnFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def synthetic(cache_dir: Path) -> Dataset:
    return load_dataset("synthetic", cache_dir=cache_dir)


@pytest.fixture
def own_folder(tmp_path: Path) -> OwnFolder:
    """Makes a folder of one's own: a database from a script, and one question for each gold query."""

    def make(script: str, *golds: str, name: str = "own", db_name: str = "shop.sqlite") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        with closing(sqlite3.connect(folder / db_name)) as connection:
            connection.executescript(script)
            connection.commit()
        lines = (json.dumps({"question": "Which?", "sql": sql}) for sql in golds)
        (folder / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return folder

    return make


def play(dataset: Dataset, *actions: tuple[str, str]) -> list[str]:
    """Play the actions on the first question; return the table names, then each result or error."""
    pool = DatabasePool(dataset.databases, EnvSettings().sandbox)
    try:
        environment = SQLEnvironment(dataset, pool)
        seen = [environment.reset(question_id=dataset.questions[0].question_id).schema_info]
        for kind, argument in actions:
            observation = environment.step(SQLAction(action_type=kind, argument=argument))
            seen.append(observation.result or observation.error)
        return seen
    finally:
        pool.close()


@pytest.fixture
def spider_folder(tmp_path: Path, pets_file: Path) -> Path:
    """A small Spider folder: one database, one gold of five rows, one that fails."""
    file = tmp_path / "database" / "pets" / "pets.sqlite"
    file.parent.mkdir(parents=True)
    shutil.copy(pets_file, file)
    golds = ("SELECT name FROM pets", "SELECT name FROM people", "SELECT count(*) FROM pets")
    entries = [{"db_id": "pets", "question": "Which?", "query": sql} for sql in golds]
    (tmp_path / "train_spider.json").write_text(json.dumps(entries), encoding="utf-8")
    return tmp_path


def test_synthetic_is_split_by_database_and_needs_no_exclusion(synthetic: Dataset, cache_dir: Path) -> None:
    assert synthetic.name == "synthetic"
    assert synthetic.excluded == ()
    train, evaluation = ({q.db_id for q in synthetic.select(split)} for split in (Split.TRAIN, Split.EVAL))
    assert train
    assert evaluation
    assert train.isdisjoint(evaluation)
    folders = {path.parent for path in synthetic.databases.values()}
    assert folders == {cache_dir / f"synthetic-v{GENERATOR_VERSION}-seed0"}


def test_the_cache_changes_nothing(synthetic: Dataset, cache_dir: Path) -> None:
    assert load_dataset("synthetic:0", cache_dir=cache_dir) == synthetic


def test_the_seed_is_part_of_the_name(synthetic: Dataset, cache_dir: Path) -> None:
    other = load_dataset(" synthetic : 7 ", cache_dir=cache_dir)
    assert {path.parent.name for path in other.databases.values()} == {f"synthetic-v{GENERATOR_VERSION}-seed7"}
    assert [q.gold_sql for q in other.questions] != [q.gold_sql for q in synthetic.questions]


def test_a_spider_folder(spider_folder: Path) -> None:
    dataset = load_dataset(f"spider:{spider_folder}")
    assert dataset.name == "spider"
    assert [q.gold.rows[0] for q in dataset.questions] == [("Rex",), (5,)]
    assert [e.detail for e in dataset.excluded] == ["missing: no such table: people"]


def test_settings_and_answer_mode_reach_the_curation(spider_folder: Path) -> None:
    settings = EnvSettings(display=DisplaySettings(max_rows=4))
    small = load_dataset(f"spider:{spider_folder}", settings=settings)
    assert [e.reason.value for e in small.excluded] == ["gold_too_large", "gold_fails"]
    typed = load_dataset(f"spider:{spider_folder}", settings=settings, answer_mode=AnswerMode.SQL)
    assert [e.reason.value for e in typed.excluded] == ["gold_fails"]


def test_progress_is_reported(spider_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_dataset(f"spider:{spider_folder}", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 3)]


def test_a_tilde_in_the_path(spider_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(spider_folder.parent))
    assert len(load_dataset(f"spider:~/{spider_folder.name}").questions) == 2


def test_a_folder_of_ones_own_by_name_and_by_path(
    own_folder: OwnFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t")
    monkeypatch.chdir(folder.parent)
    for spec in (str(folder), f"{folder}/", f"./{folder.name}", folder.name):
        assert load_dataset(spec, cache_dir=tmp_path / "cache").name == folder.name


def test_a_name_is_a_data_set_before_it_is_a_folder(
    own_folder: OwnFolder, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t", name="synthetic")
    monkeypatch.chdir(folder.parent)
    assert len(load_dataset("synthetic", cache_dir=cache_dir).questions) > 1
    assert len(load_dataset("./synthetic", cache_dir=cache_dir).questions) == 1


def test_tables_are_imported_into_the_cache_directory(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "t.csv").write_text("a,b\n1,2\n")
    (folder / "questions.jsonl").write_text('{"question": "What is b?", "sql": "SELECT b FROM t"}')
    dataset = load_dataset(str(folder), cache_dir=tmp_path / "cache")
    assert tmp_path / "cache" in dataset.databases["shop"].parents
    assert dataset.questions[0].gold.rows == ((2,),)
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(DataError, match=CACHE_VARIABLE):
        load_dataset(str(folder), cache_dir=occupied)


SPECS = ["", " ", "nothing", "spider", "spider:", "spider: ", "bird:", "Synthetic", "/some/path", "./nowhere", "x:y"]


@pytest.mark.parametrize("spec", SPECS)
def test_an_unknown_name_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(DataError) as raised:
        load_dataset(spec)
    assert repr(spec) in str(raised.value)
    assert "synthetic[:SEED], scrambled[:SEED], spider:PATH, bird:PATH, or the PATH of a folder" in str(raised.value)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    file.touch()
    with pytest.raises(DataError, match=r"is a file\. Give the folder"):
        load_dataset(str(file))


@pytest.mark.parametrize("spec", ["synthetic:x", "scrambled:-1", "synthetic:1.5", "synthetic:²"])
def test_a_seed_is_a_whole_number(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a whole number"):
        load_dataset(spec, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["synthetic", "scrambled"])
def test_a_cache_that_cannot_be_written_names_the_variable(name: str, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(DataError, match=CACHE_VARIABLE) as raised:
        load_dataset(f"{name}:3", cache_dir=occupied)
    assert str(occupied / f"{name}-v{GENERATOR_VERSION}-seed3") in str(raised.value)


def test_the_cache_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert default_cache_dir() == Path(platformdirs.user_cache_dir("sqlenv"))
    monkeypatch.delenv(CACHE_VARIABLE)
    assert default_cache_dir() == Path(platformdirs.user_cache_dir("sqlenv"))


def test_views_work_and_a_broken_one_harms_nobody(own_folder: OwnFolder) -> None:
    script = """CREATE TABLE t (a); INSERT INTO t VALUES (1), (2); CREATE VIEW v AS SELECT 2 * a AS b FROM t;
                CREATE VIEW broken AS SELECT * FROM nowhere;"""
    dataset = load_dataset(str(own_folder(script, "SELECT sum(b) FROM v", "SELECT * FROM broken")))
    assert dataset.questions[0].gold.rows == ((6,),)
    assert [e.detail for e in dataset.excluded] == ["missing: no such table: main.nowhere"]
    tables, described, sampled = play(dataset, ("DESCRIBE", "v"), ("SAMPLE", "broken"))
    assert tables == "Tables: t, v, broken"
    assert described.startswith("v (view): 2 rows")
    assert sampled == "not found: no such table: main.nowhere"


def test_triggers_never_fire(own_folder: OwnFolder) -> None:
    script = """CREATE TABLE t (a); INSERT INTO t VALUES (1);
                CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END;"""
    dataset = load_dataset(str(own_folder(script, "SELECT a FROM t")))
    assert play(dataset, ("SAMPLE", "t")) == ["Tables: t", "a\n1"]


def test_virtual_tables_work_and_their_shadows_stay_hidden(own_folder: OwnFolder) -> None:
    script = """CREATE VIRTUAL TABLE f USING fts5(body); INSERT INTO f VALUES ('hello world'), ('bye');
                CREATE VIRTUAL TABLE r USING rtree(id, low, high); INSERT INTO r VALUES (1, 2.0, 3.0);"""
    dataset = load_dataset(str(own_folder(script, "SELECT body FROM f WHERE f MATCH 'hello'", "SELECT low FROM r")))
    assert dataset.excluded == ()
    assert play(dataset, ("SAMPLE", "r"), ("QUERY", "SELECT count(*) FROM f")) == [
        "Tables: f, r",
        "id | low | high\n1 | 2.0 | 3.0",
        "count(*)\n2",
    ]


def test_names_with_quotes_spaces_dots_and_emoji(own_folder: OwnFolder) -> None:
    table = "we\"ird . na'me 😀"
    quoted = '"' + table.replace('"', '""') + '"'
    script = f"""CREATE TABLE {quoted} ("a b" INT, "c.d" TEXT, "😀" TEXT, "select" INT);
                 INSERT INTO {quoted} VALUES (1, 'x', 'y', 3);"""
    gold = f'SELECT "a b", "c.d", "😀", "select" FROM {quoted}'
    dataset = load_dataset(str(own_folder(script, gold, name="my 'own' 😀", db_name='shop "1" . 😀.db')))
    assert list(dataset.databases) == ['shop "1" . 😀']
    assert dataset.questions[0].gold.rows == ((1, "x", "y", 3),)
    assert play(dataset, ("SAMPLE", table), ("SAMPLE", quoted)) == [
        f"Tables: {table}",
        *["a b | c.d | 😀 | select\n1 | x | y | 3"] * 2,
    ]


def test_cells_that_are_not_utf8_are_shown_with_a_replacement(own_folder: OwnFolder) -> None:
    script = "CREATE TABLE t (a TEXT); INSERT INTO t VALUES (CAST(x'636166e9' AS TEXT));"
    dataset = load_dataset(str(own_folder(script, "SELECT a FROM t")))
    assert dataset.questions[0].gold.rows == (("caf\ufffd",),)
    assert play(dataset, ("SAMPLE", "t")) == ["Tables: t", "a\ncaf\ufffd"]


def test_a_database_in_another_encoding(own_folder: OwnFolder) -> None:
    script = "PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (a TEXT); INSERT INTO t VALUES ('é😀');"
    dataset = load_dataset(str(own_folder(script, "SELECT a FROM t")))
    assert play(dataset, ("SAMPLE", "t")) == ["Tables: t", "a\né😀"]


def test_a_database_in_wal_mode_that_was_closed(own_folder: OwnFolder) -> None:
    folder = own_folder("PRAGMA journal_mode = WAL; CREATE TABLE t (a); INSERT INTO t VALUES (5);", "SELECT a FROM t")
    assert [file.name for file in folder.glob("shop*")] == ["shop.sqlite"]
    assert play(load_dataset(str(folder)), ("SAMPLE", "t")) == ["Tables: t", "a\n5"]


def test_a_database_that_is_still_open_elsewhere(own_folder: OwnFolder) -> None:
    folder = own_folder("PRAGMA journal_mode = WAL; CREATE TABLE t (a);", "SELECT a FROM t")
    with closing(sqlite3.connect(folder / "shop.sqlite")) as other:
        other.execute("INSERT INTO t VALUES (5)")
        other.commit()
        with pytest.raises(DataError, match=r"shop\.sqlite-wal may hold changes that are not in it"):
            load_dataset(str(folder))
    assert play(load_dataset(str(folder)), ("SAMPLE", "t")) == ["Tables: t", "a\n5"]


def test_a_damaged_database_is_told(own_folder: OwnFolder) -> None:
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t")
    content = (folder / "shop.sqlite").read_bytes()
    (folder / "shop.sqlite").write_bytes(content[:100] + bytes(len(content) - 100))
    with pytest.raises(DataError) as raised:
        load_dataset(str(folder))
    assert "no usable question. 1 of 1 are left out as no_database" in str(raised.value)
    assert "shop.sqlite cannot be opened as a SQLite database: database disk image is malformed" in str(raised.value)


def test_a_database_that_is_cut_off_inside_a_page_is_told(own_folder: OwnFolder) -> None:
    """SQLite would read the rest of the page as zeros: here, the row as NULL."""
    folder = own_folder("CREATE TABLE t (a); INSERT INTO t VALUES (1);", "SELECT a FROM t")
    file = folder / "shop.sqlite"
    file.write_bytes(file.read_bytes()[:5_000])
    with pytest.raises(DataError, match=r"shop\.sqlite is cut off: it has 5,000 of its 8,192 bytes"):
        load_dataset(str(folder))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty (0 bytes)"), (b"hello", "is not a SQLite database, or it is encrypted")],
)
def test_a_file_that_is_no_database_is_told(own_folder: OwnFolder, content: bytes, words: str) -> None:
    folder = own_folder("CREATE TABLE t (a)", "SELECT a FROM t")
    (folder / "shop.sqlite").write_bytes(content)
    with pytest.raises(DataError) as raised:
        load_dataset(str(folder))
    assert str(raised.value).startswith(f"{folder / 'shop.sqlite'} {words}")


def test_a_refused_database_is_an_exclusion_with_the_reason(spider_folder: Path) -> None:
    lost = spider_folder / "database" / "lost.sqlite"
    lost.touch()
    file = spider_folder / "train_others.json"
    others = [{"db_id": db_id, "question": "Which?", "query": "SELECT 1"} for db_id in ("lost", "unknown")]
    file.write_text(json.dumps(others), encoding="utf-8")
    dataset = load_dataset(f"spider:{spider_folder}")
    assert [(e.db_id, e.reason.value, e.detail) for e in dataset.excluded][1:] == [
        ("lost", "no_database", f"{lost} is empty (0 bytes). Copy or unpack it again"),
        ("unknown", "no_database", "there is no file for this db_id"),
    ]


def test_the_real_folder(spider_dir: Path) -> None:
    dataset = load_dataset(f"spider:{spider_dir}")
    assert (len(dataset.questions), len(dataset.excluded), len(dataset.databases)) == (2106, 168, 46)
    assert (len(dataset.select(Split.TRAIN)), len(dataset.select(Split.EVAL))) == (1590, 516)
