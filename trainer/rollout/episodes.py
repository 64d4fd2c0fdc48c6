"""What one played episode is: the tokens that are trained on, the turns that a person reads, the outcome.

Plain data. Rollouts produce it; rewards, metrics, evaluation and the report read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from env_server.dataset import Question
from env_server.settings import RewardSettings
from env_server.types import RewardComponents, SQLAction, SQLObservation, Verdict
from trainer.rollout.timing import EpisodeTiming


class Outcome(StrEnum):
    """How an episode ended. The first four are the environment's verdicts, the others reasons of our own."""

    CORRECT = "correct"
    WRONG = "wrong"
    OUT_OF_BUDGET = "out_of_budget"
    UNJUDGED = "unjudged"
    """It answered a question that has no gold answer."""
    OUT_OF_TOKENS = "out_of_tokens"
    """The row's token budget was used up before an ANSWER; counts as unsuccessful."""
    FAILED = "failed"
    """The infrastructure failed (see `failure`); the row is masked and carries no reward."""


def outcome_of(last: SQLObservation) -> Outcome:
    """How an episode ended, by its last observation."""
    return Outcome(Verdict(last.metadata["verdict"]).value) if last.done else Outcome.OUT_OF_TOKENS


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and what came back."""

    text: str
    """The model's words, decoded, without the end-of-turn token."""
    action_type: str
    argument: str
    parseable: bool
    """False when the text was taken as a raw QUERY because nothing else fitted."""
    result: str
    error: str
    reward: RewardComponents
    policy_version: int = 0
    """Updates that the weights had had which the turn was sampled under: the oldest, where it was more than one."""
    tokens: int | None = None
    """Tokens that the policy generated; None where they were not counted."""


def turn_of(
    text: str,
    action: SQLAction,
    observation: SQLObservation,
    parseable: bool = True,
    policy_version: int = 0,
    tokens: int | None = None,
) -> Turn:
    """The record of one action and the observation it led to."""
    return Turn(
        text=text,
        action_type=action.action_type,
        argument=action.argument,
        parseable=parseable,
        result=observation.result,
        error=observation.error,
        reward=RewardComponents.model_validate(observation.metadata["reward_components"]),
        policy_version=policy_version,
        tokens=tokens,
    )


