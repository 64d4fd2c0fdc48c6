"""`sqlenv play`: what a person at the keyboard sees, and how an episode is left."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from env_server.client.errors import ConnectionLostError
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError, UnknownQuestionError
from tests.env_server.serving import running_server
from tests.terminal import BACKSPACE, CTRL_C, CTRL_D, ENTER, LEFT, PASTE, PASTED, TAB, UP, Terminal
from trainer.cli.play import run

Play = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def play(tmp_path: Path, pets_file: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Play on a Spider folder of two questions, with the given lines typed."""
    file = tmp_path / "database" / "pets" / "pets.sqlite"
    file.parent.mkdir(parents=True)
    shutil.copy(pets_file, file)
    golds = {
        "How many cats?": "SELECT COUNT(*) FROM pets WHERE species = 'cat'",
        "How many?": "SELECT COUNT(*) FROM pets",
    }
    entries = [{"db_id": "pets", "question": text, "query": sql} for text, sql in golds.items()]
    (tmp_path / "train_spider.json").write_text(json.dumps(entries), encoding="utf-8")

    def play(*lines: str, flags: tuple[str, ...] = ("--question_id", "train_spider-0000")) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run(["--data", f"spider:{tmp_path}", *flags])

    return play


def test_an_episode_to_its_end(play: Play, capsys: Captured) -> None:
    assert play("DESCRIBE pets", "QUERY SELECT wings FROM pets", "answer 2", "ANSWER never read") == 0
    out = capsys.readouterr().out
    assert "How many cats?" in out
    assert "Tables: " in out
    assert "weight REAL" in out
    assert "no such column: wings" in out
    assert "terminal +1.00" in out
    assert out.splitlines()[-3:] == [
        "correct",
        "gold query  SELECT COUNT(*) FROM pets WHERE species = 'cat'",
        "gold answer  2",
    ]
    assert out.count("COUNT(*) FROM pets WHERE") == 1, "the gold is shown at the end alone"
    assert [f"[{left} left]" in out for left in (15, 14, 13, 12)] == [True, True, True, False]


def test_rewards_add_up(play: Play, capsys: Captured) -> None:
    play("SAMPLE pets", "SAMPLE pets", "ANSWER 3")
    out = capsys.readouterr().out
    assert "reward +0.00 (step cost -0.02, success +0.02), so far +0.00" in out
    assert "reward -0.03 (step cost -0.02, success +0.02, repeat -0.03), so far -0.03" in out
    assert "so far -0.05\nwrong\n" in out


def test_what_the_clip_takes_is_shown(play: Play, capsys: Captured) -> None:
    play("QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'", "ANSWER 2")
    said = " ".join(capsys.readouterr().out.split())
    assert "reward +0.15 (step cost -0.02, success +0.02, new information +0.01, progress +0.15, clipped -0.01)" in said


def test_an_empty_line_costs_nothing(play: Play, capsys: Captured) -> None:
    assert play("", "   ", "ANSWER 2") == 0
    assert "[14 left]" not in capsys.readouterr().out


@pytest.mark.parametrize("lines", [("quit",), ("EXIT",), ()], ids=["quit", "exit", "end of input"])
def test_leaving_early_says_goodbye_and_the_gold(play: Play, capsys: Captured, lines: tuple[str, ...]) -> None:
    assert play(*lines) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["gold answer  2", "Goodbye."]


def test_asking_about_the_game_costs_nothing(play: Play, capsys: Captured) -> None:
    assert play("help", "DESCRIBE pets", "Tables", "ANSWER 2") == 0
    out = capsys.readouterr().out
    assert out.count("ANSWER value") == 2, "at the start, and when asked"
    assert out.count("weight REAL") == 2, "by DESCRIBE, and by what tables has collected"
    assert [f"[{left} left]" in out for left in (15, 14, 13)] == [True, True, False]


def test_running_out_of_steps(play: Play, capsys: Captured) -> None:
    assert play(*["SAMPLE pets"] * 15) == 0
    assert "\nout of budget\ngold query  SELECT" in capsys.readouterr().out


