"""Groups with signal: those all right or all wrong are replaced, and of more episodes the most different are taken.

GRPO compares the episodes of a group with each other. Where all are right, or all wrong, they say nothing about how to
answer (`has_signal`), and their tokens are paid for in vain. Invariants:

1. A batch has `count` groups. Each one without signal is replaced by the next question's, until `extra` further groups
   have been drawn; then it stays.
2. Judged on the whole group: nothing is decided before its last episode has ended, and every group that was drawn is
   waited for. So which groups are kept does not depend on how fast they were played, and slow episodes are kept as
   often as fast ones.
3. Every episode is in what is returned, once: in the groups that are kept, or in those that were replaced.
4. Groups are in the order in which they were drawn. The first `count` that were drawn are a sample of the questions
   that no result has chosen, so what is estimated from them is not biased by the replacement.

Where more episodes of a question are played than are trained on, `most_spread` says which: those whose rewards have the
largest variance (max-variance down-sampling: Xu et al., 2025, "Not All Rollouts are Useful", arXiv:2504.13818).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import pvariance

from trainer.rollout.client import EpisodeRequest, RolloutClient
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.failures import Failures, rollout_error_alone


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one question. `number`: the group was the so manieth to be drawn, from 0."""

    number: int
    episodes: tuple[Episode, ...]
    has_signal: bool


@dataclass(frozen=True, slots=True)
class PlayedGroups:
    """What was played for a batch: the groups it consists of, and those that were replaced."""

    kept: tuple[Group, ...]
    replaced: tuple[Group, ...]


async def play_groups(
    client: RolloutClient,
    draw: Callable[[int], Sequence[EpisodeRequest]],
    count: int,
    extra: int,
    failures: Failures,
) -> PlayedGroups:
    """Play `count` groups, and up to `extra` more in the place of those without signal.

    `draw(number)` gives the requests of the group with that number; all have the same length. Raises RolloutError.
    """
    groups: list[Group] = []
    drawn = count

    async def play(number: int) -> None:
        nonlocal drawn
        requests = draw(number)
        episodes = await client.play(requests, failures=failures, first=number * len(requests))
        groups.append(Group(number, tuple(episodes), has_signal(each.outcome for each in episodes)))
        if not groups[-1].has_signal and drawn < count + extra:
            number, drawn = drawn, drawn + 1
            await play(number)

    with rollout_error_alone():
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(play(number))
    return choose_groups(groups, count)


def has_signal(outcomes: Iterable[Outcome]) -> bool:
    """Return whether a group has right and wrong episodes, which GRPO is to learn from; failed ones are neither.

    Shaped rewards differ in nearly every group, and so say nothing about that: see DAPO's dynamic sampling (Yu et al.
    2025, arXiv:2503.14476), which filters by accuracy.
    """
    return len({outcome is Outcome.CORRECT for outcome in outcomes if outcome is not Outcome.FAILED}) > 1


def choose_groups(groups: Sequence[Group], count: int) -> PlayedGroups:
    """Return those with signal, of which there are at most `count`, and the first drawn of the others to fill up."""
    ranked = sorted(groups, key=lambda group: (not group.has_signal, group.number))
    kept, replaced = ranked[:count], ranked[count:]
    return PlayedGroups(*(tuple(sorted(part, key=lambda group: group.number)) for part in (kept, replaced)))


def most_spread(values: Sequence[float], count: int) -> list[int]:
    """Return the places of the `count` values with the largest variance, in order; of equal values, the first ones.

    They are some of the least and some of the greatest, for any value between two others can be exchanged for one of
    them without loss.
    """
    if not 0 < count < len(values):
        return list(range(min(count, len(values))))
    rising = sorted(range(len(values)), key=lambda place: (values[place], place))
    ends = [(*rising[:least], *rising[len(values) - count + least :]) for least in range(count, -1, -1)]
    return sorted(max(ends, key=lambda places: pvariance([values[place] for place in places])))
