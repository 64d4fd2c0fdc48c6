"""Each kind of issue, planted in files, is found where it is; a healthy folder is silent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from env_server.dataset import Dataset, Gold
from env_server.environment import EnvironmentFactory
from env_server.errors import DataError
from env_server.tools import diagnosis
from env_server.tools.diagnosis import diagnose
from env_server.tools.findings import Finding, Kind, Severity, Stated
from env_server.types import AnswerMode
from tests.env_server.tools.planted import PLANTED, QUESTIONS, Planted, database, look, plant, table

ELSEWHERE = {
    *(Kind.NO_DATABASE, Kind.NO_SQL, Kind.TRIVIAL, Kind.NO_TEST_DATABASES, Kind.FEW_QUESTIONS, Kind.NOT_EXAMINED),
    *(
        Kind.UNTESTED_CLAUSE,
        Kind.GOLD_REJECTED,
        Kind.GOLD_LACKS_KEY,
        Kind.UNKNOWN_COLLATION,
        Kind.DECOMPOSED_LETTERS,
        Kind.BLOB_FOR_VALUE,
    ),
}
"""Kinds that other tests plant; NOT_EXAMINED takes a table of gigabytes."""


def kinds(findings: tuple[Finding, ...]) -> set[Kind]:
    return {finding.kind for finding in findings}


def test_every_kind_is_planted() -> None:
    assert {each.kind for each in PLANTED} | ELSEWHERE == set(Kind)


@pytest.mark.parametrize("test_databases", [False, True])
def test_a_healthy_folder_is_silent(test_databases: bool, tmp_path: Path) -> None:
    found = look(plant(Planted(Kind.EMPTY_TABLE), tmp_path), test_databases=test_databases)
    assert found.findings == ()
    assert len(found.trials) == len(QUESTIONS)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: f"{each.kind.value} {'/'.join(each.files)}")
def test_a_planted_issue_is_found(planted: Planted, tmp_path: Path) -> None:
    found = look(plant(planted, tmp_path))
    of_kind = [finding for finding in found.findings if finding.kind is planted.kind]
    assert of_kind, kinds(found.findings)
    finding = next((each for each in of_kind if planted.message in each.message), of_kind[0])
    assert planted.message in finding.message
    assert planted.hint in finding.hint
    assert found.where(finding).endswith(planted.where)
    aside = {Kind.UNASKED_TABLE, Kind.PRIMARY_KEY, Kind.FOREIGN_KEY, Kind.BROKEN_REFERENCE, Kind.NO_DATABASE}
    aside |= {Kind.SURROUNDING_WHITESPACE, Kind.NUMBER_AS_TEXT, Kind.RENAMED_COLUMN, Kind.MIXED_DATES}
    assert kinds(found.findings) <= {planted.kind, Kind.FEW_QUESTIONS} | aside
    if planted.message or planted.hint:
        assert found.is_fixable(finding) is planted.fixed


def test_the_worst_comes_first(tmp_path: Path) -> None:
    files = {name: text for each in PLANTED[:12] for name, text in each.files.items()}
    found = look(plant(Planted(Kind.INCONSISTENT_VALUES, files), tmp_path))
    severities = [finding.severity for finding in found.findings]
    assert len(set(severities)) >= 2
    assert severities == sorted(severities, key=list(Severity).index)


def test_an_answer_without_sql_is_an_issue_in_sql_mode_alone(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.NO_SQL), tmp_path)
    with (folder / "questions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"question": "How many towns are there?", "answer": 4}) + "\n")
    assert look(folder, test_databases=True).findings == ()
    found = diagnose(str(folder), tmp_path / "cache", test_databases=False, answer_mode=AnswerMode.SQL)
    assert kinds(found.findings) == {Kind.NO_SQL}
    (folder / "shops.csv").write_text("shop_id,name\n1,Ann's\n2,Bo's\n", encoding="utf-8")  # asked about, or not
    assert look(folder, test_databases=True).findings == ()


def test_what_takes_test_databases(tmp_path: Path) -> None:
    older = ("How many customers joined after 2020?", "SELECT COUNT(*) FROM customers WHERE joined > '2020-12-31'")
    useless = ("How many live where?", "SELECT city, COUNT(*) FROM customers GROUP BY city HAVING COUNT(*) >= 1")
    found = look(plant(Planted(Kind.TRIVIAL, questions=(older, useless)), tmp_path), test_databases=True)
    trivial, redundant, untested = found.findings
    assert (trivial.kind, redundant.kind) == (Kind.TRIVIAL, Kind.REDUNDANT_CLAUSE)
    assert "5 of 6 mutants of the query give 5 as well" in trivial.message
    assert untested.kind is Kind.UNTESTED_CLAUSE
    assert "HAVING COUNT(*) >= 1" in untested.message
    folder = tmp_path / "search"
    script = "CREATE VIRTUAL TABLE notes USING fts5(text); INSERT INTO notes VALUES ('a b')"
    database(folder, "notes.sqlite", script)
    (folder / "questions.jsonl").write_text(json.dumps({"question": "How many?", "sql": "SELECT COUNT(*) FROM notes"}))
    assert {Kind.NO_TEST_DATABASES, Kind.FEW_QUESTIONS} <= kinds(look(folder, test_databases=True).findings)


@pytest.mark.parametrize("mode", AnswerMode)
def test_a_gold_that_the_environment_rejects_is_named(
    mode: AnswerMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(EnvironmentFactory):
        def __init__(self, dataset: Dataset, *others: object) -> None:
            lie = replace(dataset.questions[0], gold=Gold(((3,),), ordered=False))
            super().__init__(replace(dataset, questions=(lie, *dataset.questions[1:])), *others)  # type: ignore[arg-type]

    folder = plant(Planted(Kind.GOLD_REJECTED), tmp_path)
    monkeypatch.setattr(diagnosis, "EnvironmentFactory", Wrong)
    found = diagnose(str(folder), tmp_path / "cache", test_databases=False, answer_mode=mode)
    (finding,) = found.findings
    assert (finding.kind, finding.place.question_id) == (Kind.GOLD_REJECTED, "questions-0000")


def test_one_database_of_several(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.UNREADABLE), tmp_path)
    database(folder / "zoo", "zoo.sqlite", "CREATE TABLE pets (name); INSERT INTO pets VALUES (' Rex')")
    text = (folder / "questions.jsonl").read_text().replace('{"question"', '{"database": "shop", "question"')
    (folder / "questions.jsonl").write_text(text)
    found = diagnose(str(folder), tmp_path / "cache", test_databases=False, db_id="zoo")
    assert list(found.surveys) == ["zoo"]
    assert kinds(found.findings) == {Kind.SURROUNDING_WHITESPACE}
    with pytest.raises(DataError, match="no database 'farm'; it has 2, such as shop, zoo"):
        diagnose(str(folder), tmp_path / "cache", test_databases=False, db_id="farm")


def test_a_question_about_a_broken_file_is_named(tmp_path: Path) -> None:
    found = look(plant(Planted(Kind.NO_DATABASE, {"items.csv": "a,b\n1\n"}), tmp_path))
    assert [finding.kind for finding in found.findings][:2] == [Kind.UNREADABLE, Kind.NO_DATABASE]
    assert "items.csv, line 2" in found.findings[0].message


def test_columns_that_only_look_like_issues_raise_no_alarm(tmp_path: Path) -> None:
    files = {
        "places.csv": table(
            "zip,phone,version,ip,size,country,code,year,remark",
            "00501,+49 30 1234,1.2.3,192.168.100.200,6-2,NA,a1,1999,None",
            "90210,+49 30 9999,1.10.0,10.0.0.1,5-11,NO,A1,2001,unknown",
            "12345,+1 555 0100,2.0.0,10.0.0.2,6-0,DE,b2,2003,May 5",
        ),
        "sales.csv": table("region,2019,2020,2021", "north,1,2,4", "south,3,9,5", "west,8,6,7"),
        "codes.csv": table("letter,flag,level,rank", "a,0,1st,T", "A,1,2nd,F", "b,0,3rd,T"),
    }
    assert kinds(look(plant(Planted(Kind.INCONSISTENT_VALUES, files), tmp_path)).findings) == {Kind.UNASKED_TABLE}


OPEN = [
    (Kind.NON_ISO_DATES, ("03/04/2024", "05/06/2023", "07/08/2024"), "--dates", Stated(day_first=True)),
    (Kind.NON_ISO_DATES, ("12.05.45", "03.11.60", "30.06.85"), "--pivot_year", Stated(pivot_year=29)),
    (Kind.NUMBER_AS_TEXT, ("1,234", "2,500", "12,125"), "--decimal", Stated(decimal_mark=",")),
]


@pytest.mark.parametrize(("kind", "cells", "flag", "stated"), OPEN)
def test_what_is_open_is_fixed_only_when_it_is_stated(
    kind: Kind, cells: tuple[str, ...], flag: str, stated: Stated, tmp_path: Path
) -> None:
    """A cell of two meanings is no cell to guess: the user states which is meant."""
    files = {"a.tsv": table("item\tvalue", *(f"{name}\t{cell}" for name, cell in zip("xyz", cells, strict=True)))}
    folder = plant(Planted(kind, files), tmp_path)
    for what, fixable in ((Stated(), False), (stated, True)):
        found = look(folder, what)
        (finding,) = [each for each in found.findings if each.kind is kind]
        assert found.is_fixable(finding) is fixable
        assert (flag in finding.hint) is not fixable


def test_dates_that_contradict_each_other_are_not_fixed(tmp_path: Path) -> None:
    days = table("item,day", "a,13/01/2024", "b,12/25/2024", "c,03/04/2024")
    found = look(plant(Planted(Kind.NON_ISO_DATES, {"a.csv": days}), tmp_path), Stated(day_first=True))
    (finding,) = [each for each in found.findings if each.kind is Kind.NON_ISO_DATES]
    assert (finding.fix, "by hand" in finding.hint) == (None, True)


@pytest.mark.parametrize("encoding", ["cp1250", "cp1251", "cp1254", "mac_roman", "utf-16"])
def test_an_encoding_is_stated_not_guessed(encoding: str, tmp_path: Path) -> None:
    """Any 8-bit file can be read in any 8-bit encoding, so that reading it proves nothing."""
    towns = {"cp1250": "Łódź", "cp1251": "Москва", "cp1254": "Şişli", "mac_roman": "Zürich", "utf-16": "Zürich"}
    text = table("item,town", f"lamp,{towns[encoding]}", f"desk,{towns[encoding]} 2")
    folder = plant(Planted(Kind.NOT_UTF8, {"items.csv": text.encode(encoding)}), tmp_path)
    (finding,) = [each for each in look(folder).findings if each.kind is Kind.NOT_UTF8]
    assert (finding.fix is None) is (encoding != "utf-16"), "a byte order mark is certain"
    (finding,) = [each for each in look(folder, Stated(encoding=encoding)).findings if each.kind is Kind.NOT_UTF8]
    assert finding.fix is not None
    assert encoding == "utf-16" or towns[encoding] in finding.hint


def test_sqlite_files_are_examined_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    database(
        folder,
        "shop.sqlite",
        """
        CREATE TABLE branches (branch_id INTEGER PRIMARY KEY, members TEXT, room_number TEXT, cost INTEGER, town TEXT);
        INSERT INTO branches VALUES (1, '9', '9', 5, 'Oslo'), (2, '10', '10', 'N/A', ''), (3, '200', '200', 7, 'Rome');
        CREATE TABLE visits (visit_id INTEGER PRIMARY KEY, branch_id INTEGER);
        INSERT INTO visits VALUES (1, 1), (2, 2), (3, 3), (4, NULL);
        CREATE VIEW v AS SELECT * FROM branches;
        """,
    )
    (folder / "questions.csv").write_text("question,sql\nWhat costs most?,SELECT MAX(cost) FROM branches\n")
    found = look(folder)
    told = {(each.kind, each.place.column or each.place.question_id) for each in found.findings}
    assert told == {
        (Kind.NUMBER_AS_TEXT, "members"),
        (Kind.NUMBER_AS_TEXT, "cost"),
        (Kind.GOLD_TEXT_NUMBERS, "questions-0000"),
        (Kind.NULL_PLACEHOLDER, "town"),
        (Kind.FOREIGN_KEY, "branch_id"),
        (Kind.UNASKED_TABLE, ""),
        (Kind.FEW_QUESTIONS, ""),
    }
    finding = next(each for each in found.findings if each.place.column == "members")
    assert found.where(finding) == f"{folder / 'shop.sqlite'}, table branches, column members"
    assert finding.message.endswith("stored as text, so that their MAX is '9' and their MIN '10'")


def test_a_damaged_database_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.UNREADABLE), tmp_path)
    damaged = database(folder / "inner", "inner.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    damaged.write_bytes(damaged.read_bytes()[:100])
    (finding,) = look(folder).findings
    assert (finding.kind, "cut off" in finding.message) == (Kind.UNREADABLE, True)


def test_a_name_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    for spec in ("nowhere-at-all", str(tmp_path)):
        with pytest.raises(DataError):
            diagnose(spec, tmp_path)


def test_what_is_rare_among_very_many_numbers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env_server.tools.survey.MAX_TEXTS", 50)
    prices = [f"{n}.5" for n in range(200)] * 2
    files = {"items.csv": table("item,price", *(f"a,{price}" for price in prices), "b,$7", "b,N/A")}
    found = look(plant(Planted(Kind.NUMBER_AS_TEXT, files), tmp_path))
    (finding,) = [each for each in found.findings if each.kind is Kind.NUMBER_AS_TEXT]
    assert "'$7' as 7, 'N/A' as NULL" in finding.hint
