"""The benchmark of the Hugging Face engine runs, and both of its sides play the same episodes."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.server_process import ROOT
from tests.fork_server import ForkServer

LONGEST_S = 300.0


def test_both_sides_play_the_same_episodes(forks: ForkServer) -> None:
    command = [sys.executable, "-m", "benchmarks.hf_generate", "--policy", "tiny", "--quick"]
    done = forks.run(command, environment={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["agreement"]["equal"] == found["agreement"]["episodes"] == 4
    assert found["kept"]["tokens_read"] < found["whole_prompts"]["tokens_read"]
