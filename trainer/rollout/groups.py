"""Groups with signal: those all right or all wrong are replaced, and of more episodes the most different are taken.

GRPO compares the episodes of a group with each other. Where all are right, or all wrong, they say nothing about how to
answer (`has_signal`), and their rollouts are wasted. Invariants:

1. A batch has `count` groups. Each one without signal is replaced by the next question's, until `extra` further groups
   have been drawn; then it stays.
2. Judged on the whole group: nothing is decided before its last episode has ended, and every group that was drawn is
   waited for. So which groups are kept does not depend on how fast they were played, and slow episodes are kept as
   often as fast ones.
3. Every episode is in what is returned, once: in the groups that are kept, or in those that were replaced. Of one
   question at most one group is kept.
4. Groups are in the order in which they were drawn. The first `count` that were drawn are a sample of the questions
   that no result has chosen, so what is estimated from them is not biased by the replacement.
5. A group that is all wrong is played once more with steps given, where there are some to give (`--guided_starts`),
   before another question's takes its place. The guided group is kept where it has signal, and nowhere else.

Where more episodes of a question are played than are trained on, `most_spread` says which: those whose rewards have the
largest variance (max-variance down-sampling: Xu et al., 2025, "Not All Rollouts are Useful", arXiv:2504.13818).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import pvariance

from trainer.rollout.client import EpisodeRequest, RolloutClient
from trainer.rollout.episodes import Episode, all_wrong, has_signal
from trainer.rollout.failures import Failures, rollout_error_alone


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one question. `number`: the zero-based draw index of the group.

    `guided`: it was played in addition, with steps given, since the group of the same number was all wrong.
    """

    number: int
    episodes: tuple[Episode, ...]
    has_signal: bool
    guided: bool = False


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
    guide: Callable[[int], Sequence[EpisodeRequest]] = lambda _: (),
) -> PlayedGroups:
    """Play `count` groups, and up to `extra` more in the place of those without signal.

    `draw(number)` gives the requests of the group with that number; all have the same length. `guide(number)` gives
    those of the guided group of its question; none where there is nothing to give. Raises RolloutError.
    """
    groups: list[Group] = []
    drawn = count

    async def play_one(number: int, requests: Sequence[EpisodeRequest], *, guided: bool = False) -> Group:
        place = number + (count + extra) * guided
        episodes = await client.play(requests, failures=failures, first=place * len(requests))
        group = Group(number, tuple(episodes), has_signal(episodes), guided)
        groups.append(group)
        return group

    async def play(number: int) -> None:
        nonlocal drawn
        group = await play_one(number, draw(number))
        if all_wrong(group.episodes) and (requests := guide(number)):
            group = await play_one(number, requests, guided=True)
        if not group.has_signal and drawn < count + extra:
            number, drawn = drawn, drawn + 1
            await play(number)

    with rollout_error_alone():
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(play(number))
    return choose_groups(groups, count)


def choose_groups(groups: Sequence[Group], count: int) -> PlayedGroups:
    """Return those with signal, of which there are at most `count`, and the first drawn of the others to fill up."""
    used = {group.number for group in groups if group.has_signal}
    ranked = sorted(groups, key=lambda g: (not g.has_signal, g.number in used, g.guided, g.number))
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
