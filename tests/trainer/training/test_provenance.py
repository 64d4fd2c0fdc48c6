"""What a run says of its code and its machine."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from trainer.training.provenance import commit, provenance


def test_what_is_known_is_said() -> None:
    found = provenance()
    assert found["cores"] == os.cpu_count()
    assert found["memory_gib"] > 0
    assert found["processor"]
    assert abs(datetime.fromisoformat(found["started"]) - datetime.now(UTC)).total_seconds() < 3_600
    assert all(found.values())


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{git('rev-parse', 'HEAD')} with changes"


def test_a_checkout_that_git_cannot_read_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert commit(tmp_path) == ""
