"""The comparison with TRL's loop runs, and both of its sides play the same, exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.server_process import ROOT


def test_both_sides_play_the_same_episodes_exactly() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "rollout.py"), "--engine", "simulated", "--quick"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(done.stdout)["results"]["simulated"]["8"]
    assert cells.keys() == {"0 ms", "20 ms"}
    for cell in cells.values():
        assert cell["exact"]
        assert cell["ours"]["turns"] == cell["trl"]["turns"]
        assert cell["ours"]["tokens"] == cell["trl"]["tokens"]
        assert cell["checked"]["ours"] == cell["checked"]["trl"]
        assert cell["share_of_ideal"] > 0