@dataclass(frozen=True, slots=True)
class TokenRow:
    """What GRPO trains on. The four completion lists have one length.

    `env_mask` is 1 for a token that the policy generated under exactly the prefix that the row shows, 0 for
    the environment's tokens and for context. `logprobs` is 0.0 where the mask is 0. `turn_ids` is the index of the
    episode's turn that a token belongs to, the environment's reply with the turn that it answers.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    turn_ids: list[int]


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode."""

    episode_id: str
    question_id: str
    db_id: str
    question: str
    hardness: str
    family: str
    outcome: Outcome
    turns: tuple[Turn, ...] = field(repr=False)
    row: TokenRow = field(repr=False)
    truncated_turns: int = 0
    """Oldest turns that were dropped from the row because the context was full."""
    given_steps: int = 0
    """First turns that were taken in the policy's place (`--guided_starts`); they are context in the row."""
    failure: str = ""
    """For FAILED: the error's class and text."""
    prompt_tokens: int | None = None
    """Tokens that the engine was given, the prompts of all turns together; None where no engine played."""
    gold_sql: str = field(default="", repr=False)
    """For rewards; it is in no record. "" where the question has none."""
    reward_settings: RewardSettings = field(default=RewardSettings(), repr=False)
    """What the environment rewarded its turns by."""
    rewards: dict[str, Sequence[float] | None] = field(init=False, default_factory=dict, compare=False, repr=False)
    """What each reward function gave for its turns, once it was asked (`trainer.rollout.rewards`)."""
    timing: EpisodeTiming | None = field(default=None, compare=False, repr=False)
    """Where a policy played; it says nothing about what was played."""

    @property
    def policy_versions(self) -> tuple[int, int]:
        """The oldest and the newest version of the weights that its turns were sampled under. The policy took one."""
        versions = [turn.policy_version for turn in self.own_turns]
        return min(versions), max(versions)

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that the policy took."""
        return self.turns[self.given_steps :]

    @property
    def correct(self) -> bool:
        """True when the ANSWER was judged correct."""
        return self.outcome is Outcome.CORRECT

    @property
    def failed(self) -> bool:
        """True when the infrastructure failed."""
        return self.outcome is Outcome.FAILED

    @property
    def reward(self) -> float:
        """Total environment reward of the episode."""
        return sum(turn.reward.total for turn in self.turns)


def episode_without_tokens(
    question: Question, episode_id: str, observation: SQLObservation, turns: Sequence[Turn]
) -> Episode:
    """Return an episode that no engine of ours played, by its last observation: its token row is empty."""
    return Episode(
        episode_id=episode_id,
        question_id=question.question_id,
        db_id=question.db_id,
        question=observation.question,
        hardness=question.hardness.value,
        family=question.family,
        outcome=outcome_of(observation),
        turns=tuple(turns),
        row=TokenRow([], [], [], [], []),
        gold_sql=question.gold_sql,
    )


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """An episode as it is written to `episodes.jsonl`: everything but the tokens."""

    episode_id: str
    question_id: str
    db_id: str
    question: str
    hardness: str
    family: str
    outcome: str
    reward: float
    steps: int
    parse_rate: float
    tokens: int
    """Tokens that the policy generated, of those that are trained on."""
    failure: str
    prompt_tokens: int | None = None
    """Tokens that the policy was given to read, each turn's whole prompt counted; None where that is not known."""
    given_steps: int = 0
    """First turns that were given and not the policy's; above 0, the episode says nothing of unguided play."""
    truncated_turns: int = 0
    """Oldest turns that were dropped from what was trained on because the context was full."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """What each reward function gave, before its weight; none for an episode that failed or was not trained on."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """`Turn` as dictionaries."""

    @property
    def correct(self) -> bool:
        """True when the ANSWER was judged correct."""
        return self.outcome == Outcome.CORRECT

    @property
    def failed(self) -> bool:
        """True when the infrastructure failed."""
        return self.outcome == Outcome.FAILED

    @property
    def own_turns(self) -> list[dict[str, Any]]:
        """The turns that the policy took."""
        return self.turns[self.given_steps :]

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy generated, those that are no longer in what was trained on among them."""
        return sum(turn["tokens"] or 0 for turn in self.turns)


def record(episode: Episode, *, with_versions: bool = False) -> EpisodeRecord:
    """Turn an episode into its log record; `with_versions`: of each turn, the weights that it was sampled under.

    An evaluation's are those of one policy: the same play is the same record in every evaluation.
    """
    turns = episode.turns
    return EpisodeRecord(
        episode_id=episode.episode_id,
        question_id=episode.question_id,
        db_id=episode.db_id,
        question=episode.question,
        hardness=episode.hardness,
        family=episode.family,
        outcome=episode.outcome.value,
        reward=round(episode.reward, 6),
        steps=len(turns),
        parse_rate=sum(t.parseable for t in turns) / len(turns) if turns else 0.0,
        tokens=sum(episode.row.env_mask),
        failure=episode.failure,
        prompt_tokens=episode.prompt_tokens,
        given_steps=episode.given_steps,
        truncated_turns=episode.truncated_turns,
        rewards={name: None if r is None else round(math.fsum(r), 9) for name, r in episode.rewards.items()},
        turns=[_logged(turn, with_versions) for turn in turns],
    )


def has_signal(group: Iterable[Episode | EpisodeRecord]) -> bool:
    """Return whether a group has right and wrong episodes, which GRPO is to learn from; failed ones are neither.

    The one definition of signal. Shaped rewards differ in nearly every group, and so say nothing about that: see DAPO's
    dynamic sampling (Yu et al. 2025, arXiv:2503.14476), which filters by accuracy.
    """
    return len(_verdicts(group)) > 1


def all_wrong(group: Iterable[Episode | EpisodeRecord]) -> bool:
    """Return whether a group has episodes that did not fail, and none of them is right."""
    return _verdicts(group) == {False}


def _verdicts(group: Iterable[Episode | EpisodeRecord]) -> set[bool]:
    return {each.correct for each in group if not each.failed}


def _logged(turn: Turn, with_versions: bool) -> dict[str, Any]:
    logged = asdict(turn) | {"reward": turn.reward.model_dump()}
    if not with_versions:
        del logged["policy_version"]
    return logged
