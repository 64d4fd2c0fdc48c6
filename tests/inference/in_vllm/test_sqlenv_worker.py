"""What vLLM's worker does with an update that begins and does not end; the process it may end is another one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from inference.launch.process import EXTENSION

WORKER = """
import sys, threading
from sqlenv_worker import SQLEnvWorker

class Engine:
    model_update_group = None

class Worker(SQLEnvWorker):
    weight_transfer_engine = Engine()
    def sqlenv_facts(self): return {}
    def init_weight_transfer_engine(self, init_info):
        if init_info["hangs"]: threading.Event().wait()
    def start_weight_update(self): pass
    def update_weights(self, update_info):
        if update_info["hangs"]: threading.Event().wait()
        if update_info["fails"]: raise RuntimeError("no memory")
    def finish_weight_update(self): pass

worker = Worker()
deadline = 0.05
receive = dict(hangs=False, fails=False)
def expect(run="run", deadline_s=60.0): worker.sqlenv_expect_update(run, deadline_s)
def late():
    update = worker._sqlenv_update
    update._timer.join()
"""

STUCK_OR_BROKEN = {
    "waits for a trainer that never comes": "expect(deadline_s=deadline); worker.sqlenv_join_group(dict(hangs=True))",
    "waits for tensors that never come": (
        "expect(deadline_s=deadline); worker.sqlenv_start_update();worker.sqlenv_receive_weights(dict(hangs=True))"
    ),
    "is forgotten between two calls": (
        "expect(deadline_s=deadline); worker.sqlenv_start_update(); threading.Event().wait()"
    ),
    "is given up after a part": (
        "expect(); worker.sqlenv_start_update(); worker.sqlenv_receive_weights(receive);"
        "worker.sqlenv_give_up_update('run')"
    ),
}
WHOLE = {
    "ends well": (
        "expect(); worker.sqlenv_join_group(dict(hangs=False)); worker.sqlenv_start_update();"
        "worker.sqlenv_receive_weights(receive); worker.sqlenv_finish_update(); worker.sqlenv_give_up_update('run')"
    ),
    "is forgotten before it began": "expect(deadline_s=deadline); late(); expect('another')",
    "is given up before it began": "expect(); worker.sqlenv_give_up_update('run'); expect('another')",
    "is given up by another run": (
        "expect(); worker.sqlenv_start_update(); worker.sqlenv_give_up_update('another');worker.sqlenv_finish_update()"
    ),
}
REFUSED = {
    "was not announced": "worker.sqlenv_start_update()",
    "begins after its deadline": "expect(deadline_s=deadline); late(); worker.sqlenv_start_update()",
    "begins in the middle of another one": "expect(); worker.sqlenv_start_update(); expect('another')",
}


def run(script: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run a worker that leads a session, as a server does; `prefix` is a command that runs it otherwise."""
    return subprocess.run(
        [*prefix, sys.executable, "-c", f"{WORKER}\n{script}\nprint('it lives')"],
        env={"PYTHONPATH": str(EXTENSION)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


@pytest.mark.parametrize("update", STUCK_OR_BROKEN)
def test_a_worker_with_half_of_an_update_ends(update: str) -> None:
    done = run(STUCK_OR_BROKEN[update])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "rather than serve half of it" in done.stderr


def test_a_server_that_shares_its_session_is_ended_alone() -> None:
    of_its_own = "import subprocess, sys; sys.exit(subprocess.Popen(sys.argv[1:], process_group=0).wait())"
    done = run(STUCK_OR_BROKEN["is given up after a part"], sys.executable, "-c", of_its_own)
    assert done.returncode == 70, "of the worker, told by what had started it"


@pytest.mark.parametrize("update", WHOLE)
def test_a_worker_with_whole_weights_goes_on(update: str) -> None:
    done = run(WHOLE[update])
    assert (done.returncode, done.stdout) == (0, "it lives\n"), done.stderr


@pytest.mark.parametrize("update", REFUSED)
def test_no_update_begins_that_nobody_watches(update: str) -> None:
    done = run(REFUSED[update])
    assert "RuntimeError" in done.stderr
    assert "it lives" not in done.stdout


def test_the_group_of_a_run_that_is_gone_is_left() -> None:
    script = """
class Group:
    destroyed = 0
    def destroy(self): Group.destroyed += 1
worker.weight_transfer_engine.model_update_group = Group()
expect("first"); expect("first"); print(Group.destroyed, end=" ")
worker.weight_transfer_engine.model_update_group = Group()
expect("first"); print(Group.destroyed, end=" ")
expect("second"); print(Group.destroyed, worker.weight_transfer_engine.model_update_group, end=" ")
"""
    assert run(script).stdout == "1 1 2 None it lives\n"
