"""How many lucky neighbour queries do the variants catch, and do they ever reject what is right?

For each question, the mutants of its gold that give the gold's rows on the original database are run on its suite, and
on held-back databases: candidates that the choice of the suite never saw. A mutant that any of them tells from the
gold is not equivalent to it; the suite should have told it as well. The other side is judging on the original
database alone, which accepts all of these mutants. Golds and the same queries reading their tables in other orders
must pass everywhere. Prints one JSON line. Uses the Spider folder that SQLENV_SPIDER_DIR names, else synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from env_server.data.loading import load_dataset
from env_server.dataset import Question
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.database_profile import read_profile
from env_server.test_suites.suite import MAX_CANDIDATES, Plan, SuiteMaker, Variant, killed_by
from env_server.types import AnswerMode

HELD_BACK = 60
"""Databases a question that the choice of its suite never saw."""
MUTANT_STEPS = 2_000_000


def survivors(question: Question, plan: Plan, pool: DatabasePool) -> list[str]:
    """Return the mutants that give the gold's rows on the original database."""
    found = []
    for mutant in plan.neighbours:
        try:
            result = pool.query(question.db_id, mutant, len(question.gold.rows) + 1)
        except SQLError:
            continue
        if judge_rows(result.rows, question.gold).correct:
            found.append(mutant)
    return found


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
    lucky = missed = gold_failures = 0
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
        alive = survivors(question, plan, pool)
        others = held_back(maker, plan)
        different = {mutant for variant in others for mutant in killed_by(variant, alive)}
        killed = {mutant for variant in suite.variants for mutant in killed_by(variant, alive)}
        lucky += len(different | killed)
        missed += len(different - killed)
        gold_failures += sum(bool(killed_by(variant, plan.queries[:1])) for variant in (*suite.variants, *others))
        print(f"\r{done}/{len(chosen)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    figures = {
        "benchmark": "variants",
        "data": "spider" if folder else "synthetic",
        "questions": len(chosen),
        "lucky_mutants": lucky,
        "rejected_by_variants": lucky - missed,
        "rejected_by_the_original": 0,
        "share": round((lucky - missed) / max(1, lucky), 4),
        "gold_failures": gold_failures,
        "variants_per_question": round(statistics.mean(sizes), 2),
        "seconds_per_suite": {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
