"""Spider's 46 databases and their 2,274 questions: every alarm, each looked at by a person, who agreed with it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from env_server.tools.diagnosis import diagnose
from env_server.tools.findings import Finding, Kind
from tests.env_server.data.folders import write_entries

AGREED: dict[Kind, set[str]] = {
    # '3.69 MB', and numbers of members whose MAX is '91' where there is a 1418
    Kind.NUMBER_AS_TEXT: {"music_1.files.file_size", "shop_membership.branch.membership_amount"},
    Kind.NON_ISO_DATES: {
        "body_builder.people.Birth_Date",
        "candidate_poll.people.Date_of_Birth",
        "city_record.match.Date",
        "debate.debate.Date",
        "flight_1.flight.departure_date",
        "flight_1.flight.arrival_date",
        "flight_company.flight.Date",
        "journal_committee.journal.Date",
        "music_1.song.releasedate",
        "station_weather.train.time",  # '4:49' beside '04:20'
    },
    # empty texts, 'NULL', 'N/A', '-' and '??'
    Kind.NULL_PLACEHOLDER: {
        *(f"flight_4.airlines.{column}" for column in ("iata", "icao", "callsign", "country")),
        *(f"flight_4.airports.{column}" for column in ("city", "iata")),
        *(f"flight_4.routes.{column}" for column in ("airline", "src_ap", "dst_ap")),
    },
    Kind.SURROUNDING_WHITESPACE: {
        "chinook_1.Customer.City",
        "chinook_1.Invoice.BillingCity",
        "college_2.instructor.name",
        "college_2.takes.grade",
        *(f"flight_4.airlines.{column}" for column in ("name", "callsign", "country")),
        "flight_4.airports.city",
        "music_4.volume.Song",
    },
    # 'UNited Kingdom', and one list of composers with two blanks in it
    Kind.INCONSISTENT_VALUES: {"flight_4.airlines.country", "chinook_1.Track.Composer"},
    # 'YÃ¼ksel'
    Kind.MOJIBAKE: {"college_2.student.name"},
    Kind.DUPLICATE_ROWS: {
        "assets_maintenance.Asset_Parts.",
        "assets_maintenance.Engineer_Skills.",
        "assets_maintenance.Skills_Required_To_Fix.",
    },
    Kind.PRIMARY_KEY: {"dorm_1.Dorm.dormid", "dorm_1.Dorm_amenity.amenid"},
    Kind.FOREIGN_KEY: {
        "local_govt_and_lot.Customer_Event_Notes.property_id",
        "solvency_ii.Events.Channel_ID",
        "solvency_ii.Assets_in_Events.Asset_ID",
    },
    Kind.BROKEN_REFERENCE: {
        "allergy_1.Has_Allergy.StuID",
        "flight_4.routes.dst_apid",
        "flight_4.routes.src_apid",
    },
    Kind.EMPTY_COLUMN: {
        "assets_maintenance.Maintenance_Contracts.other_contract_details",
        "assets_maintenance.Parts.other_part_details",
        "assets_maintenance.Fault_Log.other_fault_details",
        "assets_maintenance.Engineer_Visits.other_visit_details",
        "assets_maintenance.Part_Faults.other_fault_details",
        "student_assessment.Courses.other_details",
    },
}
CONSTANT_COLUMNS = 14
"""Each a column that has one value, such as a country that is USA for every address; they are notes."""


TIED = {
    "assets_maintenance": 2, "body_builder": 3, "candidate_poll": 4, "chinook_1": 4, "cinema": 2, "city_record": 2,
    "climbing": 2, "college_2": 12, "company_employee": 1, "debate": 1, "decoration_competition": 1,
    "department_store": 4, "dorm_1": 2, "e_learning": 2, "entertainment_awards": 3, "flight_1": 10, "flight_company": 2,
    "insurance_fnol": 4, "journal_committee": 1, "local_govt_and_lot": 2, "local_govt_in_alabama": 1,
    "manufactory_1": 2, "medicine_enzyme_interaction": 2, "music_1": 14, "music_4": 6, "perpetrator": 1,
    "phone_market": 1, "pilot_record": 2, "products_for_hire": 1, "race_track": 2, "ship_1": 10, "shop_membership": 6,
    "solvency_ii": 1, "station_weather": 1, "storm_record": 4, "store_product": 4, "student_assessment": 4,
    "swimming": 2,
}  # fmt: skip
"""Questions by database. Their 78 queries order by what ties, stop at a LIMIT within a tie, or show a column that their
GROUP BY leaves open."""
ASKED = {
    Kind.GOLD_FAILS: 1,  # a table that is not there
    Kind.GOLD_EMPTY: 57,
    Kind.GOLD_TOO_LARGE: 110,
    Kind.GOLD_TEXT_NUMBERS: 8,  # all with the membership_amount above
    Kind.GOLD_TIE: 128,
    Kind.GOLD_ZERO: 6,
    Kind.REDUNDANT_CLAUSE: 216,
    Kind.SAME_QUESTION: 1,
}
"""Questions by kind; the last three are notes."""


TRIVIAL = {
    "driving_school": {
        # there are as many addresses, lessons and payments
        "How many staff in total?",
        "How many employees are there?",
        "How many customers in total?",
        "How many customers are there?",
    },
    "farm": set(),
    "scientist_1": {
        # as many assignments; one project of many, and each scientist works on one
        "Find the total number of scientists.",
        "How many scientists are there?",
        "Find the names of scientists who are not working on the project with the highest hours.",
        "What are the names of scientists who are not working on the project with the most hours?",
    },
}
"""By database. Test databases for all 46 take minutes; then there are 41 such questions, in 17 databases."""


@pytest.fixture(scope="module")
def findings(spider_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finding, ...]:
    found = diagnose(f"spider:{spider_dir}", tmp_path_factory.mktemp("cache"), test_databases=False)
    assert len(found.surveys) == 46
    return found.findings


def test_every_alarm_about_a_table_is_one_that_a_person_agreed_with(findings: tuple[Finding, ...]) -> None:
    raised: dict[Kind, set[str]] = defaultdict(set)
    for finding in findings:
        place = finding.place
        if not place.question_id:
            raised[finding.kind].add(f"{place.db_id}.{place.table}.{place.column}")
    constant = raised.pop(Kind.CONSTANT_COLUMN)
    assert raised == AGREED
    assert len(constant) == CONSTANT_COLUMNS
    assert Counter(finding.kind for finding in findings)[Kind.BROKEN_REFERENCE] == 3


def test_every_alarm_about_a_question_is_one_that_a_person_agreed_with(findings: tuple[Finding, ...]) -> None:
    asked = [finding for finding in findings if finding.place.question_id]
    assert Counter(finding.kind for finding in asked) == ASKED
    assert Counter(f.place.db_id for f in asked if f.kind is Kind.GOLD_TIE) == TIED
    assert {f.place.db_id for f in asked if f.kind is Kind.GOLD_TEXT_NUMBERS} == {"shop_membership"}


def test_every_trivial_answer_is_one_that_a_person_agreed_with(spider_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "spider"
    (folder / "database").mkdir(parents=True)
    for db_id in TRIVIAL:
        (folder / "database" / db_id).symlink_to(spider_dir.resolve() / "database" / db_id)
    entries = json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8"))
    asked = [entry for entry in entries if entry["db_id"] in TRIVIAL]
    write_entries(folder, asked, "train_spider.json")
    found = diagnose(f"spider:{folder}", tmp_path / "cache")
    said: dict[str, set[str]] = {db_id: set() for db_id in TRIVIAL}
    for finding in found.findings:
        if finding.kind is Kind.TRIVIAL:
            number = int(finding.place.question_id.rpartition("-")[2])
            said[finding.place.db_id].add(asked[number]["question"])
    assert said == TRIVIAL
