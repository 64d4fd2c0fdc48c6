"""The command lines that a command prints for its user: how to go on after a stop, and what to do next.

Promises:

1. A line is quoted for a shell, so that it can be pasted where the command was started. Where `sqlenv` is not on the
   PATH, it is named as it was called.
2. It names no token: a terminal is recorded, and so is a cluster's log.
3. `--resume_from_checkpoint true` is in a line that goes on once, whatever was given.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESUME = "--resume_from_checkpoint"
SECRETS = ("--env_token", "--hub_token")


@dataclass(frozen=True, slots=True)
class NextCommand:
    """What a run says of how to go on from a checkpoint, and where there is none."""

    resume_command: str
    restart_command: str

    @classmethod
    def of(cls, command: str, argv: Sequence[str]) -> NextCommand:
        """The lines of a command that was given these words."""
        words = _without_tokens(argv)
        return cls(_line(command, [*_without(words, RESUME), RESUME, "true"]), _line(command, words))


def what_next(*commands: Sequence[str]) -> str:
    """Return `next` and the commands of `sqlenv`, a line each, to be printed when something is finished."""
    return "\n".join(
        f"{'' if place else 'next':8}{_program('sqlenv')} {shlex.join(words)}" for place, words in enumerate(commands)
    )


def _program(name: str) -> str:
    called = Path(sys.argv[0])
    if called.parts[-2:] == (name, "__main__.py"):
        return f"python -m {name}"
    return str(called) if called.name == name and shutil.which(name) is None else name


def _line(command: str, words: Sequence[str]) -> str:
    program, name = command.split()
    program = _program(program)
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
