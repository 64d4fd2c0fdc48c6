"""What is shown of an observation: text, and HTML that escapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import SQLValue
from env_server.environment import SQLEnvironment
from env_server.formatting import ResultTable, episode_html, episode_text, result_table
from env_server.settings import DisplaySettings
from env_server.sql.display import format_cell, format_result
from env_server.sql.sandbox import QueryResult
from tests.env_server.serving import action

TEXTS = st.text(max_size=8) | st.sampled_from((" | ", "' | '"))
VALUES = st.none() | st.integers() | st.floats(allow_nan=False) | TEXTS


@pytest.mark.parametrize(
    ("result", "table"),
    [
        ("n\n3", ResultTable(("n",), (("3",),), "")),
        ("a | b\n1 | 'x | y'\n2 | it's", ResultTable(("a", "b"), (("1", "'x | y'"), ("2", "it's")), "")),
        ("a | b\nno rows", ResultTable(("a", "b"), (), "no rows")),
        ("a | b\n1 | 2\n(1 more row)", ResultTable(("a", "b"), (("1", "2"),), "(1 more row)")),
        ("a | b | … and 3 more columns\n1 | 2", None),
    ],
)
def test_a_result_is_read_as_a_table(result: str, table: ResultTable | None) -> None:
    assert result_table(result) == table


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=5))
def test_what_is_read_is_what_was_shown(rows: list[tuple[SQLValue, SQLValue]]) -> None:
    """Or it is not taken for a table at all: a text may hold quotes of its own beside a separator."""
    display = DisplaySettings()
    text = format_result(QueryResult(("a", "b"), tuple(rows), row_count=len(rows), vm_steps=0), display)
    cells = tuple(tuple(format_cell(value, display.max_cell_chars) for value in row) for row in rows)
    table = result_table(text)
    if not any(isinstance(value, str) and "'" in value for row in rows for value in row):
        assert table is not None
    assert table is None or table.rows == cells or any("'" in str(value) for row in rows for value in row)


def test_an_episode_is_a_transcript(environment: SQLEnvironment) -> None:
    played = [environment.reset(question_id="cats")]
    played += [environment.step(action(text)) for text in ("QUERY SELECT '<i>' AS x", "DESCRIBE nothing", "ANSWER 2")]
    assert episode_text(played) == (
        "Question: How many cats are there?\nTables: owners, pets\n\n"
        f"> QUERY SELECT '<i>' AS x ({played[1].reward:+.2f})\nx\n<i>\n\n"
        "> DESCRIBE nothing (-0.02)\nError: no such table: nothing. Tables: owners, pets\n\n"
        "> ANSWER 2 (+0.98)\nThe answer is correct."
    )
    html = episode_html(played)
    assert "<i>" not in html
    assert "<td>&lt;i&gt;</td>" in html
    assert "14 steps left" in html
    assert html.count("the episode is over") == 1
    assert all(
        html.count(f"<{tag}>") + html.count(f"<{tag} ") == html.count(f"</{tag}>") for tag in ("div", "pre", "p")
    )
