"""Questions in a table, beside a file of suggestions, and which file is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from env_server.data.folder import find_sources, read_questions
from env_server.data.question_files import SUGGESTED_FILE, question_files
from env_server.data.raw import RawQuestion
from env_server.dataset import Split
from env_server.errors import DataError
from tests.env_server.data.folders import add_database, write_entries

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


def test_a_table_that_is_only_called_so_stays_a_table(folder: Path) -> None:
    write(folder, "question,answer\nWho?,me\n")
    write_entries(folder, [{**COUNT, "database": "shop"}], "asked.json")
    assert set(find_sources(folder).usable) == {"shop", folder.name}
    inner = folder / "survey"
    inner.mkdir()
    write(inner, "question,sql\nWho?,me\n")
    assert "survey" in find_sources(folder).usable, "questions lie beside the databases"


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
