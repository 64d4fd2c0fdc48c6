"""The sample reaches every part of a table, is the same each time, and costs little of a large one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.settings import SandboxSettings
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.test_suites import row_sampling
from env_server.test_suites.row_sampling import KEPT_ROWS, SAMPLED_ROWS, Sample, read_sample, spaced

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {count})"
LATE = "iif(i > {count} - 100, NULL, i)"


class Metered(Sandbox):
    """A sandbox that adds up the steps of its statements."""

    steps = 0

    def query(self, sql: str, max_rows: int) -> QueryResult:
        result = super().query(sql, max_rows)
        self.steps += result.vm_steps
        return result


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[Sandbox]]:
    sandboxes: list[Sandbox] = []
    yield sandboxes
    for sandbox in sandboxes:
        sandbox.close()


def table(opened: list[Sandbox], path: Path, definition: str, count: int, values: str) -> Metered:
    """A sandbox on a table `t` whose rows are `values` of the numbers from 1 to `count`."""
    connection = sqlite3.connect(path / "db.sqlite")
    connection.execute(f"CREATE TABLE t {definition}")
    connection.execute(f"INSERT INTO t {NUMBERS} SELECT {values} FROM n".format(count=count))
    connection.commit()
    connection.close()
    sandbox = Metered(path / "db.sqlite", SandboxSettings())
    opened.append(sandbox)
    return sandbox


def reaches_every_part(sample: Sample, count: int) -> bool:
    """Whether each tenth of the numbers from 1 to `count` is sampled, and no number twice."""
    numbers = [int(str(row[0])) for row in sample.rows]
    return len(set(numbers)) == len(numbers) and {10 * (n - 1) // count for n in numbers} == set(range(10))


@pytest.mark.parametrize("count", [1_999, 2_001, 3_999, 10_000])
@pytest.mark.parametrize(
    "definition", ["(id INTEGER PRIMARY KEY, ended TEXT)", "(id INTEGER PRIMARY KEY, ended TEXT) WITHOUT ROWID"]
)
def test_every_part_of_a_table_is_sampled(opened: list[Sandbox], tmp_path: Path, definition: str, count: int) -> None:
    sandbox = table(opened, tmp_path, definition, count, f"i, {LATE}")
    sample = read_sample(sandbox, "t", ["id", "ended"], ["id"], count)
    assert len(sample.rows) <= SAMPLED_ROWS
    assert reaches_every_part(sample, count)
    assert sample.has_null == (False, True)
    assert read_sample(sandbox, "t", ["id", "ended"], ["id"], count) == sample


def test_a_single_null_is_found(opened: list[Sandbox], tmp_path: Path) -> None:
    sandbox = table(opened, tmp_path, "(id INTEGER PRIMARY KEY, a, b)", 10_000, "i, i, iif(i = 7778, NULL, i)")
    assert read_sample(sandbox, "t", ["id", "a", "b"], ["id"], 10_000).has_null == (False, False, True)


@pytest.mark.parametrize("key", ["a, b", "b"])
def test_a_composite_key_and_names_that_hide_the_rowid(opened: list[Sandbox], tmp_path: Path, key: str) -> None:
    definition = f"(rowid INTEGER, a TEXT, b INTEGER, _rowid_, oid, PRIMARY KEY ({key})) WITHOUT ROWID"
    sandbox = table(opened, tmp_path, definition, 5_000, f"i, i % 7, i, 0, {LATE}")
    sample = read_sample(sandbox, "t", ["rowid", "a", "b", "_rowid_", "oid"], key.split(", "), 5_000)
    assert {row[1] for row in sample.rows} == set("0123456")
    assert {10 * (int(str(row[2])) - 1) // 5_000 for row in sample.rows} == set(range(10))
    assert sample.has_null == (False, False, False, False, True)


def test_a_large_table_is_sampled_without_passing_over_it(
    opened: list[Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = row_sampling.SCANNED_ROWS + 1
    sandbox = table(opened, tmp_path, "(id INTEGER PRIMARY KEY, ended TEXT)", count, f"i, {LATE}")
    monkeypatch.setattr(row_sampling, "SCANNED_CELLS", count)
    sample = read_sample(sandbox, "t", ["id", "ended"], ["id"], count)
    assert sandbox.steps < count
    assert len(sample.rows) <= SAMPLED_ROWS
    assert reaches_every_part(sample, count)
    assert sample.has_null == (False, True)


def test_a_large_table_without_rowid_shows_its_ends(
    opened: list[Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = table(opened, tmp_path, "(id INTEGER PRIMARY KEY, a) WITHOUT ROWID", 5_000, "i, i")
    monkeypatch.setattr(row_sampling, "SCANNED_ROWS", 3_000)
    numbers = [row[0] for row in read_sample(sandbox, "t", ["id", "a"], ["id"], 5_000).rows]
    assert (numbers[0], numbers[-1], len(numbers)) == (1, 5_000, SAMPLED_ROWS // 2)


def test_rows_too_large_to_read_at_once_are_read_in_parts(opened: list[Sandbox], tmp_path: Path) -> None:
    sandbox = table(opened, tmp_path, "(id INTEGER PRIMARY KEY, a)", 100, "i, zeroblob(900000)")
    sample = read_sample(sandbox, "t", ["id", "a"], ["id"], 100)
    assert 2 < len(sample.rows) <= KEPT_ROWS
    assert reaches_every_part(sample, 100)


@given(count=st.integers(0, 500), most=st.integers(2, 100))
def test_spaced_items_begin_with_the_first_and_end_with_the_last(count: int, most: int) -> None:
    items = list(range(count))
    chosen = spaced(items, most)
    assert len(chosen) == min(count, most)
    assert chosen[:1] + chosen[-1:] == tuple(items[:1] + items[-1:])
    gaps = {after - before for before, after in pairwise(chosen)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
