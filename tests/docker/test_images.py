"""What the Dockerfiles say, read as text: needs no Docker. `test_stack` looks into the images themselves."""

from __future__ import annotations

import re

from benchmarks.server_process import ROOT


def last_stage(name: str) -> str:
    """What an image is made of, without what only builds it; a command on one line."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    return re.sub(r"\\\n\s*", " ", re.split(r"^FROM ", text, flags=re.MULTILINE)[-1])


def test_an_image_that_runs_triton_has_a_compiler_and_the_headers() -> None:
    """On a GPU, the first training step and vLLM's start compile C against Python's headers."""
    assert re.search(r"apt-get install [^;&]*\bgcc\b[^;&]*\blibc6-dev\b", last_stage("sqlenv"))
    (command,) = (line for line in last_stage("sqlenv").splitlines() if "<Python.h>" in line)
    assert "| cc -x c -fsyntax-only" in command
    assert "gcc" not in last_stage("env")
