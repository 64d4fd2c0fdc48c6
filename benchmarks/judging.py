"""How many answers are judged in a second, and what does Spider's plain way of judging SQL do?

Every question is answered twice: right (its gold) and wrong (the gold of another question about the same database).
Three ways of judging: a typed value; a query on the question's database; a query on it and on its test databases.
The other side is the official script's way: a new `sqlite3` connection for the gold and one for the prediction, both
run, rows compared under every permutation of the columns; with test databases, the same on a file for each of them.
Prints one JSON line with judgements per second, the ratios and how many verdicts differ. Uses the Spider folder that
SQLENV_SPIDER_DIR names, else the synthetic data. Test databases are made before the clock starts, and kept (minutes the
first time, on two cores).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from env_server.cache import default_cache_dir
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question, Row
from env_server.judging.answers import format_answer
from env_server.judging.verdict import judge_value
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import Suites
from env_server.test_suites.suite import Strictness
from env_server.types import AnswerMode

PASSES = 3
"""The fastest of so many passes counts: what else the machine does can only slow one down."""
WIDEST = 6
"""Columns of the widest gold: the script's way would not end on much wider ones."""


class Answer(NamedTuple):
    """A question and what was answered."""

    question: Question
    text: str


def answers(dataset: Dataset, count: int, text: Callable[[Question], str]) -> list[Answer]:
    """Return a right and a wrong answer to each of `count` questions; `text` says a question's right answer."""
    questions = [question for question in dataset.questions if question.gold.width <= WIDEST]
    chosen = random.Random(0).sample(questions, min(count, len(questions)))
    found: list[Answer] = []
    for question in chosen:
        others = [other for other in questions if other.db_id == question.db_id and other is not question]
        found += [Answer(question, text(each)) for each in (question, *random.Random(1).choices(others or [question]))]
    return found


def measure(judge: Callable[[Answer], bool], given: Sequence[Answer]) -> tuple[float, list[bool]]:
    """Return judgements per second and the verdicts."""
    seconds: list[float] = []
    for _ in range(PASSES):
        start = time.perf_counter()
        verdicts = [judge(answer) for answer in given]
        seconds.append(time.perf_counter() - start)
    return len(given) / min(seconds), verdicts


# --- the script's way --------------------------------------------------------------------------------------------


def plain_verdict(file: Path, gold_sql: str, sql: str, *, ordered: bool) -> bool:
    """Run both queries on one file and compare."""
    gold, rows = plain_rows(file, gold_sql), plain_rows(file, sql)
    return gold is not None and rows is not None and plain_equality(rows, gold, ordered=ordered)


def plain_rows(file: Path, sql: str) -> list[Row] | None:
    """Run a query on a connection of its own; None when it fails."""
    with closing(sqlite3.connect(file)) as connection:
        connection.text_factory = lambda data: data.decode(errors="ignore")
        try:
            return connection.execute(sql).fetchall()
        except sqlite3.Error:
            return None


def plain_equality(rows: Sequence[Row], gold: Sequence[Row], *, ordered: bool) -> bool:
    """Compare as a list or a multiset, under every permutation of the columns."""
    if not rows and not gold:
        return True
    if len(rows) != len(gold) or len(rows[0]) != len(gold[0]):
        return False
    loose_rows, loose_gold = (Counter(frozenset(Counter(row).items()) for row in table) for table in (rows, gold))
    if loose_rows != loose_gold:
        return False
    for order in permutations(range(len(gold[0]))):
        candidate = [tuple(row[i] for i in order) for row in rows]
        if candidate == gold if ordered else Counter(candidate) == Counter(gold):
            return True
    return False


class PlainSuites:
    """Test databases as files, the way distilled test suites are shipped. Those that compare no rows are left out."""

    def __init__(self, suites: Suites, given: Sequence[Answer], folder: Path) -> None:
        self._files: dict[str, list[tuple[Path, bool]]] = {}
        for question in {answer.question.question_id: answer.question for answer in given}.values():
            files = self._files[question.question_id] = []
            for database in suites.of(question).databases:
                if database.strictness is not Strictness.SHAPE:
                    file = folder / f"{len(self._files)}-{len(files)}.sqlite"
                    file.write_bytes(database.image)
                    files.append((file, database.gold.ordered))

    def of(self, question: Question) -> Iterator[tuple[Path, bool]]:
        """Yield the files, and whether the order of the gold's rows counts there."""
        yield from self._files[question.question_id]


# --- both sides --------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    parser.add_argument("--data", default=f"spider:{folder}" if folder else "synthetic", help="the data set")
    parser.add_argument("--questions", type=int, default=500, help="questions, each answered twice")
    args = parser.parse_args()
    settings = EnvSettings()
    typed = load_dataset(args.data, answer_mode=AnswerMode.VALUE, settings=settings)
    dataset = load_dataset(args.data, answer_mode=AnswerMode.SQL, settings=settings)
    values = answers(typed, args.questions, lambda question: format_answer(question.gold.rows))
    queries = answers(dataset, args.questions, lambda question: question.gold_sql)

    suites = Suites(dataset.databases, settings.sandbox, default_cache_dir())
    for done, answer in enumerate(queries, 1):
        suites.of(answer.question)
        print(f"\rvariants {done}/{len(queries)}", end="", file=sys.stderr, flush=True)
    pool = DatabasePool(dataset.databases, settings.sandbox)
    single = SQLJudge(pool, None, settings.judging, settings.sandbox)
    several = SQLJudge(pool, suites, settings.judging, settings.sandbox)

    def plain(answer: Answer) -> bool:
        question = answer.question
        file = dataset.databases[question.db_id]
        return plain_verdict(file, question.gold_sql, answer.text, ordered=question.gold.ordered)

    value_rate, _ = measure(lambda answer: judge_value(answer.text, answer.question.gold).correct, values)
    sql_rate, sql_verdicts = measure(lambda answer: single.judge(answer.question, answer.text).correct, queries)
    variants_rate, variant_verdicts = measure(
        lambda answer: several.judge(answer.question, answer.text).correct, queries
    )
    plain_rate, plain_verdicts = measure(plain, queries)
    with tempfile.TemporaryDirectory() as temporary:
        files = PlainSuites(suites, queries, Path(temporary))

        def plain_on_variants(answer: Answer) -> bool:
            gold_sql = answer.question.gold_sql
            return plain(answer) and all(
                plain_verdict(file, gold_sql, answer.text, ordered=ordered)
                for file, ordered in files.of(answer.question)
            )

        plain_variants_rate, plain_variant_verdicts = measure(plain_on_variants, queries)
    pool.close()
    report = {
        "benchmark": "judging",
        "ratio": sql_rate / plain_rate,
        "ratio_with_variants": variants_rate / plain_variants_rate,
        "per_second": {
            "value": value_rate,
            "sql": sql_rate,
            "sql_with_variants": variants_rate,
            "plain": plain_rate,
            "plain_with_variants": plain_variants_rate,
        },
        "verdicts_that_differ": {
            "sql": sum(a != b for a, b in zip(sql_verdicts, plain_verdicts, strict=True)),
            "sql_with_variants": sum(a != b for a, b in zip(variant_verdicts, plain_variant_verdicts, strict=True)),
        },
        "judged_right": {"sql": sum(sql_verdicts), "sql_with_variants": sum(variant_verdicts), "of": len(queries)},
        "variants_per_question": sum(len(suites.of(answer.question).databases) for answer in queries) / len(queries),
        "data": dataset.name,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
