"""The three exploring actions on one database: DESCRIBE, SAMPLE and QUERY. Pure; no statement is run here.

Each action gives its outcome, or the query that it needs; `query_outcome` makes an outcome of what the query gave. What
an agent does wrong is an outcome with `error`, one line long; nothing that an argument can hold raises. A hint holds
names that DESCRIBE shows, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from itertools import islice

from env_server.errors import UnknownTableError
from env_server.jobs import QueryJob
from env_server.outcomes import ActionOutcome, one_line
from env_server.settings import DisplaySettings
from env_server.sql.display import MAX_DESCRIBED_COLUMNS, MAX_NAME_CHARS, describe_table, sql_name
from env_server.sql.lexer import folded, tokens
from env_server.sql.schema import Schema, Table, quote_identifier, unquoted
from env_server.sql.statements import MISSING_NAME

MAX_HINTED_TABLES = 4
"""Tables of a query whose columns a hint lists."""
MAX_COMPARED = 200
"""Tables that are compared with a missing one; the length of an error allows no more."""


class Explorer:
    """Plans the exploring actions of one episode. `schema` is that of the database `db_id`."""

    def __init__(self, schema: Schema, db_id: str, display: DisplaySettings) -> None:
        self._schema = schema
        self._db_id = db_id
        self._display = display

    def describe(self, argument: str) -> ActionOutcome:
        """Show a table's columns, types, keys and row count."""
        table = self._find(argument, "DESCRIBE")
        return table if isinstance(table, ActionOutcome) else ActionOutcome(result=describe_table(table))

    def sample(self, argument: str) -> QueryJob | ActionOutcome:
        """Show a table's first rows, in the order in which the table stores them."""
        table = self._find(argument, "SAMPLE")
        if isinstance(table, ActionOutcome):
            return table
        # An index that covers the table must not decide the order.
        order = "" if table.is_view or table.is_virtual else " NOT INDEXED"
        limit = self._display.sample_rows
        sql = f"SELECT * FROM main.{quote_identifier(table.name)}{order} LIMIT {limit}"
        return QueryJob(self._db_id, sql, limit)

    def query(self, argument: str) -> QueryJob | ActionOutcome:
        """Run one read-only statement and show its rows."""
        if not argument.strip():
            return ActionOutcome(error="QUERY needs a SQL query")
        return QueryJob(self._db_id, argument, self._display.max_rows)

    def with_hint(self, sql: str, outcome: ActionOutcome) -> ActionOutcome:
        """Return a query's outcome; where it lacks a table or a column, with the names that there are, nearest first.

        The columns are those of the tables that the query names; where it names none, the tables are listed.
        """
        missing = MISSING_NAME.fullmatch(outcome.error.removeprefix("not found: "))
        if missing is None:
            return outcome
        distance = _distance_from(unquoted(missing["name"].rpartition(".")[2]))
        columns = {
            table.name: sorted((column.name for column in table.columns[:MAX_DESCRIBED_COLUMNS]), key=distance)
            for table in (self._named_in(sql) if missing["kind"] == "column" else ())
        }
        if columns:
            # The table with the nearest name first: often not the one that the query takes it from.
            ordered = sorted(columns.items(), key=lambda entry: distance(entry[1][0]))
            hint = "Columns of " + "; of ".join(f"{sql_name(table)}: {_listed(names)}" for table, names in ordered)
        else:
            hint = f"Tables: {_listed(sorted(self._schema.table_names[:MAX_COMPARED], key=distance))}"
        return ActionOutcome(error=one_line(f"{outcome.error}. {hint}"))

    def _named_in(self, sql: str) -> list[Table]:
        """The first MAX_HINTED_TABLES of the tables that a query's words name, in the schema's order."""
        words = {folded(unquoted(token[0])) for token in tokens(sql) if token.lastgroup in ("word", "quoted")}
        named = (table for table in self._schema.tables if folded(table.name) in words and table.columns)
        return list(islice(named, MAX_HINTED_TABLES))

    def _find(self, argument: str, action: str) -> Table | ActionOutcome:
        if not argument.strip():
            return ActionOutcome(error=f"{action} needs a table name")
        try:
            return self._schema.find(argument)
        except UnknownTableError as error:
            return ActionOutcome(error=one_line(str(error)))


def _distance_from(name: str) -> Callable[[str], float]:
    """Return a function that says how unlike a name is to this one, from 0 to 1."""
    matcher = SequenceMatcher(b=folded(name)[:MAX_NAME_CHARS])

    def distance(other: str) -> float:
        matcher.set_seq1(folded(other)[:MAX_NAME_CHARS])
        return 1.0 - matcher.ratio()

    return distance


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(sql_name, names))
