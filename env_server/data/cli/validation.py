"""Can a data set be trusted? Every question of its source is accounted for, and every gold answer is tried.

Promises:
- Each question of the source is usable or left out with a reason, and all of them are listed.
- "Tried" means that the environment itself is asked: an episode is started, and what a perfect agent would answer
  (the gold rows as `format_answer` writes them, or the gold SQL) is given as its ANSWER. A usable question for which
  that is judged wrong could never be solved; one of them makes the whole data set invalid.
- The same data set always gives the same report. Nothing is written here.

It names gold SQL by question only, but what it says about golds is not for an agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from env_server.cache import default_cache_dir
from env_server.data.cli.inspection import SPLITS, counted, levels_of, question_counts
from env_server.data.curation import Progress
from env_server.dataset import Dataset, ExclusionReason, Question, Split
from env_server.factory import EnvironmentFactory
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.test_suites.building import build_suites
from env_server.test_suites.guessability import Guessability, measure_guessability
from env_server.test_suites.store import Suites
from env_server.types import ActionType, AnswerMode, SQLAction, Verdict

_REASONS = {
    ExclusionReason.GOLD_FAILS: "the gold query fails",
    ExclusionReason.GOLD_TOO_SLOW: "the gold query needs too much work",
    ExclusionReason.GOLD_EMPTY: "the gold query returns no row",
    ExclusionReason.GOLD_NULL: "the gold query returns nothing but NULL",
    ExclusionReason.NO_SQL: "an answer and no SQL, which sql mode judges queries by",
    ExclusionReason.GOLD_TOO_LARGE: "the gold query returns more than an answer can hold",
    ExclusionReason.NO_DATABASE: "there is no usable database",
}

WrittenSplit = dict[str, str | dict[str, str]]
"""The split of each database, or of each of its questions."""


@dataclass(frozen=True)
class Validation:
    """What was found. `wrong` holds the ids of the questions whose gold answer is judged wrong.

    `guessability` says how easily each question's answer is hit by luck; None where that was not measured. `untested`
    holds, by question, the clauses of its gold that no variant tests, and `alone` why a question has no variants at
    all; None where no variants were made.
    """

    dataset: Dataset
    answer_mode: AnswerMode
    wrong: tuple[str, ...]
    guessability: Mapping[str, Guessability] | None = None
    untested: Mapping[str, tuple[str, ...]] | None = None
    alone: Mapping[str, str] | None = None

    @property
    def guessable(self) -> list[str]:
        """The ids of the questions whose answer is guessable, as far as that was measured."""
        return [
            question_id for question_id, guessability in (self.guessability or {}).items() if guessability.guessable
        ]

    @property
    def problem(self) -> str:
        """Why the data set cannot be trusted, in one line; "" when it can."""
        if not self.dataset.questions:
            return f"data set {self.dataset.name} has no usable question; the report says why each was left out"
        if self.wrong:
            count = counted(len(self.wrong), "usable question")
            return f"the gold answer is judged wrong for {count}, such as {self.wrong[0]}. Correct or remove the gold"
        return ""

    @property
    def total(self) -> int:
        """Number of questions in the source."""
        return len(self.dataset.questions) + len(self.dataset.excluded)

    @property
    def database_total(self) -> int:
        """Number of databases that the source's questions name."""
        named = {q.db_id for q in self.dataset.questions} | {e.db_id for e in self.dataset.excluded}
        return len(named)

    def split(self) -> WrittenSplit:
        """Return the split of each database that a usable question needs, by name.

        Where a database's questions are split among themselves, its value maps each of them to its split.
        """
        written: WrittenSplit = {}
        for db_id, splits in sorted(self.dataset.splits().items()):
            questions = {q.question_id: q.split.value for q in self.dataset.questions if q.db_id == db_id}
            written[db_id] = splits[0].value if len(splits) == 1 else questions
        return written

    def records(self) -> Iterator[dict[str, object]]:
        """Yield what became of each question of the source: the usable ones, then those that were left out."""
        wrong = set(self.wrong)
        for question in self.dataset.questions:
            yield {
                "question_id": question.question_id,
                "db_id": question.db_id,
                "usable": True,
                "split": question.split.value,
                "hardness": question.hardness.value,
                "family": question.family,
                "duplicate_of": question.duplicate_of,
                "zero": question.gold.is_zero,
                "gold_answer_correct": question.question_id not in wrong,
                **self._guessability_of(question.question_id),
                **self._suite_of(question.question_id),
            }
        for each in self.dataset.excluded:
            yield {
                "question_id": each.question_id,
                "db_id": each.db_id,
                "usable": False,
                "reason": each.reason.value,
                "detail": each.detail,
            }

    def _guessability_of(self, question_id: str) -> dict[str, object]:
        guessability = (self.guessability or {}).get(question_id)
        if guessability is None:
            return {}
        return {
            "near_misses": guessability.different,
            "lucky_near_misses": guessability.lucky,
            "guessable": guessability.guessable,
        }

    def _suite_of(self, question_id: str) -> dict[str, object]:
        if self.untested is None or self.alone is None:
            return {}
        return {
            "untested_clauses": list(self.untested.get(question_id, ())),
            "no_variants": self.alone.get(question_id, ""),
        }

    def summary(self) -> dict[str, object]:
        """Return the whole report as JSON: counts, every exclusion, every duplicate, the split."""
        questions, excluded = self.dataset.questions, self.dataset.excluded
        return {
            "data": self.dataset.name,
            "answer_mode": self.answer_mode.value,
            "problem": self.problem,
            "questions": self.total,
            "usable": len(questions),
            "left_out": len(excluded),
            "left_out_by_reason": {reason.value: count for reason, count in _reasons(self.dataset)},
            "databases": self.database_total,
            "usable_databases": len(self.dataset.databases),
            "hardness": _counts(levels_of(questions), questions, lambda question: question.hardness),
            "splits": _counts(SPLITS, questions, lambda question: question.split),
            "zero": [question.question_id for question in questions if question.gold.is_zero],
            "gold_answers_correct": len(questions) - len(self.wrong),
            "gold_answers_wrong": list(self.wrong),
            "duplicate_of": {q.question_id: q.duplicate_of for q in questions if q.duplicate_of},
            **({} if self.guessability is None else {"guessable": self.guessable}),
            **({} if self.untested is None else {"untested_clauses": {k: list(v) for k, v in self.untested.items()}}),
            **({} if self.alone is None else {"no_variants": dict(self.alone)}),
            "excluded": [
                {"question_id": e.question_id, "db_id": e.db_id, "reason": e.reason.value, "detail": e.detail}
                for e in excluded
            ],
            "split": self.split(),
        }


