"""Files as people have them: what was reported of systems that do this job, rebuilt small, and relatives of each kind.

Each gives the right answer, or the finding that it does not; and after the fixes that are certain, the right answer.
"""

from __future__ import annotations

import sqlite3
import struct
import unicodedata
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from env_server.dataset import SQLValue
from env_server.tools.diagnosis import Diagnosis
from env_server.tools.doctor import _UNCERTAIN
from env_server.tools.findings import Kind
from env_server.tools.fixes import fix_folder
from tests.env_server.tools.planted import look, table

ASIDE = {Kind.FEW_QUESTIONS, Kind.UNASKED_TABLE, Kind.PRIMARY_KEY, Kind.GOLD_TEXT_NUMBERS, Kind.GOLD_ZERO}
ASIDE |= {Kind.NO_DATABASE, Kind.GOLD_TIE}
GREATEST = "SELECT MAX(v) FROM t"
COUNT = "SELECT COUNT(*) FROM t"


@dataclass(frozen=True)
class Case:
    """A folder, a gold query, what is found, and the answer before and after the fixes that are certain.

    `fixed`: None where nothing is fixed.
    """

    name: str
    files: Mapping[str, str | bytes]
    sql: str
    found: Kind | None = None
    answer: SQLValue = None
    fixed: SQLValue = None


def cells(*values: str, head: str = "v") -> dict[str, str | bytes]:
    return {"t.tsv": table(f"id\t{head}", *(f"{place}\t{value}" for place, value in enumerate(values)))}


def numbers(name: str, *values: str, found: Kind | None = Kind.NUMBER_AS_TEXT, fixed: SQLValue = None) -> Case:
    return Case(name, cells(*values), "SELECT SUM(v) FROM t", found, fixed=fixed)


def missing(name: str, word: str, *, fixed: bool) -> Case:
    values = [word if place % 5 == 0 else f"{place * 1.5}" for place in range(1, 41)]
    return Case(f"missing {name}", cells(*values), GREATEST, Kind.NUMBER_AS_TEXT, fixed=58.5 if fixed else None)


def dates(name: str, *values: str, found: Kind | None = Kind.NON_ISO_DATES, fixed: SQLValue = None) -> Case:
    return Case(f"dates {name}", cells(*values), GREATEST, found, fixed=fixed)


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


