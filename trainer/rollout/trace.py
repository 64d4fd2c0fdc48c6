"""`--trace FILE`: what happened when, in Chrome's trace event format, which https://ui.perfetto.dev opens.

Promises:

1. An episode in flight is a track: the episode is a slice on it, its turns are slices within that, and what each turn
   waited for within these. When it ends, another episode may take its track over; slices of a track nest, and otherwise
   do not overlap. There are as many tracks as there were ever episodes in flight at once.
2. Training steps, the trainer's waits for episodes and for weights, each have a track of their own.
3. An event is on its way to the disk when it has been written, and a file that a killed process leaves opens as well:
   the format lets its array end anywhere. `close` makes it whole. A run that goes on goes on in its file.
4. Several ranks write a file each, which can be put together: each under a process number of its own, and by the
   clock on the wall. Nothing but the end of each track is kept in memory.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.config import ConfigError
from trainer.rollout.episodes import Episode
from trainer.rollout.timings import EpisodeTiming, Span, Wait

Event = dict[str, Any]

FIRST_EPISODE = 10
"""The number of the first episode's track."""
_TAIL = 1 << 16
"""Bytes that hold the last line of a file, whatever that is."""


class Track(IntEnum):
    """The tracks that are not an episode's; the number is their place."""

    STEPS = 1
    ROLLOUTS = 2
    PUSHES = 3


TITLES = {Track.STEPS: "training steps", Track.ROLLOUTS: "waiting for episodes", Track.PUSHES: "waiting for weights"}


def rank_path(path: Path, rank: int) -> Path:
    """The file of a rank: the main one's is what was asked for, others name theirs."""
    return path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")


class Trace:
    """The trace of one process; a context manager. Replaces the file, unless the run `goes_on`. Raises ConfigError."""

    def __init__(self, path: Path, rank: int = 0, *, goes_on: bool = False) -> None:
        self._rank = rank
        self._offset = time.time() - time.monotonic()
        self._ends: list[int] = []
        """Of the last episode on each track."""
        self._named: set[int] = set()
        self._lock = threading.Lock()
        path = rank_path(path, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._separator = _cut_open(path) if goes_on and path.is_file() else "[\n"
            self._file = path.open("a" if goes_on else "w", encoding="utf-8", errors="replace", newline="\n")
        except OSError as error:
            raise ConfigError(f"--trace {path}: {error.strerror}") from error
        self._write([self._meta("process_name", 0, name=f"rank {rank}")])

    def write_episode(self, episode: Episode) -> None:
        """Write an episode that has ended; one that was not timed is left out."""
        if episode.timing is None:
            return
        timing = episode.timing
        start, end = self._us(timing.started), self._us(timing.ended)
        with self._lock:
            track = self._free_track(start, end)
            about = {
                "episode": episode.episode_id,
                "outcome": episode.outcome.value,
                "turns": len(episode.turns),
                "tokens": sum(episode.row.env_mask),
                "reward": round(episode.reward, 4),
                "queued_s": round(timing.started - timing.asked, 3),
            }
            if episode.own_turns:
                about["oldest_weights"], about["newest_weights"] = episode.policy_versions
            if episode.failure:
                about["failure"] = episode.failure[:300]
            self._write(
                [
                    *self._named_track(track, f"episode {track - FIRST_EPISODE + 1}"),
                    self._slice(track, episode.question_id, timing.started, timing.ended, about),
                    *self._inside(track, timing),
                ]
            )

    def write_slice(self, track: Track, name: str, start: float, end: float, **about: object) -> None:
        """Write what took its time on one of the named tracks; times are of the monotonic clock."""
        with self._lock:
            self._write([*self._named_track(track, TITLES[track]), self._slice(track, name, start, end, about)])

    def close(self) -> None:
        """Make the file whole; closing twice is allowed."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _inside(self, track: int, timing: EpisodeTiming) -> Iterator[Event]:
        """What an episode waited for in its place in flight; a turn holds its own."""
        inside = (span for span in timing.spans if span.wait is not Wait.QUEUE)
        for turn, group in groupby(inside, key=lambda span: span.turn):
            spans: list[Span] = list(group)
            if turn is not None:
                yield self._slice(track, f"turn {turn + 1}", spans[0].start, spans[-1].end)
            for span in spans:
                yield self._slice(track, span.wait, span.start, span.end)

    def _free_track(self, start: int, end: int) -> int:
        """The track whose last episode ended last before this one started.

        Episodes come in the order of their ends, and with this choice they need no more tracks than they must.
        """
        free = [index for index, ended in enumerate(self._ends) if ended <= start]
        if free:
            index = max(free, key=self._ends.__getitem__)
            self._ends[index] = end
        else:
            index = len(self._ends)
            self._ends.append(end)
        return FIRST_EPISODE + index

    def _named_track(self, track: int, name: str) -> list[Event]:
        if track in self._named:
            return []
        self._named.add(track)
        return [
            self._meta("thread_name", track, name=name),
            self._meta("thread_sort_index", track, sort_index=int(track)),
        ]

    def _slice(
        self, track: int, name: str, start: float, end: float, about: Mapping[str, object] | None = None
    ) -> Event:
        # Both ends are rounded alike, so that what nests in seconds nests in microseconds.
        begins, ends = self._us(start), self._us(end)
        event: Event = {"ph": "X", "name": name, "pid": self._rank, "tid": int(track), "ts": begins}
        event["dur"] = ends - begins
        return event | {"args": about} if about else event

    def _meta(self, what: str, track: int, **about: object) -> Event:
        return {"ph": "M", "name": what, "pid": self._rank, "tid": int(track), "args": about}

    def _us(self, moment: float) -> int:
        """Microseconds by the clock on the wall."""
        return round((moment + self._offset) * 1e6)

    def _write(self, events: list[Event]) -> None:
        text = ",\n".join(json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in events)
        self._file.write(self._separator + text)
        self._file.flush()
        self._separator = ",\n"


def _cut_open(path: Path) -> str:
    """Take the end of the array, or half an event, off a file; returns what has to come before the next event."""
    with path.open("rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL)
        file.seek(start)
        kept = file.read().rstrip(b",\n]")
        before, _, last = kept.rpartition(b"\n")
        try:
            json.loads(last)
        except ValueError:
            kept = before.rstrip(b",\n")
        is_empty = start + len(kept) <= len("[")
        file.truncate(0 if is_empty else start + len(kept))
    return "[\n" if is_empty else ",\n"
