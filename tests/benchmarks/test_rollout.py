"""The comparison with TRL's loop runs, and both of its sides play the same."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.server_process import ROOT
from tests.fork_server import ForkServer

LONGEST_S = 300.0


def test_both_sides_play_the_same_episodes(forks: ForkServer) -> None:
    command = [sys.executable, "-m", "benchmarks.rollout", "--engine", "simulated", "--quick"]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
    done = forks.run(command, environment=environment, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(done.stdout)["results"]["simulated"]["8"]
    assert cells.keys() == {"0 ms", "20 ms"}
    for cell in cells.values():
        assert cell["ours"]["turns"] == cell["trl"]["turns"]
        assert cell["ours"]["tokens"] == cell["trl"]["tokens"]
        assert cell["times_faster"] > 0
