"""What an evaluation shows beside its success rate: exploration, tokens, pass@k, voting, false positives.

Guarantees: episodes that failed (the infrastructure broke) are left out. A share of nothing is None, and so are tokens
that were not counted. Intervals are 95%, with the database as the cluster.

pass@k is the chance that at least one of k samples is right, by the unbiased estimator of Chen et al. (2021,
"Evaluating Large Language Models Trained on Code", arXiv:2107.03374): 1 - C(n - c, k) / C(n, k) for n samples of which
c are right. Voting is self-consistency (Wang et al., 2022, arXiv:2203.11171) over values, not spellings: two answers
are one vote when they are parsed as the same values. It looks at no gold.

False positives of execution accuracy are measured in `value` mode, where nothing but the answer is judged. A right
answer is verified when a query of its episode returned the gold rows (a subset of its columns suffices) and also
returns the gold's on every test database. It is a false positive otherwise: its queries that returned the gold rows are
wrong on test databases, or no query returned them. The latter count is an upper bound: an answer may also have been
read off a wider result, a SAMPLE or the row count of a DESCRIBE, which an episode does not distinguish from a guess. A
right answer to a question without test databases counts as verified where a query returned its gold rows; `untested`
counts those.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import takewhile
from math import comb

from env_server.cache import default_cache_dir
from env_server.dataset import Dataset
from env_server.errors import SQLError
from env_server.judging.answers import normalize_text, parse_answer
from env_server.judging.submissions import submitted_query
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.test_suites.judge import Support, support_of
from env_server.test_suites.store import Suites
from env_server.types import ActionType
from trainer.eval.failure_kinds import FailureKind, error_kind, kind_of, queries_of
from trainer.eval.statistics import Interval, clustered_interval, interval_text, judged, percent, successful
from trainer.rollout.episodes import EpisodeRecord

HALLUCINATED = (FailureKind.NO_SUCH_COLUMN, FailureKind.NO_SUCH_TABLE)
"""The errors of a query that names what the database does not have."""
MAX_VOTED_ROWS = 10_000
"""Rows of a submitted query's result that distinguish it from another one."""
_ORDER = tuple(Support)

