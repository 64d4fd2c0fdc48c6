"""The command lines that a command prints for its user: how to resume after a stop, and what to do next.

Guarantees:

1. A line is quoted for a shell, so that it can be pasted where the command was started. Where `sqlenv` is not on the
   PATH, it is named as it was called.
2. It names no token: a terminal is recorded, and so is a cluster's log.
3. `--resume_from_checkpoint true` is in a line that resumes once, whatever was given.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

RESUME = "resume_from_checkpoint"
SECRETS = {"env_token", "hub_token"}


def split_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of a command line flag by flag, those before the first one as "".

    Of a flag that is given twice, the last counts.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name = word.partition("=")[0][2:].replace("-", "_")
            name = "env_server" if name == "env" else name.removeprefix("no_")
            found.pop(name, None)
        found.setdefault(name, []).append(word)
    return found


@dataclass(frozen=True, slots=True)
class NextCommand:
    """How to resume a run from a checkpoint, and how to start it again where there is none."""

    resume_command: str
    restart_command: str

    @classmethod
    def of(cls, command: str, argv: Sequence[str]) -> NextCommand:
        """The lines of a command, such as `sqlenv train`, that was given these words."""
        flags = split_flags(argv)
        for secret in SECRETS & flags.keys():
            flags[secret] = [f"--{secret}", "TOKEN"]
        others = [word for name, words in flags.items() if name != RESUME for word in words]
        return cls(_line(command, [*others, f"--{RESUME}", "true"]), _line(command, [*chain(*flags.values())]))


def what_next(*commands: Sequence[str]) -> str:
    """Return `next` and the commands of `sqlenv`, a line each, to be printed when something is finished."""
    lines = [f"{_program('sqlenv')} {shlex.join(words)}" for words in commands]
    return "\n".join(f"{'' if number else 'next':8}{line}" for number, line in enumerate(lines))


def _program(name: str) -> str:
    called = Path(sys.argv[0])
    if called.parts[-2:] == (name, "__main__.py"):
        return f"python -m {name}"
    return str(called) if called.name == name and shutil.which(name) is None else name


def _line(command: str, words: Sequence[str]) -> str:
    program, name = command.split()
    launched = "(under the same launcher) " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return f"{launched}{_program(program)} {name} {shlex.join(words)}".rstrip()
