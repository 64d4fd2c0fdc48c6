"""The generated data sets as a user sees them: size, splits, answers, wording, words, determinism."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import apsw
import pytest

from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.synthetic import build_scrambled, build_synthetic
from env_server.data.synthetic.builder import FAMILIES, is_answerable
from env_server.dataset import Row, Split

Answers = Sequence[tuple[RawQuestion, list[Row]]]


@pytest.fixture(scope="module")
def synthetic(generated_cache: Path) -> RawDataset:
    return build_synthetic(generated_cache)


@pytest.fixture(scope="module")
def scrambled(generated_cache: Path) -> RawDataset:
    """Half of the databases: enough to hold every word."""
    return build_scrambled(generated_cache, databases=300)


@pytest.fixture(scope="module")
def answers(synthetic: RawDataset) -> Answers:
    """Every question with its gold rows."""
    return list(_answers(synthetic))


def _open(path: Path) -> apsw.Connection:
    return apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)


def _connections(dataset: RawDataset) -> Iterator[tuple[list[RawQuestion], apsw.Connection]]:
    """Every database open, and the questions about it."""
    by_database: dict[str, list[RawQuestion]] = {db_id: [] for db_id in dataset.databases}
    for question in dataset.questions:
        by_database[question.db_id].append(question)
    for db_id, path in dataset.databases.items():
        with _open(path) as connection:
            yield by_database[db_id], connection


def _answers(dataset: RawDataset) -> Iterator[tuple[RawQuestion, list[Row]]]:
    for asked, connection in _connections(dataset):
        for question in asked:
            yield question, list(connection.execute(question.sql))


def _tables(connection: apsw.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]


def _cells(connection: apsw.Connection, table: str) -> list[object]:
    return [cell for row in connection.execute(f'SELECT * FROM "{table}"') for cell in row]


def _words(dataset: RawDataset) -> set[str]:
    texts = [text for q in dataset.questions for text in (q.text, q.sql)]
    for _, connection in _connections(dataset):
        texts.extend(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"))
        for table in _tables(connection):
            texts.extend(cell for cell in _cells(connection, table) if isinstance(cell, str))
    return {word for text in texts for word in re.findall(r"[^\W\d_]+", text)}


def test_the_default_data_set(synthetic: RawDataset) -> None:
    domains: dict[Split, set[str]] = {Split.TRAIN: set(), Split.EVAL: set()}
    for question in synthetic.questions:
        assert re.fullmatch(rf"synthetic-{question.db_id}-\d{{4}}", question.question_id)
        domains[question.split].add(question.db_id.rpartition("_")[0])
    assert [len(domains[split]) for split in (Split.TRAIN, Split.EVAL)] == [12, 4]
    assert domains[Split.TRAIN].isdisjoint(domains[Split.EVAL])
    assert {q.db_id for q in synthetic.questions} == set(synthetic.databases)
    assert (len(synthetic.databases), len(synthetic.questions)) == (64, 3_831)
    for split in Split.TRAIN, Split.EVAL:
        assert {q.family for q in synthetic.questions if q.split is split} == set(FAMILIES)


def test_every_answer_can_be_given_and_most_are_small(scrambled: RawDataset, answers: Answers) -> None:
    for question, rows in [*answers, *_answers(scrambled)]:
        assert is_answerable(rows), question
    small = sum(len(rows) * len(rows[0]) <= 4 for _, rows in answers)
    assert small / len(answers) > 0.85


def test_every_ordered_answer_stays_the_same_when_the_rows_are_stored_in_reverse(synthetic: RawDataset) -> None:
    """A tie would be decided by the order of the rows on disk."""
    checked = 0
    for asked, connection in _connections(synthetic):
        with _reversed(connection) as mirror:
            for question in asked:
                if "ORDER BY" in question.sql:
                    checked += 1
                    assert list(mirror.execute(question.sql)) == list(connection.execute(question.sql)), question
    assert checked > 500


def _reversed(connection: apsw.Connection) -> apsw.Connection:
    mirror = apsw.Connection(":memory:")
    for name, sql in list(connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'")):
        mirror.execute(sql.replace(" INTEGER PRIMARY KEY", " INTEGER"))
        rows = list(connection.execute(f'SELECT * FROM "{name}" ORDER BY 1 DESC'))
        mirror.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(rows[0]))})', rows)
    return mirror


def test_guessing_does_not_pay(synthetic: RawDataset, answers: Answers) -> None:
    """A player who answers with a random cell of a random table, or always with the same value."""
    cells = {asked[0].db_id: [_cells(c, t) for t in _tables(c)] for asked, c in _connections(synthetic)}
    by_cell = 0.0
    for question, rows in answers:
        if len(rows) == len(rows[0]) == 1:
            tables = cells[question.db_id]
            by_cell += sum(table.count(rows[0][0]) / len(table) for table in tables) / len(tables)
    most_common = Counter(str(rows) for _, rows in answers).most_common(1)[0][1]
    assert by_cell / len(answers) < 0.02
    assert most_common / len(answers) < 0.05


def test_texts_are_distinct_well_formed_and_hold_the_values(synthetic: RawDataset, scrambled: RawDataset) -> None:
    for dataset in (synthetic, scrambled):
        assert len({q.question_id for q in dataset.questions}) == len(dataset.questions)
        for key in ("text", "sql"):
            assert len({(q.db_id, getattr(q, key)) for q in dataset.questions}) == len(dataset.questions)
        for question in dataset.questions:
            assert re.fullmatch(r"[A-Z][^{}\n]*[.?]", question.text), question
            assert "  " not in question.text, question
            assert all(value in question.text for value in re.findall(r"'([^'%]+)%?'", question.sql)), question


def test_foreign_keys_hold_and_tables_are_of_the_promised_size(synthetic: RawDataset, scrambled: RawDataset) -> None:
    for dataset in (synthetic, scrambled):
        for _, connection in _connections(dataset):
            assert list(connection.execute("PRAGMA foreign_key_check")) == []
            assert list(connection.execute("PRAGMA integrity_check")) == [("ok",)]
            tables = _tables(connection)
            assert 3 <= len(tables) <= 5
            for table in tables:
                (rows,) = next(connection.execute(f'SELECT COUNT(*) FROM "{table}"'))
                assert 8 <= rows <= 40, table


def test_the_vocabulary_is_small_and_random_names_cover_it(synthetic: RawDataset, scrambled: RawDataset) -> None:
    warm_up = _words(scrambled)
    words = _words(synthetic)
    assert words <= warm_up
    assert len(warm_up) <= 1300


@pytest.mark.parametrize(("seed", "expected"), [(0, "1fe91bb2e4714bcc"), (7, "597946dcfaf391bd")])
def test_a_seed_gives_the_same_bytes_everywhere(seed: int, expected: str, generated_cache: Path) -> None:
    """Pinned: whoever changes what is generated raises the cache's VERSION and rebuilds the base policy."""
    dataset = build_synthetic(generated_cache, seed)
    assert _print(dataset) == expected


def test_a_seed_gives_the_same_scrambled_bytes_everywhere(scrambled: RawDataset) -> None:
    assert {q.split for q in scrambled.questions} == {Split.TRAIN}
    assert _print(scrambled) == "5685ccd95a8a43e2"


def _print(dataset: RawDataset) -> str:
    digest = hashlib.sha256(repr(dataset.questions).encode())
    for db_id, path in dataset.databases.items():
        content = path.read_bytes()
        digest.update(db_id.encode() + content[:92] + content[100:])  # without the version of SQLite
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("rows", "answerable"),
    [
        ([(3,)], True),
        ([("Oslo", 2.25)], True),
        ([], False),
        ([(0,)], False),
        ([(None,)], False),
        ([("a",), ("a",)], False),
        ([(1 / 3,)], False),
        ([(1, 2, 3, 4)], False),
        ([(i,) for i in range(9)], False),
        ([(i, i) for i in range(6)], False),
    ],
)
def test_what_can_be_an_answer(rows: list[Row], answerable: bool) -> None:
    assert is_answerable(rows) is answerable
