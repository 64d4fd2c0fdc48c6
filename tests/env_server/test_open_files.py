"""A process may have as many sockets as it needs, as far as it can see to that itself. Each case is a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from env_server.open_files import allow_open_files
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(needed), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "allowed"),
    [
        (300, 4_000, 2_000, 2_000),
        (1_024, 4_000, 100, 1_024),
        (300, 1_000, 2_000, 1_000),
        (200, 200, 10, 200),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(soft: int, hard: int, needed: int, allowed: int) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, needed))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(allowed)] * 2
