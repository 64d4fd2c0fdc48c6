"""Tokens: that they are the text, what kinds they have, and that SQLite reads the same ones."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.sql.lexer import GAPS, is_plain_name, tokens

PIECES = ["'", '"', "`", "[", "]", "--", "/*", "*/", ";", "\n", "\v", " ", "''", "x'", "1.5e-3", ".", "a$", "é", "->>"]


@pytest.mark.parametrize(
    ("sql", "kinds"),
    [
        ("SELECT a1 FROM é$", "word word word word"),
        ("1 .5 1. 1e5 1.5E-3 0x1F 1e", "number number number number number number number"),
        ("'it''s' x'00' X'00' 'open", "literal literal literal literal"),
        ('"a""b" `a``b` [a"b] "open', "quoted quoted quoted quoted"),
        ("a--b\n/* ; */b/*open", "word comment blank comment word comment"),
        ("a<>b!=c||d->>e", "word symbol word symbol word symbol word symbol word"),
        ("a.b<1;", "word symbol word symbol number symbol"),
        ("a\v\u00a0b", "word other_space other_space word"),
        ("ax'00'", "word literal"),
    ],
)
def test_kinds(sql: str, kinds: str) -> None:
    found = [str(token.lastgroup) for token in tokens(sql)]
    assert [kind for kind in found if kind != "blank" or "blank" in kinds] == kinds.split()


@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_the_tokens_are_the_text(sql: str) -> None:
    assert "".join(token[0] for token in tokens(sql)) == sql


@pytest.mark.parametrize("piece", PIECES)
def test_long_texts_are_read_in_one_go(piece: str) -> None:
    """Linear: a quadratic reading of half a million characters would not end."""
    assert sum(len(token[0]) for token in tokens(piece * (500_000 // len(piece)))) > 400_000


def test_comments_between_all_tokens_do_not_change_what_sqlite_reads(spider_dir: Path) -> None:
    """A cut within a token would, and so would a token that runs on over another one."""
    entries = json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8"))
    db_id = entries[0]["db_id"]
    file = spider_dir / "database" / db_id / f"{db_id}.sqlite"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        for entry in entries:
            if entry["db_id"] == db_id:
                spread = "/**/".join(token[0] for token in tokens(entry["query"]) if token.lastgroup not in GAPS)
                assert connection.execute(spread).fetchall() == connection.execute(entry["query"]).fetchall()


@pytest.mark.parametrize(
    ("name", "plain"), [("a_1", True), ("match", True), ("Order", False), ("1a", False), ("", False)]
)
def test_plain_names(name: str, plain: bool) -> None:
    assert is_plain_name(name) is plain
