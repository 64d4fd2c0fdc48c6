"""Trackers (`--report_to`): where they write, and under what name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl import GRPOConfig

FOLDERS = {"TENSORBOARD_LOGGING_DIR": "tensorboard", "WANDB_DIR": ""}
"""The variables that trackers know their folder by, and where it is in a run's folder.

A container's file system is read-only but for runs. TensorBoard gets one folder for a run that stops and goes on;
transformers would start one by the date each time. trackio keeps all runs together, where TRACKIO_DIR says when it is
imported.
"""


@contextmanager
def writing_into(grpo: GRPOConfig) -> Iterator[None]:
    """Have trackers write into the run's folder, unless a variable says where, and name the run as it."""
    folder = Path(grpo.output_dir).resolve()
    if grpo.report_to and grpo.run_name is None:
        grpo.run_name = folder.name
    unset = [variable for variable in FOLDERS if variable not in os.environ]
    os.environ.update({variable: str(folder / FOLDERS[variable]) for variable in unset})
    try:
        yield
    finally:
        for variable in unset:
            del os.environ[variable]


@contextmanager
def closing_runs() -> Iterator[None]:
    """End the run that wandb keeps open in the process, so that what is trained next does not write into it.

    The other trackers end theirs with the training. One that was open before stays open.
    """
    wandb = sys.modules.get("wandb")
    before = wandb is not None and wandb.run is not None
    try:
        yield
    finally:
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None and not before:
            wandb.finish()
