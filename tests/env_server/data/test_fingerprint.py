"""The fingerprint: equal for the same data wherever it is, different for any other, and cheap."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from env_server.cache import Cache
from env_server.data.fingerprint import dataset_fingerprint, served_data
from env_server.dataset import Dataset, Gold
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, ServedData


def with_database(dataset: Dataset, path: Path) -> Dataset:
    return replace(dataset, databases={"pets": path})


def changed_copy(dataset: Dataset, path: Path, *statements: str) -> Dataset:
    shutil.copyfile(dataset.databases["pets"], path)
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return with_database(dataset, path)


def test_neither_places_nor_the_order_nor_the_gold_go_into_it(pets: Dataset, tmp_path: Path) -> None:
    copy = changed_copy(pets, tmp_path / "copy.sqlite")
    blind = tuple(replace(q, gold_sql="", gold=Gold(((None,),), False)) for q in reversed(pets.questions))
    assert dataset_fingerprint(replace(copy, questions=blind, name="another name")) == dataset_fingerprint(pets)


@pytest.mark.parametrize("change", [{"text": "Who?"}, {"evidence": "a hint"}, {"question_id": "other"}, None])
def test_another_question_is_noticed(pets: Dataset, change: dict[str, str] | None) -> None:
    first, *others = pets.questions
    changed = others if change is None else (replace(first, **change), *others)  # type: ignore[arg-type]
    assert dataset_fingerprint(replace(pets, questions=tuple(changed))) != dataset_fingerprint(pets)


def test_it_does_not_depend_on_how_the_file_is_laid_out(pets: Dataset, tmp_path: Path) -> None:
    fills = ("INSERT INTO owners VALUES (9, 'x', 'y')", "DELETE FROM owners WHERE owner_id = 9")
    copy = changed_copy(pets, tmp_path / "copy.sqlite", *fills)
    with sqlite3.connect(copy.databases["pets"]) as connection:
        connection.execute("PRAGMA page_size = 8192")
        connection.commit()
        connection.execute("VACUUM")
    connection.close()
    assert copy.databases["pets"].read_bytes() != pets.databases["pets"].read_bytes()
    assert dataset_fingerprint(copy) == dataset_fingerprint(pets)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pets SET name = 'Tim' WHERE pet_id = 1",
        "UPDATE pets SET weight = 0.7500000001 WHERE pet_id = 5",
        "DELETE FROM owners WHERE owner_id = 3",
        "ALTER TABLE pets RENAME COLUMN age TO years",
        "ALTER TABLE pets RENAME TO animals",
        "CREATE TABLE more (a)",
        "DROP TABLE owners",
    ],
)
def test_another_database_is_noticed(pets: Dataset, tmp_path: Path, statement: str) -> None:
    changed = changed_copy(pets, tmp_path / "copy.sqlite", statement)
    assert dataset_fingerprint(changed) != dataset_fingerprint(pets)


def test_tables_of_every_sort(tmp_path: Path, pets: Dataset) -> None:
    path = tmp_path / "odd.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE "strange "" name" (a BLOB, b);
        INSERT INTO "strange "" name" VALUES (x'00ff', CAST(x'ff' AS TEXT)), (1e300, NULL);
        CREATE TABLE no_rowid (k TEXT PRIMARY KEY, v) WITHOUT ROWID;
        INSERT INTO no_rowid VALUES ('a', 1);
        CREATE VIEW broken AS SELECT * FROM missing;
        CREATE TABLE empty (a);
        """
    )
    connection.close()
    odd = with_database(pets, path)
    assert dataset_fingerprint(odd) == dataset_fingerprint(odd)


def test_a_database_that_is_none(tmp_path: Path, pets: Dataset) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(b"no database" * 1_000)
    with pytest.raises(DataError, match=r"broken\.sqlite"):
        dataset_fingerprint(with_database(pets, path))


def test_what_is_served_is_described_in_a_line(pets: Dataset) -> None:
    served = served_data(pets, AnswerMode.SQL, EnvSettings(step_budget=7))
    assert served.model_dump(mode="json") == {
        "name": "pets",
        "questions": 4,
        "fingerprint": dataset_fingerprint(pets),
        "answer_mode": "sql",
        "step_budget": 7,
    }
    assert ServedData.model_validate({**served.model_dump(), "later": "more"}) == served


def test_the_cache_has_the_fingerprint_of_the_file_as_it_is(pets: Dataset, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    copy = changed_copy(pets, tmp_path / "copy.sqlite")
    assert dataset_fingerprint(copy, cache) == dataset_fingerprint(pets)
    with closing(sqlite3.connect(copy.databases["pets"])) as connection, connection:
        connection.execute("UPDATE pets SET name = 'Tim' WHERE pet_id = 1")
    assert dataset_fingerprint(copy, cache) == dataset_fingerprint(copy) != dataset_fingerprint(pets)
