"""CSV and TSV files: delimiters, types, odd files, and errors with the line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.data.cells import normal
from env_server.data.csv_table import DELIMITERS, read_csv
from env_server.dataset import Row
from env_server.errors import DataError

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).map(normal) | st.sampled_from(
    ["0", "-0", "007", "12", "-5", "1.5", ".5", "5.", "1e5", "1e+05", "9223372036854775808", " 3 ", "", "  ", '"', ",;"]
)


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def read(folder: Path, content: str | bytes, name: str = "t.csv") -> tuple[list[tuple[str, str]], list[Row]]:
    """The columns with their types, and the rows."""
    table = read_csv(write(folder, content, name), "t")
    return [(column.name, column.type.value) for column in table.columns], list(table.rows())


@pytest.mark.parametrize("delimiter", DELIMITERS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_delimiters_line_ends_and_a_byte_order_mark(tmp_path: Path, delimiter: str, end: str, mark: str) -> None:
    lines = [["id", "name"], ["1", "Zoë"], ["2", "Ada"]]
    text = mark + "".join(delimiter.join(cells) + end for cells in lines)
    assert read(tmp_path, text) == ([("id", "INTEGER"), ("name", "TEXT")], [(1, "Zoë"), (2, "Ada")])


def test_the_delimiter_is_the_one_that_divides_evenly(tmp_path: Path) -> None:
    assert read(tmp_path, "name;price\nx, y;1,5\nz;2,5\n")[1] == [("x, y", "1,5"), ("z", "2,5")]
    assert read(tmp_path, "a,b|c\n1,2|3\n4,5\n", "u.csv")[1] == [(1, "2|3"), (4, "5")]
    assert read(tmp_path, 'a\t"b\tc"\n1\t2\n')[0] == [("a", "INTEGER"), ("b c", "INTEGER")]


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    assert read(tmp_path, f"a,b\n1,{'y' * 200_000}\n")[1] == [(1, "y" * 200_000)]


def test_small_and_tab_separated_files(tmp_path: Path) -> None:
    assert read(tmp_path, "a,b\tc\n1,5\t2\n", "t.TSV") == ([("a,b", "TEXT"), ("c", "INTEGER")], [("1,5", 2)])
    assert read(tmp_path, "word\nlamp\n\ndesk\n") == ([("word", "TEXT")], [("lamp",), ("desk",)])
    assert read(tmp_path, "a,b\n") == ([("a", "TEXT"), ("b", "TEXT")], [])


def test_quotes_line_breaks_and_blanks(tmp_path: Path) -> None:
    text = 'a, b, c\n"x, ""y""\nz", " kept ", dropped \n5" pipe, , "" \n'
    columns, rows = read(tmp_path, text.replace('"" ', '""'))
    assert [name for name, _ in columns] == ["a", "b", "c"]
    assert rows == [('x, "y"\nz', " kept ", "dropped "), ('5" pipe', None, None)]


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "-20", "0"], "INTEGER", [1, -20, 0]),
        (["1", "", "3"], "INTEGER", [1, None, 3]),
        (["9223372036854775807", "-9223372036854775808"], "INTEGER", [2**63 - 1, -(2**63)]),
        (["1", "9223372036854775808"], "TEXT", ["1", "9223372036854775808"]),
        (["1", "2.5", "-.5", "3.", "1e-05", "2.0E3"], "REAL", [1.0, 2.5, -0.5, 3.0, 1e-05, 2000.0]),
        (["1234567890123456", "0.5"], "TEXT", ["1234567890123456", "0.5"]),
        (["123456789012345", "0.5"], "REAL", [123456789012345.0, 0.5]),
        (["007", "12"], "TEXT", ["007", "12"]),
        (["+49301234", "1"], "TEXT", ["+49301234", "1"]),
        (["1E5", "2E10"], "TEXT", ["1E5", "2E10"]),
        (["1e+400", "1.0"], "TEXT", ["1e+400", "1.0"]),
        (["2024-01-31"], "TEXT", ["2024-01-31"]),
        (["1,234"], "TEXT", ["1,234"]),
        (["nan", "inf", "1.5"], "TEXT", ["nan", "inf", "1.5"]),
        (["true", "false"], "TEXT", ["true", "false"]),
        (["NULL", "NA", "-"], "TEXT", ["NULL", "NA", "-"]),
        (["\u0663", "\u00b2"], "TEXT", ["\u0663", "\u00b2"]),
        (["1_000"], "TEXT", ["1_000"]),
        (["", " "], "TEXT", [None, None]),
    ],
)
def test_types_come_from_every_cell(tmp_path: Path, cells: list[str], kind: str, values: list[object]) -> None:
    text = "x;y\n" + "".join(f'"{cell}";-\n' for cell in cells)
    columns, rows = read(tmp_path, text)
    assert columns[0] == ("x", kind)
    assert [row[0] for row in rows] == values
    assert [type(row[0]) for row in rows] == [type(value) for value in values]


def test_the_last_row_counts_as_much_as_the_first(tmp_path: Path) -> None:
    columns, rows = read(tmp_path, "x,y\n" + "1,1\n" * 5_000 + "n/a,1.5\n")
    assert columns == [("x", "TEXT"), ("y", "REAL")]
    assert (rows[0], rows[-1], len(rows)) == (("1", 1.0), ("n/a", 1.5), 5_001)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n3\n", "line 3: has 1 cells, but the header has 2. Add what is missing, or put a cell"),
        ("a,b\n1,2,\n", "line 2: has 3 cells, but the header has 2"),
        ('a,b\n"x\ny",2\n\n3,4,5\n', "line 5: has 3 cells, but the header has 2"),
        ("sentence\nHello, world\n", "line 2: has 2 cells, but the header has 1"),
        ("a;b;c\n1;2;3\n1;2\n", "line 3: has 2 cells, but the header has 3"),
        ('a,b\n1,2\n"3,4\n5,6\n', "line 3: unexpected end of data. Check the quotes from here on"),
        ('a;b\n1;2\n3;"4"5\n', "line 3: ';' expected after '\"'. Check the quotes from here on"),
        ('a,b\n1,"' + "x" * 140_000 + "\n", "line 2: unexpected end of data. Check the quotes from here on"),
        ("a,b\n1,2\n3,caf\u00e9\n".encode("latin-1"), "line 3: not UTF-8 (byte 0xe9). Save it as UTF-8"),
        (("a,b\n" + "1,2\n" * 30_000 + "3,caf\u00e9\n").encode("latin-1"), "line 30002: not UTF-8 (byte 0xe9)"),
        ("a,b\n1,2\n".encode("utf-16"), "line 1: is UTF-16, not UTF-8. Save it as UTF-8"),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(DataError) as raised:
        read_csv(file, "t")
    assert str(raised.value).startswith(f"{file}, {words}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"is empty\. Its first line must name the columns"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\n\n", "is empty"),
        (None, r"t\.csv cannot be read: No such file"),
    ],
)
def test_a_file_without_a_header_or_without_a_file(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "t.csv" if content is None else write(tmp_path, content)
    with pytest.raises(DataError, match=words):
        read_csv(file, "t")


def test_a_file_that_changes_meanwhile_is_not_half_believed(tmp_path: Path) -> None:
    table = read_csv(write(tmp_path, "a,b\n1,2\n"), "t")
    write(tmp_path, "a,b\n1,2\nx,2\n")
    with pytest.raises(DataError, match=r"t\.csv, line 3: the file changed while it was read"):
        list(table.rows())


def test_a_long_record_at_the_end_of_the_sample_does_not_decide(tmp_path: Path) -> None:
    text = "a;b\n" + '"x";"y,y"\n' * 7_000 + '1;"' + "z;\n" * 200 + '"\n'
    assert len(read(tmp_path, text)[1]) == 7_001
    columns, rows = read(tmp_path, "a;b\nx;" + '"' + "z;" * 40_000 + '"\n')
    assert ([name for name, _ in columns], len(rows)) == (["a", "b"], 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=8)))
def test_what_a_csv_writer_quotes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]]
) -> None:
    width = len(lines[0]) if lines else 1
    for delimiter in DELIMITERS:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([[f"c{i}" for i in range(width)], *lines])
        columns, rows = read(tmp_path_factory.mktemp("csv"), text.getvalue())
        assert [name for name, _ in columns] == [f"c{i}" for i in range(width)]
        assert len(rows) == len(lines)
        for row, cells in zip(rows, lines, strict=True):
            for value, cell, (_, kind) in zip(row, cells, columns, strict=True):
                if not cell.strip():
                    assert value is None
                elif kind == "TEXT":
                    assert value == cell
                else:
                    assert value == {"INTEGER": int, "REAL": float}[kind](cell)
        for place, (_, kind) in enumerate(columns):
            written = [line[place].strip() for line in lines if line[place].strip()]
            assert kind != "INTEGER" or all(str(int(cell)) == cell or cell == "-0" for cell in written)
