"""The generated data sets as a user sees them: size, splits, answers, wording, words, determinism."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import apsw
import pytest

from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.synthetic import build_scrambled, build_synthetic
from env_server.data.synthetic.builder import FAMILIES, MAX_CELLS, MAX_COLUMNS, MAX_ROWS, is_answerable
from env_server.dataset import Row, Split

Answers = Mapping[str, tuple[RawQuestion, list[Row]]]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> RawDataset:
    return build_synthetic(tmp_path_factory.mktemp("data") / "synthetic")


@pytest.fixture(scope="module")
def scrambled(tmp_path_factory: pytest.TempPathFactory) -> RawDataset:
    return build_scrambled(tmp_path_factory.mktemp("data") / "scrambled")


@pytest.fixture(scope="module")
def answers(synthetic: RawDataset) -> Answers:
    """Every question with its gold rows, by id."""
    found = {}
    for db_id, connection in _connections(synthetic):
        for question in synthetic.questions:
            if question.db_id == db_id:
                found[question.question_id] = (question, list(connection.execute(question.sql)))
    return found


def _open(path: Path) -> apsw.Connection:
    return apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)


def _connections(dataset: RawDataset) -> Iterator[tuple[str, apsw.Connection]]:
    for db_id, path in dataset.databases.items():
        with _open(path) as connection:
            yield db_id, connection


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


def _bytes(dataset: RawDataset) -> dict[str, bytes]:
    return {db_id: path.read_bytes() for db_id, path in dataset.databases.items()}


def test_it_has_enough_databases_domains_and_questions(synthetic: RawDataset) -> None:
    domains = Counter(db_id.rpartition("_")[0] for db_id in synthetic.databases)
    assert len(synthetic.databases) >= 48
    assert len(domains) >= 16
    assert set(domains.values()) <= {3, 4}
    assert len(synthetic.questions) >= 3000
    assert {q.db_id for q in synthetic.questions} == set(synthetic.databases)


def test_the_evaluation_domains_are_not_trained_on(synthetic: RawDataset) -> None:
    domains = {
        split: {q.db_id.rpartition("_")[0] for q in synthetic.questions if q.split is split}
        for split in (Split.TRAIN, Split.EVAL)
    }
    assert len(domains[Split.EVAL]) == 4
    assert domains[Split.TRAIN].isdisjoint(domains[Split.EVAL])


@pytest.mark.parametrize("split", [Split.TRAIN, Split.EVAL])
def test_every_family_is_in_both_splits(synthetic: RawDataset, split: Split) -> None:
    counts = Counter(q.family for q in synthetic.questions if q.split is split)
    assert set(counts) == set(FAMILIES)
    assert min(counts.values()) >= 15


def test_the_families_keep_their_shares(synthetic: RawDataset) -> None:
    counts = Counter(q.family for q in synthetic.questions)
    shares = sum(f.share for f in FAMILIES.values())
    for name, family in FAMILIES.items():
        assert counts[name] / len(synthetic.questions) == pytest.approx(family.share / shares, rel=0.25)


def test_every_gold_answer_obeys_the_limits(synthetic: RawDataset, answers: Answers) -> None:
    assert len(answers) == len(synthetic.questions)
    for question, rows in answers.values():
        assert 0 < len(rows) <= MAX_ROWS, question
        assert len(rows[0]) <= MAX_COLUMNS, question
        assert len(rows) * len(rows[0]) <= MAX_CELLS, question
        assert all(cell is not None for row in rows for cell in row), question
        assert len(set(rows)) == len(rows), question


def test_answers_are_mostly_small(answers: Answers) -> None:
    small = sum(len(rows) * len(rows[0]) <= 4 for _, rows in answers.values())
    assert small / len(answers) > 0.85


def test_every_ordered_answer_stays_the_same_when_the_rows_are_stored_in_reverse(
    synthetic: RawDataset, answers: Answers
) -> None:
    """A tie would be decided by the order of the rows on disk."""
    checked = 0
    for db_id, connection in _connections(synthetic):
        with _reversed(connection) as mirror:
            for question, rows in answers.values():
                if question.db_id == db_id and "ORDER BY" in question.sql:
                    checked += 1
                    assert list(mirror.execute(question.sql)) == rows, question
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
    cells = {db_id: [_cells(c, t) for t in _tables(c)] for db_id, c in _connections(synthetic)}
    by_cell = 0.0
    for question, rows in answers.values():
        if len(rows) == len(rows[0]) == 1:
            tables = cells[question.db_id]
            by_cell += sum(table.count(rows[0][0]) / len(table) for table in tables) / len(tables)
    most_common = Counter(str(rows) for _, rows in answers.values()).most_common(1)[0][1]
    assert by_cell / len(answers) < 0.02
    assert most_common / len(answers) < 0.05


def test_texts_are_distinct_and_well_formed(synthetic: RawDataset, scrambled: RawDataset) -> None:
    for dataset in (synthetic, scrambled):
        assert len({q.question_id for q in dataset.questions}) == len(dataset.questions)
        for key in ("text", "sql"):
            seen = Counter((q.db_id, getattr(q, key)) for q in dataset.questions)
            assert max(seen.values()) == 1
        for question in dataset.questions:
            assert re.fullmatch(r"[A-Z][^{}\n]*[.?]", question.text), question
            assert "  " not in question.text, question


def test_every_value_in_the_sql_is_in_the_text(synthetic: RawDataset, scrambled: RawDataset) -> None:
    for dataset in (synthetic, scrambled):
        for question in dataset.questions:
            for value in re.findall(r"'([^'%]+)%?'", question.sql):
                assert value in question.text, question


def test_set_operations_need_both_sides(synthetic: RawDataset) -> None:
    """Neither side selects a part of the other's rows."""
    checked = 0
    for db_id, connection in _connections(synthetic):
        for question in synthetic.questions:
            if question.db_id == db_id and question.family == "set":
                halves = re.split(r" INTERSECT | EXCEPT | UNION ", question.sql)
                first, second = (
                    {tuple(row) for row in connection.execute(re.sub(r"^SELECT .+? FROM", "SELECT rowid FROM", half))}
                    for half in halves
                )
                checked += 1
                assert first - second, question
                assert second - first, question
    assert checked > 50


