"""`sqlenv train --config FILE` where the file has `stages:`: warm-up and GRPO one after the other, in this process.

Promises:

1. All stages are looked at before the first one starts.
2. Each stage is `sqlenv warmup` or `sqlenv train` into a folder of its own, and begins with the policy of the stage
   before. What it comes to depends on its flags and that policy alone, not on what this process did before it.
3. `--resume_from_checkpoint true` goes on where the run was broken off: finished stages are not run again, the one that
   was running goes on from its newest checkpoint, or from its beginning where it has none. The outcome is that of the
   unbroken run.
4. SIGTERM and Ctrl-C stop the stage that runs as it would stop its command, and the run with the stage's exit status.
5. On several ranks all go from stage to stage together; rank 0 alone writes and speaks.
6. A first stage that fails before its first checkpoint leaves nothing behind: the same command starts again.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from env_server.errors import SQLEnvError
from trainer import train, warmup
from trainer.config import SQLEnvArguments, WarmupArguments
from trainer.eval.output_folder import RunKind, find_output, last_checkpoint, left_nothing, remove_on_failure
from trainer.flags.config_file import read_config
from trainer.flags.given import split_config
from trainer.flags.table import TRAIN_FLAGS, WARMUP_FLAGS, FlagTable
from trainer.next_command import NextCommand
from trainer.ranks import Ranks, abort_together
from trainer.signals import StopSignals
from trainer.stages.checks import Checks, same_precision, write_config
from trainer.stages.plan import RESUME, STAGES, Kind, KnownFlags, Plan, Stage, StageError, read_plan, split_flags
from trainer.stages.progress import FinishedStage, clear, read_finished, write_finished
from trainer.stages.summary import rows_of, table, write_page
from trainer.training.arguments import advise
from trainer.training.trackers import closing_runs


def run(argv: Sequence[str]) -> int:
    """`sqlenv train`, of one stage or several; returns the exit status. Raises SQLEnvError."""
    config, words = split_config(argv)
    if config is None or {"-h", "--help"} & set(words):
        return train.run(argv)
    written = read_config(config)
    if STAGES not in written:
        return train.run(argv)
    go_on = NextCommand.of("sqlenv train", argv).resume_command
    after = NextCommand(go_on, go_on)
    with abort_together("sqlenv train"), StopSignals("sqlenv train", after) as stopping:
        known = known_flags()
        flags = {flag.name: flag.value for flag in split_flags(words, known)}
        output = find_output(RunKind.STAGES, {**written, **flags, "config": config})
        plan = read_plan(written, words, known, str(output.folder))
        advise("sqlenv train", output.lines)
        return _run(plan, after)
    return stopping.status


def known_flags() -> dict[Kind, KnownFlags]:
    """The flags of each kind of stage."""
    return {Kind.WARMUP: _known(WARMUP_FLAGS, WarmupArguments), Kind.GRPO: _known(TRAIN_FLAGS, SQLEnvArguments)}


def _known(flags: FlagTable, ours: type) -> KnownFlags:
    return KnownFlags(flags.honoured | {field.name for field in fields(ours)}, frozenset(flags.notes), flags.choices)


def _run(plan: Plan, after: NextCommand) -> int:
    finished = read_finished(plan)
    left = plan.stages[len(finished) :]
    policy = str(plan.folder(plan.stages[len(finished) - 1])) if finished else None
    # By the launcher's word: until a stage's flags are read, the ranks have not met.
    is_main = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not is_main)
    with TemporaryDirectory(prefix="sqlenv-stages-") as scratch:
        checks = Checks(plan, policy, Path(scratch), console)
        checks.check(left)
        ranks = checks.ranks
        if plan.dry_run:
            return 0
        first = plan.folder(plan.stages[0])
        with remove_on_failure(plan.output_dir, lambda: ranks.is_main and not finished and left_nothing(first)):
            if left:
                _make_ready(plan, finished, left, ranks)
            for stage in left:
                status = _run_stage(plan, stage, policy, Path(scratch), console, after)
                if status is not None:
                    ranks.disconnect()
                    return status
                policy = str(plan.folder(stage))
                finished.append(FinishedStage(stage.name, stage.kind.value, stage.settings))
                if ranks.is_main:
                    write_finished(plan, finished)
                ranks.gather([None])  # the main one has written the policy that all of them read next
    if is_main:
        rows = rows_of(plan)
        console.print(table(plan, rows))
        console.print(f"policy  {policy}\nreport  {write_page(plan, rows)}", highlight=False, soft_wrap=True)
    ranks.disconnect()
    return 0


def _make_ready(plan: Plan, finished: Sequence[FinishedStage], left: Sequence[Stage], ranks: Ranks) -> None:
    """Leave the folder so that the next stage can run. Collective: every rank calls it."""
    ranks.gather([None])  # all have read what is there
    if ranks.is_main:
        write_finished(plan, finished)
        for stage in left:
            clear(plan, stage)
    ranks.gather([None])


def _run_stage(
    plan: Plan, stage: Stage, policy: str | None, scratch: Path, console: Console, after: NextCommand
) -> int | None:
    """Run a stage to its end; returns None, or the exit status when it was stopped. Raises StageError."""
    checkpoint = last_checkpoint(plan.folder(stage))
    from_where = f", going on from {checkpoint.name}" if checkpoint else f", from {policy}" if policy else ""
    console.print(f"{plan.title(stage)}: {stage.kind.command}{from_where}", highlight=False, soft_wrap=True)
    argv = ["--config", str(write_config(plan, stage, policy, scratch)), *stage.words]
    if checkpoint is not None:
        argv += [f"--{RESUME}", str(checkpoint)]
    try:
        with _alone(), StopSignals(stage.kind.command, after, plan.title(stage)) as stopping:
            (warmup.warm_up if stage.kind is Kind.WARMUP else train.train)(argv, stopping)
    except SQLEnvError as error:
        raise StageError(f"{plan.title(stage)}: {error}") from error
    return stopping.status if stopping.cut_short else None


@contextmanager
def _alone() -> Iterator[None]:
    """Undo what a stage leaves in the process: its memory and precision, the runs of its trackers."""
    try:
        with closing_runs(), same_precision():
            yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