def validate(
    dataset: Dataset,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    settings: EnvSettings | None = None,
    progress: Progress | None = None,
    *,
    guessable: bool = False,
) -> Validation:
    """Play the gold answer of each usable question. `dataset` must be loaded for the same mode and settings.

    `guessable`: also measure how easily each answer is hit by luck, which takes every question's variants, as judging
    queries does.
    `progress` is called for each suite that is made, then for each question. Raises DataError when a database cannot be
    read any more.
    """
    limits = settings or EnvSettings()
    wrong = []
    guessability: dict[str, Guessability] = {}
    untested: dict[str, tuple[str, ...]] = {}
    alone: dict[str, str] = {}
    with EnvironmentFactory(dataset, settings, answer_mode) as factory:
        suites = factory.suites
        if suites is None and guessable:
            suites = Suites(dataset.databases, limits.sandbox, default_cache_dir())
        if suites is not None:
            build_suites(dataset.databases, dataset.questions, limits.sandbox, default_cache_dir(), progress=progress)
        environment = factory.make()
        for done, question in enumerate(dataset.questions, 1):
            environment.reset(question_id=question.question_id)
            by_value = answer_mode is AnswerMode.VALUE
            answer = format_answer(question.gold.rows) if by_value else question.gold_sql
            last = environment.step(SQLAction(action_type=ActionType.ANSWER, argument=answer))
            if last.metadata.get("verdict") != Verdict.CORRECT:
                wrong.append(question.question_id)
            if suites is not None:
                suite = suites.of(question)
                if suite.untested:
                    untested[question.question_id] = suite.untested
                if suite.problem:
                    alone[question.question_id] = suite.problem
                if guessable and question.gold_sql:
                    guessability[question.question_id] = measure_guessability(question, suite, factory.pool)
            if progress is not None:
                progress(done, len(dataset.questions))
    measured = guessability if guessable else None
    without = suites is None
    return Validation(
        dataset, answer_mode, tuple(wrong), measured, None if without else untested, None if without else alone
    )


