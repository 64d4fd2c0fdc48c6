"""The phases of `benchmarks/real_model.py`: a command of the project each, in a folder of its own.

    NAME/finished.json      what the phase made and what it cost; there when all else is
    NAME/clock.json         wall clock so far, over all starts
    NAME/out                what the command writes: a run, a warm-up, an evaluation's episodes.jsonl
    NAME/log.txt            what it said, over all starts; what it printed last is in printed.txt

Promises:

1. A finished phase is not run again. One that was broken off goes on from its newest whole checkpoint by the command's
   own resuming, or begins again where it has none.
2. Commands and servers end when this process does, however it ends: none is left that writes into a folder.
3. A stage of GRPO that has had its minutes is asked to end after its step by SIGTERM, and saves it. Steps that were
   taken again, after an interruption, count once.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from benchmarks.server_process import SQLENV
from env_server.errors import SQLEnvError
from inference.adapters import RUN_MODEL
from trainer.eval.output_folder import final_state, last_checkpoint
from trainer.eval.run_files import RunFolder, read_records, replace_json
from trainer.policy import SETTINGS_FILE
from trainer.rollout.episodes import EpisodeRecord
from trainer.warmup import MINUTES_FILE

TICK_S = 2.0
"""How often a command is looked at."""
_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class PhaseError(SQLEnvError):
    """A command failed, or made nothing; the text has the end of what it said."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a phase made and what it cost.

    `seconds`: wall clock, over all starts. `minutes`: of training, where that is measured apart. `tokens_read`, each
    turn's whole prompt counted where episodes are played, each episode once where it is learned, and `tokens_written`,
    by the policy; None where no model plays. All that is said of a warm-up is up to its newest checkpoint.
    """

    seconds: float
    policy: str = ""
    """From the phase's folder, which may be moved."""
    minutes: float = 0.0
    steps: int = 0
    tokens_read: int | None = None
    tokens_written: int | None = None


_FINISHED = TypeAdapter(Finished)


def with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return what a child calls first so that it gets the signal when the thread that started it is gone."""
    parent = os.getpid()

    def before_exec() -> None:
        _LIBC.prctl(_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


class Phase:
    """One phase's folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.out = folder / "out"
        self._clock = folder / "clock.json"
        self._before: float = json.loads(self._clock.read_bytes())["seconds"] if self._clock.is_file() else 0.0
        self._started = time.monotonic()

    @property
    def finished(self) -> Finished | None:
        """What it came to, once it is finished."""
        path = self.folder / "finished.json"
        return _FINISHED.validate_json(path.read_bytes()) if path.is_file() else None

    def finish(self, **made: Any) -> Finished:
        """Say that it is finished."""
        finished = Finished(seconds=round(self.seconds, 1), **made)
        replace_json(self.folder / "finished.json", asdict(finished))
        return finished

    @property
    def seconds(self) -> float:
        """Wall clock over all starts."""
        return self._before + time.monotonic() - self._started

    @property
    def checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        return last_checkpoint(self.out)

    @property
    def printed(self) -> str:
        """What the command printed."""
        return (self.folder / "printed.txt").read_text(encoding="utf-8")

    def resume_flags(self) -> list[str]:
        """How to go on from the newest checkpoint; without one, what is there is removed."""
        if (checkpoint := self.checkpoint) is not None:
            return ["--resume_from_checkpoint", str(checkpoint)]
        shutil.rmtree(self.out, ignore_errors=True)
        return []

    def config(self, keys: Mapping[str, Any]) -> list[str]:
        """Write the command's config file; returns the flag that names it."""
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")
        return ["--config", str(path)]

    def run(self, words: Sequence[str], enough: Callable[[], bool] = lambda: False) -> None:
        """Run a command to its end, which it is asked for as soon as it is `enough`. Raises PhaseError."""
        log = self.folder / "log.txt"
        with log.open("ab") as said, (self.folder / "printed.txt").open("wb") as printed:
            process = subprocess.Popen(
                [*SQLENV, *words],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
                preexec_fn=with_parent(signal.SIGKILL),
            )
            try:
                status = self._attend(process, enough)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if status:
            end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise PhaseError(f"{self.folder.name}: sqlenv {words[0]} ended with status {status}; {log} ends:\n{end}")

    def _attend(self, process: subprocess.Popen[bytes], enough: Callable[[], bool]) -> int:
        asked = False
        while True:
            try:
                return process.wait(TICK_S)
            except subprocess.TimeoutExpired:
                replace_json(self._clock, {"seconds": self.seconds})
            if not asked and enough():
                asked = True
                process.send_signal(signal.SIGTERM)