NUMBERS = [
    numbers("plus sign", "+5", "-3", "+2", "1", "+7", fixed=12),
    numbers("spreadsheet guard", "'-4.0", "5.0", "'-20", "7.5", "'-1.25", fixed=-12.75),
    numbers("formula guard", '"=""5"""', '"=""12"""', '"=""7"""', fixed=24),
    numbers("guarded zeros are codes", '"=""005"""', '"=""012"""', found=None),
    numbers("trailing minus", "100.00", "50.25-", "20.00", "5.00-", "7.10", fixed=71.85),
    numbers("minus sign of Unicode", "\u22125", "3", "\u22127", "8", fixed=-1),
    numbers("Swiss apostrophe", "1\u2019234.50", "2\u2019000.00", "350.25", fixed=3584.75),
    numbers("thin blanks", "1\u202f234,50", "2\u202f000,00", "350,25", fixed=3584.75),
    numbers("marks of no width", "5\u200b", "7", "9\u200b", found=Kind.SURROUNDING_WHITESPACE, fixed=21),
    numbers("real", "R$ 10,50", "R$ 1.200,00", "R$ 7,00", "R$ 3,25", fixed=1220.75),
    numbers("rupees", "Rs. 100", "Rs. 1,23,456.50", "Rs. 75", fixed=123631.5),
    numbers("lakhs", "1,23,456", "5,000", "99", fixed=128555),
    numbers("crowns before", "kr 100", "kr 1 250", "kr 75,50", fixed=1425.5),
    numbers("zloty behind", "10,50 zł", "1.200,00 zł", "7,00 zł", fixed=1217.5),
    numbers("no cents", "5,-", "12,50", "7,--", fixed=24.5),
    numbers("parentheses around money", "$(5.00)", "$7.00", "($2.50)", fixed=-0.5),
    numbers("percent", "12%", "5.5%", "7 %", fixed=24.5),
    numbers("thousands or decimals is open", "$1,234", "$2,345", "$3,456"),
    numbers("magnitudes", "1.2k", "300", "5k", "1.1M", found=Kind.MIXED_UNITS),
    numbers("currencies", "$5", "€7", "$9", found=Kind.MIXED_UNITS),
    numbers("infinity", "1.5", "inf", "2.5", "-inf"),
    numbers("bounds", "<0.5", "1.2", "3.4", "0.7", "<0.5", "2.2", "5.1"),
    numbers("footnotes", "5.1*", "12.5", "3.1", "7.7", "8.2", "9.9*"),
    numbers("phones", "+4930123", "+4930999", "+4940111", found=None),
    numbers("house numbers", "12", "12a", "14", "15b", "16", "7", found=None),
    numbers("sizes", "38", "40", "S", "M", "42", "S", "M", "44", "46", "39", found=None),
    Case(
        "rupees beside a semicolon", {"t.csv": table("id;v", "1;Rs. 100", "2;Rs. 1,200")}, GREATEST, Kind.NUMBER_AS_TEXT
    ),
]
MISSING = [
    *[
        missing(word, word, fixed=True)
        for word in ("\\N", "(null)", "..", ":", "#DIV/0!", "#REF!", ".", "*", "\u2013", "?")
    ],
    *[missing(word, word, fixed=False) for word in ("ND", "(leer)", "n.v.", "free")],
    Case(
        "missing among words",
        cells("Oslo", "\\N", "Rome", "(null)", "#N/A", ".."),
        "SELECT COUNT(v) FROM t",
        Kind.NULL_PLACEHOLDER,
        answer=6,
        fixed=2,
    ),
    Case("a game that is not over", cells("1-0", "0-1", "*", "1-0"), "SELECT COUNT(v) FROM t", answer=4),
    Case("plus and minus are words", cells("+", "-", "+", "-"), "SELECT COUNT(v) FROM t", answer=4),
    Case("stars are words", cells("*", "**", "***", "*"), "SELECT COUNT(v) FROM t", answer=4),
]
DISTINCT = "SELECT COUNT(DISTINCT v) FROM t"
CODES = [
    Case("versions", cells("1.1", "1.10", "1.2", "2.0"), DISTINCT, Kind.NUMBER_OR_CODE, answer=4),
    Case("whole and not", cells("2", "2.0", "2.1"), DISTINCT, Kind.NUMBER_OR_CODE, answer=3),
    Case("versions and n/a", cells("1.1", "1.10", "N/A", "1.2"), DISTINCT, Kind.NUMBER_OR_CODE, answer=4),
    Case("by its name", cells("1.9", "1.10", head="version"), "SELECT MAX(length(version)) FROM t", answer=4),
    Case("leading zeros", cells("00501", "90210"), GREATEST, answer="90210"),
    Case("prices", cells("1.5", "2.50", "3", "4.25"), GREATEST, answer=4.25),
    Case("debts", cells("-1.5", "2.5", "2.50"), GREATEST, answer=2.5),
]
DATES = [
    dates("month and year", "Jan 2024", "Feb 2024", "Dec 2023", "Nov 2022", fixed="2024-02"),
    dates("month and short year", "Jan-24", "Feb-24", "Dec-23", "Nov-22"),
    dates("numbers of months", "05/2024", "07/2023", "12/2022", fixed="2024-05"),
    dates("German", "5. März 2024", "7. Mai 2024", "31. Dezember 2023", fixed="2024-05-07"),
    dates("French", "1er mars 2024", "7 août 2024", "31 déc. 2023", fixed="2024-08-07"),
    dates("Spanish", "5 de marzo de 2024", "7 de mayo de 2024", "31 de enero de 2023", fixed="2024-05-07"),
    dates("weekdays", "Mon 5 Feb 2024", "Dienstag, 6. Feb. 2024", "Sun, 4 Feb 2024", fixed="2024-02-06"),
    dates("RFC 2822", *(f"Tue, 0{n} Mar 2024 09:00:00 +0100" for n in (5, 7, 6)), fixed="2024-03-07 09:00:00+01:00"),
    dates("zones", "2024-03-05T09:00:00+01:00", "2024-02-07T10:00:00Z", "2023-12-31T11:00:00Z", found=Kind.MIXED_DATES),
    dates("half days", "9:00 AM", "10:30 AM", "1:15 PM", fixed="13:15"),
    dates(
        "dates with half days",
        *(f"2024-01-05 {h}" for h in ("9:00 PM", "10:00 AM", "1:00 AM")),
        fixed="2024-01-05 21:00",
    ),
    dates("clocks", "9:00", "10:30", "13:15", fixed="13:15"),
    dates("two forms", "20240105", "2024-02-07", "20231231", found=Kind.MIXED_DATES, fixed="2024-02-07"),
    dates("some without a day", "Jan 2024", "5 Feb 2024", "Dec 2023", found=Kind.MIXED_DATES),
    dates("months that sort", "2024-01", "2024-02", "2023-12", found=None),
    dates("durations that sort", "2:56", "3:45", "4:12", found=None),
]


