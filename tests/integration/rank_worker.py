"""`sqlenv` as a rank of a test: `rank_worker.py HOW RANK command...`.

HOW is `watched`: RANK is "all", and each rank that saves the model leaves its weights' digest in its directory; or
`bug`: that rank raises in its third rollout, the evaluation before training being the first, and the first episode of
each rollout fails on the other; or `flaky`: it does on all; or `told`: that rank has the launcher stop all of them in
its third rollout, and each leaves its exit status in the working directory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from inference.engine import EngineError, Session
from inference.hf.engine import HFEngine
from sqlenv import cli
from trainer.rollout.client import EpisodeRequest, RolloutClient
from trainer.rollout.episodes import Episode
from trainer.signals import StopSignals


def watch_saving() -> None:
    """Make every trainer write what its rank holds when it saves the model."""
    save_model = GRPOTrainer.save_model

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        digest = sha256()
        for name, weight in self.accelerator.unwrap_model(self.model).state_dict().items():
            digest.update(name.encode() + weight.numpy().tobytes())
        # Not in the run's folder: the other rank may not have made it yet.
        Path(f"rank-{self.args.process_index}").write_text(digest.hexdigest())
        save_model(self, *args, **kwargs)

    GRPOTrainer.save_model = watched


def in_third_rollout(happens: Callable[[], Awaitable[None]]) -> None:
    """Make this happen in the process's third rollout."""
    play = RolloutClient.play
    rollouts = count(1)

    async def playing(
        self: RolloutClient, requests: Sequence[EpisodeRequest], *args: Any, **kwargs: Any
    ) -> list[Episode]:
        if next(rollouts) == 3:
            await happens()
        return await play(self, requests, *args, **kwargs)

    RolloutClient.play = playing  # type: ignore[method-assign]


async def fail() -> None:
    raise ZeroDivisionError("this is a bug")


async def have_all_told() -> None:
    """Tell the launcher to stop, and wait until it has passed that on."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    is_echo = StopSignals._is_echo

    def watched(self: StopSignals) -> bool:
        loop.call_soon_threadsafe(told.set)  # a signal alone does not wake the loop
        return is_echo(self)

    StopSignals._is_echo = watched  # type: ignore[method-assign]
    os.kill(os.getppid(), signal.SIGTERM)
    await told.wait()


def lose_episodes() -> None:
    """Make this process's engine open no session for the first episode of a rollout."""
    session = HFEngine.session

    def flaky(self: HFEngine, key: int) -> Session:
        if key == 0:
            raise EngineError("no memory")
        return session(self, key)

    HFEngine.session = flaky  # type: ignore[method-assign]


if __name__ == "__main__":
    how, rank, *command = sys.argv[1:]
    this = os.environ["RANK"]
    if how == "watched":
        watch_saving()
    if how == "flaky" or (how == "bug" and this != rank):
        lose_episodes()
    if how in ("bug", "told") and this == rank:
        in_third_rollout(fail if how == "bug" else have_all_told)
    status = cli.main(command)
    if how == "told":
        Path(f"status-{this}").write_text(str(status))
    sys.exit(status)
