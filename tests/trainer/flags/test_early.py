"""What is answered before torch is there: help, unknown flags and keys, files and folders that do not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_dependencies import TRAINING, loaded_by
from trainer.config import ConfigError
from trainer.flags.early import Command, look
from trainer.tiny import BASE_CHECKPOINT

TINY = ["--model_name_or_path", str(BASE_CHECKPOINT)]
ROOT = Path(__file__).parents[3]
LIGHT = """
import contextlib, io, sys
from sqlenv import cli
unheard = io.StringIO()
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
    cli.main(sys.argv[1:])
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "words",
    [
        ["--learning_rate", "1e-5", "--env", "ws://a:1", "--no_gradient_checkpointing", "--dry_run"],
        ["--learning-rate=1e-5", "--env-server=local", "--max_step", "3"],
        ["--learning_rate", "-1", "--reward_weights", "1", "-1", "0", "0"],
    ],
    ids=" ".join,
)
def test_words_that_a_parser_takes_pass_as_they_are(words: list[str]) -> None:
    assert look(Command.TRAIN, TINY + words) == TINY + words


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (Command.TRAIN, ["--lerning_rate", "1"], "there is no flag --lerning_rate; did you mean --learning_rate?"),
        (Command.TRAIN, ["--data=a", "--splitt=b"], "there is no flag --splitt"),
        (Command.TRAIN, ["--max_episodes", "1"], "there is no flag --max_episodes"),
        (Command.WARMUP, ["--max-episode-s", "1"], "there is no flag --max_episode_s; did you mean --max_episodes?"),
        (Command.WARMUP, ["--eval_episodes", "1"], "there is no flag --eval_episodes"),
    ],
)
def test_a_flag_that_nothing_knows_is_refused(command: Command, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        look(command, TINY + words)
    assert str(refused.value).startswith(said)


def test_a_key_that_nothing_knows_is_refused(config: Path) -> None:
    config.write_text("learning_rte: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        look(Command.TRAIN, [*TINY, "--config", str(config)])
    assert str(refused.value) == f"there is no key of {config}: learning_rte; did you mean learning_rate?"


def test_of_stages_the_flags_of_both_kinds_pass(config: Path) -> None:
    config.write_text("stages: [{kind: warmup}, {kind: grpo}]\nmax_episodes: 4\n", encoding="utf-8")
    words = ["--config", str(config), "--max_episodes", "3", "--eval_episodes", "0"]
    assert look(Command.TRAIN, words) == words


def test_a_config_that_is_not_there_is_refused_with_one_that_is_near(config: Path) -> None:
    config.touch()
    wrong = config.with_name("rum.yaml")
    with pytest.raises(ConfigError) as refused:
        look(Command.TRAIN, [*TINY, "--config", str(wrong)])
    assert str(refused.value) == f"--config {wrong}: there is no such file; did you mean {config}?"


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_policy_that_is_not_there_is_refused(by_flag: bool, config: Path) -> None:
    missing = str(config.with_name("nothing"))
    config.write_text(f"model_name_or_path: {missing}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"the policy '{missing}' is no folder here"):
        look(Command.TRAIN, ["--model_name_or_path", missing] if by_flag else ["--config", str(config)])


def test_who_names_nothing_is_told_what_runs_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="which takes two CPU cores and no GPU") as refused:
        look(Command.TRAIN, ["--learning_rate", "1e-5"])
    assert (ROOT / str(refused.value).partition("--config ")[2].partition(",")[0]).is_file()
    assert look(Command.WARMUP, ["--max_steps", "1"]) == ["--max_steps", "1"]


def test_ranks_leave_refusals_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert look(Command.TRAIN, ["--nonsense"]) == ["--nonsense"]


def test_help_on_all_flags_is_trls() -> None:
    assert look(Command.TRAIN, ["--learning_rate", "1", "--help-all"]) == ["--help"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--help"],
        ["warmup", "-h"],
        ["train", "--nonsense"],
        ["train", "--config", "no.yaml"],
        ["evaluate", "--policy", "./no"],
    ],
    ids=" ".join,
)
def test_no_answer_needs_torch(words: list[str]) -> None:
    loaded = loaded_by(LIGHT, *words)
    assert "trainer" in loaded
    assert not loaded & {*TRAINING, "scipy", "httpx", "huggingface_hub"}


SAYS_FIRST = """
import sys, importlib.abc
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.exit(0)
sys.meta_path.insert(0, NoTorch())
from sqlenv import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["train", "warmup"])
def test_a_run_speaks_before_torch_is_imported(command: str) -> None:
    words = [sys.executable, "-c", SAYS_FIRST, command, *TINY]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stderr, done.stdout) == ("", f"sqlenv {command}: loading torch and TRL ...\n")
