"""A question's suite: small random databases on which a slightly wrong query returns other rows than the gold.

They are made one after the other (`generation`), each with the gold's constants, ties and empty groups in it. The
method is that of Zhong, Yu and Klein (EMNLP 2020), without their choice by mutants: `DATABASES` of them that nothing
chose tell as much.

Guarantees:
- The gold query passes on every database of its suite, on a connection of its own.
- A test database asks no more than the question does: the gold also runs over the same rows read in other orders.
  Where only the order of its rows changes, their order does not count there; where ties make the rows themselves a
  matter of chance, only their number and width count; where even those change, it is not kept.
- Where they leave a clause of the gold untested, more are tried for it; a clause that none tests even so is named.
- The same database and gold give the same suite.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial
from itertools import cycle, islice

import apsw
from sqlglot import exp

from env_server.dataset import Gold, Row
from env_server.errors import NoVariantsError, SQLError
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings, SQLRule
from env_server.sql.hardness import orders_at_top_level
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import quote_identifier
from env_server.sql.vfs import VFS_NAME
from env_server.test_suites.generation import CONFIGS, generate
from env_server.test_suites.profile import DatabaseProfile, TableProfile
from env_server.test_suites.queries import (
    Clause,
    QueryConstants,
    parse,
    propagate,
    read_clauses,
    read_constants,
    reordered,
)

DATABASES = 16
"""Of a suite, those apart that alone test a clause."""
CANDIDATES = 60
"""Databases made where those leave a clause untested."""
MAX_RESULT_ROWS = 500
_PAGE_BYTES = 512
_VM_STEPS = 300_000


class Strictness(Enum):
    """What a test database compares: the rows as the question does, the rows in any order, or only their shape."""

    ROWS = "rows"
    ANY_ORDER = "any_order"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class SuiteDatabase:
    """One small database, as SQLite's file image, and what the gold returns on it."""

    image: bytes
    gold: Gold
    strictness: Strictness

    def rows_of(self, sql: str, settings: SandboxSettings) -> tuple[Row, ...] | None:
        """Return a query's rows on it; None when the query fails or returns too many."""
        sandbox = Sandbox(self.image, settings)
        try:
            result = sandbox.query(sql, MAX_RESULT_ROWS)
        except SQLError:
            return None
        finally:
            sandbox.close()
        return None if result.more else result.rows

    def accepts(self, rows: Sequence[Row], rule: SQLRule = SQLRule.SPIDER) -> bool:
        """Tell whether a query that returned these rows may still be right."""
        if self.strictness is not Strictness.SHAPE:
            return judge_rows(rows, self.gold, rule).correct
        # BIRD's rule does not count rows.
        return rule is SQLRule.BIRD or list(map(len, rows)) == list(map(len, self.gold.rows))

    def rejected(self, queries: Iterable[str]) -> set[str]:
        """Return the queries that run on it and are not the gold."""
        with opened(self.image) as connection:
            results = {sql: run(connection, sql) for sql in queries}
        return {sql for sql, rows in results.items() if rows is not None and not self.accepts(rows)}


class Refusal(StrEnum):
    """Why a database is no test database."""

    FAILS = "on small databases the gold query fails or needs too much work"
    TOO_LARGE = f"on small databases the gold query returns more than {MAX_RESULT_ROWS} rows"
    CHANCE = "what the gold query returns is left to chance"
    NO_ROWS = "a table takes none of the rows made for it: a check, an index or a generated column refuses them"


@dataclass(frozen=True, slots=True)
class Suite:
    """The test databases of one question.

    `untested`: the clauses of the gold, as SQL, that could be left out, or never be met, without their notice.
    `problem`: why there are none; "" where there are.
    """

    databases: tuple[SuiteDatabase, ...]
    untested: tuple[str, ...] = ()
    problem: str = ""