def test_question_ids_name_the_database(synthetic: RawDataset) -> None:
    for question in synthetic.questions:
        assert re.fullmatch(rf"synthetic-{question.db_id}-\d{{4}}", question.question_id)


def test_foreign_keys_hold_and_tables_are_of_the_promised_size(synthetic: RawDataset, scrambled: RawDataset) -> None:
    for dataset in (synthetic, scrambled):
        for db_id, connection in _connections(dataset):
            assert list(connection.execute("PRAGMA foreign_key_check")) == []
            assert list(connection.execute("PRAGMA integrity_check")) == [("ok",)]
            tables = _tables(connection)
            assert 3 <= len(tables) <= 5, db_id
            for table in tables:
                (rows,) = next(connection.execute(f'SELECT COUNT(*) FROM "{table}"'))
                assert 8 <= rows <= 40, (db_id, table)


def test_some_names_are_awkward_and_some_cells_empty(synthetic: RawDataset) -> None:
    awkward = columns = nulls = cells = 0
    for _, connection in _connections(synthetic):
        for table in _tables(connection):
            names = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
            columns += len(names)
            awkward += sum(re.fullmatch(r"[a-z_]+", name) is None or name in ("order", "group") for name in names)
            values = _cells(connection, table)
            cells += len(values)
            nulls += values.count(None)
    assert 0.04 < awkward / columns < 0.2
    assert 0.005 < nulls / cells < 0.05


def test_the_vocabulary_is_small_and_random_names_cover_it(synthetic: RawDataset, scrambled: RawDataset) -> None:
    warm_up = _words(scrambled)
    words = _words(synthetic)
    assert words <= warm_up
    assert len(warm_up) <= 1300


def test_random_name_databases_are_all_for_training_and_hold_every_family(scrambled: RawDataset) -> None:
    assert len(scrambled.databases) == 600
    assert {q.split for q in scrambled.questions} == {Split.TRAIN}
    assert {q.family for q in scrambled.questions} == set(FAMILIES)
    assert len(scrambled.questions) >= 0.97 * 600 * 12


def test_random_name_answers_obey_the_limits(scrambled: RawDataset) -> None:
    for db_id, connection in _connections(scrambled):
        for question in scrambled.questions:
            if question.db_id == db_id:
                assert is_answerable(list(connection.execute(question.sql))), question


def test_a_seed_gives_the_same_bytes(synthetic: RawDataset, tmp_path: Path) -> None:
    again = build_synthetic(tmp_path / "again")
    assert again.questions == synthetic.questions
    assert _bytes(again) == _bytes(synthetic)


def test_another_seed_gives_other_data(synthetic: RawDataset, tmp_path: Path) -> None:
    other = build_synthetic(tmp_path / "other", seed=1)
    assert set(other.databases) == set(synthetic.databases)
    assert not set(_bytes(other).values()) & set(_bytes(synthetic).values())
    shared = {(q.db_id, q.text) for q in other.questions} & {(q.db_id, q.text) for q in synthetic.questions}
    assert len(shared) < 0.2 * len(synthetic.questions)


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
