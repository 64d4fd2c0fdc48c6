"""`sqlenv inference` over the real vLLM: replicas that serve, and an end that leaves no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import IO, Any

from benchmarks.real_model_phases import with_parent
from benchmarks.server_process import ROOT, SQLENV, reserved_ports
from tests.integration.service import until
from tests.integration.vllm_server import PYTHON, START_S, group_of, skip_without_vllm

BASE = ROOT / "trainer" / "tiny" / "base"
REPLY_S = 120.0


def complete(url: str) -> dict[str, Any]:
    """Ask for a seeded completion, and return the reply."""
    asked = {"prompt": [5, 6, 7, 8], "max_tokens": 16, "temperature": 1.0, "seed": 1, "return_token_ids": True}
    body, headers = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def children_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def engine_of(leader: int) -> int:
    """Return the process that computes."""
    (found,) = (pid for pid in group_of(leader) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text())
    return found


def launch(folder: Path, errors: IO[bytes], port: int, *flags: str) -> subprocess.Popen[str]:
    """Start `sqlenv inference`, to be ended by the caller."""
    command = [*SQLENV, "inference", "--model", str(BASE), "--python", str(PYTHON)]
    command += ["--port", str(port), "--log_dir", str(folder), "--cpu_kv_cache_gb", "0.25"]
    command += ["--startup_timeout_s", str(START_S), *flags]
    ends = with_parent(signal.SIGTERM)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=ends)


def test_two_replicas_serve_and_end_together(tmp_path: Path) -> None:
    skip_without_vllm()
    errors = tmp_path / "stderr"
    with (
        reserved_ports(2) as ports,
        errors.open("wb") as output,
        launch(tmp_path, output, ports[0], "--replicas", "2", "--no-restart") as launcher,
    ):
        assert launcher.stdout is not None
        urls = launcher.stdout.readline().strip().split(",")
        assert urls == [f"http://127.0.0.1:{port}" for port in ports], errors.read_text()
        servers = children_of(launcher.pid)
        assert all(len(group_of(server)) > 1 for server in servers)

        replies = [complete(url) for url in urls]
        tokens, again = (reply["choices"][0]["token_ids"] for reply in replies)
        assert tokens == again
        assert len({reply["system_fingerprint"] for reply in replies}) == 2

        os.kill(engine_of(servers[0]), signal.SIGKILL)
        status = launcher.wait(REPLY_S)
    assert status != 0
    assert "stopping" in errors.read_text()
    until(lambda: not any(group_of(server) for server in servers))


def test_a_killed_launcher_leaves_no_server(tmp_path: Path) -> None:
    skip_without_vllm()
    errors = tmp_path / "stderr"
    with (
        reserved_ports() as (port,),
        errors.open("wb") as output,
        launch(tmp_path, output, port) as launcher,
    ):
        assert launcher.stdout is not None
        assert launcher.stdout.readline(), errors.read_text()
        (server,) = children_of(launcher.pid)
        launcher.kill()
    until(lambda: not group_of(server))
