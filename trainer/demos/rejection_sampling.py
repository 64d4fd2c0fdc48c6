"""Rejection sampling: what a policy played right is replayed and trained on.

Episodes come from the files that `sqlenv evaluate --episodes_out` and a run write. Guarantees:

1. Training questions of the data sets alone: an episode of any other question is rejected, so that nothing leaks from
   an evaluation.
2. Every episode is replayed and judged anew; what comes out otherwise is rejected. In `sql` mode the answer has to be
   right on test databases too, and in `value` mode a query of the episode has to be: a guessed answer, or one that a
   wrong query happens to give, teaches nothing.
3. At most `limit` episodes of a question, so that easy questions do not drown hard ones: of different actions each,
   those with the fewest errors first, then the shortest.
4. A turn that failed, or that repeats an earlier one, is shown and masked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from env_server.cache import default_cache_dir
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Hardness, Question, Split
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.episode import question_text
from env_server.reward import normalize_action
from env_server.settings import EnvSettings
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import TITLE, Suites, build_suites
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from sqlenv.progress import reported
from trainer.chat.format import Conversation
from trainer.config import ConfigError
from trainer.eval.run_files import read_records
from trainer.rollout.episodes import Episode, EpisodeRecord, Outcome
from trainer.rollout.players import play
from trainer.training.questions import ALL_QUESTIONS, QuestionFilter

Actions = tuple[SQLAction, ...]


@dataclass
class RejectionSamples:
    """What is kept of the episodes of some files."""

    conversations: list[Conversation] = field(default_factory=list)
    questions: set[Question] = field(default_factory=set)
    """Those of which an episode is kept."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Episodes by the reason why they are rejected."""

    def __str__(self) -> str:
        levels = Counter(question.hardness for question in self.questions)
        by_hardness = ", ".join(f"{hardness} {levels[hardness]}" for hardness in Hardness)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.rejected.most_common())
        return (
            f"{len(self.conversations):,} episodes of {len(self.questions):,} questions are replayed "
            f"({by_hardness}); rejected: {reasons or 'none'}"
        )


class ReplayPlayer:
    """Takes the actions of an episode again, and the last one for as long as that does not end it."""

    def __init__(self, actions: Actions) -> None:
        self._plan: Iterator[SQLAction] = iter(actions)
        self._last = actions[-1]

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next action."""
        return next(self._plan, self._last)


def sample_by_rejection(
    files: Sequence[str],
    specs: Sequence[str],
    answer_mode: AnswerMode,
    settings: EnvSettings,
    limit: int,
    admitted: QuestionFilter = ALL_QUESTIONS,
) -> RejectionSamples:
    """Replay the episodes of the files and keep what is worth learning. Raises SQLEnvError.

    `admitted` says of which questions. ConfigError when there is nothing to learn.
    """
    datasets = [load_dataset(spec, answer_mode=answer_mode) for spec in specs]
    samples = RejectionSamples()
    records = [record for file in files for record in read_records(Path(file))]
    chosen = choose(records, datasets, samples.rejected, admitted)
    for dataset, successes in zip(datasets, chosen, strict=True):
        with EnvironmentFactory(dataset, settings, answer_mode) as factory:
            environment = factory.make()
            judge = _query_judge(dataset, factory, successes, settings)
            for question, ways in successes.items():
                own_judge = judge if answer_mode is AnswerMode.VALUE and question.gold_sql else None
                _replay(environment, question, ways, limit, own_judge, samples)
    if not samples.conversations:
        raise ConfigError(f"--rejection_sampling: nothing to learn from {len(records):,} episodes: {samples}")
    return samples


def _query_judge(
    dataset: Dataset, factory: EnvironmentFactory, questions: Iterable[Question], settings: EnvSettings
) -> SQLJudge:
    cache = default_cache_dir()
    with reported(TITLE) as progress:
        build_suites(dataset.databases, questions, settings.sandbox, cache, progress=progress.update)
    suites = Suites(dataset.databases, settings.sandbox, cache)
    return SQLJudge(factory.pool, suites, settings.judging, settings.sandbox)


def _replay(
    environment: SQLEnvironment,
    question: Question,
    ways: Sequence[Actions],
    limit: int,
    judge: SQLJudge | None,
    samples: RejectionSamples,
) -> None:
    """Replay the ways to a right answer, at most `limit`; `judge` is for the queries on it."""
    accepted = 0
    for actions in ways:
        if accepted == limit:
            samples.rejected["more than enough of their question"] += 1
            continue
        episode, conversation = play(environment, question, ReplayPlayer(actions))
        if not episode.correct:
            samples.rejected["not right when replayed"] += 1
        elif judge is not None and not _asked(episode, question, judge):
            samples.rejected["right without a right query"] += 1
        else:
            accepted += 1
            samples.questions.add(question)
            samples.conversations.append(replace(conversation, masked_turns=missteps(episode)))


def choose(
    records: Iterable[EpisodeRecord],
    datasets: Sequence[Dataset],
    rejected: Counter[str],
    admitted: QuestionFilter = ALL_QUESTIONS,
) -> list[Mapping[Question, Sequence[Actions]]]:
    """Return what was played right of each data set's training questions, best first; counts what is rejected."""
    homes = {
        (question.question_id, question_text(question)): (number, question)
        for number, dataset in reversed(list(enumerate(datasets)))
        for question in dataset.select(Split.TRAIN)
    }
    found: list[dict[Question, dict[tuple[str, ...], tuple[int, int, Actions]]]] = [defaultdict(dict) for _ in datasets]
    for record in records:
        home = homes.get((record.question_id, record.question))
        if home is None:
            rejected["of no training question"] += 1
        elif not admitted.admits(home[1]):
            rejected["of another difficulty or part of the data"] += 1
        elif record.outcome != Outcome.CORRECT:
            rejected["not right"] += 1
        elif record.given_steps:
            rejected["guided"] += 1
        else:
            number, question = home
            actions = _actions(record.turns)
            ways, same = found[number][question], _normalized(actions)
            if same in ways:
                rejected["played the same way before"] += 1
            else:
                ways[same] = (sum(bool(turn["error"]) for turn in record.turns), len(actions), actions)
    return [
        {
            question: [actions for *_, actions in sorted(ways.values(), key=lambda way: way[:2])]
            for question, ways in of_questions.items()
        }
        for of_questions in found
    ]


def missteps(episode: Episode) -> frozenset[int]:
    """The numbers of an episode's turns that failed, or that repeat an earlier one."""
    taken: set[str] = set()
    found = set()
    for number, turn in enumerate(episode.turns):
        action = normalize_action(turn.action_type, turn.argument)
        if turn.error or action in taken:
            found.add(number)
        taken.add(action)
    return frozenset(found)


def _asked(episode: Episode, question: Question, judge: SQLJudge) -> bool:
    """Whether a query of the episode answers the question, on test databases too."""
    queries = {turn.argument for turn in episode.turns if turn.action_type == ActionType.QUERY and not turn.error}
    return any(judge.judge(question, query).correct for query in queries)


def _actions(turns: Iterable[Mapping[str, Any]]) -> Actions:
    return tuple(SQLAction(action_type=turn["action_type"], argument=turn["argument"]) for turn in turns)


def _normalized(actions: Actions) -> tuple[str, ...]:
    """What two ways have in common that are the same play."""
    return tuple(normalize_action(action.action_type, action.argument) for action in actions)
