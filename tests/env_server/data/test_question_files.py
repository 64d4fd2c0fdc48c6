"""Questions in a table, beside a file of suggestions, and which file is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env_server.data.folder import find_sources, read_questions
from env_server.data.loading import has_no_questions, read_databases
from env_server.data.question_files import SUGGESTED_FILE, question_files
from env_server.data.raw import RawQuestion
from env_server.dataset import Split
from env_server.errors import DataError
from tests.env_server.data.folders import add_database, spider_entry, write_entries

COUNT = {"question": "How many?", "sql": "SELECT COUNT(*) FROM t"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one database and no questions."""
    add_database(tmp_path, "shop.sqlite")
    return tmp_path


def read(folder: Path) -> list[RawQuestion]:
    return read_questions(folder, find_sources(folder))


def write(folder: Path, text: str, name: str = "questions.csv") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        read(folder)
    return str(raised.value)


@pytest.mark.parametrize(("name", "mark"), [("questions.csv", ","), ("Questions.csv", ";"), ("questions.tsv", "\t")])
def test_questions_in_a_table(folder: Path, name: str, mark: str) -> None:
    rows = [
        ["Question", "SQL ", "note", "id", "evidence", "split", "database"],
        ["How many?", "SELECT COUNT(*) FROM t", "x", "7", "", "eval", ""],
        ['"Which, then?"', "\"SELECT a,\n b; FROM t WHERE a = ''x''\"", "", "", "so", "train", "shop"],
    ]
    write(folder, "\n".join(mark.join(row) for row in rows), name)
    first, second = read(folder)
    assert first == RawQuestion("7", "How many?", "shop", "SELECT COUNT(*) FROM t", Split.EVAL)
    assert (second.question_id, second.text, second.evidence) == (f"{Path(name).stem}-0001", "Which, then?", "so")
    assert second.sql == "SELECT a,\n b; FROM t WHERE a = ''x''"


QUERY = "SELECT COUNT(*) FROM t"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
@pytest.mark.parametrize(
    "entry",
    [
        {"question": "How many?", "query": QUERY},
        {"q": "How many?", "sql": QUERY},
        {"Prompt": "How many?", "Gold SQL": QUERY},
        {"query": "How many?", "sql": QUERY},
        {"text": "How many?", "completion": QUERY, "db_id": "shop"},
        {"question": "How many?", "answer": "1", "SQL": QUERY, "text": "x"},
    ],
    ids=lambda entry: ",".join(entry),
)
def test_other_names_of_the_keys(folder: Path, entry: dict[str, str], suffix: str) -> None:
    if suffix in (".csv", ".tsv"):
        mark = "," if suffix == ".csv" else "\t"
        write(folder, "\n".join(mark.join(cells) for cells in (entry.keys(), entry.values())), f"questions{suffix}")
    else:
        write(folder, json.dumps(entry if suffix == ".jsonl" else [entry]), f"questions{suffix}")
    assert set(find_sources(folder).usable) == {"shop"}
    (question,) = read(folder)
    assert (question.text, question.db_id, question.sql) == ("How many?", "shop", QUERY)


def test_questions_as_spider_writes_them_are_read_too(folder: Path) -> None:
    write_entries(folder, [spider_entry("shop", sql={"select": []})], "dev.json")
    assert [(q.db_id, q.sql) for q in read(folder)] == [("shop", "SELECT count(*) FROM t")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("questions.csv", "question,note\nWho?,me\n"),
        ("questions.csv", "question,gold answer\nWho?,me\n"),
        ("questions.csv", "sql\nSELECT 1\n"),
        ("questions.csv", "wording,query\nHow many?,SELECT 1\n"),
        ("questions.parquet", "question,sql\nHow many?,SELECT 1\n"),
        ("dev.parquet", "text,query\nHow many?,SELECT 1\n"),
    ],
)
def test_what_looks_like_questions_and_cannot_be_read_is_refused_and_no_table(
    folder: Path, name: str, text: str
) -> None:
    file = folder / name
    if file.suffix == ".parquet":
        header, row = ([[cell] for cell in line.split(",")] for line in text.splitlines())
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({key: cell for (key,), cell in zip(header, row, strict=True)}), file)
    else:
        write(folder, text, name)
    assert set(find_sources(folder).usable) == {"shop"}
    assert not has_no_questions(folder)
    assert str(file) in refusal(folder)
    with pytest.raises(DataError):
        read_databases(file, folder / "cache")


