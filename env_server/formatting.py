"""How a person sees observations: as text where they are printed, as HTML in a notebook. Pure.

Guarantees: the text of an episode is its transcript, each action with its reward and what came back; everything that
the data or the agent said is escaped in HTML; a result that is no table for certain is shown as the text that it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple, Protocol

SEPARATOR = " | "
"""Between the cells of a result; a text that holds it is quoted (`env_server.sql.display`)."""
_CELL = re.compile(r"'(?:[^']|'(?! \| |$))*'(?= \| |$)|(?:(?! \| ).)*")
_NOTICE = re.compile(r"no rows|\((?:\d+ )?more rows?\)")


class Shown(Protocol):
    """What is shown of an observation."""

    question: str
    schema_info: str
    result: str
    error: str
    reward: float
    done: bool
    budget_remaining: int
    action_history: list[str]


class ResultTable(NamedTuple):
    """A result's header, its rows, and what is said below them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notice: str


def observation_text(observation: Shown) -> str:
    """Return the question and what is known of the schema; after an action, the action and what it gave."""
    if not observation.action_history:
        asked = f"Question: {observation.question}" if observation.question else "No question: look around"
        return f"{asked}\n{observation.schema_info}"
    said = f"Error: {observation.error}" if observation.error else observation.result
    return f"> {observation.action_history[-1]} ({observation.reward:+.2f})\n{said}"


def episode_text(observations: Sequence[Shown]) -> str:
    """Return an episode's transcript, from the observation of its reset on."""
    return "\n\n".join(map(observation_text, observations))


def observation_html(observation: Shown) -> str:
    """Return the same as HTML, with the steps that are left."""
    if not observation.action_history:
        asked = escape(observation.question or "No question: look around")
        return f"<div><p><strong>{asked}</strong></p>{_pre(observation.schema_info)}</div>"
    action = f"<code>{escape(observation.action_history[-1])}</code>"
    left = "the episode is over" if observation.done else f"{observation.budget_remaining} steps left"
    said = f'<div style="color:#c0392b">{_pre(observation.error)}</div>' if observation.error else _result(observation)
    return f"<div><p>{action} &nbsp;<small>reward {observation.reward:+.2f}, {left}</small></p>{said}</div>"


def episode_html(observations: Sequence[Shown]) -> str:
    """Return an episode's transcript as HTML."""
    return "".join(map(observation_html, observations))


def result_table(result: str) -> ResultTable | None:
    """Read the result of a SAMPLE or QUERY; None where its lines have different numbers of cells."""
    header, *lines = result.split("\n")
    notice = lines.pop() if lines and _NOTICE.fullmatch(lines[-1]) else ""
    table = [_cells(line) for line in (header, *lines)]
    if len({len(cells) for cells in table}) != 1:
        return None
    return ResultTable(table[0], tuple(table[1:]), notice)


def _cells(line: str) -> tuple[str, ...]:
    cells, position = [], 0
    while True:
        match = _CELL.match(line, position)
        assert match is not None, "the empty cell matches everywhere"
        cells.append(match[0])
        position = match.end() + len(SEPARATOR)
        if match.end() >= len(line):
            return tuple(cells)


def _result(observation: Shown) -> str:
    kind = observation.action_history[-1].partition(" ")[0]
    table = result_table(observation.result) if kind in ("SAMPLE", "QUERY") else None
    if table is None:
        return _pre(observation.result)
    head = _row("th", table.header)
    body = "".join(_row("td", row) for row in table.rows)
    notice = f"<p><small>{escape(table.notice)}</small></p>" if table.notice else ""
    whole = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x:auto">{whole}</div>{notice}'


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _pre(text: str) -> str:
    return f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'
