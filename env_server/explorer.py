"""The three exploring actions on one database: DESCRIBE, SAMPLE and QUERY. Pure; no statement is run here.

Each action gives its outcome, or the query that it needs; `query_outcome` makes an outcome of what the query gave. What
an agent does wrong is an outcome with `error`, one line long; nothing that an argument can hold raises.
"""

from __future__ import annotations

from env_server.errors import UnknownTableError
from env_server.jobs import QueryJob
from env_server.outcomes import ActionOutcome, one_line
from env_server.settings import DisplaySettings
from env_server.sql.display import describe_table
from env_server.sql.schema import Schema, Table, quote_identifier


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

    def _find(self, argument: str, action: str) -> Table | ActionOutcome:
        if not argument.strip():
            return ActionOutcome(error=f"{action} needs a table name")
        try:
            return self._schema.find(argument)
        except UnknownTableError as error:
            return ActionOutcome(error=one_line(str(error)))
