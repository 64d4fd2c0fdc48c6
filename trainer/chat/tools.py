"""The four actions as tools that a chat template can declare, and calls of them as actions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from env_server.types import ActionType, AnswerMode, SQLAction

Schema = dict[str, Any]
"""A tool as chat templates know it: the JSON schema of a function."""

_ANSWER = {
    AnswerMode.VALUE: (
        "value",
        "The answer: one value as it is, a list separated by commas, or rows as a | b, one row per line; [] when "
        "nothing fits.",
    ),
    AnswerMode.SQL: ("sql", "The query that answers the question."),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a model wrote it: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def tool_schemas(mode: AnswerMode) -> list[Schema]:
    """Return the declarations of the four tools."""
    argument, meaning = _ANSWER[mode]
    return [
        _schema(ActionType.DESCRIBE, "Show a table's columns.", "table", "The table's name."),
        _schema(ActionType.SAMPLE, "Show a few rows of a table.", "table", "The table's name."),
        _schema(ActionType.QUERY, "Run one SELECT and see its result.", "sql", "The query, in SQLite's dialect."),
        _schema(ActionType.ANSWER, "Give the answer and finish.", argument, meaning),
    ]


def call_of(action: SQLAction, mode: AnswerMode) -> ToolCall:
    """Return the call that stands for an action."""
    name = action.action_type.lower()
    return ToolCall(name, {argument_name(ActionType(action.action_type), mode): action.argument})


def argument_name(kind: ActionType, mode: AnswerMode) -> str:
    """Return the name of a tool's one argument."""
    if kind is ActionType.ANSWER:
        return _ANSWER[mode][0]
    return "sql" if kind is ActionType.QUERY else "table"


def _schema(kind: ActionType, description: str, argument: str, meaning: str) -> Schema:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return {
        "type": "function",
        "function": {"name": kind.value.lower(), "description": description, "parameters": parameters},
    }
