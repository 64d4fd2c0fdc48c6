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

from trainer.rollout.episodes import Episode
from trainer.rollout.rewards import Reward

DISCOUNT = 0.95
"""GiGPO's."""


def turn_rewards(episode: Episode, rewards: Sequence[Reward], weights: Sequence[float]) -> list[float]:
    """Return the weighted reward of each turn; they add up to the weighted sum of the episode's rewards."""
    totals = [0.0] * len(episode.turns)
    for reward, weight in zip(rewards, weights, strict=True):
        for turn, value in enumerate(reward.of_turns(episode) or ()):
            totals[turn] += weight * value
    return totals


def turn_advantages(
    group: Sequence[Episode], rewards: Sequence[Reward], weights: Sequence[float], discount: float = DISCOUNT
) -> list[list[float]]:
    """Return the advantage of each turn of each episode of a group, unscaled; a failed episode has none."""
    returns: list[list[float]] = []
    by_state: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for episode in group:
        to_go: list[float] = []
        if not episode.failed:
            for reward in reversed(turn_rewards(episode, rewards, weights)):
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
