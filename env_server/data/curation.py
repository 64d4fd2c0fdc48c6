"""From raw questions to usable ones: every gold query is run once, and what cannot be used is left out and told.

What a gold query gave is kept in the cache and not run again, unless the machine and not the query stopped it.

Guarantees:
- Nothing is lost: each raw question becomes one `Question` or one `Exclusion`, both in the source's order.
- The same data and settings give the same data set: golds run in the sandbox under the agent's own limits.
- A gold that the agent could not answer is excluded: one that fails, is empty, holds nothing but NULL or is too
  large. In `value` mode too large means that one QUERY result cannot show it whole: more rows, columns or
  characters, or a longer cell, than are displayed. In `sql` mode nothing is read or typed, and only
  `SQL_MODE_ROWS` bounds the rows, so that a data set stays small in memory.
- Usable questions about one database whose SQL differs in nothing but case, white space and comments are told: all but
  the first carry its id. None is dropped, because they may ask in different words.

One database is open at a time. Questions that share a database and a gold query share one `Gold`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from env_server.cache import Cache, identity, key_of
from env_server.data.raw import RawDataset, RawQuestion
from env_server.dataset import (
    Dataset,
    Exclusion,
    ExclusionReason,
    Gold,
    Hardness,
    Question,
    rows_from_json,
    rows_to_json,
)
from env_server.errors import DataError, SQLError
from env_server.judging.submissions import runnable_query
from env_server.reward import normalize_action
from env_server.settings import DisplaySettings, SandboxSettings
from env_server.sql.display import MAX_COLUMNS, format_result
from env_server.sql.hardness import hardness, orders_at_top_level
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.types import ActionType, AnswerMode

SQL_MODE_ROWS = 1_000
"""Rows of the largest gold that `sql` mode accepts."""

Progress = Callable[[int, int], None]
"""Called after each database, with the number of questions curated so far and of all questions."""


class NothingUsableError(DataError):
    """Every question was left out; `dataset` holds the exclusions and no question."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(f"data set {dataset.name} has no usable question. {_summary(dataset.excluded)}")
        self.dataset = dataset


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a gold query cannot be used."""

    reason: ExclusionReason
    detail: str


@dataclass(frozen=True, slots=True)
class Tried:
    """What trying a gold query gave. `lasting`: the query decided it, so that it would give the same again.

    `hardness` is None where it is not graded: unusable, or graded by its source.
    """

    gold: Gold | Unusable
    hardness: Hardness | None = None
    lasting: bool = True


def curate(
    raw: RawDataset,
    *,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    sandbox: SandboxSettings | None = None,
    display: DisplaySettings | None = None,
    progress: Progress | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Run every gold query; return the usable questions with their gold rows, and the excluded ones.

    The data set's `databases` are those that a usable question needs. Raises DataError when a question id occurs
    more than once, and NothingUsableError when no question is usable.
    """
    limits = (sandbox or SandboxSettings(), display or DisplaySettings(), answer_mode)
    curator = _Curator(*limits, cache or Cache(None))
    by_database: dict[str, list[RawQuestion]] = {}
    for question in raw.questions:
        runnable = replace(question, sql=runnable_query(question.sql))
        by_database.setdefault(question.db_id, []).append(runnable)
    outcomes: dict[str, Question | Exclusion] = {}
    for db_id, questions in by_database.items():
        missing = raw.refused.get(db_id, "there is no file for this db_id")
        curated = curator.curate(raw.databases.get(db_id), missing, questions)
        outcomes.update((outcome.question_id, outcome) for outcome in curated)
        if progress is not None:
            progress(len(outcomes), len(raw.questions))
    in_order = [outcomes[question.question_id] for question in raw.questions]
    excluded = tuple(outcome for outcome in in_order if isinstance(outcome, Exclusion))
    usable = tuple(outcome for outcome in in_order if isinstance(outcome, Question))
    needed = {question.db_id for question in usable}
    databases = {db_id: path for db_id, path in raw.databases.items() if db_id in needed}
    dataset = Dataset(name=raw.name, questions=usable, databases=databases, excluded=excluded)
    if not usable:
        raise NothingUsableError(dataset)
    return dataset


def max_gold_rows(answer_mode: AnswerMode, display: DisplaySettings) -> int:
    """Return the rows of the largest usable gold."""
    return display.max_rows if answer_mode is AnswerMode.VALUE else SQL_MODE_ROWS


def unusable(
    result: QueryResult, answer_mode: AnswerMode, display: DisplaySettings, gold: str = "the gold query"
) -> Unusable | None:
    """Say why a gold result, fetched with `max_gold_rows`, cannot be used; None when it can. `gold` is its name."""
    if not result.rows:
        return Unusable(ExclusionReason.GOLD_EMPTY, f"{gold} returns no row")
    if result.more:
        limit = max_gold_rows(answer_mode, display)
        return Unusable(ExclusionReason.GOLD_TOO_LARGE, f"{gold} returns more than {limit} rows")
    if all(value is None for row in result.rows for value in row):
        return Unusable(ExclusionReason.GOLD_NULL, f"{gold} returns nothing but NULL")
    if answer_mode is AnswerMode.VALUE and not _shown_whole(result, display):
        detail = f"a QUERY result of {display.max_chars} characters cannot show the gold rows whole"
        return Unusable(ExclusionReason.GOLD_TOO_LARGE, detail)
    return None


def _shown_whole(result: QueryResult, display: DisplaySettings) -> bool:
    """Tell whether the agent can see every row and cell, however the columns are called."""
    width = len(result.columns)
    nameless = replace(result, columns=("",) * width)
    size = sum(len(str(value)) for row in result.rows for value in row)
    unbounded = replace(display, max_chars=10 * size + 1_000_000, max_cell_chars=10 * size + 1_000)
    return width <= MAX_COLUMNS and format_result(nameless, display) == format_result(nameless, unbounded)