def test_the_refusal_names_the_columns(folder: Path) -> None:
    write(folder, "question,note\nWho?,me\n")
    assert {"question,", "note,", "sql", "answer."} <= set(refusal(folder).split())
    (folder / "questions.csv").unlink()
    write_entries(folder, [{"question": "Who?", "note": "me"}])
    assert '"sql"' in refusal(folder)


def test_questions_under_any_name_are_known_by_their_queries(folder: Path) -> None:
    table = write(folder, "text,query\nHow many?,SELECT 1\n,with x as (select 1) select * from x\n", "dev.csv")
    assert question_files(folder) == [table]
    assert set(find_sources(folder).usable) == {"shop"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("searches.csv", "text,query\nshoes,red shoes\n"),
        ("faq.csv", "question,answer,views\nWho?,me,3\n"),
        ("questions.csv", "id,title,score\n1,Who?,3\n"),
        ("questions.csv", "id,text,output\n1,Who?,3\n"),
    ],
)
def test_a_table_with_such_names_and_other_cells_stays_a_table(folder: Path, name: str, text: str) -> None:
    write(folder, text, name)
    assert set(find_sources(folder).usable) == {"shop", folder.name}
    assert has_no_questions(folder)


@pytest.mark.parametrize("text", ["question,sql\nWho?,me\n", "question,answer\nWho?,me\n"])
def test_questions_lie_beside_the_databases_and_nowhere_else(folder: Path, text: str) -> None:
    inner = folder / "survey"
    inner.mkdir()
    file = write(inner, text)
    with pytest.raises(DataError, match=str(file)):
        find_sources(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("question,sql\nHow many?,SELECT a, b FROM t\n", "line 2: has 3 cells, but the header has 2"),
        ("question,sql\nHow many?,SELECT 1\nWhy?,\n", 'line 3 (question 1): the key "sql" is missing (it has question'),
        ("question,sql,SQL\nHow many?,SELECT 1,SELECT 2\n", "line 1: two columns are called sql"),
        ("question,sql,split\nHow many?,SELECT 1,test\n", "line 2 (question 0): \"split\" is 'test'"),
        ("question,sql\n", "questions.csv holds no question. Add some"),
    ],
)
def test_a_wrong_table_is_named_with_its_line(folder: Path, text: str, words: str) -> None:
    write(folder, text)
    assert words in refusal(folder)


def test_two_files_of_questions_are_refused_and_one_called_so_wins(folder: Path) -> None:
    write_entries(folder, [COUNT], "package.json")
    table = write(folder, "question,sql\nHow many?,SELECT 1\n")
    assert question_files(folder) == [table]
    write_entries(folder, [COUNT])
    assert "holds 3 files of questions (package.json, questions.csv, questions.json). Call the one" in refusal(folder)


def test_suggested_questions_are_read_beside_the_others_or_alone(folder: Path) -> None:
    write_entries(folder, [COUNT], SUGGESTED_FILE)
    assert [q.question_id for q in read(folder)] == ["questions-suggested-0000"]
    file = write_entries(folder, [COUNT, {**COUNT, "id": "questions-suggested-0000"}], "mine.json")
    assert refusal(folder).endswith(
        "the id 'questions-suggested-0000' is also that of the question on line 6 of mine.json. Give each question an "
        "id of its own, or none of them any"
    )
    write_entries(folder, [COUNT, {**COUNT, "split": "eval"}], file.name)
    assert 'mine.json, line 2 (question 0): the key "split" is missing' in refusal(folder)
    write_entries(folder, [COUNT, COUNT], file.name)
    assert [q.question_id for q in read(folder)] == ["mine-0000", "mine-0001", "questions-suggested-0000"]


def test_without_questions_the_command_that_proposes_some_is_named(folder: Path) -> None:
    assert f"let SQLEnv propose some: sqlenv data suggest {folder}" in refusal(folder)
