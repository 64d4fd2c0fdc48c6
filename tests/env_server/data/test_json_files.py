"""JSON and JSON Lines files: what is read, and the file, line and fix of what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.data.json_files import read_json_file
from env_server.errors import DataError

ENTRIES = [{"a": "x", "n": 1}, {"a": "é “😀”"}, {}]


def write(folder: Path, content: str | bytes, name: str = "q.json") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("name", ["q.json", "q.JSON", "q.jsonl"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("as_lines", [True, False])
def test_the_content_decides_whether_it_is_a_list_or_lines(
    tmp_path: Path, name: str, mark: bytes, as_lines: bool
) -> None:
    lines = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in ENTRIES)
    text = lines if as_lines else json.dumps(ENTRIES, indent=2, ensure_ascii=False)
    assert read_json_file(write(tmp_path, mark + text.encode(), name)).entries == ENTRIES


def test_blank_lines_and_line_separators_inside_text_do_not_count_in_json_lines(tmp_path: Path) -> None:
    file = read_json_file(write(tmp_path, '\r\n{"a": "x\u2028y"}\r\n  \n\n{"a": "z"}\n\n', "q.jsonl"))
    assert [entry["a"] for entry in file.entries] == ["x\u2028y", "z"]
    assert [file.line(0), file.line(1)] == [2, 5]


def test_small_files(tmp_path: Path) -> None:
    assert read_json_file(write(tmp_path, '{"a": "x"}', "q.jsonl")).entries == [{"a": "x"}]
    assert read_json_file(write(tmp_path, " [ ] ")).entries == []
    assert read_json_file(write(tmp_path, "\n", "q.jsonl")).entries == []
    with pytest.raises(DataError, match=r"nowhere\.json cannot be read: No such file"):
        read_json_file(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("name", "content", "place", "words"),
    [
        ("q.json", b'[\n {"a": "x",\n  "b": }\n]', "line 3, column 8", "not JSON"),
        ("q.json", b"", "line 1, column 1", "not JSON"),
        ("q.json", b'{"a": 1}', "line 1", "holds an object, not a list of questions. Wrap it in [ ]"),
        ("q.json", b'{\n "a": 1\n}\n', "line 1", "holds an object, not a list"),
        ("q.json", b'{\n "a": \n}\n', "line 3, column 1", "not JSON"),
        ("q.json", b"null", "line 1", "holds null, not a list"),
        ("q.json", b"[[]]", "line 1 (question 0)", "is a list, not an object"),
        ("q.json", b'[\n{"a": 1}\n,\n"x"]', "line 4 (question 1)", "is a string, not an object"),
        ("q.json", b'{"a": 1}\n{"a": 2\n', "line 2, column 8", "not JSON"),
        ("q.jsonl", b'{"a": 1}\n\n{"a" 2}\n', "line 3, column 6", "not JSON"),
        ("q.jsonl", b'{"a": 1}\n7\n', "line 2 (question 1)", "is a number, not an object"),
        ("q.jsonl", b'{"a": 1}\n{"a": 1} {"a": 2}\n', "line 2, column 10", "not JSON (Extra data)"),
        ("q.json", b'[\n{"a": "caf\xe9"}]', "line 2", "not UTF-8 (byte 0xe9)"),
        ("q.json", b"\xff\xfe[\x00]\x00", "line 1", "is UTF-16, not UTF-8"),
        ("q.json", b"[" * 200_000, "line 1", "nested too deeply"),
        ("q.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5_000 + b"}\n", "line 2", "not JSON"),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, place: str, words: str
) -> None:
    file = write(tmp_path, content, name)
    with pytest.raises(DataError) as raised:
        read_json_file(file)
    assert str(raised.value).startswith(f"{file}, {place}: ")
    assert words in str(raised.value)


def test_text_is_required_or_optional(tmp_path: Path) -> None:
    file = read_json_file(write(tmp_path, '[{"a": " x ", "c": " y ", "d": null, "e": "  "}]'))
    assert file.strings(0, ("a",), ("b", "c", "d", "e")) == {"a": " x ", "b": "", "c": "y", "d": "", "e": ""}


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, 'the key "a" is missing (it has no key)'),
        ({"b": "x", "A": "y"}, 'the key "a" is missing (it has b, A)'),
        ({"a": None}, '"a" is null, not a string'),
        ({"a": 3}, '"a" is a number, not a string'),
        ({"a": True}, '"a" is a boolean, not a string'),
        ({"a": {}}, '"a" is an object, not a string'),
        ({"a": " \n"}, '"a" is blank'),
        ({"a": "x", "b": ["y"]}, '"b" is a list, not a string'),
        ({"a": "\ud800"}, '"a" holds half of a surrogate pair'),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, entry: dict[str, Any], problem: str, suffix: str) -> None:
    lines = [json.dumps(each) for each in ({"a": "fine"}, entry)]
    text = "\n".join(lines) if suffix == ".jsonl" else "[\n" + ",\n".join(lines) + "]"
    file = read_json_file(write(tmp_path, text, "q" + suffix))
    with pytest.raises(DataError) as raised:
        file.strings(1, ("a",), ("b",))
    line = 2 if suffix == ".jsonl" else 3
    assert str(raised.value).startswith(f"{file.path}, line {line} (question 1): {problem}")
    assert str(raised.value).endswith("Correct or remove this question")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=3), max_size=6), st.data())
def test_every_line_of_a_list_is_found(
    tmp_path_factory: pytest.TempPathFactory, entries: list[dict[str, Any]], data: st.DataObject
) -> None:
    blank = st.text(" \n", max_size=3)
    text, lines = "[", []
    for place, entry in enumerate(entries):
        text += ("," if place else "") + data.draw(blank)
        lines.append(text.count("\n") + 1)
        text += json.dumps(entry, indent=data.draw(st.sampled_from([None, 1]))) + data.draw(blank)
    file = read_json_file(write(tmp_path_factory.mktemp("lines"), text + "]"))
    assert file.entries == entries
    assert [file.line(index) for index in range(len(entries))] == lines
