"""SQL text as a syntax tree: one query, as SQLite reads it.

sqlglot's SQLite dialect takes `range <` and `map <` for the beginning of a nested type, which SQLite does not have;
here they are a column and a comparison.
"""

from __future__ import annotations

from typing import ClassVar

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite
from sqlglot.errors import SqlglotError


class _Dialect(SQLite):  # type: ignore[misc]
    """SQLite without nested types."""

    class Parser(SQLite.Parser):  # type: ignore[misc]
        """SQLite's parser without them."""

        NESTED_TYPE_TOKENS: ClassVar[set[object]] = set()


def parse_query(sql: str) -> exp.Query | None:
    """Parse a text; None for what sqlglot cannot parse as one query. Never raises."""
    try:
        statements = [tree for tree in sqlglot.parse(sql, read=_Dialect) if tree is not None]
    except (SqlglotError, RecursionError):
        return None
    return statements[0] if len(statements) == 1 and isinstance(statements[0], exp.Query) else None
