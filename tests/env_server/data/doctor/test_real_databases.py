"""Spider's 46 databases: every alarm, each looked at by a person, who agreed with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from env_server.data.doctor.diagnosis import examine
from env_server.data.doctor.findings import Finding, Kind

AGREED: dict[Kind, set[str]] = {
    # '3.69 MB', and numbers of members whose MAX is '91' where there is a 1418
    Kind.NUMBER_AS_TEXT: {"music_1.files.file_size", "shop_membership.branch.membership_amount"},
    Kind.UNSORTABLE_DATES: {
        "body_builder.people.Birth_Date",
        "candidate_poll.people.Date_of_Birth",
        "city_record.match.Date",
        "debate.debate.Date",
        "flight_1.flight.departure_date",
        "flight_1.flight.arrival_date",
        "flight_company.flight.Date",
        "journal_committee.journal.Date",
        "music_1.song.releasedate",
    },
    # empty texts, 'NULL', 'N/A', '-' and '??'
    Kind.MISSING_WORD: {
        *(f"flight_4.airlines.{column}" for column in ("iata", "icao", "callsign", "country")),
        *(f"flight_4.airports.{column}" for column in ("city", "iata")),
        *(f"flight_4.routes.{column}" for column in ("airline", "src_ap", "dst_ap")),
    },
    Kind.OUTER_BLANKS: {
        "chinook_1.Customer.City",
        "chinook_1.Invoice.BillingCity",
        "college_2.instructor.name",
        "college_2.takes.grade",
        *(f"flight_4.airlines.{column}" for column in ("name", "callsign", "country")),
        "flight_4.airports.city",
        "music_4.volume.Song",
    },
    # 'UNited Kingdom', and one list of composers with two blanks in it
    Kind.SPELLINGS: {"flight_4.airlines.country", "chinook_1.Track.Composer"},
    # 'YÃ¼ksel'
    Kind.BROKEN_LETTERS: {"college_2.student.name"},
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


@pytest.fixture(scope="module")
def findings(spider_dir: Path) -> list[Finding]:
    files = sorted((spider_dir / "database").glob("*/*.sqlite"))
    assert len(files) == 46
    return [finding for file in files for finding in examine(file.stem, file, imported=False)[1]]


def test_every_alarm_is_one_that_a_person_agreed_with(findings: list[Finding]) -> None:
    raised: dict[Kind, set[str]] = defaultdict(set)
    for finding in findings:
        place = finding.place
        raised[finding.kind].add(f"{place.db_id}.{place.table}.{place.column}")
    constant = raised.pop(Kind.CONSTANT_COLUMN)
    assert raised == AGREED
    assert len(constant) == CONSTANT_COLUMNS
    assert Counter(finding.kind for finding in findings)[Kind.BROKEN_REFERENCE] == 3