class SuiteMaker:
    """Makes suites for the questions of one database."""

    def __init__(self, profile: DatabaseProfile, settings: SandboxSettings) -> None:
        """Prepare the empty schema. Raises NoVariantsError when it cannot be rebuilt."""
        self._profile = profile
        self._settings = settings
        with _connected() as connection:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            for statement in profile.statements:
                try:
                    connection.execute(statement)
                except apsw.Error as error:
                    said = f"the schema cannot be rebuilt: {error}. It says: {statement[:200]}"
                    raise NoVariantsError(said) from error
            self.empty = connection.serialize("main")

    def make(self, sql: str) -> Suite:
        """Make the suite of a gold query."""
        tree = parse(sql, self._profile.schema)
        clauses = () if tree is None else self._runnable(read_clauses(tree))
        untested = {probe for clause in clauses for probe in clause.probes}
        found: list[SuiteDatabase] = []
        refusals: Counter[Refusal] = Counter()
        for made in islice(self.candidates(sql, tree), CANDIDATES):
            if isinstance(made, Refusal):
                refusals[made] += 1
                continue
            told = made.rejected(untested)
            if (told or len(found) < DATABASES) and self._gold_passes(made, sql):
                found.append(made)
                untested -= told
            if len(found) >= DATABASES and not untested:
                break
        if not found:
            problem = refusals.most_common(1)[0][0] if refusals else Refusal.FAILS
            return Suite((), problem=problem.value)
        return Suite(tuple(found), tuple(c.text for c in clauses if not untested.isdisjoint(c.probes)))

    def candidates(self, sql: str, tree: exp.Query | None) -> Iterator[SuiteDatabase | Refusal]:
        """Yield databases for a gold query without end, or say why one is no test database. `tree`: it, parsed."""
        constants, queries = QueryConstants(), [sql]
        if tree is not None:
            constants = read_constants(tree, self._profile.schema)
            propagate(constants, self._profile.references())
            queries += reordered(tree, self._profile.schema)
        for number, config in enumerate(cycle(CONFIGS)):
            with opened(self.empty) as connection:
                rng = random.Random(f"{number}\n{sql}")
                refusing = generate(self._profile, constants, rng, config, partial(insert, connection))
                image = connection.serialize("main")
            yield Refusal.NO_ROWS if refusing & constants.tables else self._tried(image, queries)

    def _tried(self, image: bytes, queries: Sequence[str]) -> SuiteDatabase | Refusal:
        """Run the gold, and the gold in other orders, on a database."""
        with opened(image) as connection:
            results = [run(connection, query) for query in queries]
        if results[0] is None:
            return Refusal.FAILS
        if len(results[0]) > MAX_RESULT_ROWS:
            return Refusal.TOO_LARGE
        with opened(image, reverse=True) as connection:
            results.append(run(connection, queries[0]))
        rows = [each for each in results if each is not None]
        return strictest(image, rows, ordered=orders_at_top_level(queries[0])) or Refusal.CHANCE

    def _runnable(self, clauses: Sequence[Clause]) -> tuple[Clause, ...]:
        """Return the clauses with those of their probes that can run."""
        with opened(self.empty) as connection:
            return tuple(
                Clause(each.text, tuple(probe for probe in each.probes if run(connection, probe) is not None))
                for each in clauses
            )

    def _gold_passes(self, database: SuiteDatabase, sql: str) -> bool:
        """Tell whether the gold passes as an agent's query would, under the sandbox's limits."""
        rows = database.rows_of(sql, self._settings)
        return rows is not None and database.accepts(rows)


def strictest(image: bytes, results: Sequence[tuple[Row, ...]], *, ordered: bool) -> SuiteDatabase | None:
    """Return the strictest test database that accepts all of the gold's results; None where there is none."""
    for strictness in Strictness:
        gold = Gold(results[0], ordered=ordered and strictness is Strictness.ROWS)
        database = SuiteDatabase(image, gold, strictness)
        if all(database.accepts(rows) for rows in results):
            return database
    return None


def insert(connection: apsw.Connection, table: TableProfile, rows: Sequence[Row]) -> Sequence[Row]:
    """Store rows and return those that the table took: what its constraints, indexes and columns refuse is left out."""
    names = ", ".join(quote_identifier(column.name) for column in table.columns)
    marks = ", ".join("?" * len(table.columns))
    name = quote_identifier(table.name)
    statement = f"INSERT OR IGNORE INTO {name} ({names}) VALUES ({marks})"
    try:
        with connection:
            connection.executemany(statement, rows)
    except apsw.Error:  # one cannot be stored: a generated column, an index or a check cannot be computed for it
        for row in rows:
            with suppress(apsw.Error):
                connection.execute(statement, row)
    return connection.execute(f"SELECT {names} FROM {name}").fetchall()


@contextmanager
def opened(image: bytes, *, reverse: bool = False) -> Iterator[apsw.Connection]:
    """Open an image for a data set's own queries, not an agent's: those go through the sandbox.

    Their work is bounded all the same, since a condition may have been left out. `reverse`: rows whose order no query
    asked for come the other way round.
    """
    with _connected() as connection:
        connection.deserialize("main", image)
        if reverse:
            connection.execute("PRAGMA reverse_unordered_selects = 1")
        connection.set_progress_handler(lambda: True, _VM_STEPS)
        yield connection


def run(connection: apsw.Connection, sql: str) -> tuple[Row, ...] | None:
    """Run one query and return up to `MAX_RESULT_ROWS + 1` rows; None when it fails or needs too many steps."""
    try:
        return tuple(islice(connection.cursor().execute(sql), MAX_RESULT_ROWS + 1))
    except apsw.Error:
        return None


@contextmanager
def _connected() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:", vfs=VFS_NAME, statementcachesize=0)
    try:
        yield connection
    finally:
        connection.close(True)
