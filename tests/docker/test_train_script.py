"""train.sh and wait_for.py of docker/kubernetes/base, which the trainer's pods run.

A real run under the script is in `tests/integration/test_lost_node.py`.
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docker.kubernetes import FOLDER
from trainer.eval.run_files import RunFolder
from trainer.policy import SETTINGS_FILE

TRAIN = FOLDER / "base" / "train.sh"
WAIT_FOR = FOLDER / "base" / "wait_for.py"
SAYS = ("sh", "-c", 'printf "%s\\n" "$@" > "$SAID"', "command")
"""A command that writes down its arguments."""
FINISHES = ("sh", "-c", 'mkdir -p "$2" && touch "$2/report.html"', "command")
"""A command that does what a run does last; its second argument is the folder."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def train(folder: RunFolder, command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": os.environ["PATH"], "SAID": f"{folder.path}.said", **variables}
    return subprocess.run(["sh", TRAIN, folder.path, *command], env=own, capture_output=True, text=True, check=False)


def said(folder: RunFolder) -> list[str]:
    return Path(f"{folder.path}.said").read_text(encoding="utf-8").splitlines()


def whole_checkpoint(folder: RunFolder, step: int) -> None:
    (folder.path / f"checkpoint-{step}").mkdir(parents=True)
    (folder.path / f"checkpoint-{step}" / SETTINGS_FILE).touch()
    folder.config_path.touch()


def test_a_new_run(folder: RunFolder) -> None:
    assert train(folder, FINISHES).returncode == 0
    assert folder.report_path.exists()


def test_a_finished_run_is_left_alone(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.report_path.touch()
    ended = train(folder, SAYS)
    assert ended.returncode == 0
    assert f"nothing to do, {folder.report_path} is there" in ended.stdout
    assert not Path(f"{folder.path}.said").exists()


def test_runs_that_are_named_by_the_date(tmp_path: Path) -> None:
    """The newest that is not finished goes on; else one begins. Others' names are not looked at."""

    def start() -> RunFolder:
        folder = RunFolder(tmp_path / "runs")
        command = ["sh", str(TRAIN), f"{folder.path}/", *SAYS]
        own = {"PATH": os.environ["PATH"], "SAID": f"{folder.path}.said"}
        subprocess.run(command, env=own, capture_output=True, check=False)
        return RunFolder(Path(said(folder)[1]))

    for name in ("20240102-000000", "20240101-000000", "mine"):
        whole_checkpoint(RunFolder(tmp_path / "runs" / name), 10)
    assert start().path == tmp_path / "runs" / "20240102-000000"
    for name in ("20240102-000000", "20240101-000000"):
        RunFolder(tmp_path / "runs" / name).report_path.touch()
    begun = start().path
    assert begun.parent == tmp_path / "runs"
    assert begun.name > "2025"


def test_flags_are_words_and_come_last(folder: RunFolder) -> None:
    """So that they win over what the manifests say."""
    train(folder, [*SAYS, "--config", "a b.yaml"], TRAIN_FLAGS="--max_steps 5 --save_steps  10")
    own = ["--output_dir", str(folder.path), "--max_steps", "5", "--save_steps", "10"]
    assert said(folder) == ["--config", "a b.yaml", *own]


def test_a_run_goes_on_from_a_whole_checkpoint(folder: RunFolder) -> None:
    whole_checkpoint(folder, 10)
    (folder.path / "checkpoint-20").mkdir()
    train(folder, SAYS)
    assert said(folder) == ["--output_dir", str(folder.path), "--resume_from_checkpoint", "true"]


def test_a_run_that_was_lost_before_its_first_checkpoint_begins_again_and_nothing_is_removed(folder: RunFolder) -> None:
    (folder.path / "checkpoint-10").mkdir(parents=True)  # half written
    folder.config_path.write_text("{}", encoding="utf-8")
    ended = train(folder, FINISHES)
    assert ended.returncode == 0
    assert "was lost before its first checkpoint" in ended.stdout
    (aside,) = folder.path.parent.glob("run.lost-*")
    assert (aside / "config.json").read_text(encoding="utf-8") == "{}"
    assert (aside / "checkpoint-10").is_dir()


def test_one_rank_alone_puts_it_aside(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.config_path.touch()
    train(folder, SAYS, RANK="1")
    assert folder.config_path.exists()


def test_a_run_that_ends_well_and_unfinished_is_tried_again(folder: RunFolder) -> None:
    """`sqlenv train` ends with 0 after SIGTERM, and a Job takes 0 for the end of the run."""
    assert train(folder, ["true"]).returncode == 75


def test_a_failure_is_what_it_was(folder: RunFolder) -> None:
    assert train(folder, ["sh", "-c", "exit 7"]).returncode == 7


def test_sigterm_is_passed_on_and_its_effect_waited_for(folder: RunFolder) -> None:
    """The first process of a container gets it alone."""
    command = "trap 'echo told; exit 0' TERM; echo ready; for _ in $(seq 2000); do sleep 0.1; done"
    started = ["sh", str(TRAIN), str(folder.path), "sh", "-c", command]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.readline() == "told\n"
        assert run.wait(60) == 75


def test_servers_are_waited_for() -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        asked: list[str] = []  # noqa: RUF012

        def do_GET(self) -> None:
            self.asked.append(self.path)
            self.send_response(503 if len(self.asked) == 1 else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        url = f"http://127.0.0.1:{server.server_port}"
        # A proxy that a cluster sets for all pods is not asked.
        own = {"http_proxy": "http://127.0.0.1:9", "PATH": os.environ["PATH"]}
        ended = subprocess.run(
            [sys.executable, WAIT_FOR, f"{url}/ready", f"{url},{url}/"],
            env=own,
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    assert Answers.asked == ["/ready", "/ready", "/health", "/health"]
    assert ended.stdout.splitlines()[:2] == [f"waiting for {url}/ready", f"{url}/ready answers"]
