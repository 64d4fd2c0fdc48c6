"""`sqlenv chat`, with the tiny policy on files of one's own: what a terminal shows, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from env_server.errors import SQLEnvError
from tests.terminal import CTRL_D, ENTER, Terminal
from trainer.cli.chat import run
from trainer.tiny import BASE_CHECKPOINT as BASE

Captured = pytest.CaptureFixture[str]
CSV = "pet_id,name,species\n1,Rex,dog\n2,Tom,cat\n3,Kit,cat\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "pets.csv"
    file.write_text(CSV, encoding="utf-8")
    return file


def test_one_question_about_a_table(table: Path, capsys: Captured) -> None:
    status = run([str(BASE), "--data", str(table), "--question", "How many pets are there?"])
    out = capsys.readouterr().out
    assert " 1 " in out
    assert ("the answer: " in out) == (status == 0)
    assert " token" in out.splitlines()[-2]
    assert "correct" not in out
    assert "wrong" not in out


def test_samples_vote_and_vote_alike_when_they_are_asked_again(table: Path, capsys: Captured) -> None:
    said = []
    for _ in range(2):
        run([str(BASE), "--data", str(table), "--question", "How many pets are there?", "--samples", "9"])
        said.append(capsys.readouterr().out.splitlines()[:-2])  # without the time
    assert said[0] == said[1]
    found = re.fullmatch(r"(\d) of 9 samples gave this answer", said[0][-1])
    assert found is not None
    assert 2 <= int(found[1]) <= 9
    assert sum(line.startswith(" 1 ") for line in said[0]) == 1, "one sample is shown"


def test_two_policies_one_after_the_other(table: Path, tmp_path: Path, capsys: Captured) -> None:
    copy = tmp_path / "after"
    shutil.copytree(BASE, copy)
    (copy / "sqlenv.json").write_text(json.dumps({"step_budget": 1}), encoding="utf-8")
    run([str(BASE), str(copy), "--data", str(table), "--question", "How many pets are there?"])
    before, after = re.split(r"^\S+ ─+$", capsys.readouterr().out, flags=re.M)[1:]
    assert " token" in before
    assert "1 step," in after, "what was saved with a policy decides"


@pytest.mark.timeout(120)  # what a terminal does not show is waited for
def test_a_conversation_in_a_terminal(table: Path, tmp_path: Path) -> None:
    with Terminal("chat", str(BASE), "--data", str(table), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.read_until("pets: pets")
        for _ in range(2):
            terminal.read_until("question>")
            terminal.press(f"How many pets are there?{ENTER}")
            terminal.read_until(" 1 ")
            terminal.read_until(" token")
        terminal.read_until("question>")
        terminal.press(f"tables{ENTER}")
        terminal.read_until("pets: pets")
        terminal.read_until("question>")
        terminal.press(CTRL_D)
        assert terminal.read_to_end().splitlines()[-1] == "Goodbye."
        assert terminal.status() == 0


@pytest.mark.parametrize(
    ("policy", "data", "words"),
    [
        ("FOLDER", "pets.csv", "is not a checkpoint"),
        ("no/such/run", "pets.csv", "no folder here"),
        ("BASE", "FOLDER/x.csv", "x.csv does not exist"),
        ("BASE", "FOLDER/a.txt", "is no table and no database"),
        ("BASE", "FOLDER", "there are 2 databases; say which one"),
        ("BASE", "pets.csv --database x", "there is no database 'x'"),
    ],
    ids=["no model", "no folder", "no file", "no data", "several databases", "unknown database"],
)
def test_what_cannot_be_played_is_said(policy: str, data: str, words: str, table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "pets.csv").write_text(CSV, encoding="utf-8")
    (folder / "a.txt").write_text("a", encoding="utf-8")
    places = {"FOLDER": folder, "BASE": BASE, "pets.csv": table}
    arguments = [policy, "--data", *data.split()]
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    with pytest.raises(SQLEnvError, match=words):
        run(arguments)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("a", "b", "c"), "3 policies were given"),
        (("a", "--few_shot", "-1"), "--few_shot must be a whole number from 0 on, not '-1'"),
        (("a", "--question", " "), "--question is empty"),
        (("a", "b", "--use_vllm"), "--use_vllm asks one policy"),
        (("a", "--port", "1"), "--port needs --web"),
        (("a", "--host", "::"), "--host needs --web"),
        (("a", "--web", "--samples", "3"), "--samples is for the terminal"),
        (("a", "--samples", "0"), "--samples must be a whole number from 1 on"),
        (("a", "--web", "--question", "?"), "--question is for the terminal; with --web it is chosen in the page"),
        (("a", "--web", "--database", "x"), "--database is for the terminal"),
        (("a", "--vllm_server_base_url", "http://x"), "--vllm_server_base_url needs --use_vllm"),
    ],
)
def test_flags_that_do_not_go_together(flags: tuple[str, ...], words: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        run([*flags, "--data", "x.csv"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_worked_episodes_whose_data_is_gone(table: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(BASE, policy)
    (policy / "sqlenv.json").write_text(json.dumps({"few_shot": 2, "data": "spider:/no/such"}), encoding="utf-8")
    with pytest.raises(SQLEnvError, match="--few_shot 0 plays it without"):
        run([str(policy), "--data", str(table), "--question", "How many?"])
