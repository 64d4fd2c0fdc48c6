"""What a config with `stages:` asks for: which stage gets which keys and flags, and where each one writes.

    output_dir: runs/recipe                 # keys beside `stages` are shared
    model_name_or_path: trainer/tiny/base
    stages:
      - kind: warmup                        # `sqlenv warmup`
        max_episodes: 480
      - kind: grpo                          # `sqlenv train`
        name: easy                          # names the folder: runs/recipe/2-easy
        difficulty: easy
        max_steps: 40

Promises:

1. A shared key goes to the stages of every kind that honours it; where none does, to those that say why not. One that
   no stage knows is an error, and so is a key that a stage does not know.
2. A stage's own key wins over a shared one, and a flag of the command line over both; flags go where shared keys go.
3. The policy is named once, for the first stage; each other one goes on from the stage before.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

STAGES = "stages"
START = ("model_name_or_path", "model_revision")
"""Where training begins: the first stage's alone."""
OUTPUT, RESUME, DRY_RUN, DRY_RUN_GPU = "output_dir", "resume_from_checkpoint", "dry_run", "dry_run_gpu"
ON_COMMAND_LINE = (RESUME, DRY_RUN, DRY_RUN_GPU)
"""About the run as a whole, and about how it is started."""
SECRETS = ("env_token", "hub_token")
VARIABLES = "env"
"""TRL's key for environment variables."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ALIASES = {"env": "env_server"}


class StageError(ConfigError):
    """The stages cannot be run as they are written; the text names the stage and the key."""


class Kind(StrEnum):
    """What a stage does."""

    WARMUP = "warmup"
    GRPO = "grpo"

    @property
    def command(self) -> str:
        """The command that does it."""
        return "sqlenv warmup" if self is Kind.WARMUP else "sqlenv train"


@dataclass(frozen=True, slots=True)
class KnownFlags:
    """The flags of a kind: those that it honours, and those of which it says why it does not.

    `choices`: the values that it honours of some.
    """

    honoured: frozenset[str]
    noted: frozenset[str] = frozenset()
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.honoured or name in self.noted

    def honours(self, name: str, value: str) -> bool:
        """Whether it does what a flag of this value asks."""
        return name in self.honoured and value in self.choices.get(name, (value,))


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line with its values, word by word as it was written."""

    name: str
    words: tuple[str, ...]
    value: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the keys of its config, and the flags that win over them."""

    number: int
    name: str
    kind: Kind
    keys: Mapping[str, Any]
    flags: tuple[Flag, ...] = ()

    @property
    def folder(self) -> str:
        """The name of its folder in the run's."""
        return f"{self.number}-{self.name}"

    @property
    def settings(self) -> dict[str, str]:
        """What was asked of it, as text, to be compared with what a later start asks; secrets apart."""
        texts = {key: _text(value) for key, value in self.keys.items()} | {f.name: f.value for f in self.flags}
        return {key: text for key, text in texts.items() if key not in SECRETS}

    @property
    def words(self) -> list[str]:
        """Its flags, as a command line has them."""
        return [word for flag in self.flags for word in flag.words]


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a run, in their order."""

    output_dir: Path
    stages: tuple[Stage, ...]
    resume: bool = False
    dry_run: bool = False
    dry_run_gpu: tuple[str, ...] = ()
    """The flag's words, where it is given."""

    def folder(self, stage: Stage) -> Path:
        """Where a stage writes, and where its policy is afterwards."""
        return self.output_dir / stage.folder

    def title(self, stage: Stage) -> str:
        """Which stage of how many."""
        return f"stage {stage.number} of {len(self.stages)} ({stage.name})"


