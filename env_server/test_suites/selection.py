"""Which candidates to keep: as few as possible that kill as many mutants as possible. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

KILLS_WANTED = 2
"""Variants that should tell a mutant from the gold: one is enough for it, two are likelier to meet its like."""


def choose(kills: Sequence[Collection[str]], least: int, most: int) -> list[int]:
    """Return the indexes of at least `least` candidates, or of all where there are fewer, in ascending order.

    `kills` holds what each candidate kills. Greedy cover: the next candidate is the one that adds most, a mutant's
    first kill counting more than any number of second ones, the earlier of equals. One that adds nothing is taken
    only to reach `least`, one that adds no first kill only up to `most`.
    """
    times: Counter[str] = Counter()
    chosen: list[int] = []
    waiting = list(range(len(kills)))
    while waiting:
        gains = {i: _gain(kills[i], times) for i in waiting}
        best = max(waiting, key=lambda i: gains[i])
        first, second = gains[best]
        if not first and (len(chosen) >= most or (not second and len(chosen) >= least)):
            break
        waiting.remove(best)
        chosen.append(best)
        times.update(kills[best])
    return sorted(chosen)


def _gain(killed: Collection[str], times: Counter[str]) -> tuple[int, int]:
    first = sum(times[mutant] == 0 for mutant in killed)
    return first, sum(0 < times[mutant] < KILLS_WANTED for mutant in killed)
