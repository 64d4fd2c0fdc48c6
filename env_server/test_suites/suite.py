"""A question's suite: a handful of small databases on which the gold query and its neighbour queries differ.

Candidates are made one after the other (`generation`), the gold and those of its mutants (`mutants`) that are
still alive run on each, and `selection` keeps the fewest that kill the most. The method is that of distilled test
suites (Zhong, Yu and Klein, EMNLP 2020).

Promises:
- The gold query passes on every variant of its suite, on a connection of its own.
- A variant asks no more than the question does: the gold also runs over the same rows read in other orders.
  Where only the order of its rows changes, their order does not count on the variant; where ties make the rows
  themselves a matter of chance, only their number and width count; where even those change, it is no variant.
- Where the candidates leave a clause of the gold untested (`clauses`), more are aimed at it, and some at the mutants
  that survive; a clause that no variant tests even so is named.
- The same database and gold give the same suite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

import sqlglot
from sqlglot import exp

from env_server.dataset import Gold, Row
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings, SQLRule
from env_server.sql.hardness import orders_at_top_level
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import Schema, quote_identifier
from env_server.test_suites.clauses import Clause, read_clauses
from env_server.test_suites.constants import Hints, parse, read_hints, spread
from env_server.test_suites.database_profile import DatabaseProfile
from env_server.test_suites.generation import AIMED_STYLES, CLOSE_STYLES, STYLES, generate
from env_server.test_suites.images import MAX_RESULT_ROWS, ImageBuilder, opened, run
from env_server.test_suites.mutants import mutants
from env_server.test_suites.selection import KILLS_WANTED, choose

SUITE_VERSION = 8
"""Counts up when the same question would get another suite."""
_SEED = 1
"""Begins every candidate's seed. It stays when the version counts up, so that no suite changes without need."""
_STYLES = {"": STYLES, "aimed ": AIMED_STYLES, "close ": CLOSE_STYLES}
MAX_VARIANTS = 8
"""Variants, those apart that alone tell a mutant or a clause."""
MIN_VARIANTS = 4
"""Variants of a query whose mutants fewer would kill, or that has no mutants: its other neighbours are unknown."""
MAX_CANDIDATES = 48
AIMED_ROUND = 12
AIMED_CANDIDATES = 60
"""Candidates more where those leave mutants alive: a round of each of two kinds; so many where a clause is untested."""
PATIENCE = 12
"""Candidates in a row that kill nothing, after which no more are made."""


class Strictness(Enum):
    """What a variant compares: the rows as the question does, the rows in any order, or only their shape."""

    ROWS = "rows"
    ANY_ORDER = "any_order"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class Variant:
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


class Refusal(StrEnum):
    """Why a candidate is no variant."""

    FAILS = "on small databases the gold query fails or needs too much work"
    TOO_LARGE = f"on small databases the gold query returns more than {MAX_RESULT_ROWS} rows"
    CHANCE = "what the gold query returns is left to chance"
    EMPTY = "on small databases the gold query returns no row, and neither do its neighbour queries"


