"""`sqlenv train --config FILE` where the file has `stages:`: warm-up and GRPO one after the other, in this process.

    output_dir: runs/recipe                 # keys beside `stages` are shared
    model_name_or_path: trainer/tiny/base
    stages:
      - kind: warmup                        # `sqlenv warmup`
        max_episodes: 480
      - kind: grpo                          # `sqlenv train`
        name: easy                          # names the folder: runs/recipe/2-easy
        difficulty: easy
        max_steps: 40

Guarantees:

1. A shared key goes to the stages of every kind that honours it. A stage's own key wins over it, and a flag of the
   command line over both. A key that no stage honours is an error.
2. Each stage is its command into a folder of its own, and starts from the policy of the stage before: its outcome
   depends on its flags and that policy alone. All are checked before the first one starts.
3. `--resume_from_checkpoint true` continues where the run ended: finished stages are not run again and must not have
   changed, and the one that was running resumes from its newest checkpoint. The outcome is that of the unbroken run.
4. SIGTERM and Ctrl-C stop the running stage as they would stop its command, and the run with the same exit status.
5. On several ranks all go from stage to stage together; rank 0 alone writes and prints.
6. A first stage that fails before its first checkpoint leaves nothing behind: the same command starts again.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from rich.console import Console
from trl import ModelConfig, get_peft_config

from env_server.data.loading import load_dataset
from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from inference.adapters import STAGES_FILE
from trainer import train, warmup
from trainer.config import ConfigError, EpisodeArguments, advise
from trainer.eval.output_folder import (
    RunKind,
    final_state,
    find_output,
    last_checkpoint,
    left_nothing,
    remove_on_failure,
)
from trainer.eval.run_files import PLACES, RunFolder, replace_json
from trainer.eval.statistics import interval_text, percent
from trainer.flags.config_file import STAGES, read_config, split_config
from trainer.flags.configs import Config, SQLEnvConfig, WarmupConfig, honours
from trainer.flags.early import Command
from trainer.next_command import SECRETS, NextCommand, split_flags
from trainer.policy import SavedPlay, resolve_policy
from trainer.ranks import Ranks, abort_together
from trainer.signals import StopSignals
from trainer.training.arguments import NamedPlay, parse_train, parse_warmup
from trainer.training.dry_run import dry_run
from trainer.training.questions import QuestionFilter, require_questions
from trainer.training.run_log import closing_runs

START = ("model_name_or_path", "model_revision")
"""The policy that the first stage starts from."""
OUTPUT, RESUME, DRY_RUN = "output_dir", "resume_from_checkpoint", "dry_run"
VARIABLES = "env"
"""TRL's key for environment variables."""
WHOLE = (OUTPUT, RESUME, DRY_RUN, VARIABLES)
"""Keys and flags of the run as a whole."""
MACHINES = re.compile(r"env_server|max_concurrency|vllm_server_.*|weight_sync_dir")
"""Flags that say where servers are, and how much runs at once: a resumed run may be on another machine."""
COMMANDS: Mapping[str, tuple[Command, type[Config]]] = {
    "warmup": (Command.WARMUP, WarmupConfig),
    "grpo": (Command.TRAIN, SQLEnvConfig),
}
"""By kind, the command that does a stage, and its flags."""


