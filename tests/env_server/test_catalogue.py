"""The catalogue: facts about a file as it is, shared by processes, and no harm where it cannot be used."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import apsw
import pytest

from env_server.catalogue import KEPT_DAYS, Catalogue, fact_key
from env_server.errors import DataError
from env_server.settings import SandboxSettings


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "pets.sqlite"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "cache")


def catalogue_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").iterdir()
    return file


def test_what_was_learned_is_recalled_by_another_catalogue(
    catalogue: Catalogue, database: Path, tmp_path: Path
) -> None:
    catalogue.of(database).remember("schema", "three tables")
    catalogue.of(database).remember("golds", "two")
    assert Catalogue(tmp_path / "cache").of(database).recall("schema") == "three tables"
    assert catalogue.of(database).recall("golds") == "two"
    assert catalogue.of(database).recall("other") is None


def test_a_fact_under_the_same_key_is_replaced(catalogue: Catalogue, database: Path) -> None:
    for fact in ("old", "new"):
        catalogue.of(database).remember("schema", fact)
    assert catalogue.of(database).recall("schema") == "new"


@pytest.mark.parametrize("change", ["size", "content", "same_time"])
def test_a_changed_file_has_no_facts(catalogue: Catalogue, database: Path, change: str) -> None:
    catalogue.of(database).remember("schema", "of one")
    before = database.stat()
    if change == "size":
        database.write_bytes(b"longer")
    else:
        database.write_bytes(b"two")
        os.utime(database, ns=(before.st_atime_ns, before.st_mtime_ns + (change == "content")))
    assert catalogue.of(database).recall("schema") is None


def test_what_is_learned_while_the_file_changes_is_not_recalled(catalogue: Catalogue, database: Path) -> None:
    facts = catalogue.of(database)
    database.write_bytes(b"changed meanwhile")
    facts.remember("schema", "of one")
    assert catalogue.of(database).recall("schema") is None


def test_a_link_has_the_facts_of_its_file(catalogue: Catalogue, database: Path, tmp_path: Path) -> None:
    catalogue.of(database).remember("schema", "three tables")
    link = tmp_path / "link.sqlite"
    link.symlink_to(database)
    assert catalogue.of(link).recall("schema") == "three tables"


def test_without_a_folder_nothing_is_kept(database: Path) -> None:
    nothing = Catalogue(None)
    nothing.of(database).remember("schema", "three tables")
    assert nothing.of(database).recall("schema") is None


def test_a_file_that_is_gone_is_an_error(catalogue: Catalogue, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.sqlite cannot be read: No such file"):
        catalogue.of(tmp_path / "gone.sqlite")


def test_a_catalogue_that_cannot_be_used_warns_once_and_does_no_harm(
    catalogue: Catalogue, database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue.of(database).remember("schema", "three tables")
    catalogue_file(tmp_path).write_bytes(b"this is no database, and long enough to be looked at" * 40)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert catalogue.of(database).recall("schema") is None
            catalogue.of(database).remember("schema", "three tables")
    (warning,) = caplog.messages
    assert "cannot be used" in warning
    assert "Delete it" in warning


def test_a_folder_that_cannot_be_made_does_no_harm(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = Catalogue(database / "below a file")
    with caplog.at_level(logging.WARNING):
        catalogue.of(database).remember("schema", "three tables")
        assert catalogue.of(database).recall("schema") is None
    (warning,) = caplog.messages
    assert "SQLENV_CACHE_DIR" in warning


def test_old_facts_are_forgotten(catalogue: Catalogue, database: Path, tmp_path: Path) -> None:
    catalogue.of(database).remember("schema", "three tables")
    with apsw.Connection(str(catalogue_file(tmp_path))) as connection:
        connection.execute("UPDATE facts SET day = ?", (int(time.time() // 86_400) - KEPT_DAYS - 1,))
    connection.close()
    again = Catalogue(tmp_path / "cache")
    again.of(database).remember("golds", "two")
    assert again.of(database).recall("schema") is None
    assert again.of(database).recall("golds") == "two"


def test_keys_differ_with_their_settings() -> None:
    keys = [fact_key("golds", SandboxSettings(vm_steps=steps), mode) for steps in (1, 2) for mode in ("value", "sql")]
    assert len({*keys, fact_key("golds"), fact_key("schema")}) == 6
    assert fact_key("golds", SandboxSettings(), "value") == fact_key("golds", SandboxSettings(), "value")


def _learn(folder: Path, database: Path, name: str) -> None:
    catalogue = Catalogue(folder)
    for number in range(20):
        catalogue.of(database).remember(f"{name}-{number}", f"{name} says {number}")


def test_processes_write_at_the_same_time_and_lose_nothing(database: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_learn, args=(tmp_path / "cache", database, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    facts = Catalogue(tmp_path / "cache").of(database)
    assert all(facts.recall(f"{name}-{number}") == f"{name} says {number}" for name in "abc" for number in range(20))
