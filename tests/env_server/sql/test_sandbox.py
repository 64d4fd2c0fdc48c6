"""The sandbox on ordinary statements: results, errors, budgets, determinism, odd databases."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.errors import DataError, SQLError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import QueryResult, Sandbox

SETTINGS = SandboxSettings()
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) "


def build(path: Path, script: str) -> Path:
    connection = apsw.Connection(str(path))
    connection.execute(script).fetchall()
    connection.close()
    return path


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(
        tmp_path_factory.mktemp("db") / "pets.sqlite",
        """
        CREATE TABLE pets (pet_id INTEGER PRIMARY KEY, name TEXT, weight REAL, photo BLOB);
        INSERT INTO pets VALUES (1, 'Rex', 12.5, x'0102'), (2, 'Tom', NULL, NULL), (3, '', 4.0, NULL);
        """
        + "CREATE TABLE many AS "
        + NUMBERS.format(500)
        + "SELECT i, i % 7 AS k FROM n;",
    )


@pytest.fixture
def sandbox(pets: Path) -> Iterator[Sandbox]:
    box = Sandbox(pets, SETTINGS)
    yield box
    box.close()


def failure(box: Sandbox, sql: str) -> SQLError:
    with pytest.raises(SQLError) as caught:
        box.query(sql, 5)
    return caught.value


def outcome(box: Sandbox, sql: str, max_rows: int = 5) -> QueryResult | tuple[str, str]:
    try:
        return box.query(sql, max_rows)
    except SQLError as error:
        return error.kind, error.message


def test_a_result_holds_names_values_and_the_exact_count(sandbox: Sandbox) -> None:
    result = sandbox.query("SELECT pet_id, name AS n, weight, photo FROM pets", 20)
    assert result.columns == ("pet_id", "n", "weight", "photo")
    assert result.rows == ((1, "Rex", 12.5, b"\x01\x02"), (2, "Tom", None, None), (3, "", 4.0, None))
    assert result.row_count == 3
    assert not result.more
    assert result.vm_steps > 0


def test_more_rows_than_asked_for_are_counted(sandbox: Sandbox) -> None:
    result = sandbox.query("SELECT i FROM many ORDER BY i DESC -- newest first", 5)
    assert [row[0] for row in result.rows] == [500, 499, 498, 497, 496]
    assert result.row_count == 500
    assert result.more


@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("SELECT i FROM many LIMIT 6", 6),
        ("SELECT i FROM many LIMIT 5", 5),
        ("WITH x AS (SELECT i FROM many) SELECT * FROM x;", 500),
        ("VALUES (1), (2), (3), (4), (5), (6), (7)", 7),
        ("SELECT i, i, k AS i FROM many", 500),
        ("SELECT k FROM many UNION SELECT 100 ORDER BY 1 /* open", 8),
    ],
)
def test_the_count_is_exact_for_every_form(sandbox: Sandbox, sql: str, count: int) -> None:
    assert sandbox.query(sql, 5).row_count == count


def test_an_empty_result_keeps_its_columns(sandbox: Sandbox) -> None:
    result = sandbox.query("SELECT name, weight FROM pets WHERE 0", 5)
    assert (result.columns, result.rows, result.row_count) == (("name", "weight"), (), 0)


def test_a_count_that_costs_too_much_is_left_open(pets: Path) -> None:
    box = Sandbox(pets, SandboxSettings(vm_steps=20_000))
    result = box.query("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n", 5)
    assert len(result.rows) == 5
    assert result.row_count is None
    assert result.more
    box.close()


@pytest.mark.parametrize(
    ("sql", "kind", "words"),
    [
        ("SELECT * FORM pets", "syntax", 'near "FORM": syntax error'),
        ("SELECT (1", "syntax", "incomplete input"),
        ("SELECT * FROM cats", "missing", "no such table: cats"),
        ("SELECT age FROM pets", "missing", "no such column: age"),
        ("SELECT nofn(1)", "missing", "no such function: nofn"),
        ("SELECT abs(-9223372036854775808)", "runtime", "integer overflow"),
        ("SELECT json('{')", "runtime", "malformed JSON"),
        ("SELECT sum(9223372036854775807) FROM pets", "runtime", "integer overflow"),
        ("SELECT ?", "syntax", "parameters are not allowed"),
        ("SELECT random()", "denied", "random"),
        ("PRAGMA journal_mode", "denied", "journal_mode"),
        ("SELECT zeroblob(2000000)", "size", "too big"),
    ],
)
def test_errors_are_classified_and_worded_by_sqlite(sandbox: Sandbox, sql: str, kind: str, words: str) -> None:
    error = failure(sandbox, sql)
    assert error.kind == kind
    assert words in error.message
    assert "\n" not in error.message


def test_double_quoted_text_is_a_literal_as_sqlite_has_it(sandbox: Sandbox) -> None:
    assert sandbox.query('SELECT pet_id FROM pets WHERE name = "Rex"', 5).rows == ((1,),)


def test_the_clock_stands_still(sandbox: Sandbox) -> None:
    sql = "SELECT datetime('now'), CURRENT_TIMESTAMP, date(), unixepoch('now')"
    stamp = "2026-01-01 00:00:00"
    assert sandbox.query(sql, 5).rows == ((stamp, stamp, "2026-01-01", 1_767_225_600),)


def test_read_only_pragmas_answer_in_both_forms(sandbox: Sandbox) -> None:
    statement = sandbox.query("PRAGMA table_info(pets)", 9)
    function = sandbox.query("SELECT * FROM pragma_table_info('pets')", 9)
    assert [row[1] for row in statement.rows] == ["pet_id", "name", "weight", "photo"]
    assert statement.rows == function.rows


def test_the_step_budget_decides_at_the_same_step_every_time(pets: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    box = Sandbox(pets, SandboxSettings(vm_steps=50_000))
    error = failure(box, endless)
    assert (error.kind, error.message) == ("budget", "the query needs more than 50000 steps")
    box.close()
    needed = 0
    for steps in range(2_000, 20_000, 1_000):
        box = Sandbox(pets, SandboxSettings(vm_steps=steps))
        verdicts = {
            isinstance(outcome(box, NUMBERS.format(500) + "SELECT count(*) FROM n"), QueryResult) for _ in range(3)
        }
        box.close()
        assert len(verdicts) == 1
        needed += verdicts == {False}
    assert 0 < needed < 18


def test_reported_steps_are_the_same_on_a_used_and_a_fresh_connection(pets: Path, sandbox: Sandbox) -> None:
    sql = "SELECT k, count(*) FROM many GROUP BY k"
    for warm in ("SELECT * FROM pets", "SELECT * FROM cats", sql, sql):
        outcome(sandbox, warm)
    fresh = Sandbox(pets, SETTINGS)
    assert sandbox.query(sql, 3) == fresh.query(sql, 3)
    fresh.close()


def test_the_deadline_stops_a_statement_that_the_step_budget_lets_run(pets: Path) -> None:
    box = Sandbox(pets, SandboxSettings(vm_steps=10**15, deadline_s=0.02))
    error = failure(box, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")
    assert (error.kind, error.message) == ("budget", "the query takes longer than 0.02 s")
    box.close()


def test_the_deadline_is_processor_time(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the clock an hour goes by, as if the process had not been let run."""
    hours = itertools.count(0.0, 3600.0)
    clocks = SimpleNamespace(monotonic=lambda: next(hours), thread_time=time.thread_time)
    monkeypatch.setattr("env_server.sql.sandbox.time", clocks)
    box = Sandbox(pets, SandboxSettings(vm_steps=50_000, deadline_s=60))
    error = failure(box, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")
    assert error.message == "the query needs more than 50000 steps"
    assert next(hours) > 10 * 3600
    box.close()


def test_interrupt_stops_the_running_statement_and_only_that(pets: Path) -> None:
    box = Sandbox(pets, SandboxSettings(vm_steps=10**15, deadline_s=60))
    box.interrupt()
    done = threading.Event()

    def keep_interrupting() -> None:
        while not done.wait(0.001):
            box.interrupt()

    thread = threading.Thread(target=keep_interrupting)
    thread.start()
    try:
        error = failure(box, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")
    finally:
        done.set()
        thread.join()
    assert (error.kind, error.message) == ("budget", "the query was interrupted")
    assert box.query("SELECT count(*) FROM pets", 5).rows == ((3,),)
    box.close()


@pytest.mark.parametrize("line", range(1, 7))
def test_a_statement_may_end_at_any_moment_of_an_interrupt(pets: Path, line: int) -> None:
    box = Sandbox(pets, SandboxSettings(vm_steps=10**15, deadline_s=60))
    errors: list[SQLError] = []

    def run() -> None:
        errors.append(
            failure(box, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")
        )

    statement = threading.Thread(target=run)
    executed = itertools.count(1)

    def end_statement() -> None:
        while statement.is_alive():
            assert box._connection is not None
            box._connection.interrupt()
            statement.join(0.001)

    def before_line(_frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and next(executed) == line:
            end_statement()
        return before_line

    def trace(frame: FrameType, _event: str, _: object) -> Any:
        return before_line if frame.f_code is Sandbox.interrupt.__code__ else None

    box.query("SELECT 1", 1)
    statement.start()
    while box._meter is None:
        statement.join(0.001)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        box.interrupt()
    finally:
        sys.settrace(before)
    end_statement()
    assert [error.message for error in errors] == ["the query was interrupted"]
    box.close()


def test_a_sandbox_leaves_the_memory_of_its_process_as_it_was_bounded(pets: Path) -> None:
    bound = apsw.hard_heap_limit(-1)
    Sandbox(pets, SandboxSettings(heap_bytes=bound + 1_000_000)).close()
    assert apsw.hard_heap_limit(-1) == bound


def test_a_large_sort_spills_into_bounded_memory(pets: Path) -> None:
    box = Sandbox(pets, SETTINGS)
    spilled = NUMBERS.format(60_000) + "SELECT i || hex(zeroblob(50)) AS x FROM n ORDER BY x DESC"
    assert str(box.query(spilled, 1).rows[0][0]).startswith("9999")
    assert box.query(spilled, 1).row_count == 60_000
    refused = failure(box, NUMBERS.format(5_000) + "SELECT i || hex(zeroblob(20000)) AS x FROM n ORDER BY x")
    assert (refused.kind, refused.message) == ("size", "the query needs too much temporary space")
    box.close()


def test_a_result_is_bounded_in_bytes(pets: Path) -> None:
    box = Sandbox(pets, SandboxSettings(value_bytes=10_000))
    assert failure(box, "SELECT hex(zeroblob(4000)), hex(zeroblob(4000))").message == "a row of the result is too large"
    rows = NUMBERS.format(100) + "SELECT hex(zeroblob(4500)) FROM n"
    with pytest.raises(SQLError, match="the result is too large"):
        box.query(rows, 100)
    assert box.query(rows, 5).row_count == 100
    box.close()


def test_a_dear_function_gets_small_values_unless_its_other_argument_is_short(sandbox: Sandbox) -> None:
    assert sandbox.query("SELECT length(hex(zeroblob(400000))), instr(hex(zeroblob(400000)), 'x')", 5).rows == (
        (800_000, 0),
    )
    assert failure(sandbox, "SELECT trim(hex(zeroblob(40000)), name) FROM pets").kind == "size"
    assert sandbox.query("SELECT length(trim(hex(zeroblob(40000)), 'xyz'))", 5).rows == ((80_000,),)
    assert failure(sandbox, "SELECT hex(zeroblob(40000)) LIKE '%' || hex(zeroblob(60))").kind == "size"


def test_a_result_that_came_after_the_deadline_is_not_accepted(pets: Path) -> None:
    box = Sandbox(pets, SandboxSettings(deadline_s=1e-9))
    error = failure(box, "SELECT 1")
    assert (error.kind, error.deterministic) == ("budget", False)
    box.close()


def test_percentiles_get_fewer_steps(sandbox: Sandbox) -> None:
    assert sandbox.query("SELECT median(i) FROM many", 5).rows == ((250.5,),)
    error = failure(sandbox, NUMBERS.format(100_000) + "SELECT median(i) FROM n")
    assert (error.kind, error.deterministic) == ("budget", True)


def test_large_values_and_long_programs_give_what_small_ones_would(sandbox: Sandbox) -> None:
    """Whatever is first tried under narrow limits; the steps are those of the last run alone."""
    form = "SELECT i, length(hex(zeroblob({}))) > 0 AS x FROM many WHERE i % 50 = 0"
    small, large = sandbox.query(form.format(10), 20), sandbox.query(form.format(30_000), 20)
    assert small == large
    columns = ", ".join(["i"] * 1_900)
    assert sandbox.query(f"SELECT {columns} FROM many LIMIT 1", 5).rows == ((1,) * 1_900,)


def test_a_statement_longer_than_the_limit_is_refused_unseen(sandbox: Sandbox) -> None:
    assert failure(sandbox, "SELECT '" + "x" * SETTINGS.sql_bytes + "'").kind == "size"


def test_text_that_is_not_unicode_is_shown_with_replacement_characters(tmp_path: Path) -> None:
    path = build(
        tmp_path / "latin1.sqlite",
        "CREATE TABLE t (a INTEGER, b TEXT, c BLOB);"
        "INSERT INTO t VALUES (2, CAST(x'4a6f73e9' AS TEXT), x'e9'), (1, 'José', NULL), (3, CAST(x'ff' AS TEXT), 1.5)",
    )
    box = Sandbox(path, SETTINGS)
    result = box.query("SELECT a, b, b, c FROM t ORDER BY a DESC", 2)
    assert result.columns == ("a", "b", "b", "c")
    assert result.rows == ((3, "\ufffd", "\ufffd", 1.5), (2, "Jos\ufffd", "Jos\ufffd", b"\xe9"))
    assert result.row_count == 3
    box.close()


def test_a_utf16_database_reads_like_any_other(tmp_path: Path) -> None:
    path = build(
        tmp_path / "utf16.sqlite",
        "PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (a TEXT); INSERT INTO t VALUES ('né😀'), (CAST(x'00d8' AS TEXT))",
    )
    box = Sandbox(path, SETTINGS)
    first, second = box.query("SELECT a FROM t", 5).rows
    assert first == ("né😀",)
    assert isinstance(second[0], str)
    box.close()


@pytest.mark.parametrize("name", ["we ird %41?#&=.db", "größe 😀.db", "quo'te\".db", "a+b;c.db"])
def test_odd_file_names_open(tmp_path: Path, name: str) -> None:
    box = Sandbox(build(tmp_path / name, "CREATE TABLE t (a); INSERT INTO t VALUES (7)"), SETTINGS)
    assert box.query("SELECT a FROM t", 5).rows == ((7,),)
    box.close()


def test_a_database_with_a_leftover_journal_is_read_as_it_is(tmp_path: Path) -> None:
    path = build(tmp_path / "a.db", "CREATE TABLE t (a); INSERT INTO t VALUES (7)")
    journal = tmp_path / "a.db-journal"
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(600))
    box = Sandbox(path, SETTINGS)
    assert box.query("SELECT a FROM t", 5).rows == ((7,),)
    box.close()
    assert journal.exists()


def test_full_text_and_rtree_tables_answer_alike_fresh_and_used(tmp_path: Path) -> None:
    path = build(
        tmp_path / "v.db",
        "CREATE VIRTUAL TABLE f USING fts5(body); INSERT INTO f VALUES ('red fish'), ('blue fish');"
        "CREATE VIRTUAL TABLE r USING rtree(id, low, high); INSERT INTO r VALUES (1, 2, 3);",
    )
    used = Sandbox(path, SETTINGS)
    queries = ("SELECT body FROM f WHERE f MATCH 'fish' ORDER BY rank", "SELECT id FROM r WHERE low < 5")
    for _ in range(3):
        for sql in queries:
            fresh = Sandbox(path, SETTINGS)
            assert used.query(sql, 5) == fresh.query(sql, 5)
            fresh.close()
    assert used.query(queries[1], 5).rows == ((1,),)
    used.close()


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be looked at" * 50])
def test_a_file_that_is_no_database_is_a_data_error_or_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(content)
    if content:
        with pytest.raises(DataError, match=r"x\.db cannot be opened"):
            Sandbox(path, SETTINGS)
    else:
        box = Sandbox(path, SETTINGS)
        assert box.query("SELECT count(*) FROM sqlite_master", 5).rows == ((0,),)
        box.close()


def test_a_missing_file_is_a_data_error_and_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        Sandbox(tmp_path / "none.db", SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_page_is_an_error_of_the_query_that_meets_it(tmp_path: Path) -> None:
    path = build(tmp_path / "d.db", "CREATE TABLE t AS " + NUMBERS.format(5_000) + "SELECT i, hex(zeroblob(20)) FROM n")
    data = bytearray(path.read_bytes())
    data[4096 * 2 : 4096 * 20] = b"\xff" * (4096 * 18)
    path.write_bytes(data)
    box = Sandbox(path, SETTINGS)
    error = failure(box, "SELECT sum(i) FROM t")
    assert (error.kind, error.message) == ("runtime", "database disk image is malformed")
    assert box.query("SELECT 1", 5).rows == ((1,),)
    box.close()


def test_a_closed_sandbox_opens_again(pets: Path) -> None:
    box = Sandbox(pets, SETTINGS)
    box.close()
    box.close()
    assert box.query("SELECT 1", 5).rows == ((1,),)
    box.close()


SNIPPETS = st.sampled_from(
    [
        *("SELECT", "*", "FROM", "pets", "many", "name", "i", "(", ")", ",", "1", "'a", "'", '"', ";", "--", "/*"),
        *("WHERE", "=", "ORDER BY", "LIMIT", "UNION", "WITH", "x", "AS", "JOIN", "count(*)", "GROUP BY", "\n", "\0"),
        *("é", "😀", "x'0", "instr(", "hex(", "date("),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(max_size=60), st.lists(SNIPPETS, max_size=14).map(" ".join)))
def test_any_text_gives_one_outcome_however_often_it_is_tried(sandbox: Sandbox, pets: Path, sql: str) -> None:
    first = outcome(sandbox, sql)
    assert outcome(sandbox, sql) == first
    fresh = Sandbox(pets, SETTINGS)
    try:
        assert outcome(fresh, sql) == first
    finally:
        fresh.close()


def test_a_database_may_lie_behind_symbolic_links(pets_file: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(pets_file.parent)
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "folder" / pets_file.name)
    for path in (tmp_path / "folder" / pets_file.name, tmp_path / "link.sqlite"):
        sandbox = Sandbox(path, SandboxSettings())
        assert sandbox.query("SELECT COUNT(*) FROM pets", 1).rows == ((5,),)
        sandbox.close()
