"""`docker compose up` for real: images, three environment servers, vLLM on the CPU, the trainer; killed and stopped.

`make compose-test` runs it. It needs a Docker engine, 20 GB of disk and some minutes; the tests tell one story.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import ROOT, reserved_ports
from tests.docker.stack import USER, Stack, contains, docker, exit_code, page, sizes, state, total

pytestmark = pytest.mark.skipif(not os.environ.get("SQLENV_COMPOSE_TEST"), reason="make compose-test runs it")

SERVICES = ("env", "env-public", "inference", "inference-public", "model", "trainer", "trainer-remote")
IMAGES = ("sqlenv-env", "sqlenv-cpu")
BASE = "python:3.11-slim-bookworm"
TOKEN = secrets.token_hex(16)
GROUPS, GROUP = 4, 4
EPISODES = GROUPS * GROUP
FLAGS = (
    *("--eval_episodes", "16", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
    *("--num_generations", str(GROUP), "--learning_rate", "1e-3"),
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    runs = tmp_path_factory.mktemp("runs")
    for folder in (runs, *runs.parents):  # the containers' user has to get there
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    stack = Stack(runs / "stack", {"SQLENV_TOKEN": TOKEN})
    try:
        stack.run("build", "env", "inference")
        flags = " ".join(("--max_steps", "3", *FLAGS))
        stack.run("up", "--detach", "--scale", "env=3", RUN="first", TRAIN_FLAGS=flags)
        yield stack
    finally:
        stack.close()


def test_a_run_completes_and_leaves_its_report(stack: Stack) -> None:
    assert exit_code(stack.container("trainer")) == 0, stack.logs()[-6000:]
    run = stack.runs / "first"
    assert "</html>" in (run / "report.html").read_text()
    assert {each.stem for each in (run / "evaluations").glob("*.json")} == {"random", "oracle", "before", "after"}
    assert (run / "report.html").stat().st_uid == USER


def test_the_weights_arrived_with_every_step(stack: Stack) -> None:
    """With this learning rate, a policy that is one step behind has ratios far from 1."""
    steps = [each for each in stack.steps("first") if "sampling/importance_sampling_ratio/min" in each]
    assert len(steps) == 3
    for step in steps:
        assert step["sampling/importance_sampling_ratio/min"] > 1 - 1e-3
        assert step["sampling/importance_sampling_ratio/max"] < 1 + 1e-3
    assert json.loads(page(stack.container("inference"), "/weight_info"))["weight_version"].endswith("/3")


def test_all_three_environment_servers_played(stack: Stack) -> None:
    servers = stack.containers("env")
    assert len(servers) == 3
    answers = [total(page(server, "/metrics", TOKEN), "sqlenv_steps_total", action="ANSWER") for server in servers]
    assert min(answers) > 0, answers


def test_a_killed_environment_server_costs_no_episode(stack: Stack) -> None:
    trainer = stack.train("second", "--max_steps", "6", *FLAGS)
    stack.until(lambda: len(stack.steps("second")) >= 1, "the first step")
    victim = stack.containers("env")[0]
    docker("kill", victim)
    assert len(stack.steps("second")) < 6, "it was killed too late to matter"
    assert exit_code(trainer) == 0, stack.logs()[-6000:]
    lines = [json.loads(line) for line in (stack.runs / "second" / "episodes.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in lines) == dict.fromkeys(range(1, 7), EPISODES)
    assert not [line for line in lines if line["outcome"] == "failed"]
    for step in range(1, 7):
        groups = Counter(line["question_id"] for line in lines if line["step"] == step)
        assert all(count % GROUP == 0 for count in groups.values()), groups
    docker("start", victim)


def test_two_inference_servers_share_the_work(stack: Stack) -> None:
    stack.run("up", "--detach", "--no-deps", "--scale", "inference=2", "inference")
    servers = stack.containers("inference")
    assert len(servers) == 2
    stack.until(lambda: all(health(server) == "healthy" for server in servers), "the second vLLM")
    before = [total(page(server, "/metrics"), "vllm:request_success_total") for server in servers]
    assert exit_code(stack.train("third", "--max_steps", "1", *FLAGS)) == 0, stack.logs()[-6000:]
    after = [total(page(server, "/metrics"), "vllm:request_success_total") for server in servers]
    assert all(later > earlier for earlier, later in zip(before, after, strict=True)), (before, after)


def test_every_service_stops_when_it_is_told_to(stack: Stack) -> None:
    trainer = stack.train("fourth", "--max_steps", "500", *FLAGS)
    stack.until(lambda: len(stack.steps("fourth")) >= 1, "the first step")
    env, inference = stack.containers("env")[0], stack.containers("inference")[0]
    docker("stop", env)  # with episodes on it
    assert state(env)["ExitCode"] == 0
    assert '"draining"' in docker("logs", env)
    done = len(stack.steps("fourth"))
    stack.until(lambda: len(stack.steps("fourth")) > done + 1, "the steps after that")
    docker("stop", trainer)
    assert state(trainer)["ExitCode"] == 75, "stopped in the middle"
    assert list((stack.runs / "fourth").glob("checkpoint-*"))
    assert "--resume_from_checkpoint" in docker("logs", trainer)
    docker("stop", inference)
    assert state(inference)["ExitCode"] == 0


def test_a_stopped_run_goes_on(stack: Stack) -> None:
    """On the servers that are left; and once it is finished, it is left alone."""
    done = len(stack.steps("fourth"))
    flags = ("--max_steps", str(done + 2), *FLAGS)
    assert exit_code(stack.train("fourth", *flags)) == 0, stack.logs()[-6000:]
    assert stack.steps("fourth")[-1]["step"] == done + 2
    assert (stack.runs / "fourth" / "report.html").exists()
    again = stack.train("fourth", *flags)
    assert exit_code(again) == 0
    assert "nothing to do" in docker("logs", again)


def test_the_weights_do_not_leave_their_network(stack: Stack) -> None:
    """A container on the network that leads out does not reach vLLM, whose endpoints change weights."""
    inference = stack.containers("inference")[1]
    inspected = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", inference))
    assert [name.rsplit("_", 1)[1] for name in inspected] == ["inside"]
    assert not docker("port", inference).strip()
    (name, network), *_ = inspected.items()
    program = f"import socket; socket.create_connection(('{network['IPAddress']}', 8000), timeout=3); print('reached')"
    probe = ("--entrypoint", "python", "sqlenv-env", "-c", program)
    assert "reached" in docker("run", "--rm", "--network", name, *probe)
    assert "reached" not in docker("run", "--rm", "--network", name.replace("_inside", "_outside"), *probe, check=False)


def test_nobody_is_root(stack: Stack) -> None:
    for image in IMAGES:
        assert docker("image", "inspect", "--format", "{{.Config.User}}", image).strip() == "1000:1000"
        assert docker("run", "--rm", "--entrypoint", "id", image, "-u").strip() == "1000"
    for service in ("env", "inference"):
        assert docker("exec", stack.containers(service)[-1], "id", "-u").strip() == str(USER)


@pytest.mark.parametrize("image", IMAGES)
def test_the_requirements_of_all_packages_are_met(image: str, stack: Stack) -> None:
    check = docker("run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-m", "pip", "check")
    assert "No broken requirements" in check


def test_the_environment_is_small(stack: Stack) -> None:
    base, env = sizes((BASE, IMAGES[0]))
    assert env - base < 250e6, f"{(env - base) / 1e6:.0f} MB"
    assert "torch" not in docker("run", "--rm", "--entrypoint", "pip", IMAGES[0], "list")


def test_a_published_environment_wants_a_token(stack: Stack) -> None:
    refused = stack.run("--profile", "env", "run", "--rm", "env-public", check=False, SQLENV_TOKEN="")
    assert refused.returncode == 2
    assert "Set SQLENV_TOKEN" in refused.stdout
    with reserved_ports() as (port,):
        stack.run("--profile", "env", "up", "--detach", "env-public", ENV_PORT=str(port))
    server = stack.container("env-public")
    stack.until(lambda: health(server) == "healthy", "the published server")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert b"sqlenv_steps" in reply.read()


def test_a_trainer_alone_plays_on_it(stack: Stack) -> None:
    """With Hugging Face `generate`; the token reaches it as a variable."""
    flags = " ".join(("--max_steps", "1", *FLAGS))
    remote = ("--profile", "trainer", "run", "--rm", "trainer-remote")
    done = stack.run(*remote, ENV_URL="ws://env-public:8000", RUN="remote", TRAIN_FLAGS=flags)
    assert (stack.runs / "remote" / "report.html").exists(), done.stdout[-4000:]
    answers = total(page(stack.container("env-public"), "/metrics", TOKEN), "sqlenv_steps_total", action="ANSWER")
    assert answers > 0


def test_a_trainer_outside_the_containers_uses_their_vllm(stack: Stack, tmp_path: Path) -> None:
    weights = Path(tempfile.mkdtemp(prefix="sqlenv-weights-", dir="/var/tmp"))
    weights.chmod(0o755)
    started = ("--profile", "inference", "up", "--detach", "inference-public")
    with reserved_ports() as (port,):
        stack.run(*started, INFERENCE_PORT=str(port), WEIGHTS_DIR=str(weights))
    server = stack.container("inference-public")
    stack.until(lambda: health(server) == "healthy", "the published vLLM")
    assert docker("port", server).strip() == f"8000/tcp -> 127.0.0.1:{port}"
    flags = ("--config", "configs/tiny.yaml", "--output_dir", str(tmp_path / "run"), "--max_steps", "2", *FLAGS)
    vllm = ("--use_vllm", "true", "--vllm_server_base_url", f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "sqlenv", "train", *flags, *vllm, "--weight_sync_dir", str(weights)]
    try:
        subprocess.run(command, cwd=ROOT, check=True)
    finally:
        shutil.rmtree(weights, ignore_errors=True)
    assert json.loads(page(server, "/weight_info"))["weight_version"].endswith("/2")


def test_the_token_is_nowhere_to_be_read(stack: Stack) -> None:
    assert TOKEN not in stack.logs()
    for path in stack.runs.rglob("*.json*"):
        assert TOKEN not in path.read_text()
    there = (ROOT / "env_server" / "sql" / "sandbox.py").read_bytes()[:60]
    for image in IMAGES:
        assert TOKEN not in docker("history", "--no-trunc", image)
        assert contains(image, [TOKEN.encode(), there]) == [False, True]


def health(container: str) -> str:
    """Return what a container's health check says."""
    found = state(container)["Health"]
    assert isinstance(found, dict)
    return str(found["Status"])


def test_nothing_is_left(stack: Stack) -> None:
    stack.close()
    assert not any(stack.containers(service) for service in SERVICES)