class StageError(ConfigError):
    """The stages cannot be run as they are written; the text names the stage and the key."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the keys of its config, and the words of the flags that win over them."""

    title: str
    name: str
    kind: str
    folder: Path
    keys: dict[str, Any]
    flags: dict[str, list[str]] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that does it."""
        return COMMANDS[self.kind][0].prog

    @property
    def settings(self) -> dict[str, str]:
        """Its keys and flags as text, without secrets: what a resumed run compares."""
        texts = {key: _text(value) for key, value in self.keys.items()}
        texts |= {name: _value(words) for name, words in self.flags.items()}
        return {key: text for key, text in texts.items() if key not in SECRETS}


def read_stages(written: Mapping[str, Any], words: Sequence[str], output: Path) -> list[Stage]:
    """Read a config that has `stages`, and the words of the command line beside it. Pure. Raises StageError."""
    entries = written[STAGES]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise StageError(f"{STAGES} must be a list of stages, each with its keys: - kind: warmup")
    stages = []
    for number, entry in enumerate(entries, 1):
        kind = str(entry.get("kind"))
        if kind not in COMMANDS:
            raise StageError(f"stage {number}: kind must be {' or '.join(COMMANDS)}, not {entry.get('kind')!r}")
        name = str(entry.get("name", kind))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise StageError(f"stage {number}: name is letters, digits, _ and -, as it names a folder; not {name!r}")
        keys = {key: value for key, value in entry.items() if key not in ("kind", "name")}
        title = f"stage {number} of {len(entries)} ({name})"
        if misplaced := [key for key in keys if key in WHOLE or (key in START and number > 1)]:
            raise StageError(f"{title}: {misplaced[0]} is the whole run's: put it beside {STAGES}")
        stages.append(Stage(title, name, kind, output / f"{number}-{name}", keys))
    if misplaced := [key for key in written if key in (RESUME, DRY_RUN)]:
        raise StageError(f"give --{misplaced[0]} on the command line")
    for key, value in written.items():
        if key == VARIABLES or key not in (STAGES, *WHOLE):
            for stage in stages if key == VARIABLES else _takers(stages, key, _text(value), key):
                stage.keys.setdefault(key, value)
    for name, flag in split_flags(words).items():
        if not name:
            raise StageError(f"what is {flag[0]!r} for? Flags begin with --")
        if name not in WHOLE:
            for stage in _takers(stages, name, _value(flag), f"--{name}"):
                stage.flags[name] = flag
    return stages


def _takers(stages: Sequence[Stage], name: str, value: str, shown: str) -> list[Stage]:
    """The stages that get a shared key or a flag. Raises StageError where none honours it."""
    asked = stages[:1] if name in START else stages
    if takers := [stage for stage in asked if honours(*COMMANDS[stage.kind], name, value)]:
        return takers
    commands = ", ".join(dict.fromkeys(stage.command for stage in asked))
    raise StageError(f"{shown} {value}: no stage has that flag and value ({commands})")


def _value(words: Sequence[str]) -> str:
    """The value of a flag's words."""
    flag, equals, value = words[0].partition("=")
    if not equals and len(words) == 1:
        return "false" if flag.startswith("--no") else "true"
    return value if equals else " ".join(words[1:])


