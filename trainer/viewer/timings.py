"""How long each turn of an episode took, from the file of a run's `--trace`.

Episodes are logged without times, so that the same play is the same log; who wants times asks for a trace. The events
of an episode stand together in it, as `trainer.rollout.trace` writes them.
"""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.rollout.timings import PARTS, Part, Wait

_TURN = re.compile(r"turn (\d+)")


@dataclass(frozen=True, slots=True)
class TurnTime:
    """Seconds that a turn took, and what it waited for in them."""

    seconds: float
    parts: dict[str, float]


def turn_times(path: Path, episode_id: str) -> list[TurnTime]:
    """Return the times of an episode's turns; none where it is not in the trace. Raises OSError."""
    needle = f'"args":{{"episode":{json.dumps(episode_id, ensure_ascii=False)},'.encode()
    with path.open("rb") as file:
        if not path.stat().st_size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            # A run that goes on may have played it twice; the last time is the one that was trained on.
            place = text.rfind(needle)
            if place < 0:
                return []
            text.seek(text.rfind(b"\n", 0, place) + 1)
            return _read_turns(text)


def _read_turns(text: mmap.mmap) -> list[TurnTime]:
    """Read on from the line of an episode to the last event that is part of it."""
    whole = _event(text.readline())
    turns: list[TurnTime] = []
    while whole and (event := _event(text.readline())) and event.get("tid") == whole["tid"] and "args" not in event:
        if _TURN.fullmatch(event["name"]):
            turns.append(TurnTime(event["dur"] / 1e6, {}))
        elif turns and event["name"] in set(Wait):
            part: Part = PARTS[Wait(event["name"])]
            parts = turns[-1].parts
            parts[part] = parts.get(part, 0.0) + event["dur"] / 1e6
    return turns


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line.rstrip().removesuffix(b","))
    except ValueError:  # the end, or half an event of a run that still writes
        return None
    return event if isinstance(event, dict) else None
