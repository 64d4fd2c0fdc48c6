"""A process of a fork server is what its command line would have started, but for what is imported already."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.fork_server import ForkedProcess, ForkServer

LONGEST_S = 60.0
PRELOADED = "from pathlib import Path\nPath('imports').open('a').write('imported ')\n"
TELL = """
import json, os, sys
import preloaded
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "variable": os.environ.get("SQLENV_FORKED"), "path": sys.path[:2],
    "main": sys.modules["__main__"].__dict__ is globals(), "leads": os.getsid(0) == os.getpid(),
}))
print("told", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "preloaded.py").write_text(PRELOADED)
    (folder / "tell.py").write_text(TELL)
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        found = ForkServer(sys.executable, ["preloaded"], {**os.environ, "PYTHONPATH": str(home)}, home / "log")
    with closing(found):
        yield found


def surroundings(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(home), "SQLENV_FORKED": "yes"}


@pytest.mark.parametrize("how", ["-m", "-c", "file"])
def test_it_is_what_the_command_line_starts(how: str, server: ForkServer, home: Path, tmp_path: Path) -> None:
    arguments = {"-m": ["-m", "tell"], "-c": ["-c", TELL], "file": [str(home / "tell.py")]}[how]
    command, environment = [sys.executable, *arguments, "--flag", "a b"], surroundings(home)
    forked = server.run(command, environment=environment, folder=tmp_path, timeout=LONGEST_S)
    there = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stderr) == (there.returncode, there.stderr) == (3, "told\n")
    assert json.loads(forked.stdout) == json.loads(there.stdout)
    assert (home / "imports").read_text() == "imported ", "once for all of them"


def test_an_error_is_a_traceback_and_status_1(server: ForkServer) -> None:
    failed = server.run([sys.executable, "-c", "raise ValueError('no')"], timeout=LONGEST_S)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: no\n")


@pytest.fixture
def waiting(server: ForkServer, tmp_path: Path) -> Iterator[ForkedProcess]:
    with (tmp_path / "output").open("wb") as output:
        process = server.start([sys.executable, "-c", "import signal\nsignal.pause()"], output=output, new_session=True)
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_it_is_signalled_and_waited_for(waiting: ForkedProcess) -> None:
    assert os.getsid(waiting.pid) == waiting.pid
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.0)
    os.killpg(waiting.pid, signal.SIGKILL)
    assert waiting.wait(LONGEST_S) == waiting.poll() == waiting.wait() == -signal.SIGKILL
    waiting.terminate()


def test_one_that_takes_too_long_is_ended(server: ForkServer) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        server.run([sys.executable, "-c", "import signal\nsignal.pause()"], timeout=0.0)


def test_processes_end_with_the_server(tmp_path: Path) -> None:
    server = ForkServer(sys.executable, [], os.environ, tmp_path / "log")
    with (tmp_path / "output").open("wb") as output:
        process = server.start([sys.executable, "-c", "import signal\nsignal.pause()"], output=output)
    ended = select.poll()
    ended.register(process.handle, select.POLLIN)
    server.close()
    assert ended.poll(LONGEST_S * 1000)


SERVES = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine has its own mind
engine = subprocess.Popen(["sleep", "1000"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {engine.pid}")
os.kill(os.getpid(), signal.SIGSTOP)
"""
TEST = """
import os, signal, sys
from contextlib import closing
import pytest
from tests.fork_server import ForkServer

@pytest.fixture
def forks(tmp_path):
    with closing(ForkServer(sys.executable, [], os.environ, tmp_path / "log")) as server:
        yield server

def test_that_serves(forks, tmp_path):
    with (tmp_path / "output").open("wb") as output:
        forks.start([sys.executable, "-c", SERVES, PIPE], output=output, new_session=True)
    if not os.fork():  # holds all that is open, for longer than the test takes
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(150)
        signal.pause()
    signal.pause()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_sigterm_to_a_test_run_leaves_no_server_behind(workers: str, tmp_path: Path) -> None:
    """Not even one that is frozen, nor what it has started; nor where the test runs in a worker of xdist."""
    pipe, file = tmp_path / "pipe", tmp_path / "test_inner.py"
    os.mkfifo(pipe)
    file.write_text(f"SERVES, PIPE = {SERVES!r}, {str(pipe)!r}\n{TEST}")
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    run = subprocess.Popen([*command, "-p", "no:cacheprovider", str(file)], cwd=tmp_path, env=environment)
    started = [os.pidfd_open(int(pid)) for pid in pipe.read_text().split()]
    run.terminate()
    run.wait()
    assert len(started) == 2
    for process in started:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        assert ended.poll(LONGEST_S * 1000)
        os.close(process)


def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    with (
        closing(ForkServer(sys.executable, ["no_such_module"], os.environ, tmp_path / "log")) as server,
        pytest.raises(RuntimeError, match="No module named 'no_such_module'"),
    ):
        server.run([sys.executable, "-c", ""], timeout=LONGEST_S)
