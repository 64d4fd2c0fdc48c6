"""What the text-to-SQL baseline says and reads: schema and question in one prompt, and the query in a reply. Pure.

The prompt is the zero-shot one of Rajkumar, Li and Bahdanau (Evaluating the Text-to-SQL Capabilities of Large Language
Models, 2022), "Create Table", which BIRD's baseline has taken over: the database's own CREATE statements, the question
in comments, and SELECT. A chat model gets it as a user's message, under a system message that asks for one query.

`query_in` promises: any text is read, in time linear in its length; what is returned is one statement, as it was
written, that begins with SELECT or WITH. It is, reasoning blocks aside, the first of:

1. a statement in a code fence; one that is not closed runs to the end;
2. a line that begins with one, perhaps after a label ("SQL:");
3. SELECT in capitals, anywhere.

It ends with its semicolon, the fence or backtick around it, or, outside of fences, a blank line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from env_server.sql.lexer import tokens
from trainer.chat.reasoning import strip_reasoning

SYSTEM_PROMPT = (
    "You write SQL for a SQLite database. You are shown its schema and a question. Reply with one SELECT statement "
    "that answers the question, and nothing else."
)

_FENCE = "```"
_START = r"(?:SELECT\b|WITH\s+(?:RECURSIVE\s+)?[\w\"`\[\]]+\s*(?:\([^()]*\)\s*)?AS\b)"
_ANY_START = re.compile(rf"\b{_START}", re.IGNORECASE)
_LINE_START = re.compile(
    rf"^[ \t>*_#`-]*+(?:[A-Za-z ]{{1,30}}:)?[ \t*`]*+(?P<query>{_START})", re.IGNORECASE | re.MULTILINE
)
_SHOUTED = re.compile(r"\b(?P<query>SELECT)\b")
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


def schema_prompt(statements: Sequence[str], question: str) -> str:
    """Return the user's message; `question` as the environment words it, with its hint if it has one."""
    schema = "\n\n".join(f"{statement.strip().rstrip(';')};" for statement in statements)
    asked = "\n".join(f"-- {line}" for line in question.splitlines())
    task = "-- Using valid SQLite, answer the following question for the tables provided above."
    return f"{schema}\n\n{task}\n{asked}\nSELECT"


def query_in(text: str) -> str | None:
    """Return the query in a reply; None when there is none."""
    said = strip_reasoning(text)
    for fenced in _fenced(said):
        if found := _ANY_START.search(fenced):
            return _statement(fenced[found.start() :], fenced=True)
    found = _LINE_START.search(said) or _SHOUTED.search(said)
    if found is None:
        return None
    start = found.start("query")
    closing = "`" if said[:start].endswith("`") else _FENCE
    return _statement(said[start:].partition(closing)[0], fenced=False)


def _fenced(text: str) -> Iterator[str]:
    """What stands in code fences, in order."""
    parts = text.split(_FENCE)
    return iter(parts[1::2])


def _statement(text: str, *, fenced: bool) -> str:
    """Return the statement that a text begins with, without its semicolon."""
    for token in tokens(text):
        if token[0] == ";" or (not fenced and token.lastgroup == "blank" and _BLANK_LINE.search(token[0])):
            return text[: token.start()].rstrip()
    return text.rstrip()
