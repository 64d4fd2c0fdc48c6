"""Dates do not depend on the machine's time zone, and are otherwise SQLite's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.dataset import Row
from env_server.errors import SQLError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.sql.statements import FIRST_MODIFIER, may_use_local_time
from env_server.sql.vfs import VFS_NAME

SCRIPT = """
CREATE TABLE t (day, modifier);
INSERT INTO t VALUES
    ('2026-07-01 12:00:00', '+1 day'), (1782907200, 'unixepoch'), ('2026-07-01', NULL), (2461223.25, 'start of month'),
    (x'32303236', x'2b3120646179'), ('2026-07-01', ' localtime'), ('no date', '+1 day'),
    (CAST(x'ff' AS TEXT), '+1 day');
CREATE TABLE zones (day, modifier);
INSERT INTO zones VALUES ('2026-07-01 12:00:00', 'LocalTime');
"""
VIEW = "CREATE VIEW local AS SELECT datetime(day, 'localtime') FROM zones;"
ROWS = "(SELECT * FROM t WHERE rowid < 8)"
"""Of text that is no Unicode, only SQLite's own functions can make something."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("db") / "dates.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute(SCRIPT).fetchall()
    connection.close()
    return path


@pytest.fixture
def sandbox(database: Path) -> Iterator[Sandbox]:
    box = Sandbox(database, SandboxSettings())
    yield box
    box.close()


@pytest.fixture
def far_from_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def failure(box: Sandbox, sql: str) -> SQLError:
    with pytest.raises(SQLError) as caught:
        box.query(sql, 5)
    return caught.value


