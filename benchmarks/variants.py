"""How many near-misses do the test databases catch, do they ever reject what is right, and what do they cost?

For each question, near-misses of its gold (`near_misses`, and the mutants that measure how easily an answer is hit by
luck) that give the gold's rows on the original database are run on its suite, and on held-back databases of other
seeds. One that any of them tells from the gold is wrong; the suite should have told it as well. The other side is
judging on the original database alone, which accepts all of them. Golds, and rewrites that mean the same as their gold
(`rewrites`), must pass; what does not is printed. Prints one JSON line. Uses the Spider folder that SQLENV_SPIDER_DIR
names, else the synthetic data.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from benchmarks.harness import parser, progress, report, spider_or_synthetic
from benchmarks.near_misses import near_misses
from benchmarks.rewrites import rewrites
from env_server.data.loading import load_dataset
from env_server.dataset import Question
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.profile import read_profile
from env_server.test_suites.queries import mutants, parse
from env_server.test_suites.suite import CANDIDATES, Refusal, SuiteDatabase, SuiteMaker
from env_server.types import AnswerMode

HELD_BACK = 60
"""Databases a question that its suite does not have."""
MUTANT_STEPS = 2_000_000
NEAR_MISSES = 120
"""Near-misses of a question, those apart that are wrong on the original database."""
PASSES = 3
"""The fastest of so many passes counts."""


def survivors(question: Question, queries: Iterable[str], pool: DatabasePool) -> list[str]:
    """Return the queries that give the gold's rows on the original database."""
    found = []
    for query in queries:
        try:
            result = pool.query(question.db_id, query, len(question.gold.rows) + 1)
        except SQLError:
            continue
        if judge_rows(result.rows, question.gold).correct:
            found.append(query)
    return found


def accepts(database: SuiteDatabase, query: str) -> bool:
    """Tell whether a query may be right on a test database, as the judge does."""
    rows = database.rows_of(query, SandboxSettings())
    return rows is not None and database.accepts(rows)


def judging_seconds(suite: Sequence[SuiteDatabase], query: str) -> float:
    """Return the processor time of judging a right query."""
    seconds = []
    for _ in range(PASSES):
        began = time.process_time()
        for database in suite:
            accepts(database, query)
        seconds.append(time.process_time() - began)
    return min(seconds)


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--questions", type=int, default=200, help="questions, at equal distances (default: 200)")
    arguments.add_argument("--data", default=spider_or_synthetic(), help="the data set")
    args = arguments.parse_args()
    dataset = load_dataset(args.data, answer_mode=AnswerMode.SQL)
    distinct = list({(q.db_id, q.gold_sql): q for q in dataset.questions}.values())
    chosen = distinct[:: max(1, len(distinct) // args.questions)]
    pool = DatabasePool(dataset.databases, SandboxSettings(vm_steps=MUTANT_STEPS))
    makers: dict[str, SuiteMaker] = {}
    lucky: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    gold_failures = judged = rejected = 0
    seconds: list[float] = []
    judging: list[float] = []
    sizes: list[int] = []
    for done, question in enumerate(chosen, 1):
        if question.db_id not in makers:
            sandbox = Sandbox(dataset.databases[question.db_id], SandboxSettings())
            makers[question.db_id] = SuiteMaker(read_profile(sandbox), SandboxSettings())
            sandbox.close()
        maker = makers[question.db_id]
        began = time.process_time()
        suite = maker.make(question.gold_sql).databases
        seconds.append(time.process_time() - began)
        judging.append(judging_seconds(suite, question.gold_sql))
        sizes.append(len(suite))
        schema = pool.schema(question.db_id)
        tree = parse(question.gold_sql, schema)
        candidates = maker.candidates(question.gold_sql, tree)
        others = [
            each for each in islice(candidates, CANDIDATES, CANDIDATES + HELD_BACK) if not isinstance(each, Refusal)
        ]
        changed = near_misses(question.gold_sql, schema, random.Random(question.gold_sql), NEAR_MISSES)
        for kind, queries in (("near_misses", changed), ("mutants", () if tree is None else mutants(tree, schema))):
            alive = survivors(question, queries, pool)
            different = {query for database in others for query in database.rejected(alive)}
            killed = {query for database in suite for query in database.rejected(alive)}
            lucky[kind] += len(different | killed)
            missed[kind] += len(different - killed)
        rules = {query: rule for rule, query in rewrites(question.gold_sql, schema)}
        for query in survivors(question, rules, pool):
            judged += 1
            if not all(accepts(database, query) for database in suite):
                rejected += 1
                print(f"\nrejected: {rules[query]} of {question.gold_sql}: {query}", file=sys.stderr)
        gold_failures += sum(not accepts(database, question.gold_sql) for database in (*suite, *others))
        progress(f"{done}/{len(chosen)}")
    report(
        "variants",
        data=dataset.name,
        questions=len(chosen),
        **{
            f"lucky_{kind}": {
                "number": count,
                "rejected_by_test_databases": count - missed[kind],
                "share": round((count - missed[kind]) / max(1, count), 4),
            }
            for kind, count in lucky.items()
        },
        gold_failures=gold_failures,
        equivalent_rewrites={"judged": judged, "rejected": rejected},
        databases_per_question=round(statistics.mean(sizes), 2),
        seconds_per_suite={"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)},
        microseconds_to_judge_right=round(1e6 * statistics.mean(judging)),
    )


if __name__ == "__main__":
    main()
