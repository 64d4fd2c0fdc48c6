"""What is written as JSON is read back, and a whole file is the old one or the new one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.results.json_writing import JsonlWriter, json_line, replace_file, replace_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_a_line_is_read_back(row: dict[str, Any]) -> None:
    line = json_line(row)
    assert line.count("\n") == 1
    assert json.loads(line) == row


def test_numbers_that_json_has_not_are_words() -> None:
    row: dict[Any, Any] = {"a": np.float32(0.5), "b": np.int64(3), "c": [math.nan, -math.inf], 4: (np.float64("inf"),)}
    assert json.loads(json_line(row)) == {"a": 0.5, "b": 3, "c": ["nan", "-inf"], "4": ["inf"]}


def test_lines_are_there_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"text": "half a pair: \ud800"})
        assert path.read_text("utf-8") == '{"text": "half a pair: ?"}\n'
    writer.close()


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    replace_json(path, {"step": 1})
    with pytest.raises(TypeError):
        replace_json(path, {"step": object()})
    assert json.loads(path.read_bytes()) == {"step": 1}
    replace_file(path, "two")
    assert path.read_text("utf-8") == "two"
    assert list(tmp_path.iterdir()) == [path]
