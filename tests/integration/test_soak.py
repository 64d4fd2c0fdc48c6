"""A small soak: clients that leave in every way that a client can, and a server that keeps nothing of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import ROOT
from env_server.dataset import Dataset
from tests.integration.service import write_data

TIMEOUT_S = 300.0


def test_nothing_is_left_of_badly_behaved_clients(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> None:
    data: Path = write_data(pets, tmp_path_factory.mktemp("pets"))
    soak = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--data", str(data)]
    done = subprocess.run(
        [*soak, "--steps", "3000", "--episodes", "300", "--looks", "1"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert done.returncode == 0
    ways = set(report["clients"])
    assert {"_polite", "_dropping", "_dropping_a_query", "_sending_nonsense", "killed"} <= ways
    assert report["sessions_closed"]["idle"] > 0, "silent clients were let go of"
