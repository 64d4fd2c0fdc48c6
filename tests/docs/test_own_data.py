"""docs/own-data.md, the tutorial: its files are written and its commands run, one after the other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sqlenv import cli
from tests.integration.training import surroundings_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w./-]+)`[^\n]*\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line)[1:] for kind, block in FENCED if kind == "sh" for line in block.splitlines()]
SHOWN = [block for kind, block in FENCED if not kind]


def test_from_two_csv_files_to_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("configs", "trainer"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    said, status = [], []
    with surroundings_in(tmp_path / "cache"):
        for command in COMMANDS:
            status.append(cli.main(command))
            said.append(capsys.readouterr().out)
    assert [" ".join(command[:2]) for command in COMMANDS] == [
        "data doctor",
        "data doctor",
        "data suggest",
        "data doctor",
        "warmup --model_name_or_path",
        "train --config",
        "chat runs/my-shop",
    ]
    assert status == [1, 1, 0, 0, 0, 0, 0]
    found, fixed, proposed, checked, _, _, answered = said
    kinds = {"number_as_text", "mixed_dates", "surrounding_whitespace", "inconsistent_values", "undeclared_foreign_key"}
    assert kinds <= set(re.findall(r"^(?:error|warning) (\w+)", found, re.M))
    assert SHOWN[0] in fixed
    assert "60 added to fixed/my-shop/questions-suggested.jsonl." in proposed
    assert "80 questions, answered with a value: 80 usable" in checked
    assert Path("runs/my-shop/report.html").is_file()
    assert SHOWN[1] in answered
