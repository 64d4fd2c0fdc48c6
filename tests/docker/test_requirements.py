"""What the images install is what pyproject.toml says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import ROOT

SCRIPT = ROOT / "docker" / "requirements.py"
PROJECT = """
[project]
name = "x"
dependencies = ["apsw>=3.50,<4", "rich>=14"]
[project.optional-dependencies]
serve = ["fastapi>=0.133"]
train = ["torch==2.13.0", "types-x; python_version > '3'"]
"""


def run(*arguments: str, script: Path = SCRIPT) -> list[str]:
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script beside a project file, as it is in an image's build."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return Path(shutil.copy(SCRIPT, tmp_path))


def test_the_extras_come_on_top(script: Path) -> None:
    assert run(script=script) == ["apsw>=3.50,<4", "rich>=14"]
    assert run("serve", script=script) == ["apsw>=3.50,<4", "rich>=14", "fastapi>=0.133"]


@pytest.mark.parametrize(
    ("name", "found"),
    [("torch", ["torch==2.13.0"]), ("types-x", ["types-x; python_version > '3'"]), ("rich", ["rich>=14"])],
)
def test_one_distribution_alone(script: Path, name: str, found: list[str]) -> None:
    assert run("train", "--only", name, script=script) == found


def test_an_extra_that_there_is_not_is_an_error(script: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run("trian", script=script)


def test_the_server_needs_no_torch() -> None:
    names = {re.split(r"[^\w.-]", each)[0] for each in run("serve")}
    assert {"apsw", "fastapi", "uvicorn"} <= names
    assert not names & {"torch", "transformers", "trl", "vllm"}
