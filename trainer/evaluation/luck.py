"""How many right answers of an evaluation were right by luck, in `value` mode, where nothing but the answer is judged.

A right answer is earned when a query of its episode returned the gold rows (some of its columns suffice) and goes on to
return the gold's on every variant of the database. It is lucky otherwise: its queries that returned the gold rows are
wrong on variants, or no query returned them. The latter is an upper bound: an answer may also have been read off a
wider result, a SAMPLE or the row count of a DESCRIBE, and nothing in an episode tells that from a guess.

A question without variants cannot tell: where a query returned its gold rows, the answer counts as earned, and
`untested` says how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from env_server.cache import default_cache_dir
from env_server.dataset import Dataset, Question
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.test_suites.evidence import Evidence, Standing
from env_server.test_suites.store import Suites
from trainer.results.exploration import Share, share_of, share_text
from trainer.results.failure_kinds import queries_of
from trainer.results.statistics import successful
from trainer.rollout.episodes import EpisodeRecord

_ORDER = tuple(Standing)


@dataclass(frozen=True, slots=True)
class Luck:
    """Of the right answers, the share that is lucky, and how many there are of each sort.

    `lucky_query`: a query returned the gold rows, and none of those holds on the variants. `no_query`: none did.
    """

    lucky: Share
    lucky_query: int
    no_query: int
    untested: int


def measure_luck(
    records: Sequence[EpisodeRecord], dataset: Dataset, on_record: Callable[[], None] = lambda: None
) -> Luck | None:
    """Measure it over an evaluation's episodes in `value` mode; None when no answer is right.

    `on_record` is called for each right answer (progress); the first of a question has its variants made, in tenths of
    a second. Raises DataError when a database cannot be read.
    """
    right = [record for record in records if successful(record)]
    if not right:
        return None
    settings = SandboxSettings()
    databases = DatabasePool(dataset.databases, settings)
    evidence = Evidence(databases, Suites(dataset.databases, settings, default_cache_dir()), settings)
    standings = []
    try:
        for record in right:
            standings.append(_best(record, dataset.question(record.question_id), evidence))
            on_record()
    finally:
        databases.close()
    lucky = [standing in (Standing.LUCKY, Standing.OTHER_ROWS) for standing in standings]
    return Luck(
        share_of([record.db_id for record in right], lucky, [record.question_id for record in right]),
        standings.count(Standing.LUCKY),
        standings.count(Standing.OTHER_ROWS),
        standings.count(Standing.UNTESTED),
    )


def luck_line(luck: Luck) -> str:
    """Say it in one line."""
    text = (
        f"right by luck: {share_text(luck.lucky)} of {luck.lucky.n:,} right answers, {luck.lucky_query} on a query "
        f"that is wrong on variants of the database, {luck.no_query} on none that returned the answer"
    )
    return text + (f"; {luck.untested} without variants" if luck.untested else "")


def _best(record: EpisodeRecord, question: Question, evidence: Evidence) -> Standing:
    """The best standing of an episode's queries."""
    best = Standing.OTHER_ROWS
    for sql in dict.fromkeys(turn["argument"] for turn in queries_of(record) if not turn["error"]):
        best = max(best, evidence.standing(question, sql), key=_ORDER.index)
        if best is Standing.HOLDS:
            break
    return best
