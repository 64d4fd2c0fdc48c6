"""The lines that go on: what was given, for a shell, with one flag more and no token."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.next_command import NextCommand, split_flags, what_next

RESUME = ["--resume_from_checkpoint", "true"]


def lines(*words: str) -> tuple[list[str], list[str]]:
    after = NextCommand.of("sqlenv train", words)
    return shlex.split(after.resume_command), shlex.split(after.restart_command)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@given(st.text(min_size=1).filter(lambda word: not word.startswith("-")))
def test_a_shell_reads_what_was_given(value: str) -> None:
    words = ["--data", value]
    assert lines(*words) == (["sqlenv", "train", *words, *RESUME], ["sqlenv", "train", *words])


@given(st.lists(st.tuples(st.sampled_from(["beta", "seed", "data"]), st.lists(st.integers(-9, 9), max_size=3))))
def test_flags_are_split_word_by_word_and_the_last_counts(given_flags: list[tuple[str, list[int]]]) -> None:
    words = [word for name, values in given_flags for word in (f"--{name}", *map(str, values))]
    assert split_flags(words) == {name: [f"--{name}", *map(str, values)] for name, values in dict(given_flags).items()}


@pytest.mark.parametrize(
    "given", [["--resume_from_checkpoint", "runs/a/checkpoint-3"], ["--resume-from-checkpoint=true"], [RESUME[0]]]
)
def test_a_run_that_was_resumed_goes_on_from_its_newest_checkpoint(given: list[str]) -> None:
    go_on, again = lines("--config", "a.yaml", *given, "--seed", "1")
    assert go_on == ["sqlenv", "train", "--config", "a.yaml", "--seed", "1", *RESUME]
    assert again == ["sqlenv", "train", "--config", "a.yaml", *given, "--seed", "1"], "from where it was to"


@pytest.mark.parametrize("given", [["--env_token", "geheim"], ["--env-token=geheim"], ["--hub_token", "geheim"]])
def test_tokens_are_not_shown(given: list[str]) -> None:
    go_on, again = lines("--env", "ws://a:1", *given)
    assert "geheim" not in " ".join((*go_on, *again))
    assert again[-1] == "TOKEN"


def test_it_is_called_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/sqlenv/__main__.py", "warmup"])
    assert NextCommand.of("sqlenv warmup", []).restart_command == "python -m sqlenv warmup"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert NextCommand.of("sqlenv warmup", []).restart_command == "(under the same launcher) python -m sqlenv warmup"


@pytest.mark.parametrize(
    ("called", "path", "named"),
    [
        (".venv/bin/sqlenv", "", ".venv/bin/sqlenv"),
        ("/somewhere/else/sqlenv", "bin", "sqlenv"),
        ("/somewhere/sqlenv/__main__.py", "bin", "python -m sqlenv"),
        ("pytest", "", "sqlenv"),
    ],
)
def test_the_program_is_named_so_that_a_shell_finds_it(
    called: str, path: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sqlenv").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    monkeypatch.setattr("sys.argv", [called])
    assert NextCommand.of("sqlenv train", ["--seed", "1"]).restart_command == f"{named} train --seed 1"
    first, second = what_next(["view", "runs/my run"], ["chat", "x"]).splitlines()
    assert shlex.split(first) == ["next", *named.split(), "view", "runs/my run"]
    assert shlex.split(second) == [*named.split(), "chat", "x"]
