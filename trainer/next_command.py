"""The command lines that a run which was stopped prints for its user: how to go on, or to start again.

Promises:

1. A line is what was given, quoted for a shell, so that it can be pasted where the run was started.
2. It names no token: a terminal is recorded, and so is a cluster's log.
3. `--resume_from_checkpoint true` is in a line that goes on once, whatever was given.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESUME = "--resume_from_checkpoint"
SECRETS = ("--env_token", "--hub_token")


@dataclass(frozen=True, slots=True)
class NextCommand:
    """What a run says of how to go on from a checkpoint, and where there is none."""

    go_on: str
    again: str

    @classmethod
    def of(cls, command: str, argv: Sequence[str]) -> NextCommand:
        """The lines of a command that was given these words."""
        words = _without_tokens(argv)
        return cls(_line(command, [*_without(words, RESUME), RESUME, "true"]), _line(command, words))


def _line(command: str, words: Sequence[str]) -> str:
    program, name = command.split()
    if Path(sys.argv[0]).parts[-2:] == ("sqlenv", "__main__.py"):
        program = f"python -m {program}"
    launched = "(under the same launcher) " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return f"{launched}{program} {name} {shlex.join(words)}".rstrip()


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its value, in either form."""
    kept = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_flag = name.replace("-", "_") == flag.replace("-", "_")
        if is_flag:
            skip = not equals
        elif skip and not word.startswith("--"):
            skip = False
        else:
            skip = False
            kept.append(word)
    return kept


def _without_tokens(words: Sequence[str]) -> list[str]:
    shown = list(words)
    for secret in SECRETS:
        if (kept := _without(shown, secret)) != shown:
            shown = [*kept, secret, "TOKEN"]
    return shown
