"""What the Dockerfiles say, read as text: needs no Docker. `test_stack` looks into the images themselves."""

from __future__ import annotations

import re

import pytest

from benchmarks.server_process import ROOT


def last_stage(name: str) -> str:
    """What an image is made of, without what only builds it; a command on one line."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    return re.sub(r"\\\n\s*", " ", re.split(r"^FROM ", text, flags=re.MULTILINE)[-1])


@pytest.mark.parametrize("name", ["trainer", "inference"])
def test_an_image_that_runs_triton_has_a_compiler(name: str) -> None:
    """On a GPU, the first training step and vLLM's start compile C against Python's headers."""
    assert re.search(r"apt-get install [^;&]*\bgcc\b[^;&]*\blibc6-dev\b", last_stage(name))


def test_the_trainers_headers_are_looked_for_when_it_is_built() -> None:
    (command,) = (line for line in last_stage("trainer").splitlines() if "<Python.h>" in line)
    assert "| cc -x c -fsyntax-only" in command


def test_the_environment_has_none() -> None:
    assert "gcc" not in last_stage("env")
