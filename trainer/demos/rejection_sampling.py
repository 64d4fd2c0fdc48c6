"""Rejection sampling: what a policy played right is played again, and learned.

Episodes come from the files that `sqlenv evaluate --episodes_out` and a run write. Guarantees:

1. Training questions of the data sets alone: an episode of any other question is left out, so that nothing leaks from
   an evaluation.
2. Every episode is played and judged anew; what comes out otherwise is left out. In `sql` mode the answer has to be
   right on test databases too, and in `value` mode a query of the episode has to be: an answer that was guessed,
   or that a wrong query happens to give, teaches nothing.
3. At most `most` episodes of a question, so that easy questions do not drown hard ones: of different actions each,
   those with the fewest errors first, then the shortest.
4. A turn that failed, or that repeats an earlier one, is shown and masked.
5. Where mistakes are to be corrected, episodes that were not right are played again up to their first failed action,
   and the oracle goes on from there; at most `most` of a question, too. A policy that has learned from good play alone
   has never been where its own mistakes lead, so it is shown what to do there (DAgger: Ross et al., 2011,
   arXiv:1011.0686).
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
from env_server.environment import SQLEnvironment
from env_server.episodes import question_text
from env_server.factory import EnvironmentFactory
from env_server.reward import normalize_action
from env_server.settings import EnvSettings
from env_server.test_suites.building import TITLE, build_suites
from env_server.test_suites.judge import QueryJudge, SQLJudge
from env_server.test_suites.store import Suites
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from sqlenv.progress import reported
from trainer.chat.format import Conversation
from trainer.config import ConfigError
from trainer.eval.run_files import read_records
from trainer.rollout.episodes import Episode, EpisodeRecord, Outcome
from trainer.rollout.players import OraclePlayer, as_shown_to_players, play, with_sql
from trainer.training.questions import ALL_QUESTIONS, QuestionFilter


@dataclass
class Replayed:
    """What came of the episodes of some files."""

    conversations: list[Conversation] = field(default_factory=list)
    questions: Counter[Hardness] = field(default_factory=Counter)
    """Questions of which an episode is learned."""
    corrected: int = 0
    """Conversations in which the oracle takes over."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Episodes by the reason why they are not learned."""

    def __str__(self) -> str:
        by_hardness = ", ".join(f"{hardness} {self.questions[hardness]}" for hardness in Hardness)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.most_common())
        corrected = f", {self.corrected:,} of them corrected" if self.corrected else ""
        return (
            f"{len(self.conversations):,} episodes of {self.questions.total():,} questions are played again"
            f"{corrected} ({by_hardness}); left out: {reasons or 'none'}"
        )


