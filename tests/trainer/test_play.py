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
from trainer.play import run

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
    assert out.splitlines()[-1] == "correct"
    assert "COUNT(*) FROM pets WHERE" not in out, "the gold is not shown"
    assert [f"[{left} left]" in out for left in (15, 14, 13, 12)] == [True, True, True, False]


def test_rewards_add_up(play: Play, capsys: Captured) -> None:
    play("SAMPLE pets", "SAMPLE pets", "ANSWER 3")
    out = capsys.readouterr().out
    assert "reward +0.00 (step_cost -0.02, success +0.02), so far +0.00" in out
    assert "reward -0.03 (step_cost -0.02, success +0.02, repeat -0.03), so far -0.03" in out
    assert out.rstrip().endswith("so far -0.05\nwrong")


def test_a_line_can_be_continued(play: Play, capsys: Captured) -> None:
    play("QUERY SELECT 40 + \\", "2 AS x", "ANSWER 2")
    assert "\n42\n" in capsys.readouterr().out


def test_an_empty_line_costs_nothing(play: Play, capsys: Captured) -> None:
    assert play("", "   ", "ANSWER 2") == 0
    assert "[14 left]" not in capsys.readouterr().out


@pytest.mark.parametrize("lines", [("quit",), ("EXIT",), ()], ids=["quit", "exit", "end of input"])
def test_leaving_early(play: Play, lines: tuple[str, ...]) -> None:
    assert play(*lines) == 1


def test_running_out_of_steps(play: Play, capsys: Captured) -> None:
    assert play(*["SAMPLE pets"] * 15) == 0
    assert capsys.readouterr().out.rstrip().endswith("out of budget")


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
        assert run(["--env", server.url, "--question_id", "cats", "--data", "spider:/no/such/folder"]) == 0
    out = capsys.readouterr().out
    assert "no such column: wings" in out
    assert out.splitlines()[-1] == "correct"


def test_a_server_that_is_not_there(pets: Dataset) -> None:
    with running_server(pets) as server:
        server.die()
        with pytest.raises(ConnectionLostError, match="Is it running"):
            run(["--env", server.url])