def of_sqlite(path: Path, sql: str) -> tuple[list[Row], int]:
    """The rows that SQLite alone gives, and its virtual-machine steps."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY, vfs=VFS_NAME, statementcachesize=0)
    steps = 0

    def record(event: dict[str, dict[str, int]]) -> None:
        nonlocal steps
        steps += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, record)
    rows = connection.execute(sql).fetchall()
    connection.close()
    return rows, steps


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize(
    ("sql", "shown"),
    [
        ("SELECT datetime('2026-07-01', 'localtime')", "'localtime'"),
        ("SELECT datetime('2026-07-01', 'local' || 'time')", "'localtime'"),
        ("SELECT date('2026-07-01', '+1 day', replace('LxCAL', 'x', 'O') || 'time')", "'LOCALtime'"),
        ("SELECT time('2026-07-01', printf('%s', 'utc'))", "'utc'"),
        ("SELECT julianday('2026-07-01', x'6c6f63616c74696d65')", "'localtime'"),
        ("SELECT unixepoch('2026-07-01', 'utc' || char(0) || 'x')", "'utc'"),
        ("SELECT strftime('%H', '2026-07-01', (SELECT 'utc'))", "'utc'"),
        ("SELECT datetime \ufeff ('2026-07-01', 'localtime' || '')", "'localtime'"),
        ("SELECT datetime(day, modifier) FROM zones", "'LocalTime'"),
        ("SELECT count(*) FROM zones WHERE [datetime](day, modifier) > '2026'", "'LocalTime'"),
        ("WITH m(x) AS (SELECT 'utc') SELECT datetime('2026-07-01', x) FROM m", "'utc'"),
        ("SELECT datetime('2026-07-01'" + ", '+0 days'" * 97 + ", 'local' || 'time')", "'localtime'"),
    ],
)
def test_local_time_is_refused_wherever_the_modifier_comes_from(sandbox: Sandbox, sql: str, shown: str) -> None:
    error = failure(sandbox, sql)
    assert (error.kind, error.message) == ("denied", f"the modifier {shown} is not allowed; times are in UTC")
    assert error.deterministic


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
def test_local_time_in_a_view_or_in_another_encoding_is_refused_too(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA encoding = '{encoding}'; {SCRIPT} {VIEW}").fetchall()
    connection.close()
    sandbox = Sandbox(path, SandboxSettings())
    for sql in ("SELECT * FROM local", f"SELECT date('2026-07-01', x'{'utc'.encode(encoding).hex()}')"):
        assert failure(sandbox, sql).kind == "denied"
    assert sandbox.query("SELECT count(*) FROM zones", 1).rows == ((1,),)
    sandbox.close()


MODIFIERS = ("+1 day", "unixepoch", "auto", "subsec", "weekday 1", "floor", "+1 month", "-00:30", "", "x", "local time")
values = st.one_of(
    st.none(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.dates().map(str),
    st.datetimes().map(str),
    st.sampled_from(("now", "2026-02-30 25:00", "12:30", "%Y-%j %s %f", "2026-01-31T10:00:00+02:00")),
    st.sampled_from(MODIFIERS),
    st.text(max_size=5).map(str.encode),
)


def literal(value: float | str | bytes | None) -> str:
    return str(apsw.format_sql_value(value))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FIRST_MODIFIER)), arguments=st.lists(values, min_size=2, max_size=5))
def test_every_other_call_is_sqlite_s_own(
    sandbox: Sandbox, database: Path, name: str, arguments: list[float | str | bytes | None]
) -> None:
    # In parentheses, what a modifier is shows only when it runs.
    sql = f"SELECT {name}({', '.join(f'({literal(value)})' for value in arguments)})"
    assert may_use_local_time(sql) == (len(arguments) > FIRST_MODIFIER[name])
    result = sandbox.query(sql, 1)
    assert (list(result.rows), result.vm_steps) == of_sqlite(database, sql)


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT day, modifier, datetime(day, modifier), strftime('%s', day, modifier) FROM {ROWS}",
        f"SELECT count(*) FROM {ROWS} WHERE julianday(day, modifier, '+1 day') > julianday('now', trim(' +1 day'))",
        f"SELECT date(day, modifier) AS d, count(*) FROM {ROWS} GROUP BY 1 ORDER BY d",
        "SELECT date(day, '+1 day') FROM t",
        "SELECT strftime(lower('%Y'), 'now', lower('+1 DAY')), strftime('%d', '2026-07-01'), timediff('now', '2026')",
    ],
)
def test_rows_and_steps_are_sqlite_s_own(sandbox: Sandbox, database: Path, sql: str) -> None:
    result = sandbox.query(sql, 20)
    assert (list(result.rows), result.vm_steps) == of_sqlite(database, sql)


def test_an_ordinary_statement_is_not_affected_by_those_before(sandbox: Sandbox) -> None:
    # Text that is no Unicode does not get through a function of ours.
    ordinary = "SELECT date(day, '+1 day') FROM t WHERE rowid = 8"
    before = sandbox.query(ordinary, 1)
    sandbox.query(f"SELECT date(day, modifier) FROM {ROWS}", 20)
    assert sandbox.query(ordinary, 1) == before


@pytest.mark.parametrize(
    ("sql", "may"),
    [
        ("SELECT a, b FROM t", False),
        ("SELECT date, time FROM t WHERE date IN (a, b)", False),
        ("SELECT date(a), strftime('%Y', a), datetime(), date('now') FROM t", False),
        ("SELECT date(a, '+1 day', 'start of month') FROM t", False),
        ("SELECT strftime('%Y', max(a, b), '+1 day') FROM t", False),
        ("SELECT max(date(a, '+1 day'), b, c) FROM t", False),
        ("SELECT 'date(', b, c FROM t", False),
        ("SELECT date(a, b) FROM t", True),
        ('SELECT date(a, "+1 day") FROM t', True),
        ("SELECT date(a, 'localtime') FROM t", True),
        ("SELECT date(a, ('+1 day')) FROM t", True),
        ("SELECT date(a, x'00') FROM t", True),
        ("SELECT strftime(a, b, c) FROM t", True),
        ("SELECT max(date(a, b || c)) FROM t", True),
        ("SELECT `Date` /* */ (a, b) FROM t", True),
        ("SELECT date(date(a, b), '+1 day') FROM t", True),
        ("SELECT date(a, date(b)) FROM t", True),
    ],
)
def test_only_literal_modifiers_are_left_to_sqlite(sql: str, may: bool) -> None:
    assert may_use_local_time(sql) == may