def test_markup_in_data_is_shown_as_it_is(play: Play, capsys: Captured) -> None:
    play("QUERY SELECT '[red]x[/red] [/nope]' AS cell", "ANSWER [bold]2", "quit")
    assert "[red]x[/red] [/nope]" in capsys.readouterr().out


def test_a_seed_draws_the_same_question(play: Play, capsys: Captured) -> None:
    drawn = []
    for seed in (0, 0, 1, 2, 3, 4, 5):
        play("quit", flags=("--seed", str(seed)))
        drawn.append("How many cats?" in capsys.readouterr().out)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 2


def test_the_answer_may_be_a_query(play: Play) -> None:
    flags = ("--question_id", "train_spider-0000", "--answer_mode", "sql")
    assert play("ANSWER SELECT 2", flags=flags) == 0


def test_an_unknown_question_and_an_empty_split(play: Play) -> None:
    with pytest.raises(UnknownQuestionError, match="no question 'x'"):
        play("quit", flags=("--question_id", "x"))
    with pytest.raises(SQLEnvError, match="no usable question in split 'train'"):
        play("quit", flags=("--split", "train"))


def test_on_a_server_no_data_set_is_needed_here(
    pets: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("QUERY SELECT wings FROM pets\nANSWER 2\n"))
    monkeypatch.setenv("SQLENV_TOKEN", "geheim")
    with running_server(pets, token="geheim") as server:
        assert run(["--env", server.url, "--question_id", "cats"]) == 0
    out = capsys.readouterr().out
    assert "no such column: wings" in out
    assert out.splitlines()[-2:] == ["correct", "The gold query and answer stay on the server."]


@pytest.mark.parametrize("flags", [("--data", "synthetic"), ("--answer_mode", "value")], ids=lambda flags: flags[0])
def test_what_a_server_has_of_its_own_is_no_flag_beside_it(flags: tuple[str, ...], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        run(["--env", "ws://localhost:1", *flags])
    assert end.value.code == 2
    assert f"{flags[0]} and --env exclude each other: the server at ws://localhost:1 has its own." in (
        capsys.readouterr().err
    )


@pytest.mark.timeout(60)  # what a terminal does not show is waited for
def test_keys_in_a_terminal(play: Play, tmp_path: Path) -> None:
    flags = ("--data", f"spider:{tmp_path}", "--question_id", "train_spider-0000")
    with Terminal("play", *flags, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.read_until("[15 left] >")
        terminal.press(f"QUERY SELECT 41{LEFT}2{ENTER}")  # the cursor goes back by one
        terminal.read_until("421")
        terminal.read_until("[14 left] >")
        terminal.press(f"{UP}{BACKSPACE}{ENTER}")  # the entry before, changed
        terminal.read_until("\n42\n")
        terminal.read_until("[13 left] >")
        terminal.press(f"{PASTE}QUERY SELECT\n  8 AS n\nFROM pets LIMIT 1{PASTED}{ENTER}")
        terminal.read_until("\n8\n")
        terminal.read_until("[12 left] >")
        terminal.press(f"desc{TAB} pe{TAB}{ENTER}")
        terminal.read_until("weight REAL")
        terminal.read_until("[11 left] >")
        terminal.press(CTRL_D)
        assert terminal.read_to_end().splitlines()[-1] == "Goodbye."
        assert terminal.status() == 1
    with Terminal("play", *flags, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.read_until("[15 left] >")
        terminal.press(f"{UP}{UP}{ENTER}")
        terminal.read_until("\n8\n")
        terminal.read_until("[14 left] >")
        terminal.press(CTRL_C)
        terminal.read_to_end()
        assert terminal.status() == 1


def test_a_server_that_is_not_there(pets: Dataset) -> None:
    with running_server(pets) as server:
        server.die()
        with pytest.raises(ConnectionLostError, match="Is it running"):
            run(["--env", server.url])
