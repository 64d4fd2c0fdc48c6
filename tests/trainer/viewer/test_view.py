"""`sqlenv view` says what is wrong before it serves anything."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from sqlenv.cli import main
from tests.trainer.viewer.runs import make_run
from trainer.viewer.view import HOST


def test_a_port_that_is_taken_is_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "first")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sqlenv view: port {port} is not available (")
    assert "--port 0" in error


def test_a_path_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"sqlenv view: there is no {tmp_path / 'none'}; give the folder of a run")


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine there")
def test_in_a_container_it_can_be_reached_from_outside_under_names_of_this_machine_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    command = [sys.executable, "-m", "sqlenv", "view", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as view:
        try:
            assert view.stdout is not None
            port = int(view.stdout.readline().split("http://127.0.0.1:")[1].split("/")[0])
            statuses = []
            for host in ("localhost", "evil.example"):
                connection = http.client.HTTPConnection("127.0.0.2", port, timeout=60)
                connection.request("GET", "/", headers={"Host": host})
                statuses.append(connection.getresponse().status)
                connection.close()
        finally:
            view.terminate()
    assert statuses == [200, 400]