def trained_minutes(run: Path) -> float:
    """The minutes that the steps of a run of GRPO took, rollouts and all."""
    return sum(row.get("step_time", 0.0) for row in RunFolder(run).metrics()) / 60


def steps_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def minutes_learned(checkpoint: Path | None) -> float:
    """Minutes that a warm-up with a deadline had had when it saved a checkpoint."""
    if checkpoint is None or not (checkpoint / MINUTES_FILE).is_file():
        return 0.0
    return float(json.loads((checkpoint / MINUTES_FILE).read_bytes())["minutes"])


def took_all_steps(checkpoint: Path | None) -> bool:
    """Whether training ended of itself, not by a deadline or a signal."""
    if checkpoint is None:
        return False
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    return bool(state["global_step"] >= state["max_steps"])


def tokens_learned(checkpoint: Path | None) -> int | None:
    """Tokens of the episodes that a warm-up had read when it saved a checkpoint."""
    if checkpoint is None:
        return None
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    return int(max((row.get("num_tokens", 0) for row in state["log_history"]), default=0)) or None


def tokens_played(records: Sequence[EpisodeRecord]) -> dict[str, int | None]:
    """What the policy was given to read in episodes, and what it wrote; None where no model played."""
    read = [record.prompt_tokens for record in records if record.prompt_tokens is not None]
    if not read:
        return {"tokens_read": None, "tokens_written": None}
    return {"tokens_read": sum(read), "tokens_written": sum(record.tokens for record in records)}


def evaluate(phase: Phase, words: Sequence[str]) -> Finished:
    """Play an evaluation, from its beginning unless it is finished."""
    if (finished := phase.finished) is not None:
        return finished
    phase.out.mkdir(exist_ok=True)
    episodes = phase.out / "episodes.jsonl"
    phase.run(["evaluate", *words, "--json", "--episodes_out", str(episodes)])
    replace_json(phase.out / "summary.json", json.loads(phase.printed.strip().splitlines()[-1]))
    return phase.finish(**tokens_played(read_records(episodes)))


def warm_up(phase: Phase, keys: Mapping[str, Any], words: Sequence[str], minutes: float = 0.0) -> Finished:
    """Warm up to the end, or for so many minutes."""
    if (finished := phase.finished) is not None:
        return finished
    flags = [*phase.config(keys), *words, "--output_dir", str(phase.out), *phase.resume_flags()]
    if minutes:
        flags += ["--max_minutes", f"{minutes:.2f}"]
    if final_state(phase.out) is None:
        phase.run(["warmup", *flags])
    if not (phase.out / RUN_MODEL / SETTINGS_FILE).is_file():
        raise PhaseError(f"{phase.folder.name}: the warm-up was stopped; start again to go on")
    checkpoint = phase.checkpoint
    steps = steps_of(checkpoint) if checkpoint else 0
    spent = round(minutes_learned(checkpoint), 2)
    return phase.finish(policy=phase.out.name, steps=steps, minutes=spent, tokens_read=tokens_learned(checkpoint))


def train(
    phase: Phase, keys: Mapping[str, Any], words: Sequence[str], url: Callable[[], str], minutes: float
) -> Finished:
    """Train by GRPO for so many minutes, or for as many steps as the keys say; `url` starts the server and names it."""
    if (finished := phase.finished) is not None:
        return finished
    resume = phase.resume_flags()
    checkpoint = phase.checkpoint
    if checkpoint is not None:
        # What was trained after it is trained again, and is not enough before that.
        RunFolder(phase.out).resume_from(steps_of(checkpoint))
    if checkpoint is None or (trained_minutes(phase.out) < minutes and final_state(phase.out) is None):
        flags = [*phase.config(keys), *words, "--output_dir", str(phase.out), *resume]
        server = ["--use_vllm", "true", "--vllm_server_base_url", url()]
        phase.run(["train", *flags, *server], lambda: trained_minutes(phase.out) >= minutes)
    run = RunFolder(phase.out)
    model = phase.out / "model"
    policy = model if model.is_dir() else phase.checkpoint
    if policy is None:
        raise PhaseError(f"{phase.folder.name}: the run was stopped before its first checkpoint; start again to go on")
    steps = int(max((row["step"] for row in run.metrics()), default=0))
    if not model.is_dir() and (steps != steps_of(policy) or trained_minutes(phase.out) < minutes):
        raise PhaseError(f"{phase.folder.name}: the run was stopped; start again to go on")
    played = [episode.record for episode in run.episodes(turns=False)]
    spent = trained_minutes(phase.out)
    return phase.finish(
        policy=str(policy.relative_to(phase.folder)), steps=steps, minutes=round(spent, 2), **tokens_played(played)
    )
