"""Only what is new is read, and a file that is another one is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.viewer.growing import Place, read_news

WHOLE = 1_000_000


def read(path: Path, place: Place, limit: int = WHOLE) -> tuple[list[bytes], Place, bool]:
    news = read_news(path, place, limit)
    return news.lines, news.place, news.restarted


def test_a_line_is_given_out_once_and_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    lines, place, _ = read(path, Place())
    assert lines == [b"one\n"]
    assert read(path, place)[0] == []
    with path.open("ab") as file:
        file.write(b"o\nthree\r\x0b\n")
    lines, place, restarted = read(path, place)
    assert (lines, restarted) == ([b"two\n", b"three\r\x0b\n"], False)
    assert place.offset == path.stat().st_size


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=20),
    limit=st.integers(1, 30),
)
def test_parts_add_up_to_the_whole(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], limit: int) -> None:
    path = tmp_path_factory.mktemp("growing") / "log"
    path.write_bytes(b"".join(lines))
    found: list[bytes] = []
    place, more = Place(), True
    while more:
        news = read_news(path, place, limit)
        assert news.start == sum(map(len, found))
        found += news.lines
        place, more = news.place, news.more
    assert found == lines


@pytest.mark.parametrize("text", [b"one\n", b"one\nTWO\n", b"one\nTWO\nthree\nfour\n", b""])
def test_a_file_that_was_cut_off_is_read_again(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    _, place, _ = read(path, Place())
    with path.open("r+b") as file:  # the same file, as `os.truncate` leaves it
        file.truncate(0)
        file.write(text)
    lines, after, restarted = read(path, place)
    assert restarted
    assert b"".join(lines) == text
    assert after.offset == len(text)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "new"
    for each in (path, other):
        each.write_bytes(b"one\ntwo\n")
    _, place, _ = read(path, Place())
    other.replace(path)
    lines, _, restarted = read(path, place)
    assert (lines, restarted) == ([b"one\n", b"two\n"], True)
