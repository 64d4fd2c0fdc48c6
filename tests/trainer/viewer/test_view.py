"""`sqlenv view` says what is wrong before it serves anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

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
