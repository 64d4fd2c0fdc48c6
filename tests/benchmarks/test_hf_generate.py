"""The benchmark of the Hugging Face engine runs, and both of its sides play the same episodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0


def test_both_sides_play_the_same_episodes(forks: ForkServer) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "hf_generate.py"), "--policy", "tiny", "--quick"]
    done = forks.run(command, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["agreement"]["equal"] == found["agreement"]["episodes"] == 4
    assert found["kept"]["tokens_read"] < found["whole_prompts"]["tokens_read"]