def file(name: str, text: str, sql: str, answer: SQLValue, found: Kind | None = None, fixed: SQLValue = None) -> Case:
    return Case(name, {"t.csv": text}, sql, found, answer, fixed)


AS_TEXT = Kind.NUMBER_AS_TEXT
DELIMITERS = [
    file("prices", "Preis, EUR;Menge\n1,50;3\n2,75;1\n", "SELECT SUM(Menge) FROM t", 4, AS_TEXT, 4),
    file("names", "Name, Vorname;Age\nMeier, Eva;30\nLang, Tom;41\n", "SELECT SUM(Age) FROM t", 71),
    file("more commas", "City, Land, Area;Pop\nOslo, NO, N;5\nRome, IT, S;6\n", "SELECT SUM(Pop) FROM t", 11),
    file("tabs", "Name, First\tAge\nDoe, J\t15\nRoe, R\t25\n", "SELECT SUM(Age) FROM t", 40),
    file("pipes", "a, x|b\nx,5|1\ny,5|2\n", "SELECT SUM(b) FROM t", 3),
    file("tags", "name,tags\nx,a;b\ny,c;d\n", "SELECT MAX(tags) FROM t", "c;d"),
    file("a sign", "place;lat,lon\nOslo;59.9,10.7\nRome;41.9,12.5\n", COUNT, 2, Kind.OTHER_DELIMITER),
    file("sep=;", "sep=;\nid;name\n1;Ada\n2;Bo\n", COUNT, 2),
    file("sep= of three", '"sep=;"\r\nid;name;x\r\n1;Ada;3\r\n', "SELECT name FROM t", "Ada"),
    file("sep= decides", "\ufeffSEP=,\nid,a;b\n1,x;y\n", 'SELECT "a;b" FROM t', "x;y", Kind.OTHER_DELIMITER),
    file("sep= and a tab", "sep=\t\nid\tname\n1\ta,b\n", "SELECT name FROM t", "a,b"),
]
LETTERS = [
    file("two marks", "\ufeff\ufeffid,name\n1,a\n2,b\n", "SELECT SUM(id) FROM t", 3),
    file("a mark in the middle", '\ufeff"id","n"\n"1","a"\n\ufeff"2","b"\n', "SELECT SUM(id) FROM t", 3),
    file("joined files", "\ufeffid,n\n1,a\n\ufeffid,n\n2,b\n", COUNT, 3, Kind.EXTRA_LINES, 2),
    file("a NUL in a name", "id,na\0me\n1,a\n", "SELECT name FROM t", "a"),
    file("NULs behind a cell", "id,name\n1,a\0\0\n2,b\n", "SELECT name FROM t WHERE id = 1", "a"),
    file("a name of a NUL", "id,\0\n1,a\n", "SELECT column_2 FROM t", "a", Kind.RENAMED_COLUMN),
    *[
        Case(each, {"t.csv": "id,v\n1,Zürich\n".encode(each)}, GREATEST, Kind.NOT_UTF8, fixed="Zürich")
        for each in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
    ],
    Case("Chinese", {"t.csv": "id,n\n1,北京\n2,上海\n".encode("utf-16-le")}, COUNT, Kind.NOT_UTF8, fixed=2),
    Case("the table's name", {nfd("grösse.csv"): "id\n1\n2\n"}, "SELECT COUNT(*) FROM grösse", answer=2),
    file("a column's name", nfd("id,größe\n1,5\n"), "SELECT größe FROM t", 5),
    file("cells", "id,v\n1,Zürich\n2," + nfd("Zürich") + "\n", DISTINCT, 1),
    file("a query", "id,v\n1,Zürich\n2,Rome\n", nfd("SELECT id FROM t WHERE v = 'Zürich'"), 1),
    Case(
        "keys",
        {"t.csv": nfd("größe,n\n1,5\n"), "keys.toml": nfd('[primary_keys]\nt = "größe"')},
        "SELECT n FROM t",
        answer=5,
    ),
    file("names that differ in case", "Ä,ä\n1,5\n", 'SELECT "Ä" FROM t', 1),
    Case("tables that do", {"Ä.csv": "id\n1\n", "ä.csv": "id\n1\n2\n"}, 'SELECT COUNT(*) FROM "ä"', answer=2),
]
ROWS = ("id,name,price", "1,a,5", "2,b,6")


