"""SQLite's lexical structure: what in a text is a word, a literal, quoted, or commented out.

Guarantees: the tokens are the text, cut up without a gap; reading is linear in the text's length and never raises. A
quotation or a comment that is never closed runs to the end of the text. Words are letters and digits of any script.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

_RESERVED = """
add all alter and as autoincrement between case cast check collate commit constraint create current_date
current_time current_timestamp default deferrable delete distinct drop else escape except exists foreign
from group having in index insert intersect into is isnull join limit not nothing notnull null on or
order primary raise references returning select set table then to transaction union unique update using
values when where
"""
RESERVED_WORDS = frozenset(_RESERVED.split())
"""The keywords that SQLite does not take for the bare name of a column, in lower case."""

BLANKS = " \t\n\f\r"
"""The white space of SQLite."""

Token = re.Match[str]
"""A piece of a text: `token[0]`, which is what `token.lastgroup` says.

- `blank`, `comment`; `other_space`, white space that SQLite does not know, such as a vertical tab: an error to it
- `literal`, a text in single quotes, perhaps a blob's; `number`
- `quoted`, a name in double quotes, which may also be a text, in backticks or in brackets
- `word`, a keyword or a bare name; `symbol`, an operator or a punctuation mark, or what SQLite has no use for
"""

GAPS = frozenset(("blank", "comment", "other_space"))
"""The kinds of tokens that only separate others."""

_FOLD = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAGS = re.VERBOSE | re.DOTALL | re.IGNORECASE
_OPAQUE = r"""
        (?P<comment> --[^\n]* | /\*.*?(?:\*/|\Z) )
      | (?P<literal> (?:\bx)?'[^']*(?:''[^']*)*(?:'|\Z) )
      | (?P<quoted> "[^"]*(?:""[^"]*)*(?:"|\Z) | `[^`]*(?:``[^`]*)*(?:`|\Z) | \[[^\]]*(?:\]|\Z) )"""
_OPAQUE_TOKEN = re.compile(_OPAQUE, _FLAGS)
_OPAQUE_START = re.compile(r"""['"`\[]|--|/\*""")
"""Found much faster than a token: most statements have none."""
_TOKEN = re.compile(
    rf"""(?P<blank> [{BLANKS}]+ )
      | {_OPAQUE}
      | (?P<other_space> \s )
      | (?P<number> (?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?\w* )
      | (?P<word> [^\W\d][\w$]* )
      | (?P<symbol> <> | != | == | <= | >= | \|\| | << | >> | ->> | -> | . )""",
    _FLAGS,
)


def tokens(sql: str) -> Iterator[Token]:
    """Return the tokens of a text, gaps included."""
    return _TOKEN.finditer(sql)


def opaque_tokens(sql: str) -> Iterator[Token]:
    """Return the comments, literals and quoted names of a text, which say nothing outside of themselves."""
    return _OPAQUE_TOKEN.finditer(sql) if _OPAQUE_START.search(sql) else iter(())


def is_plain_name(name: str) -> bool:
    """Tell whether SQLite reads the text as a name where one is expected, without quotes around it."""
    return _PLAIN_NAME.fullmatch(name) is not None and name.lower() not in RESERVED_WORDS


def fold(text: str) -> str:
    """Return names and keywords as SQLite compares them: without regard to the case of ASCII letters."""
    return text.lower() if text.isascii() else text.translate(_FOLD)