def read_plan(
    written: Mapping[str, Any], words: Sequence[str], known: Mapping[Kind, KnownFlags], output_dir: str
) -> Plan:
    """Read a config that has `stages` and the words of the command line beside it. Raises StageError.

    `output_dir` is where the run writes unless it is said.
    """
    entries = written[STAGES]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise StageError(f"{STAGES} must be a list of stages, each with its keys: - kind: {Kind.WARMUP}")
    kinds = [_kind(number, entry) for number, entry in enumerate(entries, 1)]
    names = [_name(number, entry, kind) for number, (entry, kind) in enumerate(zip(entries, kinds, strict=True), 1)]
    for number, (entry, name, kind) in enumerate(zip(entries, names, kinds, strict=True), 1):
        _check_own(f"stage {number} ({name})", number, entry, kind, known)
    shared = {key: value for key, value in written.items() if key not in (STAGES, OUTPUT, VARIABLES)}
    flags = split_flags(words, known)
    whole = {flag.name: flag for flag in flags if flag.name in (OUTPUT, *ON_COMMAND_LINE)}
    flags = [flag for flag in flags if flag.name not in whole]
    for key in shared:
        if key in ON_COMMAND_LINE:
            raise StageError(f"{key} is about the run as a whole: give --{key} on the command line")
    takers = {key: _takers(key, _text(value), kinds, known) for key, value in shared.items()}
    taking = {flag.name: _takers(flag.name, flag.value, kinds, known, dashes="--") for flag in flags}
    stages = []
    for index, (entry, name, kind) in enumerate(zip(entries, names, kinds, strict=True)):
        own = {key: value for key, value in entry.items() if key not in ("kind", "name")}
        keys = {key: value for key, value in shared.items() if index in takers[key]} | own
        if VARIABLES in written:
            keys[VARIABLES] = written[VARIABLES]
        stages.append(Stage(index + 1, name, kind, keys, tuple(f for f in flags if index in taking[f.name])))
    return Plan(
        Path(whole[OUTPUT].value if OUTPUT in whole else str(written.get(OUTPUT, output_dir))),
        tuple(stages),
        _switch(whole.get(RESUME), "stages find their own checkpoint; give true or leave it out"),
        _switch(whole.get(DRY_RUN), "give true or leave it out"),
        whole[DRY_RUN_GPU].words if DRY_RUN_GPU in whole else (),
    )


def split_flags(words: Sequence[str], known: Mapping[Kind, KnownFlags]) -> list[Flag]:
    """Take a command line apart, flag by flag; of one that is given twice, the last counts. Raises StageError."""
    found: dict[str, Flag] = {}
    starts = [place for place, word in enumerate(words) if re.match(r"--[A-Za-z]", word)]
    if words[: starts[0] if starts else None]:
        raise StageError(f"what is {words[0]!r} for? Flags begin with --")
    for start, end in pairwise([*starts, len(words)]):
        first, equals, value = words[start].partition("=")
        name = first[2:].replace("-", "_")
        name = _ALIASES.get(name, name)
        values = [value] if equals else list(words[start + 1 : end])
        if name.startswith("no_") and not any(name in flags for flags in known.values()):
            name, values = name[3:], ["false"]
        found.pop(name, None)
        found[name] = Flag(name, tuple(words[start:end]), " ".join(values) or "true")
    return list(found.values())


def _kind(number: int, entry: Mapping[str, Any]) -> Kind:
    try:
        return Kind(str(entry.get("kind")))
    except ValueError:
        kinds = " or ".join(kind.value for kind in Kind)
        raise StageError(f"stage {number}: kind must be {kinds}, not {entry.get('kind')!r}") from None


def _name(number: int, entry: Mapping[str, Any], kind: Kind) -> str:
    name = str(entry.get("name", kind.value))
    if not _NAME.fullmatch(name):
        raise StageError(f"stage {number}: name is letters, digits, _ and -, since it names a folder; not {name!r}")
    return name


def _check_own(title: str, number: int, entry: Mapping[str, Any], kind: Kind, known: Mapping[Kind, KnownFlags]) -> None:
    """Refuse the keys of a stage that cannot be its own. Raises StageError."""
    for key in entry:
        if key in ("kind", "name"):
            continue
        if key in (OUTPUT, VARIABLES, *ON_COMMAND_LINE):
            raise StageError(f"{title}: {key} is about the run as a whole, and not a stage's own")
        if key in START and number > 1:
            raise StageError(f"{title}: {key} is the first stage's; this one goes on from the stage before")
        if key not in known[kind]:
            raise StageError(f"{title}: {key} is no flag of {kind.command}")


def _takers(
    name: str, value: str, kinds: Sequence[Kind], known: Mapping[Kind, KnownFlags], dashes: str = ""
) -> frozenset[int]:
    """Which stages get a shared key, or a flag of the command line. Raises StageError when none knows it."""
    asked = kinds[:1] if name in START else kinds
    honour = {index for index, kind in enumerate(asked) if known[kind].honours(name, value)}
    takers = honour or {index for index, kind in enumerate(asked) if name in known[kind]}
    if takers:
        return frozenset(takers)
    others = [kind.value for kind in Kind if name in known[kind]]
    if others and name in START:
        raise StageError(f"{dashes}{name} is for a first stage of the kind {_either(others)}, and it is {kinds[0]}")
    if others:
        raise StageError(f"{dashes}{name} is for stages of the kind {_either(others)}, and there is none")
    raise StageError(f"{dashes}{name} is no flag of {_either(kind.command for kind in Kind)}")


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)


def _switch(flag: Flag | None, otherwise: str) -> bool:
    if flag is None:
        return False
    if flag.value.lower() not in ("true", "false"):
        raise StageError(f"--{flag.name} {flag.value}: {otherwise}")
    return flag.value.lower() == "true"


def _text(value: Any) -> str:
    """A value of YAML as a flag would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)