def _text(value: Any) -> str:
    """A value of YAML as a flag would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)


def read_finished(stages: Sequence[Stage], output: Path) -> int:
    """Return how many stages are finished. Raises StageError where the run cannot continue from them."""
    path = output / STAGES_FILE
    if not path.is_file():
        if taken := [stage.folder for stage in stages if stage.folder.exists()]:
            raise StageError(f"{taken[0]} exists, and {path} does not; choose another --{OUTPUT}")
        return 0
    try:
        done = json.loads(path.read_bytes())["finished"]
        records = [{"name": each["name"], "kind": each["kind"], **each["settings"]} for each in done]
    except (ValueError, KeyError, TypeError) as error:
        raise StageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if len(records) > len(stages):
        raise StageError(f"{len(records)} stages are finished, and the config has {len(stages)}")
    for stage, before in zip(stages, records, strict=False):
        after = {"name": stage.name, "kind": stage.kind, **stage.settings}
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key) and not (PLACES.fullmatch(key) or MACHINES.fullmatch(key)):
                raise StageError(
                    f"{stage.title} is finished, with {key} {before.get(key, 'left out')}, and is now to have "
                    f"{after.get(key, 'left out')}; put it back, or start anew in another --{OUTPUT}"
                )
    # The run may have been killed between the end of a stage and the line that says so.
    return len(records) + sum(1 for _ in takewhile(lambda each: final_state(each.folder), stages[len(records) :]))


def write_finished(stages: Sequence[Stage], output: Path, count: int) -> None:
    """Write which stages there are and which are finished; the folder may be moved, so no path is in it."""
    finished = [{"name": each.name, "kind": each.kind, "settings": each.settings} for each in stages[:count]]
    output.mkdir(parents=True, exist_ok=True)
    replace_json(output / STAGES_FILE, {"stages": [stage.folder.name for stage in stages], "finished": finished})


def run(argv: Sequence[str]) -> int:
    """`sqlenv train`, of one stage or several; returns the exit status. Raises SQLEnvError."""
    config, words = split_config(argv)
    if config is None or STAGES not in (written := read_config(config)):
        return train.run(argv)
    resume = NextCommand.of("sqlenv train", argv).resume_command
    after = NextCommand(resume, resume)
    with abort_together("sqlenv train"), StopSignals("sqlenv train", after) as stopping:
        flags = {name: _value(flag) for name, flag in split_flags(words).items()}
        output = find_output(RunKind.STAGES, {**written, **flags, "config": config})
        for name in (RESUME, DRY_RUN):
            if flags.get(name, "true").lower() not in ("true", "false"):
                raise StageError(f"--{name} {flags[name]}: give true, or leave it out; a stage finds its checkpoint")
        stages = read_stages(written, words, output.folder)
        advise("sqlenv train", output.lines)
        return _run(stages, output.folder, after, only_checks=flags.get(DRY_RUN, "false").lower() == "true")
    return stopping.status


def _run(stages: Sequence[Stage], output: Path, after: NextCommand, *, only_checks: bool) -> int:
    finished = read_finished(stages, output)
    policy, left = str(stages[finished - 1].folder) if finished else None, stages[finished:]
    # By the launcher's word: until a stage's flags are read, the ranks have not met.
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    with TemporaryDirectory(prefix="sqlenv-stages-") as scratch:
        ranks = _check(left, policy, Path(scratch), console, plans=only_checks)
        if only_checks:
            return 0
        first = stages[0].folder
        with remove_on_failure(output, lambda: ranks.is_main and not finished and left_nothing(first)):
            ranks.gather([None])  # all have read what is there
            if ranks.is_main:
                write_finished(stages, output, finished)
                for stage in left:
                    if last_checkpoint(stage.folder) is None:
                        shutil.rmtree(stage.folder, ignore_errors=True)  # of a start that was broken off early
            ranks.gather([None])
            for stage in left:
                status = _run_stage(stage, policy, Path(scratch), console, after)
                if status is not None:
                    ranks.disconnect()
                    return status
                policy = str(stage.folder)
                finished += 1
                if ranks.is_main:
                    write_finished(stages, output, finished)
                ranks.gather([None])  # the main one has written the policy that all of them read next
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(f"the stages of {output}, greedy, with 95% intervals:")
    for line in _summary(stages):
        say(f"  {line}")
    console.print(f"policy  {policy}", highlight=False, soft_wrap=True)
    ranks.disconnect()
    return 0


def _run_stage(stage: Stage, policy: str | None, scratch: Path, console: Console, after: NextCommand) -> int | None:
    """Run a stage to its end; returns None, or the exit status when it was stopped. Raises StageError."""
    checkpoint = last_checkpoint(stage.folder)
    start = f", resumed from {checkpoint.name}" if checkpoint else f", from {policy}" if policy else ""
    console.print(f"{stage.title}: {stage.command}{start}", highlight=False, soft_wrap=True)
    argv = [*_config(stage, policy, scratch), *([f"--{RESUME}", str(checkpoint)] if checkpoint else [])]
    try:
        with closing_runs(), same_precision(), StopSignals(stage.command, after, stage.title) as stopping:
            (warmup.warm_up if stage.kind == "warmup" else train.train)(argv, stopping)
    except SQLEnvError as error:
        raise StageError(f"{stage.title}: {error}") from error
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return stopping.status if stopping.cut_short else None


def _config(stage: Stage, policy: str | None, scratch: Path) -> list[str]:
    """Write a stage's config file and return its command line; `policy` is what it starts from, None: its own key."""
    keys = {**stage.keys, OUTPUT: str(stage.folder)} | ({} if policy is None else {START[0]: policy})
    path = scratch / f"{stage.folder.name}.yaml"
    path.write_text(yaml.safe_dump(keys, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return ["--config", str(path), *chain.from_iterable(stage.flags.values())]


@contextmanager
def same_precision() -> Iterator[None]:
    """Undo what `--tf32` and `--torch_compile` set for the whole process."""
    backends: Any = torch.backends  # whose types do not have it
    before = backends.fp32_precision
    try:
        yield
    finally:
        backends.fp32_precision = before


def _check(stages: Sequence[Stage], policy: str | None, scratch: Path, console: Console, *, plans: bool) -> Ranks:
    """Check stages in their order before the first one starts: flags, data, and the policy that each starts from.

    A later stage's policy does not exist yet. A stand-in takes its place: the policy that the first stage starts from,
    and where a stage makes an adapter, the adapter's configuration on it. Raises StageError with every problem.
    """
    play: NamedPlay | None = None
    ranks, problems = Ranks(), []
    for stage in stages:
        said = io.StringIO()
        try:
            # What a stage says of its flags, it says when it starts.
            with redirect_stderr(said), same_precision():
                if plans:
                    console.print(f"{stage.title}: {stage.command}, {stage.folder}", highlight=False, soft_wrap=True)
                config, model = _parse(stage, policy, play, scratch, plans=plans)
                stand_in = policy is not None and Path(policy).parent == scratch
                ranks, play = Ranks.of(config), (str(stage.folder), SavedPlay.of(config.play_settings()))
                policy = str(model.model_name_or_path)
                named = resolve_policy(policy, model.model_revision)
                if named.adapter is None and model.use_peft:
                    adapter = get_peft_config(model)
                    adapter.base_model_name_or_path = named.base.location
                    policy = str(scratch / stage.folder.name)
                    adapter.save_pretrained(policy)
                if isinstance(config, WarmupConfig):
                    for source in config.data.split(","):
                        if not _questions(config, source):
                            raise StageError(f"--data {source} has no usable question for training")
                elif plans:
                    dry_run(config, model, console, probe=not stand_in)
                else:
                    require_questions(_questions(config, config.data), config)
        except SQLEnvError as error:
            problems.append(f"{stage.title}: {error}")
        except SystemExit as end:  # argparse's, of a value that does not fit its flag
            if not end.code:
                raise
            *_, last = said.getvalue().strip().splitlines() or [""]
            problems.append(f"{stage.title}: {last.removeprefix(f'{stage.command}: ')}")
        if plans:
            sys.stderr.write(said.getvalue())
        if policy is None:
            break  # without the policy of the first one, nothing can be said of the others
    if problems:
        raise StageError("; ".join(problems))
    return ranks


def _parse(
    stage: Stage, policy: str | None, play: NamedPlay | None, scratch: Path, *, plans: bool
) -> tuple[SQLEnvConfig | WarmupConfig, ModelConfig]:
    argv = _config(stage, policy, scratch)
    if (checkpoint := last_checkpoint(stage.folder)) is not None:
        argv += [f"--{RESUME}", str(checkpoint)]
    elif stage.folder.exists():  # it is removed before the stage starts again
        argv += [f"--{OUTPUT}", str(scratch / f"new-{stage.folder.name}")]
    if stage.kind == "warmup":
        return parse_warmup(argv, play)
    return parse_train([*argv, *([f"--{DRY_RUN}", "true"] if plans else [])], play)


def _questions(arguments: EpisodeArguments, data: str) -> Sequence[Any]:
    dataset = load_dataset(data, answer_mode=AnswerMode(arguments.answer_mode))
    return QuestionFilter.of(arguments).asked(dataset, data)


def _summary(stages: Sequence[Stage]) -> Iterator[str]:
    """What the stages came to, a line each; what a warm-up gave is the evaluation before the stage that follows it."""
    for stage in stages:
        if stage.kind == "warmup":
            yield f"{stage.folder.name}: {stage.command}"
            continue
        folder = RunFolder(stage.folder)
        success = [
            f"{percent(each.summary.success_rate)} ({interval_text(each.summary.interval)}) {each.label}"
            for each in folder.evaluations()
            if each.label in ("before", "after")
        ]
        steps = max((int(row["step"]) for row in folder.metrics()), default=0)
        found = ", ".join(success) or "not evaluated"
        yield f"{stage.folder.name}: {steps} steps, success {found}, {folder.report_path}"
