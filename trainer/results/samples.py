"""Several samples of each question: pass@1, pass@k, and the answer that most of them agree on. Pure, `rows_key` apart.

pass@k is the chance that at least one of k samples is right, by the unbiased estimator of Chen et al. (2021,
"Evaluating Large Language Models Trained on Code", arXiv:2107.03374): 1 - C(n - c, k) / C(n, k) for n samples of which
c are right. Voting is self-consistency (Wang et al., 2022, arXiv:2203.11171) over what answers are, not how they are
written: two answers are one vote when they are read as the same values. It looks at no gold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import comb

from env_server.errors import SQLError
from env_server.judging.answers import normalize_text, parse_answer
from env_server.judging.submissions import submitted_query
from env_server.sql.pool import DatabasePool
from env_server.types import ActionType
from trainer.results.statistics import Interval, clustered_interval, judged, successful
from trainer.results.summary_table import interval_text, percent
from trainer.rollout.episodes import EpisodeRecord

MAX_VOTED_ROWS = 10_000
"""Of the result of a submitted query, those that tell it from another one."""

Key = Callable[[EpisodeRecord], Hashable | None]
"""What an episode's answer is: equal for equal answers, None where there is none."""


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
    """Return the values that a typed answer is read as, whatever their order, case and notation."""
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
    """Return the episodes that gave the answer that most of them gave; nothing where none answered.

    Of answers with as many votes, the one that was given first.
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
    ks = [k for k in (2**power for power in range(most.bit_length())) if k < most]
    pass_at = {}
    for k in (*ks, most):
        values = [
            (g[0].db_id, pass_at_k(len(g), sum(map(successful, g)), k)) for g in by_question.values() if len(g) >= k
        ]
        pass_at[k] = _rate(values)
    winners = [(group[0].db_id, agreeing(group, key)[:1]) for group in by_question.values()]
    voted = _rate([(db_id, float(any(map(successful, winner)))) for db_id, winner in winners])
    return SampledSuccess(len(by_question), most, pass_at, voted)


def sampled_line(sampled: SampledSuccess) -> str:
    """Return it in one line."""
    rates = {f"pass@{k}": rate for k, rate in sampled.pass_at.items()} | {f"voting of {sampled.samples}": sampled.voted}
    shown = ", ".join(f"{name} {percent(each.rate)} ({interval_text(each.interval)})" for name, each in rates.items())
    return f"{sampled.questions:,} questions, {sampled.samples} samples each: {shown}"


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