def lines(name: str, *rows: str, fixed: SQLValue = 2, found: Kind | None = Kind.EXTRA_LINES) -> Case:
    return Case(name, {"t.csv": table(rows[0], *rows[1:])}, COUNT, found, fixed=fixed)


LINES = [
    lines("title", "Sales report 2024,,", ",,", *ROWS),
    lines("title as narrow as it is", "Sales report 2024", "", *ROWS),
    lines("titles with a date", "Umsätze;;", "Stand: 1.5.2024;;", "Nr;Name;Betrag", "1;a;5", "2;b;6"),
    lines("comment", "# exported", *ROWS),
    lines("header again", *ROWS, "id,name,price", fixed=2),
    lines("header of words again", "name,town", "Ada,Oslo", "name,town", "Bo,Rome"),
    lines("units", ROWS[0], ",,EUR", *ROWS[1:]),
    lines("types", ROWS[0], "int,text,real", *ROWS[1:]),
    lines("blank rows", *ROWS, ",,", ",,"),
    lines("remark", *ROWS, "Source: me,,"),
    lines("remark as narrow as it is", *ROWS, "", "Generated on 2024-05-01"),
    lines("a title is open", "Staff,", "name,town", "Ada,Oslo", "Bo,Rome", fixed=None),
    lines("years for columns", "People by country,,", "country,2019,2020", "Norway,5,6", "Italy,60,61"),
    lines("rows with gaps", "name,town,age", "Ada,Oslo,5", "Bo,,", "Cy,,", found=None, fixed=None),
    lines("a long cell", "name,note,age", 'Ada,"x\n\ny",5', "Bo,,", found=None, fixed=None),
    lines("a word may be a name", "item,,", "lamp,red,small", "desk,5,6", "sofa,7,8", fixed=None),
    lines("words for marks", "name,a,b", "Ada,absent,absent", "Bo,5,6", "Cy,7,8", found=None, fixed=None),
    lines("a word among numbers", "item,price", "lamp,free", "desk,7", "sofa,8", found=None, fixed=None),
]
CASES = [*NUMBERS, *MISSING, *CODES, *DATES, *DELIMITERS, *LETTERS, *LINES]


