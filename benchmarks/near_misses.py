"""Near-misses of a query, made by random changes of its tokens. Pure.

Most cannot run or are wrong on the question's database; some are right there by luck, and some mean the same as the
query. How suites are made takes no account of them, nor of any other list of wrong queries.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from env_server.sql.lexer import GAPS, tokens
from env_server.sql.schema import Schema

_EXCHANGED = {
    "max": ("min", "avg", "sum"), "min": ("max", "avg"), "avg": ("sum", "max"), "sum": ("avg", "count"),
    "count": ("max", "sum"), "and": ("or",), "or": ("and",), "asc": ("desc",), "desc": ("asc",),
    "union": ("intersect", "except"), "intersect": ("union", "except"), "except": ("intersect", "union"),
    "<": ("<=", ">", "="), ">": (">=", "<", "="), "<=": ("<", ">="), ">=": (">", "<="), "=": ("!=", ">=", "<", "like"),
    "!=": ("=", ">"), "like": ("=",), "in": ("not in",), "not": ("",), "distinct": ("",), "+": ("-",), "-": ("+",),
    "join": ("left join",),
}  # fmt: skip
_CONDITIONS = ("and", "or", "where", "having")
_CLAUSES = ("group", "order", "limit", "union", "intersect", "except")
_CUT_SHARE = 0.2
_SECOND_CHANGE = 0.3
_TRIES = 3


def near_misses(sql: str, schema: Schema, rng: random.Random, count: int) -> Iterator[str]:
    """Yield up to `count` queries that one or two random changes make of a query."""
    words = [token[0] for token in tokens(sql) if token.lastgroup not in GAPS]
    seen = {" ".join(words)}
    for _ in range(_TRIES * count):
        changed = _changed(words, schema, rng)
        if rng.random() < _SECOND_CHANGE:
            changed = _changed(changed, schema, rng)
        text = " ".join(changed)
        if text not in seen:
            seen.add(text)
            yield text
        if len(seen) > count:
            return


def _changed(words: list[str], schema: Schema, rng: random.Random) -> list[str]:
    if rng.random() < _CUT_SHARE:
        starts = [i for i, word in enumerate(words) if word.casefold() in (*_CONDITIONS, *_CLAUSES)]
        return _cut(words, rng.choice(starts)) if starts else words
    place = rng.randrange(len(words))
    return [*words[:place], _exchanged(words, place, schema, rng), *words[place + 1 :]]


def _cut(words: list[str], start: int) -> list[str]:
    """Leave out a condition or a clause: up to the next one, or the end of its parentheses."""
    condition = words[start].casefold() in _CONDITIONS
    depth, end = 0, start + 1
    while end < len(words):
        word = words[end].casefold()
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth < 0 or (depth == 0 and word in (*_CLAUSES, ";", *(_CONDITIONS if condition else ()))):
            break
        end += 1
    return words[:start] + words[end:]


def _exchanged(words: list[str], place: int, schema: Schema, rng: random.Random) -> str:
    """Return another word for one: its opposite, another table or column, a number or a text near to it."""
    word = words[place]
    name = word.casefold()
    tables = {table.name.casefold(): table for table in schema.tables}
    columns = {column.name.casefold() for table in schema.tables for column in table.columns}
    if name == "select":
        return f"{word} DISTINCT"
    if name in _EXCHANGED:
        return rng.choice(_EXCHANGED[name])
    if name in tables:
        return rng.choice(schema.tables).name
    if name in columns:
        read = [tables[each.casefold()] for each in words if each.casefold() in tables]
        return rng.choice(rng.choice(read or list(schema.tables)).columns).name
    if word.isdecimal():
        number = int(word)
        return str(rng.choice((number + 1, max(number - 1, 0), 2 * number, 0, number + rng.randint(2, 50))))
    if word[:1] in ("'", '"') and len(word) > 3:
        text = word[1:-1]
        return (
            word[0] + rng.choice((text[:-1], f"{text}a", text.lower(), text.upper(), text[1:], f"%{text}%")) + word[0]
        )
    return word
