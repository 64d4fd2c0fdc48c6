"""Which statements are admitted, and how errors are classified."""

from __future__ import annotations

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.errors import SQLError
from env_server.sql.statements import MAX_MESSAGE_CHARS, authorize, classify, statement_body

LIMIT = 20_000


def refusal(sql: str) -> SQLError:
    with pytest.raises(SQLError) as caught:
        statement_body(sql, LIMIT)
    return caught.value


@pytest.mark.parametrize(
    ("sql", "body"),
    [
        ("SELECT 1", "SELECT 1"),
        ("  SELECT 1 ;\n", "SELECT 1"),
        ("SELECT 1;;; -- done", "SELECT 1"),
        ("-- first\n/* ; */ SELECT 1 /* no end", "SELECT 1"),
        ("SELECT ';' || \"a;b\" || `c;d` || [e;f]; ", "SELECT ';' || \"a;b\" || `c;d` || [e;f]"),
        ("SELECT 'it''s; fine'", "SELECT 'it''s; fine'"),
        ("SELECT 'never closed; SELECT 2", "SELECT 'never closed; SELECT 2"),
        ("SELECT 1 - -1", "SELECT 1 - -1"),
        ("SELECT 'UTC', \"date\" FROM t", "SELECT 'UTC', \"date\" FROM t"),
        ("SELECT date FROM t WHERE zone = 'utc'", "SELECT date FROM t WHERE zone = 'utc'"),
    ],
)
def test_one_statement_is_cut_out(sql: str, body: str) -> None:
    assert statement_body(sql, LIMIT) == body


@pytest.mark.parametrize("sql", ["", " \n\t", ";", " ; ;", "--", "/*", "/* SELECT 1 */", "-- SELECT 1;"])
def test_a_text_without_a_statement_is_empty(sql: str) -> None:
    assert (refusal(sql).kind, refusal(sql).message) == ("syntax", "the statement is empty")


@pytest.mark.parametrize("sql", ["SELECT 1; SELECT 2", "SELECT 1;x", "SELECT 1; -- a\n ;'b'", "; SELECT 1"])
def test_a_second_statement_is_denied(sql: str) -> None:
    error = refusal(sql)
    assert error.kind in ("denied", "syntax")
    assert error.message == "only one statement is allowed"


@pytest.mark.parametrize("verb", ["insert", "Update", "DELETE", "attach", "explain", "VACUUM", "begin", "replace"])
def test_other_verbs_are_denied_by_name(verb: str) -> None:
    error = refusal(f"/* hidden */ {verb} x")
    assert error.kind == "denied"
    assert verb.upper() in error.message


@pytest.mark.parametrize(
    ("sql", "kind"),
    [("SELECT '\0'", "syntax"), ("SELECT '\ud800'", "syntax"), ("SELECT '" + "é" * LIMIT + "'", "size")],
)
def test_texts_that_sqlite_must_not_see(sql: str, kind: str) -> None:
    assert refusal(sql).kind == kind


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT datetime('2026-01-01', 'localtime')",
        "SELECT DATE ('2026-01-01', ' UTC ')",
        "SELECT strftime('%H', x, \"LocalTime\") FROM t",
    ],
)
def test_the_machines_time_zone_is_refused(sql: str) -> None:
    assert refusal(sql).kind == "denied"


@given(st.text(max_size=200))
def test_any_text_gives_a_body_of_itself_or_an_sql_error(sql: str) -> None:
    try:
        body = statement_body(sql, LIMIT)
    except SQLError:
        return
    assert body
    assert body in sql
    assert statement_body(body, LIMIT) == body


@given(st.text(alphabet="'\"`[];-/* \nab", max_size=30))
def test_a_body_is_one_statement_to_sqlite_as_well(noise: str) -> None:
    try:
        body = statement_body(f"SELECT 1 {noise}", LIMIT)
    except SQLError:
        return
    seen: list[str] = []

    def record(_cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
        seen.append(sql)
        return True

    connection = apsw.Connection(":memory:")
    connection.exec_trace = record
    try:
        connection.execute(body).fetchall()
    except apsw.Error:
        seen = seen[:1]
    finally:
        connection.close()
    assert len(seen) <= 1


def test_the_authorizer_lets_reads_pass_and_nothing_that_it_does_not_know() -> None:
    def reason(action: int, first: str | None = None, second: str | None = None) -> str:
        return authorize(action, first, second, {"dbstat"})

    assert reason(apsw.SQLITE_SELECT) == ""
    assert reason(apsw.SQLITE_READ, "pets", "name") == ""
    assert reason(apsw.SQLITE_READ, "DBSTAT", "name") == ""
    assert reason(apsw.SQLITE_PRAGMA, "TABLE_INFO", "pets") == ""
    assert reason(apsw.SQLITE_FUNCTION, None, "count") == ""
    assert "carray" in reason(apsw.SQLITE_READ, "carray", "value")
    assert "RANDOM" in reason(apsw.SQLITE_FUNCTION, None, "RANDOM")
    assert "database_list" in reason(apsw.SQLITE_PRAGMA, "database_list")
    for action in (apsw.SQLITE_INSERT, apsw.SQLITE_ATTACH, apsw.SQLITE_CREATE_TEMP_TABLE, apsw.SQLITE_TRANSACTION, 999):
        assert reason(action, "x", "y")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (apsw.SQLError("no such table: pets"), "missing"),
        (apsw.SQLError('near "FORM": syntax error'), "syntax"),
        (apsw.SQLError("incomplete input"), "syntax"),
        (apsw.SQLError("too many terms in compound SELECT"), "size"),
        (apsw.SQLError("ambiguous column name: id"), "runtime"),
        (apsw.TooBigError("string or blob too big"), "size"),
        (apsw.FullError("database or disk is full"), "size"),
        (apsw.AuthError("not authorized"), "denied"),
        (apsw.BindingsError("incorrect number of bindings"), "syntax"),
        (apsw.CorruptError("database disk image is malformed"), "runtime"),
    ],
)
def test_kinds(error: apsw.Error, kind: str) -> None:
    assert classify(error).kind == kind


def test_a_message_is_one_bounded_line() -> None:
    message = classify(apsw.SQLError("near\n  \tx" + "y" * 1_000)).message
    assert message.startswith("near x")
    assert len(message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize("name", ["date", '"date"', "[strftime]", "`datetime`", "'time'", "JulianDay"])
def test_a_time_zone_is_refused_however_the_function_is_written(name: str) -> None:
    with pytest.raises(SQLError, match="localtime"):
        statement_body(f"SELECT {name} ('now', 'localtime')", 1_000)


def outcome(sql: str) -> str:
    try:
        return statement_body(sql, 1_000)
    except SQLError as error:
        return f"{error.kind}: {error.message}"


@given(sql=st.text(alphabet=" \t\n\v'\"`[]()abSELECTdrop_%1\u00e9", max_size=30))
def test_a_plain_statement_is_read_as_its_tokens_are(sql: str) -> None:
    # A comment in front changes nothing, but sends the text the long way. Blanks at the end belong to a quote that is
    # left open, which is an error either way.
    assert outcome(sql).rstrip() == outcome("/**/" + sql).rstrip()


@pytest.mark.parametrize("sql", ["drop table pets", " \n UPDATE pets SET age = 1", "Delete from pets", "", " \t"])
def test_the_short_way_refuses_what_the_long_way_does(sql: str) -> None:
    assert outcome(sql) == outcome(sql + ";")
    assert ": " in outcome(sql)