@dataclass(frozen=True, slots=True)
class Suite:
    """The variants of one question; `killed` of the `mutants` that can run differ from the gold on one of them.

    `untested`: the clauses of the gold, as SQL, that could be left out, or never be met, without a variant's notice.
    `problem`: why there are no variants; "" where there are.
    """

    variants: tuple[Variant, ...]
    mutants: int = 0
    killed: int = 0
    untested: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What candidates are made from: the gold and the same query in other orders, its hints, mutants and clauses."""

    queries: tuple[str, ...]
    hints: Hints
    neighbours: tuple[str, ...]
    clauses: tuple[Clause, ...]


class SuiteMaker:
    """Makes suites for the questions of one database."""

    def __init__(self, profile: DatabaseProfile, settings: SandboxSettings) -> None:
        """Prepare the empty schema. Raises NoVariantsError when it cannot be rebuilt."""
        self._profile = profile
        self._settings = settings
        self._builder = ImageBuilder(profile)

    def make(self, sql: str) -> Suite:
        """Make the suite of a gold query."""
        plan = self.plan(sql)
        probes = {probe for clause in plan.clauses for probe in clause.probes}
        times = dict.fromkeys((*plan.neighbours, *sorted(probes)), 0)
        candidates: list[Variant] = []
        kills: list[set[str]] = []
        refusals: Counter[Refusal] = Counter()

        def offer(candidate: Variant | Refusal, wanted: Iterable[str], *, anyway: bool = False) -> bool:
            """Keep a candidate that kills what is wanted, or `anyway` where the gold returns rows."""
            if isinstance(candidate, Refusal):
                refusals[candidate] += 1
                return False
            killed = killed_by(candidate, wanted)
            if killed or (anyway and candidate.gold.rows):
                candidates.append(candidate)
                kills.append(killed)
            elif not candidate.gold.rows:
                refusals[Refusal.EMPTY] += 1
            for each in killed:
                times[each] += 1
            return bool(killed)

        idle = 0
        for number in range(MAX_CANDIDATES):
            alive = [each for each, count in times.items() if count < KILLS_WANTED]
            if idle == PATIENCE or (not alive and len(candidates) >= MIN_VARIANTS):
                break
            idle = 0 if offer(self.candidate(plan, number), alive, anyway=True) else idle + 1
        aimed = [(kind, number) for kind in ("aimed ", "close ") for number in range(AIMED_ROUND)]
        for kind, number in (*aimed, *(("aimed ", number) for number in range(AIMED_ROUND, AIMED_CANDIDATES))):
            surviving = [each for each, count in times.items() if count == 0]
            if not surviving or (number >= AIMED_ROUND and probes.isdisjoint(surviving)):
                break
            offer(self.candidate(plan, number, kind), surviving)

        chosen = [i for i in choose(kills, MIN_VARIANTS, MAX_VARIANTS) if self._gold_passes(candidates[i], sql)]
        dead = {each for i in chosen for each in kills[i]}
        untested = tuple(clause.text for clause in plan.clauses if not dead.issuperset(clause.probes))
        if not chosen:
            # Where candidates were made but the gold did not pass, it fails under the sandbox's limits.
            problem = Refusal.FAILS if candidates else max(refusals, key=lambda each: refusals[each])
            return Suite((), len(plan.neighbours), problem=problem.value)
        variants = tuple(candidates[i] for i in chosen)
        return Suite(variants, len(plan.neighbours), len(dead.intersection(plan.neighbours)), untested)

    def plan(self, sql: str) -> Plan:
        """Read what a gold query's candidates are made from and tried with."""
        tree = parse(sql, self._profile.schema)
        if tree is None:
            return Plan((sql,), Hints(), (), ())
        hints = read_hints(tree, self._profile.schema)
        spread(hints, self._profile.references())
        queries = (sql, *reordered(tree, self._profile.schema))
        text = tree.sql(dialect="sqlite")
        return Plan(queries, hints, *self._runnable(text))

    def _gold_passes(self, variant: Variant, sql: str) -> bool:
        """Tell whether the gold passes as an agent's query would, under the sandbox's limits."""
        rows = variant.rows_of(sql, self._settings)
        return rows is not None and variant.accepts(rows)

    def _runnable(self, sql: str) -> tuple[tuple[str, ...], tuple[Clause, ...]]:
        """Return the mutants, and the clauses with the probes, that can run."""
        neighbours = [mutant.sql for mutant in mutants(sql, self._profile.schema)]
        clauses = read_clauses(sql, self._profile.schema)
        with opened(self._builder.empty) as connection:
            probed = (
                Clause(each.text, tuple(probe for probe in each.probes if run(connection, probe) is not None))
                for each in clauses
            )
            return tuple(mutant for mutant in neighbours if run(connection, mutant) is not None), tuple(probed)

    def candidate(self, plan: Plan, number: int, kind: str = "") -> Variant | Refusal:
        """Make a candidate, or say why there is none. `kind`: a key of `_STYLES`."""
        queries = plan.queries
        styles = _STYLES[kind]
        seed = f"{_SEED}\n{kind}{number}\n{queries[0]}"
        with self._builder.building() as building:
            generate(self._profile, plan.hints, seed, styles[number % len(styles)], building.insert)
            image = building.image()
        with opened(image) as connection:
            results = [run(connection, query) for query in queries]
        with opened(image, reverse=True) as connection:
            results.append(run(connection, queries[0]))
        rows = [each for each in results if each is not None]
        if results[0] is None:
            return Refusal.FAILS
        if len(results[0]) > MAX_RESULT_ROWS:
            return Refusal.TOO_LARGE
        return as_variant(image, rows, ordered=orders_at_top_level(queries[0])) or Refusal.CHANCE