Key = Callable[[EpisodeRecord], Hashable | None]
"""An episode's answer as a value: equal for equal answers, None where there is none."""


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `n`."""

    share: float
    interval: Interval
    count: int
    n: int

    def __str__(self) -> str:
        return f"{percent(self.share)} ({interval_text(self.interval)})"


def share_of(databases: Sequence[str], outcomes: Sequence[bool], questions: Sequence[str] = ()) -> Share:
    """Return the share of outcomes that are true; there is at least one, and `databases[i]` is that of `outcomes[i]`.

    `questions[i]` is its question, where several may have the same.
    """
    count, n = sum(outcomes), len(outcomes)
    return Share(count / n, clustered_interval(outcomes, databases, questions), count, n)


@dataclass(frozen=True, slots=True)
class Exploration:
    """How an evaluation's policy explored; tokens and steps are means over questions.

    `described_first`: of the episodes that queried, those with a successful DESCRIBE before the first QUERY.
    `recovered`: of the failed queries, those that a successful one follows in their episode. `hallucinated_names`: of
    the queries, those that failed for a column or a table that does not exist. `prompt_tokens`: each turn's whole
    prompt counted; an engine's prefix cache saves most of that after the first turn.
    """

    described_first: Share | None
    recovered: Share | None
    hallucinated_names: Share | None
    steps: float
    generated_tokens: float | None
    prompt_tokens: float | None


def explore(records: Sequence[EpisodeRecord]) -> Exploration:
    """Return how the policy explored in these episodes, of which at least one was judged."""
    counted = judged(records)
    prompts = [r.prompt_tokens for r in counted if r.prompt_tokens is not None]
    known = len(prompts) == len(counted)
    return Exploration(
        described_first=_share([(r.db_id, _described_first(r)) for r in counted if queries_of(r)]),
        recovered=_share([(r.db_id, recovered) for r in counted for recovered in _recoveries(r)]),
        hallucinated_names=_share([(r.db_id, wrong) for r in counted for wrong in _hallucinations(r)]),
        steps=_mean([r.steps for r in counted]),
        generated_tokens=_mean([r.tokens for r in counted]) if known else None,
        prompt_tokens=_mean(prompts) if known else None,
    )


def _described_first(record: EpisodeRecord) -> bool:
    first_query = queries_of(record)[0]
    before = takewhile(lambda turn: turn is not first_query, record.turns)
    return any(kind_of(turn) == ActionType.DESCRIBE and not turn["error"] for turn in before)


def _recoveries(record: EpisodeRecord) -> Iterator[bool]:
    """Of each failed query, whether a later one succeeds."""
    errors = [bool(turn["error"]) for turn in queries_of(record)]
    return (not all(errors[i:]) for i, failed in enumerate(errors) if failed)


def _hallucinations(record: EpisodeRecord) -> Iterator[bool]:
    return (bool(turn["error"]) and error_kind(turn["error"]) in HALLUCINATED for turn in queries_of(record))


def _share(cases: Sequence[tuple[str, bool]]) -> Share | None:
    """The share of the cases, each of a database, that are true."""
    return share_of([db_id for db_id, _ in cases], [outcome for _, outcome in cases]) if cases else None


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


@dataclass(frozen=True, slots=True)
class FalsePositives:
    """The share of right answers that are false positives, and how many there are of each kind.

    `wrong_query`: a query returned the gold rows, but none of those is right on the test databases. `no_query`: no
    query returned them.
    """

    share: Share
    wrong_query: int
    no_query: int
    untested: int

    def __str__(self) -> str:
        untested = f"; {self.untested} without test databases" if self.untested else ""
        return (
            f"false positives: {self.share} of {self.share.n:,} right answers, {self.wrong_query} with a query that "
            f"is wrong on a test database, {self.no_query} without a query that returned the answer{untested}"
        )


def false_positives(
    records: Sequence[EpisodeRecord], dataset: Dataset, on_record: Callable[[], None] = lambda: None
) -> FalsePositives | None:
    """Measure the false positives of an evaluation in `value` mode; None when no answer is right.

    `on_record` is called for each right answer (progress); the first of a question generates its test databases, which
    takes tenths of a second. Raises DataError when a database cannot be read.
    """
    right = [record for record in records if successful(record)]
    if not right:
        return None
    settings = SandboxSettings()
    databases = DatabasePool(dataset.databases, settings)
    suites = Suites(dataset.databases, settings, default_cache_dir())
    supports = []
    try:
        for record in right:
            question = dataset.question(record.question_id)
            supports.append(
                _best_support(
                    record, partial(support_of, question, databases=databases, suites=suites, settings=settings)
                )
            )
            on_record()
    finally:
        databases.close()
    return FalsePositives(
        share_of(
            [record.db_id for record in right],
            [support in (Support.FALSE_POSITIVE, Support.OTHER_ROWS) for support in supports],
            [record.question_id for record in right],
        ),
        supports.count(Support.FALSE_POSITIVE),
        supports.count(Support.OTHER_ROWS),
        supports.count(Support.UNTESTED),
    )


def _best_support(record: EpisodeRecord, support: Callable[[str], Support]) -> Support:
    best = Support.OTHER_ROWS
    for sql in dict.fromkeys(turn["argument"] for turn in queries_of(record) if not turn["error"]):
        best = max(best, support(sql), key=_ORDER.index)
        if best is Support.VERIFIED:
            break
    return best


@dataclass(frozen=True, slots=True)
class Rate:
    """The mean over questions, with its 95% interval over databases."""

    rate: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class SampledSuccess:
    """An evaluation with several samples of each question. `pass_at`: by k, from 1 to `samples` in powers of two."""

    questions: int
    samples: int
    pass_at: dict[int, Rate]
    voted: Rate

    def __str__(self) -> str:
        rates = {f"pass@{k}": rate for k, rate in self.pass_at.items()} | {f"voting of {self.samples}": self.voted}
        shown = ", ".join(f"{name} {percent(r.rate)} ({interval_text(r.interval)})" for name, r in rates.items())
        return f"{self.questions:,} questions, {self.samples} samples each: {shown}"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that one of `k` of the samples is right. Raises ValueError unless 1 <= k <= samples."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {right} in {samples} samples is not defined")
    return 1 - comb(samples - right, k) / comb(samples, k)


def answer_of(record: EpisodeRecord) -> str | None:
    """Return the text of an episode's ANSWER; None where it gave none."""
    last = record.turns[-1] if record.turns else None
    return last["argument"] if last and last["action_type"] == ActionType.ANSWER and not last["error"] else None


