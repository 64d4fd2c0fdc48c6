"""Proposes questions about a user's databases, and verifies each before anybody sees it.

A proposal is drawn by one of the generator's families (`env_server.data.synthetic.families`) over the user's schema.
Promises, of each one:
- Its gold runs under the agent's limits and gives an answer that can be typed: no NULL, no repeated row, few cells.
- No tie decides the answer, no condition in it is idle, and few wrong queries give the same answer.
- It has variants, which test each of its clauses, so that it can be judged in `sql` mode as well.
- Neither its words nor its SQL are those of a question that is there already.
- The same files and seed give the same proposals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from env_server.data.curation import max_gold_rows, unusable
from env_server.data.doctor.findings import Severity
from env_server.data.doctor.references import check_keys, likely_references
from env_server.data.doctor.survey import SURVEY_LIMITS, read_references, read_survey
from env_server.data.doctor.tables import check_database
from env_server.data.doctor.trials import try_gold
from env_server.data.raw import RawQuestion
from env_server.data.suggest.own_schema import own_schema
from env_server.data.synthetic.builder import FAMILIES, Judge, draw
from env_server.data.synthetic.families.common import Candidate
from env_server.data.synthetic.model import Database
from env_server.dataset import Gold, Question, Row, Split
from env_server.errors import DataError, SQLError
from env_server.reward import normalize_action
from env_server.settings import EnvSettings
from env_server.sql.hardness import hardness, orders_at_top_level
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.profile import read_sample
from env_server.test_suites.store import Suites
from env_server.types import ActionType, AnswerMode

MAX_GUESS_RATE = 0.34
"""How often a random cell may be the answer: user's tables are small, and variants tell more than this does."""
MAX_LUCKY_SHARE = 1 / 3
"""Proposals with as many lucky queries are refused: another one costs nothing, so the measure is stricter than where
somebody wrote the question."""
PATIENCE = 60
"""Draws in a row without a proposal, after which a database has no more."""


@dataclass(frozen=True, slots=True)
class Source:
    """A database to ask about, and the questions that are there. `imported`: it was made from files of tables."""

    db_id: str
    path: Path
    imported: bool
    asked: tuple[RawQuestion, ...]


class Proposer:
    """Proposes and verifies; one database after the other."""

    def __init__(self, sources: Sequence[Source], settings: EnvSettings, cache_dir: Path, seed: int) -> None:
        self._sources = sources
        self._settings = settings
        self._seed = seed
        databases = {source.db_id: source.path for source in sources}
        self._pool = DatabasePool(databases, settings.sandbox)
        self._suites = Suites(databases, settings.sandbox, cache_dir)

    def close(self) -> None:
        """Close the databases."""
        self._pool.close()

    def proposals(self, count: int) -> Iterator[Question]:
        """Yield up to `count` questions, in turn about each database as long as it has some. Raises DataError."""
        drawing = [self._about(source) for source in self._sources]
        done = 0
        while drawing and done < count:
            for each in list(drawing):
                question = next(each, None)
                if question is None:
                    drawing.remove(each)
                elif done < count:
                    done += 1
                    yield question

    def verified(self, db_id: str, text: str, sql: str, family: str = "") -> Question:
        """Return the question with its answer; raises DataError that says why it cannot be asked."""
        try:
            result = self._pool.query(db_id, sql, max_gold_rows(AnswerMode.VALUE, self._settings.display))
        except SQLError as error:
            raise DataError(f"the query fails: {error}") from error
        problem = unusable(result, AnswerMode.VALUE, self._settings.display)
        if problem is not None:
            raise DataError(problem.detail)
        gold = Gold(result.rows, orders_at_top_level(sql))
        question = Question(f"{db_id}-{text}", text, db_id, sql, hardness(sql), Split.TRAIN, gold, family)
        trial = try_gold(question, self._pool, None)
        if trial.other_order:
            raise DataError("several rows are equally first, so that the answer is left to chance")
        if trial.idle:
            raise DataError(f"the answer is the same without {trial.idle[0]}")
        trial = try_gold(question, self._pool, self._suites)
        if trial.no_variants:
            raise DataError(trial.no_variants)
        if trial.guessability is not None and trial.guessability.lucky_share >= MAX_LUCKY_SHARE:
            raise DataError(f"{trial.guessability} give the same answer")
        if untested := self._suites.of(question).untested:
            raise DataError(f"no variant tests {untested[0]}")
        return question

    def _about(self, source: Source) -> Iterator[Question]:
        database = read_own_schema(source)
        if database is None:
            return
        rng = Random(f"suggest/{self._seed}/{source.db_id}")
        judge = Judge(database, lambda sql: self._rows(source.db_id, sql), rng, MAX_GUESS_RATE)
        known = {normalize_action(ActionType.QUERY, question.sql) for question in source.asked}
        words = {_bare(question.text) for question in source.asked}
        names = list(FAMILIES)
        idle = 0
        while idle < PATIENCE:
            family = rng.choices(names, [FAMILIES[name].share for name in names])[0]
            candidate = draw(FAMILIES[family], database, judge, rng)
            question = None if candidate is None else self._accepted(source.db_id, candidate, family, known, words)
            idle = idle + 1 if question is None else 0
            if question is not None:
                yield question

    def _accepted(
        self, db_id: str, candidate: Candidate, family: str, known: set[str], words: set[str]
    ) -> Question | None:
        sql = normalize_action(ActionType.QUERY, candidate.sql)
        if sql in known or _bare(candidate.text) in words:
            return None
        known.add(sql)
        try:
            question = self.verified(db_id, candidate.text, candidate.sql, family)
        except DataError:
            return None
        words.add(_bare(candidate.text))
        return question

    def _rows(self, db_id: str, sql: str) -> list[Row]:
        """Run a query; a query that fails has no rows, which no question may have."""
        try:
            return list(self._pool.query(db_id, sql, max_gold_rows(AnswerMode.SQL, self._settings.display)).rows)
        except SQLError:
            return []


def read_own_schema(source: Source) -> Database | None:
    """Describe a database as the families need it. Raises DataError when it cannot be read."""
    with closing(Sandbox(source.path, SURVEY_LIMITS)) as sandbox:
        try:
            survey = read_survey(sandbox, source.db_id, imported=source.imported)
            references = read_references(sandbox, likely_references(survey))
            rows = {}
            for table in survey.tables:
                names = [column.name for column in table.columns]
                rows[table.name] = read_sample(sandbox, table.name, names, table.rows)
        except SQLError as error:
            raise DataError(f"{source.path} cannot be read: {error}. Copy or export it again") from error
    found = [*check_database(survey), *check_keys(survey)]
    troubled = {(f.place.table, f.place.column) for f in found if f.severity is not Severity.NOTE and f.place.column}
    return own_schema(survey, rows, references, troubled)


def _bare(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .?!")