class RepeatingPlayer:
    """Takes the actions of an episode again, and the last one for as long as that does not end it."""

    def __init__(self, actions: Actions) -> None:
        self._plan: Iterator[SQLAction] = iter(actions)
        self._last = actions[-1]

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next action."""
        return next(self._plan, self._last)


def replay(
    files: Sequence[str],
    specs: Sequence[str],
    answer_mode: AnswerMode,
    settings: EnvSettings,
    most: int,
    kept: QuestionFilter = ALL_QUESTIONS,
    correct: bool = False,
) -> Replayed:
    """Play the episodes of the files again and keep what is worth learning. Raises SQLEnvError.

    `kept` says which questions are played; `correct`: learn the way out of mistakes, too. ConfigError when
    there is nothing to learn.
    """
    datasets = [load_dataset(spec, answer_mode=answer_mode) for spec in specs]
    replayed = Replayed()
    records = [record for file in files for record in read_records(Path(file))]
    chosen = choose(records, datasets, replayed.left_out, kept)
    mistakes = first_mistakes(records) if correct else {}
    for dataset, of_questions in zip(datasets, chosen, strict=True):
        learned: set[Question] = set()
        with EnvironmentFactory(dataset, settings, answer_mode) as factory:
            suites = Suites(dataset.databases, settings.sandbox, default_cache_dir())
            with reported(TITLE) as progress:
                build_suites(
                    dataset.databases, of_questions, settings.sandbox, default_cache_dir(), progress=progress.update
                )
            judge = SQLJudge(factory.pool, suites, settings.judging, settings.sandbox)
            environment = factory.make()
            own_judge = judge if answer_mode is AnswerMode.VALUE else None
            for question, ways in of_questions.items():
                if _play_again(environment, question, ways, most, own_judge, replayed):
                    learned.add(question)
            for question in with_sql(dataset.select(Split.TRAIN), "--correct_mistakes") if mistakes else ():
                starts = mistakes.get((question.question_id, question_text(question)), [])[:most]
                if starts and kept.admits(question):
                    shown = as_shown_to_players(question, factory.pool)
                    players = [CorrectingPlayer(shown, actions, answer_mode) for actions in starts]
                    if _correct(environment, question, players, replayed):
                        learned.add(question)
        replayed.questions.update(question.hardness for question in learned)
    if not replayed.conversations:
        raise ConfigError(f"--rejection_sampling: nothing to learn from {len(records):,} episodes: {replayed}")
    return replayed


def _play_again(
    environment: SQLEnvironment,
    question: Question,
    ways: Sequence[Actions],
    most: int,
    judge: QueryJudge | None,
    replayed: Replayed,
) -> bool:
    """Play the ways to a right answer again, at most `most`; tell whether one is learned. `judge`: of the queries."""
    kept = 0
    for actions in ways:
        if kept == most:
            replayed.left_out["more than enough of their question"] += 1
            continue
        episode, conversation = play(environment, question, RepeatingPlayer(actions))
        if not episode.correct:
            replayed.left_out["not right when played again"] += 1
        elif judge is not None and question.gold_sql and not _asked(episode, question, judge):
            replayed.left_out["right without a right query"] += 1
        else:
            kept += 1
            replayed.conversations.append(replace(conversation, masked_turns=missteps(episode)))
    return kept > 0


def _correct(
    environment: SQLEnvironment, question: Question, players: Sequence[CorrectingPlayer], replayed: Replayed
) -> bool:
    """Play the ways out of mistakes; tell whether one is learned."""
    before = replayed.corrected
    for player in players:
        episode, conversation = play(environment, question, player)
        if episode.correct:
            replayed.corrected += 1
            replayed.left_out["not right"] -= 1
            replayed.conversations.append(replace(conversation, masked_turns=player.masked_turns))
    return replayed.corrected > before


def choose(
    records: Iterable[EpisodeRecord],
    datasets: Sequence[Dataset],
    left_out: Counter[str],
    kept: QuestionFilter = ALL_QUESTIONS,
) -> list[Mapping[Question, Sequence[Actions]]]:
    """Return what was played right of each data set's training questions, best first; counts what is left out."""
    homes = {
        (question.question_id, question_text(question)): (number, question)
        for number, dataset in reversed(list(enumerate(datasets)))
        for question in dataset.select(Split.TRAIN)
    }
    found: list[dict[Question, dict[tuple[str, ...], tuple[int, int, Actions]]]] = [defaultdict(dict) for _ in datasets]
    for record in records:
        home = homes.get((record.question_id, record.question))
        if home is None:
            left_out["of no training question"] += 1
        elif not kept.admits(home[1]):
            left_out["of another difficulty or fold"] += 1
        elif record.outcome != Outcome.CORRECT:
            left_out["not right"] += 1
        elif record.given_steps:
            left_out["guided"] += 1
        else:
            number, question = home
            actions = actions_of(record.turns)
            same = normalized(actions)
            ways = found[number][question]
            if same in ways:
                left_out["played the same way before"] += 1
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


def _asked(episode: Episode, question: Question, judge: QueryJudge) -> bool:
    """Whether a query of the episode answers the question, on variants of the database too."""
    queries = {turn.argument for turn in episode.turns if turn.action_type == ActionType.QUERY and not turn.error}
    return any(judge.judge(question, query).correct for query in queries)


Actions = tuple[SQLAction, ...]


def actions_of(turns: Iterable[Mapping[str, Any]]) -> Actions:
    """The actions of a record's turns."""
    return tuple(SQLAction(action_type=turn["action_type"], argument=turn["argument"]) for turn in turns)


def normalized(actions: Actions) -> tuple[str, ...]:
    """What two ways have in common that are the same play."""
    return tuple(normalize_action(action.action_type, action.argument) for action in actions)


class CorrectingPlayer:
    """Takes a policy's actions, and then the oracle's, but for the tables that were described."""

    def __init__(self, question: Question, actions: Actions, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._actions = actions
        self._left: Iterator[SQLAction] = iter(actions)
        self._oracle = OraclePlayer(question, answer_mode)

    @property
    def masked_turns(self) -> frozenset[int]:
        """The numbers of the policy's own turns."""
        return frozenset(range(len(self._actions)))

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next action."""
        if (own := next(self._left, None)) is not None:
            return own
        described = {a.argument.strip().casefold() for a in self._actions if a.action_type == ActionType.DESCRIBE}
        action = self._oracle.act(observation)
        while action.action_type == ActionType.DESCRIBE and action.argument.casefold() in described:
            action = self._oracle.act(observation)
        return action


def first_mistakes(records: Iterable[EpisodeRecord]) -> dict[tuple[str, str], list[Actions]]:
    """Return the different ways to a first action that failed, in episodes that were not right.

    By the id and the text of the question.
    """
    found: dict[tuple[str, str], dict[tuple[str, ...], Actions]] = {}
    for record in records:
        failed = next((number for number, turn in enumerate(record.turns) if turn["error"]), None)
        if failed is None or record.outcome in (Outcome.CORRECT, Outcome.FAILED):
            continue
        actions = actions_of(record.turns[: failed + 1])
        found.setdefault((record.question_id, record.question), {}).setdefault(normalized(actions), actions)
    return {question: list(ways.values()) for question, ways in found.items()}