def reordered(tree: exp.Expression, schema: Schema) -> list[str]:
    """Return the query twice more, reading its tables in other orders and breaking ties in opposite ways.

    Tables are read by their first column backwards, and by their last one; each ORDER BY goes on with the columns of
    the result, upwards and downwards, and a DISTINCT row that stands for several stands where the first or the last of
    them would. What either changes, the query leaves to chance.
    """
    columns = {table.name.casefold(): len(table.columns) for table in schema.tables}
    shadowed = {each.alias.casefold() for each in tree.find_all(exp.CTE)}
    texts = []
    for order, descending in (("1 DESC", False), ("{last}, 1 DESC", True)):
        copy = tree.copy()
        for clause in copy.find_all(exp.Order):
            if isinstance(clause.parent, exp.Query):
                if isinstance(clause.parent, exp.Select):
                    _settle_distinct(clause.parent, clause, exp.Max if descending else exp.Min)
                width = len(clause.parent.selects)
                ties = (exp.Literal.number(place) for place in range(1, width + 1))
                keys = (exp.Ordered(this=tie, desc=descending, nulls_first=not descending) for tie in ties)
                clause.set("expressions", [*clause.expressions, *keys])
        for table in list(copy.find_all(exp.Table)):
            name = table.name.casefold()
            if name in columns and name not in shadowed:
                # The LIMIT keeps SQLite from dropping the sort.
                by = order.format(last=columns[name])
                rows = f"SELECT * FROM {quote_identifier(table.name)} ORDER BY {by} LIMIT -1"
                query = sqlglot.parse_one(rows, read="sqlite")
                alias = exp.TableAlias(this=exp.to_identifier(table.alias or table.name, quoted=True))
                table.replace(exp.Subquery(this=query, alias=alias, joins=table.args.get("joins")))
        texts.append(copy.sql(dialect="sqlite"))
    return texts


def _settle_distinct(select: exp.Select, order: exp.Order, which: type[exp.AggFunc]) -> None:
    """Sort DISTINCT rows by the least or the greatest value of what is not selected."""
    shown = [each.unalias() for each in select.selects]
    names = {each.alias_or_name.casefold() for each in select.selects}
    if not select.args.get("distinct") or select.args.get("group") or select.is_star or select.find(exp.AggFunc):
        return
    select.set("distinct", None)
    select.set("group", exp.Group(expressions=[each.copy() for each in shown]))
    for key in order.expressions:
        named = isinstance(key.this, exp.Column) and not key.this.table and key.this.name.casefold() in names
        if not (named or key.this in shown or isinstance(key.this, exp.Literal)):
            key.set("this", which(this=key.this))


def as_variant(image: bytes, results: Sequence[tuple[Row, ...]], *, ordered: bool) -> Variant | None:
    """Return the strictest variant that accepts all of the gold's results; None where there is none."""
    for strictness in Strictness:
        gold = Gold(results[0], ordered=ordered and strictness is Strictness.ROWS)
        variant = Variant(image, gold, strictness)
        if all(variant.accepts(rows) for rows in results):
            return variant
    return None


def killed_by(variant: Variant, mutants: Iterable[str]) -> set[str]:
    """Return the mutants that the variant tells from the gold."""
    killed = set()
    with opened(variant.image) as connection:
        for mutant in mutants:
            rows = run(connection, mutant)
            if rows is not None and not variant.accepts(rows):
                killed.add(mutant)
    return killed