def typed_key(record: EpisodeRecord) -> Hashable | None:
    """Return the values that a typed answer is parsed as, whatever their order, case and notation."""
    text = answer_of(record)
    if text is None:
        return None
    width = text.partition("\n")[0].count("|") + 1
    readings = parse_answer(text, width)
    if not readings:
        return normalize_text(text)
    tables: list[list[tuple[Decimal | str, ...]]] = [
        [tuple(_value(cell.text) for cell in row) for row in reading] for reading in readings
    ]
    # 1,234 is a number; any other text with commas is the list that it looks like.
    numbers = [table for table in tables if len(table) == 1 and isinstance(table[0][0], Decimal)]
    chosen = numbers or sorted(tables, key=len, reverse=True)
    return frozenset(Counter(chosen[0]).items())


def rows_key(databases: DatabasePool) -> Key:
    """Return the key of answers that are queries: the rows that each returns, and None where it fails."""

    def key(record: EpisodeRecord) -> Hashable | None:
        text = answer_of(record)
        if text is None:
            return None
        try:
            result = databases.query(record.db_id, submitted_query(text), MAX_VOTED_ROWS)
        except SQLError:
            return None
        return frozenset(Counter(result.rows).items())

    return key


def agreeing(records: Sequence[EpisodeRecord], key: Key) -> list[EpisodeRecord]:
    """Return the episodes that gave the most frequent answer; nothing where none answered.

    Of equally frequent answers, the one that was given first.
    """
    votes: defaultdict[Hashable, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        if (answer := key(record)) is not None:
            votes[answer].append(record)
    return max(votes.values(), key=len, default=[])


def sampled_success(records: Sequence[EpisodeRecord], key: Key = typed_key) -> SampledSuccess | None:
    """Return pass@k and voting over an evaluation's episodes; None where no question has two that were judged.

    Questions of which fewer were judged, since episodes failed, count for the k that they have.
    """
    by_question: defaultdict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in judged(records):
        by_question[record.question_id].append(record)
    most = max(map(len, by_question.values()), default=0)
    if most < 2:
        return None
    pass_at = {}
    for k in (*(2**power for power in range(most.bit_length()) if 2**power < most), most):
        pass_at[k] = _rate(
            [(g[0].db_id, pass_at_k(len(g), sum(map(successful, g)), k)) for g in by_question.values() if len(g) >= k]
        )
    winners = [(group[0].db_id, agreeing(group, key)[:1]) for group in by_question.values()]
    voted = _rate([(db_id, float(any(map(successful, winner)))) for db_id, winner in winners])
    return SampledSuccess(len(by_question), most, pass_at, voted)


def _rate(values: Sequence[tuple[str, float]]) -> Rate:
    clusters, rates = zip(*values, strict=True)
    return Rate(sum(rates) / len(rates), clustered_interval(rates, clusters))


def _value(text: str) -> Decimal | str:
    """Return a cell's number where it is one, else its text, as it is compared."""
    word = normalize_text(text)
    try:
        number = Decimal(word.replace(",", ""))
    except InvalidOperation:
        return word
    return number if number.is_finite() else word
