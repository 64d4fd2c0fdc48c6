"""Advantages of single turns: what an episode did better than others of its group from the same state on. Pure.

GRPO gives all tokens of an episode one advantage. The environment is deterministic, so two episodes of one question
whose transcripts are equal up to a turn stand in the same state, and what their turns there led to can be compared.
After GiGPO (Feng et al., 2025, "Group-in-Group Policy Optimization", arXiv:2505.10978), with exact states in place of
hashed observations. For turn t of episode i, with rewards r and the discount g,

    q(i, t) = r(i, t) + g q(i, t + 1)
    a(i, t) = q(i, t) - mean of q over all turns of the group in the state of (i, t)

which is 0 where no other episode of the group stood in that state. The rewards of an episode's turns add up to its
reward in GRPO, so that with g = 1 the first turn's a is the episode's own, unscaled advantage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from env_server.settings import RewardSettings
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.rewards import all_weights, structure_rises

DISCOUNT = 0.95
"""GiGPO's."""


def turn_rewards(episode: Episode, weights: Sequence[float], settings: RewardSettings) -> list[float]:
    """Return the weighted reward of each turn; they add up to the weighted sum of the episode's reward functions."""
    correctness, progress, operational, format_share, structure = all_weights(weights)
    rises = structure_rises(episode) or [0.0] * len(episode.turns)
    last = len(episode.turns) - 1
    return [
        correctness * (episode.correct and number == last)
        + progress * turn.reward.progress / settings.progress_scale
        + operational * turn.reward.operational
        + format_share * turn.parseable / len(episode.turns)
        + structure * rise
        for number, (turn, rise) in enumerate(zip(episode.turns, rises, strict=True))
    ]


def turn_advantages(
    group: Sequence[Episode], weights: Sequence[float], settings: RewardSettings, discount: float = DISCOUNT
) -> list[list[float]]:
    """Return the advantage of each turn of each episode of a group, unscaled; a failed episode has none.

    `weights` are in the order of ALL_REWARDS.
    """
    returns: list[list[float]] = []
    by_state: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for episode in group:
        to_go: list[float] = []
        if episode.outcome is not Outcome.FAILED:
            for reward in reversed(turn_rewards(episode, weights, settings)):
                to_go.append(reward + discount * (to_go[-1] if to_go else 0.0))
            to_go.reverse()
        returns.append(to_go)
        for state, value in zip(_states(episode), to_go, strict=False):
            by_state[state].append(value)
    baselines = {state: fmean(values) for state, values in by_state.items()}
    return [
        [value - baselines[state] for state, value in zip(_states(episode), to_go, strict=False)]
        for episode, to_go in zip(group, returns, strict=True)
    ]


def _states(episode: Episode) -> list[tuple[str, ...]]:
    """Return what the policy had written before each turn, which decides all that it was shown."""
    texts = tuple(turn.text for turn in episode.turns)
    return [texts[:number] for number in range(len(texts))]
