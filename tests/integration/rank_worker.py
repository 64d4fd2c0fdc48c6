"""`sqlenv` as a rank of a test: `rank_worker.py HOW RANK command...`.

HOW is `watched`: RANK is "all", and each rank that saves the model leaves its weights' digest in the run's folder; or
`error` or `bug`: that rank raises so in its third rollout, the evaluation before training being the first; or `flaky`:
the first episode of each rollout fails on that rank, or on "all".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

import sqlenv
from inference.engine import EngineError, Session
from inference.hf.engine import HFEngine
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutError
from trainer.rollout.episodes import Episode

FAILURES: dict[str, Exception] = {
    "error": RolloutError("the engine is gone"),
    "bug": ZeroDivisionError("this is a bug"),
}


def watch_saving() -> None:
    """Make every trainer write what its rank holds when it saves the model."""
    save_model = GRPOTrainer.save_model

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        digest = sha256()
        for name, weight in self.accelerator.unwrap_model(self.model).state_dict().items():
            digest.update(name.encode() + weight.numpy().tobytes())
        Path(self.args.output_dir, f"rank-{self.args.process_index}").write_text(digest.hexdigest())
        save_model(self, *args, **kwargs)

    GRPOTrainer.save_model = watched


def fail(error: Exception) -> None:
    """Make this process's third rollout raise."""
    play = RolloutClient.play
    rollouts = count(1)

    async def failing(
        self: RolloutClient, requests: Sequence[EpisodeRequest], *args: Any, **kwargs: Any
    ) -> list[Episode]:
        if next(rollouts) == 3:
            raise error
        return await play(self, requests, *args, **kwargs)

    RolloutClient.play = failing  # type: ignore[method-assign]


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
    if how == "watched":
        watch_saving()
    elif how == "flaky":
        if rank in ("all", os.environ["RANK"]):
            lose_episodes()
    elif os.environ["RANK"] == rank:
        fail(FAILURES[how])
    sys.exit(sqlenv.main(command))