def asked(folder: Path, sql: str) -> Path:
    (folder / "questions.csv").write_text(
        f'question,sql\n"What?","{sql.replace(chr(34), chr(34) * 2)}"\n', encoding="utf-8"
    )
    return folder


def answer(found: Diagnosis) -> SQLValue:
    assert found.dataset is not None
    ((question,),) = (found.dataset.questions,)
    return question.gold.rows[0][0]


def found_in(found: Diagnosis) -> set[Kind]:
    return {each.kind for each in found.findings} - ASIDE


def fixed(found: Diagnosis, target: Path) -> Diagnosis:
    chosen = [each for each in found.findings if found.is_fixable(each) and each.kind not in _UNCERTAIN]
    fix_folder(found, chosen, target)
    return look(target)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_right_or_found(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "in" / "data"
    folder.mkdir(parents=True)
    for name, content in case.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = look(asked(folder, case.sql))
    kinds = found_in(found)
    assert kinds == ({case.found} if case.found else set()) or (case.found is Kind.EXTRA_LINES and case.found in kinds)
    if case.answer is not None:
        assert answer(found) == case.answer
    certain = [each for each in found.findings if each.kind is case.found and found.is_fixable(each)]
    assert bool(certain and case.found not in _UNCERTAIN) is (case.fixed is not None)
    if case.fixed is not None:
        again = fixed(found, tmp_path / "out" / "data")
        assert answer(again) == (pytest.approx(case.fixed) if isinstance(case.fixed, float) else case.fixed)
        assert found_in(again) - {Kind.NUMBER_AS_TEXT} == set()


BLOBS = [
    ("INTEGER", [n.to_bytes(8, "little") for n in (10, 20, 30)], 60),
    ("INTEGER", [n.to_bytes(4, "little", signed=True) for n in (10, -20, 30)], 20),
    ("REAL", [struct.pack("<d", n) for n in (1.5, 2.5, 3.5)], 7.5),
    ("FLOAT", [struct.pack("<f", n) for n in (1.5, 2.5, 3.5)], 7.5),
    ("INTEGER", [b"abc", b"xy", b"z"], None),
]


@pytest.mark.parametrize(("declared", "blobs", "total"), BLOBS)
def test_blobs_for_values(declared: str, blobs: list[bytes], total: float | None, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "t.sqlite")) as connection, connection:
        connection.execute(f"CREATE TABLE t (v {declared}, name TEXT, picture BLOB, hash)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", [(v, f"n{v[0]}".encode(), v, v) for v in blobs])
    found = look(asked(folder, "SELECT SUM(v) FROM t"))
    columns = {each.place.column: each for each in found.findings if each.kind is Kind.BLOB_FOR_VALUE}
    assert columns.keys() == {"v", "name"}
    assert (columns["v"].fix is None) is (total is None)
    again = fixed(found, tmp_path / "out")
    assert {each.place.column for each in again.findings if each.kind is Kind.BLOB_FOR_VALUE} == (
        set() if total else {"v"}
    )
    assert total is None or answer(again) == total


def test_letters_and_names_of_a_sqlite_file(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    file = folder / "t.sqlite"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE t (v TEXT)")
        connection.executemany("INSERT INTO t VALUES (?)", [(nfd("Zürich"),), ("Zürich",)])
    found = look(asked(folder, DISTINCT))
    assert (found_in(found), answer(found)) == ({Kind.DECOMPOSED_LETTERS}, 2)
    assert answer(fixed(found, tmp_path / "out")) == 1
    file.write_bytes(file.read_bytes().replace(b"(v TEXT)", b"(\xf6 TEXT)"))
    found = look(folder)
    assert found_in(found) == {Kind.UNREADABLE}
    assert "b'\\xf6'" in found.findings[0].message
    assert found.dataset is not None
    assert "not UTF-8" in found.dataset.excluded[0].detail
