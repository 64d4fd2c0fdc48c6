"""docs/extending.md, done as written: each section's changes on a copy of the code, then its scripts and commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from trainer.flags.configs import SQLEnvConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CODE = ("env_server", "inference", "sqlenv", "trainer", "configs")
SMALL = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1")
"""A page's training commands play this much, instead of what their config says."""


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def apply(diff: str, tree: Path) -> None:
    """Make the change that a block shows; its place must be there, once."""
    head, _, body = diff.partition("\n")
    file = tree / head.removeprefix("--- ")
    lines = body.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text(encoding="utf-8")
    assert before.strip(), f"{head}: the change says no place"
    assert text.count(before) == 1, f"{head}: the page's lines are in it {text.count(before)} times:\n{before}"
    file.write_text(text.replace(before, after), encoding="utf-8")


class Copy:
    """A copy of the code, changed as a section says."""

    def __init__(self, title: str, tree: Path, cache: Path) -> None:
        self._text = section(title)
        self._tree = tree
        self._environment = {**os.environ, "PYTHONPATH": str(tree), CACHE_VARIABLE: str(cache)}
        for name in CODE:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for diff in blocks(self._text, "diff"):
            apply(diff, tree)
        for name, code in re.findall(r'^```python title="(.*?)"\n(.*?)^```$', self._text, re.MULTILINE | re.DOTALL):
            (tree / name).write_text(code, encoding="utf-8")

    def run_scripts(self) -> None:
        """Run the section's scripts. Warnings are errors."""
        for script in blocks(self._text, "python"):
            (self._tree / "script.py").write_text(script, encoding="utf-8")
            self._run("-W", "error", "script.py")

    def train(self) -> dict[str, float]:
        """Run the section's command; return what it measured in its step."""
        (command,) = "".join(blocks(self._text, "sh")).splitlines()
        program, *arguments = command.split()
        assert (program, arguments[0]) == ("sqlenv", "train")
        self._run("-m", "sqlenv", *arguments, *SMALL)
        (folder,) = (self._tree / "runs").iterdir()
        (row,) = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return dict(json.loads(row))

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._tree,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]


def titles() -> Sequence[str]:
    return re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("title", titles())
def test_a_section_works_as_it_is_written(title: str, tmp_path: Path, generated_cache: Path) -> None:
    copy = Copy(title, tmp_path, generated_cache)
    copy.run_scripts()
    if title == "A reward function":
        assert 0 <= copy.train()["rewards/reward_look_first/mean"] <= 1
    elif title == "A loss":
        assert 0 <= copy.train()["better_share"] < 1


def test_the_losses_are_those_that_are_taken() -> None:
    listed = re.search(r"`--loss_type` takes (.*?), and", section("A loss"), re.DOTALL)
    assert listed is not None
    assert list(re.findall(r"`(\w+)`", listed[1])) == SQLEnvConfig.__dataclass_fields__["loss_type"].metadata["choices"]
