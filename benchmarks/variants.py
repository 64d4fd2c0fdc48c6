"""How many lucky near-misses do the variants catch, and do they ever reject what is right?

For each question, the mutants of its gold that give the gold's rows on the original database are run on its suite, and
on held-back databases: candidates that the choice of the suite never saw. A mutant that any of them tells from the
gold is not equivalent to it; the suite should have told it as well. Suites are chosen by these mutants, so the same is
measured on near-misses that are made otherwise (`near_misses`). The other side is judging on the original database
alone, which accepts all of them. Golds, and rewrites that mean the same as their gold (`rewrites`), must pass; what
does not is printed. Prints one JSON line. Uses the Spider folder that SQLENV_SPIDER_DIR names, else synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from benchmarks.near_misses import near_misses
from benchmarks.rewrites import rewrites
from env_server.data.loading import load_dataset
from env_server.dataset import Question
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.database_profile import read_profile
from env_server.test_suites.images import opened, run
from env_server.test_suites.suite import MAX_CANDIDATES, Plan, SuiteMaker, Variant, killed_by
from env_server.types import AnswerMode

HELD_BACK = 60
"""Databases a question that the choice of its suite never saw."""
MUTANT_STEPS = 2_000_000
NEAR_MISSES = 60
"""Near-misses of a question that are no mutants."""


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


def accepts(variant: Variant, query: str) -> bool:
    """Tell whether a query runs on a variant and may be right."""
    with opened(variant.image) as connection:
        rows = run(connection, query)
    return rows is not None and variant.accepts(rows)


def held_back(maker: SuiteMaker, plan: Plan) -> list[Variant]:
    """Return candidates beyond those that a suite is chosen from."""
    made = (maker.candidate(plan, MAX_CANDIDATES + number) for number in range(HELD_BACK))
    return [variant for variant in made if isinstance(variant, Variant)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=int, default=200, help="questions, at equal distances (default: 200)")
    count = parser.parse_args().questions
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    spec = f"spider:{folder}" if folder else "synthetic"
    dataset = load_dataset(spec, answer_mode=AnswerMode.SQL)
    distinct = list({(q.db_id, q.gold_sql): q for q in dataset.questions}.values())
    chosen = distinct[:: max(1, len(distinct) // count)]
    pool = DatabasePool(dataset.databases, SandboxSettings(vm_steps=MUTANT_STEPS))
    makers: dict[str, SuiteMaker] = {}
    lucky: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    gold_failures = judged = rejected = 0
    seconds: list[float] = []
    sizes: list[int] = []
    for done, question in enumerate(chosen, 1):
        if question.db_id not in makers:
            sandbox = Sandbox(dataset.databases[question.db_id], SandboxSettings())
            makers[question.db_id] = SuiteMaker(read_profile(sandbox), SandboxSettings())
            sandbox.close()
        maker = makers[question.db_id]
        began = time.perf_counter()
        suite = maker.make(question.gold_sql)
        seconds.append(time.perf_counter() - began)
        sizes.append(len(suite.variants))
        plan = maker.plan(question.gold_sql)
        others = held_back(maker, plan)
        schema = pool.schema(question.db_id)
        changed = near_misses(question.gold_sql, schema, random.Random(question.gold_sql), NEAR_MISSES)
        for kind, queries in (
            ("mutants", plan.neighbours),
            ("near_misses", tuple(set(changed) - set(plan.neighbours))),
        ):
            alive = survivors(question, queries, pool)
            different = {query for variant in others for query in killed_by(variant, alive)}
            killed = {query for variant in suite.variants for query in killed_by(variant, alive)}
            lucky[kind] += len(different | killed)
            missed[kind] += len(different - killed)
        rules = {query: rule for rule, query in rewrites(question.gold_sql, schema)}
        for query in survivors(question, rules, pool):
            judged += 1
            if not all(accepts(variant, query) for variant in suite.variants):
                rejected += 1
                print(f"\nrejected: {rules[query]} of {question.gold_sql}: {query}", file=sys.stderr)
        gold_failures += sum(bool(killed_by(variant, plan.queries[:1])) for variant in (*suite.variants, *others))
        print(f"\r{done}/{len(chosen)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    figures = {
        "benchmark": "variants",
        "data": "spider" if folder else "synthetic",
        "questions": len(chosen),
        **{
            f"lucky_{kind}": {
                "number": count,
                "rejected_by_variants": count - missed[kind],
                "rejected_by_the_original": 0,
                "share": round((count - missed[kind]) / max(1, count), 4),
            }
            for kind, count in lucky.items()
        },
        "gold_failures": gold_failures,
        "equivalent_rewrites": {"judged": judged, "rejected": rejected},
        "variants_per_question": round(statistics.mean(sizes), 2),
        "seconds_per_suite": {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
