"""Rows of a query as JSON text and back, every value with its type: blobs are `{"blob": HEX}`."""

from __future__ import annotations

import json
from typing import Any

from env_server.dataset import Row, SQLValue


def rows_to_json(rows: tuple[Row, ...]) -> str:
    """Return the rows as JSON text."""
    return json.dumps([[_plain(value) for value in row] for row in rows])


def rows_from_json(text: str | bytes) -> tuple[Row, ...]:
    """Return the rows that `rows_to_json` wrote. Raises ValueError."""
    return tuple(tuple(_value(cell) for cell in row) for row in json.loads(text))


def _plain(value: SQLValue) -> object:
    return {"blob": value.hex()} if isinstance(value, bytes) else value


def _value(cell: Any) -> SQLValue:
    value: SQLValue = bytes.fromhex(cell["blob"]) if isinstance(cell, dict) else cell
    return value
