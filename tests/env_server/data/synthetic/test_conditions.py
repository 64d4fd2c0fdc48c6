"""A condition means the same in Python and in SQL, always restricts, and is put into both styles of English."""

from __future__ import annotations

from random import Random

import apsw
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.data.synthetic.builder import open_in_memory
from env_server.data.synthetic.conditions import Clause, Condition, any_condition, around_day, equals, in_year
from env_server.data.synthetic.domains import Kind, all_domains
from env_server.data.synthetic.families.common import entity, listed
from env_server.data.synthetic.model import Column, Database, Table
from env_server.data.synthetic.schema import draft, populate

AGE = Column("age", "age", Kind.INTEGER, averages=True)
SEATS = Column("seats", "seats", Kind.INTEGER, sums=True, averages=True)
NAME = Column("name", "name", Kind.NAME)
PETS = Table(
    "pets", "pet", "pets", (Column("id", "id", Kind.ID), NAME, AGE, SEATS), ((1, "Rex", 5, 2), (2, "Milo", None, 3))
)


DOMAINS = all_domains()


def _database(domain: int, seed: int) -> Database:
    rng = Random(f"conditions/{domain}/{seed}")
    return populate("db", draft(DOMAINS[domain], rng), rng)


def _rows(connection: apsw.Connection, table: Table, where: str) -> set[int]:
    return {key - 1 for (key,) in connection.execute(f"SELECT {table.key.sql} FROM {table.sql} WHERE {where}")}


@settings(max_examples=40, deadline=None)
@given(domain=st.integers(0, len(DOMAINS) - 1), seed=st.integers(0, 10_000))
def test_sql_selects_the_rows_that_the_condition_names(domain: int, seed: int) -> None:
    database = _database(domain, seed)
    rng = Random(seed)
    with open_in_memory(database) as connection:
        for table in database.tables:
            drawn: list[Condition | Clause | None] = [any_condition(table, rng, pairs=0.5) for _ in range(6)]
            drawn += [draw(table, c, rng) for c in table.of(Kind.DATE) for draw in (in_year, around_day)]
            for condition in drawn:
                if condition is not None:
                    assert _rows(connection, table, condition.sql()) == condition.rows
                    assert 0 < len(condition.rows) < len(table.rows)


def test_both_styles_of_text() -> None:
    age, seats = equals(PETS, AGE, Random(0)), equals(PETS, SEATS, Random(1))
    assert age is not None
    assert seats is not None
    condition = Condition((age, seats), "OR")
    texts = {condition.text(Random(i)) for i in range(20)}
    assert texts == {"whose age is 5 or whose seats are equal to 2", "with age 5 or seats equal to 2"}
    assert condition.sql("T1.") == "T1.age = 5 OR T1.seats = 2"
    assert condition.rows == {0}


def test_a_condition_that_restricts_nothing_is_not_drawn() -> None:
    single = Table("pets", "pet", "pets", PETS.columns, PETS.rows[:1])
    assert any_condition(single, Random(0)) is None


def test_a_row_is_named_in_words() -> None:
    assert {entity(PETS, NAME, "Rex", Random(i)) for i in range(30)} == {
        "pet named Rex",
        "pet with name Rex",
        "pet whose name is Rex",
    }


def test_lists_in_words() -> None:
    assert [listed([NAME, AGE, SEATS][:n]) for n in (1, 2, 3)] == ["name", "name and age", "name, age and seats"]