@dataclass(frozen=True, slots=True)
class _Curator:
    """Curates the questions of one database after the other."""

    sandbox: SandboxSettings
    display: DisplaySettings
    answer_mode: AnswerMode
    cache: Cache

    def curate(self, path: Path | None, missing: str, questions: Sequence[RawQuestion]) -> list[Question | Exclusion]:
        """Run each distinct gold query of a database once; `missing` says why `path` is None."""
        if path is None:
            return _all_excluded(questions, missing)
        try:
            golds = self._golds(path, {each.sql: each.hardness is None for each in questions if each.sql})
        except DataError as error:
            return _all_excluded(questions, str(error))
        return _outcomes(questions, [golds[each.sql] if each.sql else self._stated(each) for each in questions])

    def _stated(self, question: RawQuestion) -> Tried:
        """Return the answer of a question that has no SQL."""
        if self.answer_mode is AnswerMode.SQL:
            return Tried(Unusable(ExclusionReason.NO_SQL, "it has an answer and no SQL to judge queries by"))
        rows = question.answer
        shown = rows[: max_gold_rows(self.answer_mode, self.display)]
        result = QueryResult(("",) * len(rows[0] if rows else ()), shown, row_count=len(rows), vm_steps=0)
        problem = unusable(result, self.answer_mode, self.display, "the stated answer")
        return Tried(problem or Gold(rows, ordered=False, stated=True), Hardness.UNKNOWN)

    def _golds(self, path: Path, wanted: Mapping[str, bool]) -> dict[str, Tried]:
        """Return what golds gave, by their SQL; `wanted` says which are to be graded."""
        key = key_of("golds", identity(path), self.sandbox, self.display, self.answer_mode)
        known = golds_from_json(self.cache.get(key) or "{}")
        if new := [sql for sql in wanted if sql not in known]:
            with closing(Sandbox(path, self.sandbox)) as sandbox:
                tried = {sql: self._try(sandbox, sql, wanted[sql]) for sql in new}
            known |= tried
            self.cache.set(key, golds_to_json({sql: each for sql, each in known.items() if each.lasting}))
        return known

    def _try(self, sandbox: Sandbox, sql: str, graded: bool) -> Tried:
        try:
            result = sandbox.query(sql, max_gold_rows(self.answer_mode, self.display))
        except SQLError as error:
            too_slow = error.kind == "budget"
            reason = ExclusionReason.GOLD_TOO_SLOW if too_slow else ExclusionReason.GOLD_FAILS
            return Tried(Unusable(reason, str(error)), lasting=error.deterministic)
        if problem := unusable(result, self.answer_mode, self.display):
            return Tried(problem)
        return Tried(Gold(rows=result.rows, ordered=orders_at_top_level(sql)), hardness(sql) if graded else None)


def golds_to_json(golds: Mapping[str, Tried]) -> str:
    """Return what golds gave, by their SQL, as JSON text."""
    return json.dumps({sql: _plain(each) for sql, each in golds.items()})


def golds_from_json(text: str) -> dict[str, Tried]:
    """Return what `golds_to_json` wrote. Raises ValueError."""
    return {sql: _tried(plain) for sql, plain in json.loads(text).items()}


def _plain(tried: Tried) -> dict[str, Any]:
    if isinstance(tried.gold, Unusable):
        return {"reason": tried.gold.reason, "detail": tried.gold.detail}
    return {"rows": rows_to_json(tried.gold.rows), "ordered": tried.gold.ordered, "hardness": tried.hardness}


def _tried(plain: Mapping[str, Any]) -> Tried:
    if "reason" in plain:
        return Tried(Unusable(ExclusionReason(plain["reason"]), plain["detail"]))
    grade = plain["hardness"]
    return Tried(Gold(rows_from_json(plain["rows"]), plain["ordered"]), grade and Hardness(grade))


def _outcomes(questions: Sequence[RawQuestion], golds: Sequence[Tried]) -> list[Question | Exclusion]:
    first: dict[str, str] = {}
    outcomes: list[Question | Exclusion] = []
    for each, tried in zip(questions, golds, strict=True):
        if isinstance(tried.gold, Unusable):
            outcomes.append(_excluded(each, tried.gold))
            continue
        same = normalize_action(ActionType.QUERY, each.sql) if each.sql else each.question_id
        earlier = first.setdefault(same, each.question_id)
        outcomes.append(
            Question(
                question_id=each.question_id,
                text=each.text,
                db_id=each.db_id,
                gold_sql=each.sql,
                hardness=each.hardness or tried.hardness or hardness(each.sql),
                split=each.split,
                gold=tried.gold,
                family=each.family,
                evidence=each.evidence,
                duplicate_of="" if earlier == each.question_id else earlier,
            )
        )
    return outcomes


def _all_excluded(questions: Iterable[RawQuestion], detail: str) -> list[Question | Exclusion]:
    return [_excluded(each, Unusable(ExclusionReason.NO_DATABASE, detail)) for each in questions]


def _excluded(question: RawQuestion, problem: Unusable) -> Exclusion:
    return Exclusion(question.question_id, question.db_id, question.text, problem.reason, problem.detail)


def _summary(excluded: tuple[Exclusion, ...]) -> str:
    """Name the commonest reason and one example of it."""
    if not excluded:
        return "It holds no question at all"
    reason, count = Counter(exclusion.reason for exclusion in excluded).most_common(1)[0]
    example = next(exclusion for exclusion in excluded if exclusion.reason is reason)
    return f"{count} of {len(excluded)} are left out as {reason.value}, such as {example.question_id}: {example.detail}"
