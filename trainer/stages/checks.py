"""All stages looked at before the first one starts: their flags, their data, and the policy that each begins with.

A later stage begins with a policy that is not there yet. A stand-in takes its place: the policy that the first stage
begins with, and where a stage before makes an adapter, the adapter's configuration on it. Nothing of it is trained.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from trl import ModelConfig, get_peft_config

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question
from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from trainer.config import EpisodeArguments
from trainer.eval.output_folder import last_checkpoint
from trainer.policy import SavedPlay, resolve_policy
from trainer.ranks import Ranks
from trainer.stages.plan import DRY_RUN, OUTPUT, RESUME, START, Kind, Plan, Stage, StageError
from trainer.training.arguments import (
    NamedPlay,
    parse_arguments,
    parse_warmup_arguments,
    play_settings,
    require_questions,
    warmup_play_settings,
)
from trainer.training.dry_run import dry_run
from trainer.training.questions import QuestionFilter


def write_config(plan: Plan, stage: Stage, policy: str | None, folder: Path) -> Path:
    """Write a stage's config file; `policy` is what it begins with, None where the stage itself says so."""
    keys = {**stage.keys, OUTPUT: str(plan.folder(stage))}
    if policy is not None:
        keys[START[0]] = policy
    path = folder / f"{stage.folder}.yaml"
    path.write_text(yaml.safe_dump(keys, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return path


@contextmanager
def same_precision() -> Iterator[None]:
    """Undo what `--tf32` and `--torch_compile` set for the whole process, as soon as a stage's flags are read."""
    backends: Any = torch.backends  # whose types do not have it
    before = backends.fp32_precision
    try:
        yield
    finally:
        backends.fp32_precision = before


@dataclass
class Checks:
    """Looks at stages in their order, and keeps what is in the way.

    `policy`: what the first of them begins with, None where it says so itself. `scratch`: a folder for files.
    """

    plan: Plan
    policy: str | None
    scratch: Path
    console: Console
    problems: list[str] = field(default_factory=list)
    start_play: NamedPlay | None = None
    """The folder of the stage before, and how the policy that it makes will be played; None where it is there."""
    ranks: Ranks = field(default_factory=Ranks)
    """Those that the launcher has started, known when flags have been read."""

    def check(self, stages: Sequence[Stage]) -> None:
        """Look at all of them. Raises StageError that says what is in the way of which."""
        for stage in stages:
            with self._checking(stage):
                self._check(stage)
            if self.policy is None:
                break  # without the policy of the first one, nothing can be said of the others
        if self.problems:
            raise StageError("; ".join(self.problems))

    @contextmanager
    def _checking(self, stage: Stage) -> Iterator[None]:
        said = io.StringIO()
        try:
            # What a stage is told about its flags, it is told when it starts.
            with redirect_stderr(said), same_precision():
                yield
        except SQLEnvError as error:
            self.problems.append(f"{self.plan.title(stage)}: {error}")
        except SystemExit as end:  # argparse's, of a value that does not fit its flag
            if not end.code:
                raise
            *_, last = said.getvalue().strip().splitlines() or [""]
            self.problems.append(f"{self.plan.title(stage)}: {last.removeprefix(f'{stage.kind.command}: ')}")
        if self.plan.dry_run:
            sys.stderr.write(said.getvalue())

    def _check(self, stage: Stage) -> None:
        if self.plan.dry_run:
            self.console.print(self.plan.title(stage), highlight=False)
        config = write_config(self.plan, stage, self.policy, self.scratch)
        argv = ["--config", str(config), *stage.words, *self._where(stage)]
        if stage.kind is Kind.WARMUP:
            self._check_warmup(stage, argv)
        else:
            self._check_grpo(stage, argv)

    def _check_warmup(self, stage: Stage, argv: Sequence[str]) -> None:
        arguments, sft, model = parse_warmup_arguments(argv, "", self.start_play)
        self.ranks = Ranks.of(sft)
        self._hand_on(model, stage)
        self.start_play = str(self.plan.folder(stage)), SavedPlay.of(warmup_play_settings(arguments))
        found = []
        for source in arguments.data.split(","):
            dataset = load_dataset(source, answer_mode=AnswerMode(arguments.answer_mode))
            questions = _asked(dataset, arguments, source)
            if not questions:
                raise StageError(f"--data {source} has no usable question for training")
            found.append(f"{source}, {len(questions):,} questions to play")
        if self.plan.dry_run:
            self.console.print(
                f"{stage.kind.command}, {self.plan.folder(stage)}: {model.model_name_or_path}, {'; '.join(found)}",
                highlight=False,
                soft_wrap=True,
            )

    def _check_grpo(self, stage: Stage, argv: Sequence[str]) -> None:
        if self.plan.dry_run:
            argv = [*argv, f"--{DRY_RUN}", "true", *self.plan.dry_run_gpu]
        arguments, grpo, model = parse_arguments(argv, self.start_play)
        self.ranks = Ranks.of(grpo)
        self._hand_on(model, stage)
        self.start_play = str(self.plan.folder(stage)), SavedPlay.of(play_settings(arguments, grpo))
        if self.plan.dry_run:
            dry_run(arguments, grpo, model, self.console)
            return
        dataset = load_dataset(arguments.data, answer_mode=AnswerMode(arguments.answer_mode))
        require_questions(_asked(dataset, arguments, arguments.data), grpo)

    def _where(self, stage: Stage) -> list[str]:
        """Flags that resume a stage that was broken off, or leave aside what is removed before it starts again."""
        folder = self.plan.folder(stage)
        if (checkpoint := last_checkpoint(folder)) is not None:
            return [f"--{RESUME}", str(checkpoint)]
        return [f"--{OUTPUT}", str(self.scratch / f"new-{stage.folder}")] if folder.exists() else []

    def _hand_on(self, model: ModelConfig, stage: Stage) -> None:
        """Have the next stage begin with what this one is going to make, or with what stands in for it."""
        policy = str(model.model_name_or_path)
        named = resolve_policy(policy, model.model_revision)
        self.policy = policy
        if named.adapter is not None or not model.use_peft:
            return
        adapter = get_peft_config(model)
        adapter.base_model_name_or_path = named.base.location
        self.policy = str(self.scratch / stage.folder)
        adapter.save_pretrained(self.policy)


def _asked(dataset: Dataset, arguments: EpisodeArguments, data: str) -> list[Question]:
    return QuestionFilter.of(arguments).asked(dataset, data)
