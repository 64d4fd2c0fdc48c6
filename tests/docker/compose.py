"""Docker Compose as a command: `docker compose`, else `docker-compose`. Both have to understand the files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from benchmarks.server_process import ROOT

GPU = ("docker-compose.yml", "docker-compose.override.yml")
CPU = ("docker-compose.yml", "docker-compose.cpu.yml")


@cache
def compose() -> tuple[str, ...] | None:
    """Return the command, None where there is none."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) and not subprocess.run((*command, "version"), capture_output=True).returncode:
            return command
    return None


def surroundings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return variables for Compose: the settings, and of ours only what every command needs."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **settings}


@cache
def resolved(files: tuple[str, ...], **settings: str) -> dict[str, Any]:
    """Return the services as Compose resolves them, whatever an .env beside the files says."""
    command = compose()
    assert command is not None
    flags = [flag for file in files for flag in ("-f", str(ROOT / file))]
    everything = ["--profile", "env", "--profile", "inference", "--profile", "trainer"]
    with tempfile.NamedTemporaryFile(prefix="sqlenv-", suffix=".env") as empty:
        done = subprocess.run(
            [*command, "--env-file", empty.name, *flags, *everything, "config"],
            env=surroundings(settings),
            capture_output=True,
            text=True,
            check=True,
        )
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services
