"""Proposals about a user's tables: each is verified, none is there already, and the same seed gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from env_server.data.raw import RawQuestion
from env_server.data.synthetic.builder import is_answerable
from env_server.dataset import Question, Split
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.test_suites.store import Suites
from env_server.tools.suggest import Proposer, Source
from tests.env_server.data.folders import add_database


@pytest.fixture
def source(pets_file: Path) -> Source:
    return Source("pets", pets_file, imported=False, asked=())


@pytest.fixture
def proposer(source: Source, tmp_path: Path) -> Iterator[Proposer]:
    with closing(Proposer([source], EnvSettings(), tmp_path, seed=0)) as proposer:
        yield proposer


def test_each_proposal_is_verified(proposer: Proposer, pets_file: Path, tmp_path: Path) -> None:
    found = list(proposer.proposals(15))
    assert len(found) == 15
    assert len({each.text for each in found}) == len({each.gold_sql for each in found}) == 15
    assert len({each.family for each in found}) >= 5
    suites = Suites({"pets": pets_file}, EnvSettings().sandbox, tmp_path)
    for each in found:
        assert is_answerable(list(each.gold.rows))
        suite = suites.of(each)
        assert suite.databases
        assert not suite.untested


def test_the_same_seed_proposes_the_same_and_another_seed_others(source: Source, tmp_path: Path) -> None:
    def first(seed: int) -> list[Question]:
        with closing(Proposer([source], EnvSettings(), tmp_path, seed)) as proposer:
            return list(proposer.proposals(5))

    assert first(0) == first(0) != first(1)


def test_what_is_there_already_is_not_proposed(source: Source, proposer: Proposer, tmp_path: Path) -> None:
    before = list(proposer.proposals(6))
    asked = [RawQuestion(str(i), f"{i}?", "pets", f"\n{q.gold_sql} ;", Split.ALL) for i, q in enumerate(before[:3])]
    asked += [RawQuestion(q.text, q.text.upper(), "pets", "SELECT 1", Split.ALL) for q in before[3:]]
    known = Source("pets", source.path, imported=False, asked=tuple(asked))
    with closing(Proposer([known], EnvSettings(), tmp_path, seed=0)) as again:
        after = list(again.proposals(6))
    assert not {q.text for q in before} & {q.text for q in after}
    assert not {q.gold_sql for q in before[:3]} & {q.gold_sql for q in after}


def test_databases_take_turns(source: Source, tmp_path: Path) -> None:
    poor = add_database(tmp_path, "poor.sqlite", "CREATE TABLE a (b); INSERT INTO a VALUES (1)")
    sources = [source, Source("poor", poor, imported=False, asked=()), Source("more", source.path, False, ())]
    with closing(Proposer(sources, EnvSettings(), tmp_path, seed=0)) as proposer:
        assert [q.db_id for q in islice(proposer.proposals(4), 4)] == ["pets", "more", "pets", "more"]


def test_the_rows_of_the_only_table_may_be_counted(tmp_path: Path) -> None:
    file = add_database(tmp_path, "only.sqlite", "CREATE TABLE pets (name); INSERT INTO pets VALUES ('Bo'), ('Cy')")
    with closing(Proposer([Source("only", file, False, ())], EnvSettings(), tmp_path, seed=0)) as proposer:
        assert proposer.verified("only", "How many?", "SELECT COUNT(*) FROM pets").gold.rows == ((2,),)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT nmae FROM pets", "the query fails: missing: no such column: nmae"),
        ("SELECT name FROM pets WHERE age > 50", "returns no row"),
        ("SELECT species FROM pets GROUP BY 1 ORDER BY COUNT(*) DESC LIMIT 1", "depends on a tie"),
        ("SELECT MAX(age) FROM pets WHERE age > 3", "the answer is the same without WHERE age > 3"),
        ("SELECT COUNT(*) FROM pets WHERE owner_id = 2", "mutants of the query give the same answer"),
    ],
)
def test_what_cannot_be_asked_is_told(sql: str, words: str, proposer: Proposer) -> None:
    with pytest.raises(DataError, match=words):
        proposer.verified("pets", "?", sql)
