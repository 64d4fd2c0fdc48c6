"""A query as somebody writes it who has looked at the schema: names as DESCRIBE shows them, keywords in capitals.

Gold queries of benchmarks are written by many hands: a table `Aircraft` where the schema has `aircraft`, two blanks
around an operator, texts in double quotes. A small model that learns from them learns that names are not what it was
shown.

`canonicalize` changes how a query is written and nothing that it means: blanks and comments, the case of keywords, of
functions and of names, the quotes of texts. A name that the schema spells in several ways stays as it is where the
query does not say which one is meant. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from env_server.sql.lexer import GAPS, RESERVED_WORDS, Token, fold, tokens
from env_server.sql.schema import Schema, Table, quote_text, unquoted

_NAMES_TOO = """
asc cross current desc end filter following full glob inner left like natural nulls offset outer over partition
preceding range recursive regexp right row rows unbounded window with
"""
"""Keywords that a column may have for its name."""
_KEYWORDS = RESERVED_WORDS | frozenset(_NAMES_TOO.split())
_APART_FROM_PARENTHESIS = _KEYWORDS - {"cast"}
"""As in `IN (`; a function's name is not."""
_TABLE_FOLLOWS = frozenset(("from", "join"))
_SIGNS = frozenset("+-~")
_OPERATORS = frozenset(
    ("=", "==", "<", ">", "<=", ">=", "<>", "!=", "||", "+", "-", "*", "/", "%", "<<", ">>", "&", "|")
)


def canonicalize(sql: str, schema: Schema) -> str:
    """Return the query in the spelling of the schema."""
    pieces = [token for token in tokens(sql) if token.lastgroup not in GAPS]
    while pieces and pieces[-1][0] == ";":
        pieces.pop()
    names = _Names(schema, pieces)
    written = (
        (" " if index and _apart(pieces, index) else "") + _spelled(pieces, index, names)
        for index in range(len(pieces))
    )
    return "".join(written)


class _Names:
    """How the tables of a query and their columns are spelled."""

    def __init__(self, schema: Schema, pieces: Sequence[Token]) -> None:
        self._tables = {fold(table.name): table for table in schema.tables}
        self._aliases: defaultdict[str, list[Table]] = defaultdict(list)
        for index, token in enumerate(pieces):
            if (table := self._tables.get(_name(token))) is not None:
                self._aliases[_name(token)].append(table)
                rest = [_name(later) for later in pieces[index + 1 : index + 3]]
                alias = rest[1] if rest[:1] == ["as"] and len(rest) > 1 else rest[0] if rest else ""
                if alias not in _KEYWORDS:
                    self._aliases[alias].append(table)
        used = [table for tables in self._aliases.values() for table in tables]
        self._columns = _columns(used)
        self._all_columns = _columns(schema.tables)

    def table(self, name: str) -> str | None:
        """The spelling of a table, or None."""
        table = self._tables.get(name)
        return table.name if table else None

    def column(self, name: str, qualifier: str | None) -> str | None:
        """The one spelling of a column of the qualifier's table, or of all tables of the query; or None."""
        tables = self._aliases.get(qualifier) if qualifier else None
        known = self._columns if tables is None else _columns(tables)
        found = known.get(name, set())
        return next(iter(found)) if len(found) == 1 else None

    def is_column(self, name: str) -> bool:
        """Whether any table has such a column."""
        return name in self._all_columns

    def __contains__(self, name: str) -> bool:
        return name in self._tables or name in self._all_columns


def _columns(tables: Iterable[Table]) -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for table in tables:
        for column in table.columns:
            found[fold(column.name)].add(column.name)
    return dict(found)


def _name(token: Token) -> str:
    return fold(unquoted(token[0])) if token.lastgroup in ("word", "quoted") else token[0]


def _spelled(pieces: Sequence[Token], index: int, names: _Names) -> str:
    token, text = pieces[index], pieces[index][0]
    before = _name(pieces[index - 1]) if index else ""
    after = pieces[index + 1][0] if index + 1 < len(pieces) else ""
    if token.lastgroup == "quoted":
        name = unquoted(text)
        # What is no name here is a text to SQLite, and better written as one.
        is_text = text[0] == '"' == text[-1] and len(text) > 1 and fold(name) not in names
        return quote_text(name) if is_text else text
    if token.lastgroup != "word":
        return text
    name = fold(text)
    if name in RESERVED_WORDS:
        return text.upper()
    if before == ".":
        return names.column(name, _name(pieces[index - 2]) if index > 1 else None) or text
    if before in _TABLE_FOLLOWS or after == ".":
        return names.table(name) or text
    if after == "(":
        return text.upper()
    if name in _KEYWORDS and name not in names:
        return text.upper()
    # A column that tables spell differently is not taken for a table of that name.
    return names.column(name, None) or (text if names.is_column(name) else names.table(name) or text)


def _apart(pieces: Sequence[Token], index: int) -> bool:
    """Whether a blank stands between a token and the one before it."""
    last, token = pieces[index - 1], pieces[index]
    if token[0] in (",", ")", ";", ".") or last[0] in ("(", "."):
        return False
    if token[0] == "(" and last.lastgroup == "word":
        return fold(last[0]) in _APART_FROM_PARENTHESIS
    if last[0] in _SIGNS and token.start() == last.end():
        # A sign belongs to what follows where nothing that it could be taken from or added to comes before it.
        previous = pieces[index - 2][0] if index > 1 else "("
        return not (previous in _OPERATORS or previous in ("(", ",") or fold(previous) in _KEYWORDS)
    return True
