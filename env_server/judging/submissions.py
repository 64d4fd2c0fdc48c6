"""The text of a submitted query, as Spider's official evaluator would read it.

`submitted_query` takes off what people and models put around a query, then rewrites the two things that the evaluator
rewrites before it runs one: `> =`, `< =` and `! =` are joined, and MySQL's YEAR(CURDATE()) is 2020. The evaluator does
that to gold queries too: `runnable_query`. Guarantees:

1. The query inside stays as it is, but for those two; so does a query with nothing around it. Names, texts and comments
   are never touched (the evaluator's own replacement looks into them).
2. Only what cannot begin a statement of SQLite is taken off, and what belongs to it at the end. Other text around a
   query stays, so that the query fails: nobody guesses which part was meant.
3. What was read is read as itself again. Any text is read, in linear time, and nothing raises.

Wrappers, in any order and number: code fences with or without a language, backticks or quotes around the whole,
"Answer:", "The answer is", "SQL:", "Query:", trailing semicolons, white space.
"""

from __future__ import annotations

import re
from itertools import groupby

from env_server.sql.lexer import tokens

_FENCE = "```"
_OPENING = re.compile(rf"{_FENCE}(?:(?!(?:select|with|values)\b)\w*[ \t]*\n)?", re.IGNORECASE)
_PREFIX = re.compile(
    r"(?:the\s+)?(?:final\s+)?"
    r"(?:answer(?:\s+is(?:\s*:|(?=\s))|\s*[:=])|(?:sql(?:ite)?(?:\s+query)?|query)(?:\s+is)?\s*:)"
    r"|sql(?:ite)?\d*(?=\s|\Z)",
    re.IGNORECASE,
)

_REWRITTEN = re.compile(r"([<>!]) =|\bYEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)", re.IGNORECASE)
_KEPT = ("literal", "quoted", "comment")


def submitted_query(text: str) -> str:
    """Return the query that a submitted text stands for, as it is to be run."""
    return runnable_query(_unwrapped(text))


def runnable_query(sql: str) -> str:
    """Return a query as the official evaluator runs it."""
    if not _REWRITTEN.search(sql):
        return sql
    runs = groupby(tokens(sql), key=lambda token: token.lastgroup in _KEPT)
    texts = ((kept, "".join(token[0] for token in run)) for kept, run in runs)
    return "".join(text if kept else _REWRITTEN.sub(_rewritten, text) for kept, text in texts)


def _rewritten(match: re.Match[str]) -> str:
    return match[1] + "=" if match[1] else "2020"


def _unwrapped(text: str) -> str:
    """Take the wrappers off until none is left."""
    start, end = _trimmed(text, 0, len(text))
    while start < end:
        inside = _inside(text, start, end)
        if inside is None:
            break
        start, end = _trimmed(text, *inside)
    return text[start:end]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Leave out white space at both ends, and semicolons at the second."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and (text[end - 1].isspace() or text[end - 1] == ";"):
        end -= 1
    return start, end


def _inside(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return where the outermost wrapper's inside begins and ends; None when there is no wrapper."""
    if opening := _OPENING.match(text, start, end):
        start = opening.end()
        return start, end - len(_FENCE) if text.endswith(_FENCE, start, end) else end
    if end - start > 1 and text[start] == text[end - 1] and text[start] in "\"'`":
        return start + 1, end - 1
    if prefix := _PREFIX.match(text, start, end):
        return prefix.end(), end
    return None