def validation_text(validation: Validation) -> Group:
    """Return the report, ready for a rich console. Nothing is cut, so print it with soft wrapping."""
    dataset = validation.dataset
    questions = dataset.questions
    return Group(
        _headline(validation),
        _accounts(validation),
        *([question_counts("split", SPLITS, questions, lambda question: question.split)] if questions else []),
        *_listed("left out", [f"{e.question_id}  {e.db_id}  {e.reason.value}  {e.detail}" for e in dataset.excluded]),
        *_listed("gold answers that are judged wrong", validation.wrong),
        *_listed("guessable", [_guess_line(validation.guessability or {}, each) for each in validation.guessable]),
        *_listed("clauses that no variant tests, or that change nothing", _untested_lines(validation)),
        *_listed("without variants, so judged on one database", _alone_lines(validation)),
        *_listed("split by database", _split_lines(dataset)),
    )


def _headline(validation: Validation) -> Text:
    dataset = validation.dataset
    return Text.assemble(
        (dataset.name, "bold"),
        f": {counted(validation.total, 'question')} over {counted(validation.database_total, 'database')}, ",
        f"answered with a {'value' if validation.answer_mode is AnswerMode.VALUE else 'query'}\n",
    )


def _accounts(validation: Validation) -> Text:
    """Say what became of the questions: lines of a number and a sentence."""
    questions = validation.dataset.questions
    correct = len(questions) - len(validation.wrong)
    lines = [
        (len(questions), "usable"),
        (correct, "  the gold answer, played through the environment, is judged correct"),
        (sum(bool(q.duplicate_of) for q in questions), "  the SQL of an earlier question, up to formatting; kept"),
        (sum(q.gold.is_zero for q in questions), "  the answer is a single 0; kept, an answer like any other"),
    ]
    if validation.guessability is not None:
        guessable = "  guessable: half or more of the queries that ask something else give the answer; kept"
        lines.append((len(validation.guessable), guessable))
    if validation.untested is not None:
        lines.append((len(validation.untested), "  a clause of the gold is tested by none of its variants; kept"))
    if validation.alone is not None:
        lines.append((len(validation.alone), "  no variant can be made, so a query is judged on one database; kept"))
    lines.append((len(validation.dataset.excluded), "left out"))
    lines += [(count, f"  {reason.value}: {_REASONS[reason]}") for reason, count in _reasons(validation.dataset)]
    return Text("".join(f"{count:>9,} {text}\n" for count, text in lines))


def _guess_line(guessability: Mapping[str, Guessability], question_id: str) -> str:
    return f"{question_id}  {guessability[question_id]} give the same answer"


def _untested_lines(validation: Validation) -> list[str]:
    untested = validation.untested or {}
    return [f"{question_id}  {clause}" for question_id, clauses in untested.items() for clause in clauses]


def _alone_lines(validation: Validation) -> list[str]:
    databases = {question.question_id: question.db_id for question in validation.dataset.questions}
    return [f"{each}  {databases[each]}  {problem}" for each, problem in (validation.alone or {}).items()]


def _reasons(dataset: Dataset) -> list[tuple[ExclusionReason, int]]:
    """Count every reason, those that never occurred included."""
    counts = Counter(exclusion.reason for exclusion in dataset.excluded)
    return [(reason, counts[reason]) for reason in _REASONS]


def _counts(names: Sequence[str], questions: Sequence[Question], key: Callable[[Question], str]) -> dict[str, int]:
    counts = Counter(key(question) for question in questions)
    return {str(name): counts[name] for name in names}


def _split_lines(dataset: Dataset) -> list[str]:
    groups: dict[tuple[Split, ...], list[str]] = {}
    for db_id, splits in sorted(dataset.splits().items()):
        groups.setdefault(splits, []).append(db_id)
    return [f"{' and '.join(splits)} ({len(names)}): {', '.join(names)}" for splits, names in sorted(groups.items())]


def _listed(title: str, lines: Sequence[str]) -> list[RenderableType]:
    return [Text.assemble((title, "bold"), "\n", "".join(f"  {line}\n" for line in lines))] if lines else []
