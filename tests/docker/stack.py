"""The whole stack in real containers, as `docker compose -f docker-compose.yml -f docker-compose.cpu.yml up` makes it.

Promises: a project name of its own, so nobody else's containers are touched; `close` removes containers, networks and
volumes, whatever happened. The images stay, since building them is what takes long.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.server_process import ROOT
from tests.docker.compose import CPU, compose, surroundings

WAIT_S = 600.0
"""Longest wait for the stack to do something: for vLLM to start, for a step, on a crowded machine too."""
POLL_S = 0.2
USER = os.getuid() or 1000
"""Whose files the containers write; never root's."""


def docker(*arguments: str, check: bool = True) -> str:
    """Run a docker command and return what it prints on both streams."""
    command = ("docker", *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}"
    return done.stdout


class Stack:
    """A project of Compose, with runs in `runs`."""

    def __init__(self, runs: Path, settings: Mapping[str, str]) -> None:
        self._project = f"sqlenv-test-{os.getpid()}"
        self._env_file = runs / "empty.env"
        self.runs = runs
        self.settings = dict(settings)
        runs.mkdir(parents=True, exist_ok=True)
        self._env_file.touch()
        if os.getuid() == 0:
            os.chown(runs, USER, USER)

    def run(self, *arguments: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Compose on the project."""
        command = compose()
        assert command is not None
        files = [flag for file in CPU for flag in ("-f", str(ROOT / file))]
        variables = {
            "SQLENV_UID": str(USER),
            "SQLENV_GID": str(USER),
            "RUNS_DIR": str(self.runs),
            **self.settings,
            **settings,
        }
        done = subprocess.run(
            [*command, "--env-file", str(self._env_file), "-p", self._project, *files, *arguments],
            env=surroundings(variables) | {name: value for name, value in os.environ.items() if name[:7] == "DOCKER_"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}"
        return done

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, ended ones too."""
        label = f"label=com.docker.compose.project={self._project}"
        service_label = f"label=com.docker.compose.service={service}"
        return docker("ps", "--all", "--quiet", "--filter", label, "--filter", service_label).split()

    def container(self, service: str) -> str:
        """Return the id of a service's only container."""
        (found,) = self.containers(service)
        return found

    def logs(self) -> str:
        """Return what all containers have printed."""
        return self.run("logs", "--no-color").stdout

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds; fail with the logs when it never does."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.logs()[-6000:]}"
            time.sleep(POLL_S)

    def train(self, run: str, *flags: str) -> str:
        """Start a training run and return its container; servers that are up stay as they are."""
        self.run("up", "--detach", "--no-deps", "trainer", RUN=run, TRAIN_FLAGS=" ".join(flags))
        return self.container("trainer")

    def steps(self, run: str) -> list[dict[str, float]]:
        """Return what a run has logged so far, a step each."""
        file = self.runs / run / "metrics.jsonl"
        if not file.exists():
            return []
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Remove all that was started."""
        self.run(
            "--profile",
            "env",
            "--profile",
            "inference",
            "--profile",
            "trainer",
            "down",
            "--volumes",
            "--remove-orphans",
            "--timeout",
            "5",
            check=False,
        )


def state(container: str) -> dict[str, object]:
    """Return a container's state: Running, ExitCode, OOMKilled, ..."""
    found: dict[str, object] = json.loads(docker("inspect", "--format", "{{json .State}}", container))
    return found


def exit_code(container: str) -> int:
    """Wait until a container ends, and return its exit status."""
    return int(docker("wait", container).strip())


def page(container: str, path: str, token: str = "") -> str:
    """Return what a server inside a container answers, on its own loopback."""
    program = (
        "import sys; from urllib.request import Request, urlopen; "
        "print(urlopen(Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]})).read().decode())"
    )
    return docker("exec", container, "python3", "-c", program, f"http://127.0.0.1:8000{path}", token)


def total(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's series with these labels."""
    lines = [line for line in metrics.splitlines() if line.startswith(name)]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))


def contains(image: str, needles: Sequence[bytes]) -> list[bool]:
    """Say of each needle whether any layer of an image, or its configuration, contains it."""
    found = [False] * len(needles)
    longest = max(map(len, needles))
    with subprocess.Popen(("docker", "save", image), stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        tail = b""
        while block := saving.stdout.read(1 << 24):
            window = tail + block
            found = [was or needle in window for was, needle in zip(found, needles, strict=True)]
            tail = window[-longest:]
    assert saving.returncode == 0
    return found


def sizes(images: Sequence[str]) -> list[int]:
    """Return images' sizes in bytes."""
    return [int(docker("image", "inspect", "--format", "{{.Size}}", image)) for image in images]
