"""Which questions of a database have the same SQL, up to formatting.

`formatting_key` gives two queries the same text when one is a rewriting of the other that changes

- the case of keywords and identifiers, white space and comments, a closing semicolon;
- the quotes around identifiers;
- the names of aliases, and AS before them;
- `<>` for `!=` and `==` for `=`.

Literals stay as they are: `1` is not `1.0`, 'Oslo' is not 'oslo', and a text in double quotes that is no name of the
database is a literal to SQLite. The one thing that is not looked at is whether a name in double quotes can be seen
where it stands; where it cannot, it is a literal as well. Works on words, not on a syntax tree, so it holds for
whatever SQLite accepts. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass

import apsw

from env_server.sql.lexer import GAPS, folded, tokens
from env_server.sql.schema import quote_identifier, unquoted

_PLAIN_NAME = re.compile(r"[^\W\d][\w$]*\Z")
_SAME_SYMBOL = {"<>": "!=", "==": "="}


def repeated(keys: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """Map each id whose key has occurred before to the first id with that key; takes pairs of id and key."""
    first: dict[Hashable, str] = {}
    found = ((each, first.setdefault(key, each)) for each, key in keys)
    return {each: earlier for each, earlier in found if earlier != each}


def formatting_key(sql: str, names: Collection[str]) -> str:
    """Return a text that queries have in common when they differ in formatting alone.

    `names` are those of the database's tables, views and columns, as `folded` returns them.
    """
    lexemes = list(_lexemes(sql))
    while lexemes and lexemes[-1].symbol == ";":
        lexemes.pop()
    places = set(_alias_places(lexemes))
    aliases = {folded(lexemes[place].text) for place in places} - set(names)
    number: dict[str, int] = {}
    words: list[str] = []
    for place, lexeme in enumerate(lexemes):
        name = folded(lexeme.text)
        calls = place + 1 < len(lexemes) and lexemes[place + 1].symbol == "("
        if lexeme.keyword == "as" and place + 1 in places:
            continue
        if lexeme.is_name and name in aliases and not calls:
            words.append(f":{number.setdefault(name, len(number) + 1)}")  # no alias looks like a parameter
        elif lexeme.kind == "literal":
            words.append(lexeme.text)
        elif lexeme.kind == "text" and name not in names:
            words.append(quote_identifier(lexeme.text))
        elif lexeme.is_name:
            words.append(
                name if _PLAIN_NAME.match(name) and name.upper() not in apsw.keywords else quote_identifier(name)
            )
        else:
            words.append(_SAME_SYMBOL.get(name, name))
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Lexeme:
    """A word of a query, without its quotes.

    `kind`: `keyword`; `name`, bare; `quoted`, a name in brackets or backticks; `text`, in double quotes, which is a
    name or a literal; `literal`; `symbol`.
    """

    kind: str
    text: str

    @property
    def is_name(self) -> bool:
        """Whether it may name something."""
        return self.kind in ("name", "quoted", "text")

    @property
    def keyword(self) -> str:
        """The keyword in lower case, "" for anything else."""
        return self.text.lower() if self.kind == "keyword" else ""

    @property
    def symbol(self) -> str:
        """The symbol, "" for anything else."""
        return self.text if self.kind == "symbol" else ""


def _lexemes(sql: str) -> Iterator[_Lexeme]:
    for token in tokens(sql):
        text = token[0]
        if token.lastgroup == "quoted":
            yield _Lexeme("text" if text[0] == '"' else "quoted", unquoted(text))
        elif token.lastgroup == "word":
            yield _Lexeme("keyword" if text.upper() in apsw.keywords else "name", text)
        elif token.lastgroup not in GAPS:
            yield _Lexeme("symbol" if token.lastgroup == "symbol" else "literal", text)


def _alias_places(lexemes: list[_Lexeme]) -> Iterator[int]:
    """Yield the places of the names that are made up: after AS, or after what can only be followed by an alias."""
    in_cast = [False]
    previous = _Lexeme("symbol", ";")
    for place, lexeme in enumerate(lexemes):
        if lexeme.symbol == "(":
            in_cast.append(previous.keyword == "cast")
        elif lexeme.symbol == ")" and len(in_cast) > 1:
            in_cast.pop()
        elif lexeme.is_name and not in_cast[-1]:
            ends_operand = previous.is_name or previous.kind == "literal" or previous.symbol == ")"
            if previous.keyword == "as" or ends_operand:
                yield place
        previous = lexeme
