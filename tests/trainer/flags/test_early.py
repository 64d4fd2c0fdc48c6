"""What is answered before torch is there: help, unknown flags and keys, files and folders that do not exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from env_server.errors import DataError
from tests.test_dependencies import TRAINING, loaded_by
from trainer.config import ConfigError
from trainer.flags.early import Command, flags_of, look
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
        ["--learning-rate=1e-5", "--env-server=local", "--max_steps", "3"],
        ["--learning_rate", "1e-5", "--reward_weights", "1", "-1", "0", "0"],
        ["--config", "configs/tiny.yaml", "--lora_target_modules", "q_proj", "v_proj", "--output_dir", "runs/none"],
    ],
    ids=" ".join,
)
def test_words_that_a_parser_takes_pass(words: list[str]) -> None:
    look(Command.TRAIN, TINY + words)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (Command.TRAIN, ["--lerning_rate", "1"], "there is no flag --lerning_rate; did you mean --learning_rate?"),
        (Command.TRAIN, ["--data=a", "--splitt=b"], "there is no flag --splitt"),
        (Command.TRAIN, ["--max_episodes", "1"], "there is no flag --max_episodes"),
        (Command.WARMUP, ["--max-episode-s", "1"], "there is no flag --max-episode-s; did you mean --max-episodes?"),
        (Command.WARMUP, ["--eval_episodes", "1"], "there is no flag --eval_episodes"),
    ],
)
def test_a_flag_that_nothing_knows_is_refused(
    command: Command, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        look(command, TINY + words)
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command.prog}: {said}")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["configs/tiny.yaml"], "--config configs/tiny.yaml"),
        (["--max_steps", "4", "configs/tiny.yaml"], "--config configs/tiny.yaml"),
        (["--max_steps=4", "configs/tiny.yml"], "--config configs/tiny.yml"),
        (["learning_rate", "1e-5", *TINY], "--learning_rate"),
        ([*TINY, "--data", "my", "shop"], "'shop'"),
        ([*TINY, "--max_steps", "4", "5"], "'5'"),
    ],
)
@pytest.mark.parametrize("command", Command)
def test_a_word_that_belongs_to_no_flag_is_refused_with_the_fix(command: Command, words: list[str], fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fix)):
        look(command, words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_steps", "four"), ("max_steps", "4.5"), ("step_budget", "x"), ("learning_rate", "-1"), ("lora_r", "0")),
        *(("seed", "-1"), ("weight_decay", "nan")),
    ],
)
@pytest.mark.parametrize("by_flag", [True, False])
def test_what_is_no_number_of_its_flag_is_refused(
    name: str, value: str, by_flag: bool, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"{name}: {'.nan' if value == 'nan' else value}\n", encoding="utf-8")
    for command in Command:
        with pytest.raises((ConfigError, SystemExit)) as refused:
            look(command, [*TINY, *([f"--{name}", value] if by_flag else ["--config", str(config)])])
        assert f"--{name}" in f"{refused.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("data", ["/no/such/data", "spider:/no/such/data", "synthetic:x", "answers:/no/such/data"])
def test_data_that_cannot_be_read_is_refused(data: str) -> None:
    for command in Command:
        with pytest.raises(DataError):
            look(command, [*TINY, "--data", data])
    with pytest.raises(DataError):
        look(Command.WARMUP, [*TINY, "--data", f"synthetic,{data}"])


def test_a_key_that_nothing_knows_is_refused(config: Path) -> None:
    config.write_text("learning_rte: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        look(Command.TRAIN, [*TINY, "--config", str(config)])
    assert "there is no key learning_rte; did you mean learning_rate?" in str(refused.value)


def test_of_stages_the_flags_of_both_kinds_pass(config: Path) -> None:
    config.write_text("stages: [{kind: warmup}, {kind: grpo}]\nmax_episodes: 4\n", encoding="utf-8")
    look(Command.TRAIN, ["--config", str(config), "--max_episodes", "3", "--eval_episodes", "0"])


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
    look(Command.WARMUP, ["--max_steps", "1"])


def test_ranks_leave_refusals_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    look(Command.TRAIN, ["--nonsense"])


def test_a_configs_variables_are_set_before_torch_reads_them(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config.write_text("env: {OMP_NUM_THREADS: 1}\n", encoding="utf-8")
    look(Command.TRAIN, [*TINY, "--config", str(config)])
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("command", Command)
def test_help_fits_eighty_columns_and_teaches(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        look(command, ["--learning_rate", "1", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 300, "that of all flags is a thousand lines longer"
    assert (
        text.index("--model_name_or_path") < text.index("--data") < text.rindex("--help_all") < text.index("examples")
    )
    words = text.split()
    assert [flag.name for flag in flags_of(command).values() if flag.own and f"--{flag.name}" not in words] == []
    with pytest.raises(SystemExit):
        look(command, ["--help_all"])
    words = capsys.readouterr().out.split()
    assert [name for name in flags_of(command) if f"--{name}" not in words] == []


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
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        ["train", "configs/tiny.yaml"],
        ["train", *TINY, "--max_steps", "four"],
        ["train", *TINY, "--data", "/no/such/data"],
        ["train", *TINY, "--output_dir", str(BASE_CHECKPOINT), "--dry_run"],
        ["train", *TINY, "--output_dir", "unfinished"],
        ["train", *TINY, "--output_dir", "finished", "--resume_from_checkpoint", "true"],
        ["train", "--config", "stages.yaml", "--output_dir", str(BASE_CHECKPOINT)],
        ["warmup", *TINY, "--output_dir", str(BASE_CHECKPOINT)],
    ],
    ids=" ".join,
)
def test_no_refusal_needs_torch(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    shutil.copytree(BASE_CHECKPOINT, tmp_path / "finished" / "model")
    (tmp_path / "finished" / "trainer_state.json").write_text('{"global_step": 2, "max_steps": 2}')
    (tmp_path / "stages.yaml").write_text("stages: [{kind: warmup}]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = LIGHT.replace("cli.main(sys.argv[1:])", "assert cli.main(sys.argv[1:]) == 2")
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert not set(done.stdout.split()) & HEAVY


HEAVY = {*TRAINING, "scipy", "httpx", "aiohttp", "huggingface_hub"}
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
