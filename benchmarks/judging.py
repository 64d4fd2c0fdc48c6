"""How many answers are judged per second, and what does Spider's plain way of judging SQL do?

    python -m benchmarks.judging [--questions 500]

Every question is answered twice: right (its gold) and wrong (the gold of another question about the same database).
Three ways of judging: a typed value; a query on the question's database; a query on it and on its test databases. The
other side is the official script's way: a new `sqlite3` connection for the gold and one for the prediction, both run,
rows compared under every permutation of the columns. Prints one JSON line with judgements per second, the ratio and how
many verdicts differ. Test databases are made before the clock starts, and kept (minutes the first time, on two cores).
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import parser, progress, report, spider_or_synthetic
from env_server.cache import default_cache_dir
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question, Row
from env_server.judging.answers import format_answer
from env_server.judging.verdict import judge_value
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import Suites
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


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", default=spider_or_synthetic(), help="the data set")
    arguments.add_argument("--questions", type=int, default=500, help="questions, each answered twice")
    args = arguments.parse_args()
    settings = EnvSettings()
    typed = load_dataset(args.data, answer_mode=AnswerMode.VALUE, settings=settings)
    dataset = load_dataset(args.data, answer_mode=AnswerMode.SQL, settings=settings)
    values = answers(typed, args.questions, lambda question: format_answer(question.gold.rows))
    queries = answers(dataset, args.questions, lambda question: question.gold_sql)

    suites = Suites(dataset.databases, settings.sandbox, default_cache_dir())
    for done, answer in enumerate(queries, 1):
        suites.of(answer.question)
        progress(f"test databases {done}/{len(queries)}")
    pool = DatabasePool(dataset.databases, settings.sandbox)
    single = SQLJudge(pool, None, settings.judging, settings.sandbox)
    several = SQLJudge(pool, suites, settings.judging, settings.sandbox)

    def plain(answer: Answer) -> bool:
        question = answer.question
        file = dataset.databases[question.db_id]
        return plain_verdict(file, question.gold_sql, answer.text, ordered=question.gold.ordered)

    found = {
        "value": measure(lambda answer: judge_value(answer.text, answer.question.gold).correct, values),
        "sql": measure(lambda answer: single.judge(answer.question, answer.text).correct, queries),
        "sql_with_variants": measure(lambda answer: several.judge(answer.question, answer.text).correct, queries),
        "plain": measure(plain, queries),
    }
    pool.close()
    verdicts = {name: judged for name, (_, judged) in found.items()}
    report(
        "judging",
        ratio=found["sql"][0] / found["plain"][0],
        per_second={name: rate for name, (rate, _) in found.items()},
        verdicts_that_differ=sum(a != b for a, b in zip(verdicts["sql"], verdicts["plain"], strict=True)),
        judged_right={name: sum(judged) for name, judged in verdicts.items()},
        answers=len(queries),
        variants_per_question=sum(len(suites.of(answer.question).databases) for answer in queries) / len(queries),
        data=dataset.name,
    )


if __name__ == "__main__":
    main()
