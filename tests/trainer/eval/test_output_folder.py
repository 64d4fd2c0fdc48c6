"""The folder of a run: never one that holds a policy or another run, and as it was before after a start that failed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig

from sqlenv import cli
from trainer.eval.output_folder import remove_on_failure
from trainer.policy import SETTINGS_FILE
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import parse_train, parse_warmup

ON_CPU = ["--use_cpu", "true", "--bf16", "false"]


def adapter(folder: Path) -> Path:
    LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path=str(BASE_CHECKPOINT)).save_pretrained(folder)
    return folder


def model(folder: Path) -> Path:
    return Path(shutil.copytree(BASE_CHECKPOINT, folder))


def run_of_grpo(folder: Path) -> Path:
    adapter(folder / "model")
    (folder / "evaluations").mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def stages(folder: Path) -> Path:
    adapter(folder / "1-warmup")
    (folder / "stages.json").write_text(json.dumps({"stages": ["1-warmup"], "finished": [{}]}))
    return folder


def checkpoint(folder: Path, step: int = 2) -> Path:
    whole = folder / f"checkpoint-{step}"
    whole.mkdir(parents=True)
    (whole / SETTINGS_FILE).write_text("{}")
    return whole


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def command(name: str, folder: Path) -> list[str]:
    """The command, of the base policy or of stages."""
    policy = ["--model_name_or_path", str(BASE_CHECKPOINT), *ON_CPU]
    if name == "stages":
        config = folder / "stages.yaml"
        config.write_text("stages: [{kind: warmup}]", encoding="utf-8")
        return ["train", "--config", str(config), *policy]
    return [name, *policy]


COMMANDS = [("train", []), ("train", ["--dry_run"]), ("warmup", []), ("stages", []), ("stages", ["--dry_run"])]


@pytest.mark.parametrize(("name", "flags"), COMMANDS, ids=str)
@pytest.mark.parametrize("make", [adapter, model, run_of_grpo, stages])
def test_a_folder_that_holds_a_policy_is_refused(
    make: Callable[[Path], Path], name: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "held")
    before = contents(folder)
    assert cli.main([*command(name, tmp_path), "--output_dir", str(folder), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line
    _, _, fix = line.rpartition("--output_dir ")
    assert Path(fix).parent == tmp_path
    assert not Path(fix).exists()
    assert contents(folder) == before


@pytest.mark.parametrize(("name", "flags"), COMMANDS, ids=str)
def test_a_folder_that_holds_a_run_without_a_policy_is_refused_with_the_two_ways_out(
    name: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    checkpoint(tmp_path / "warm-up")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "stages.json").write_text('{"stages": ["1-warmup"], "finished": []}')
    for folder in ("run", "warm-up", "recipe"):
        assert cli.main([*command(name, tmp_path), "--output_dir", str(tmp_path / folder), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--resume_from_checkpoint true" in line
        assert f"--output_dir {tmp_path / folder}-" in line


def folder_of(command: str, *words: str) -> str:
    """Where the command writes."""
    argv = [*ON_CPU, *words]
    config, _ = parse_train(argv) if command == "train" else parse_warmup(argv)
    return str(config.output_dir)


def test_the_default_is_named_after_the_policy_and_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter(Path("a", "b", "c"))
    for name, last in (("a/b/c/", "c"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"), (".", tmp_path.name)):
        assert folder_of("train", "--model_name_or_path", name) == f"runs/{last}"
        assert folder_of("warmup", "--model_name_or_path", name) == f"runs/warmup-{last}"
    capsys.readouterr()
    warm = str(adapter(Path("runs", "warm")))
    assert folder_of("train", "--model_name_or_path", warm) == "runs/warm-grpo"
    assert "runs/warm-grpo" in capsys.readouterr().err, "a folder that nobody would expect is named"
    run_of_grpo(Path("runs", "warm-grpo"))
    assert folder_of("train", "--model_name_or_path", warm) == "runs/warm-grpo-2"
    adapter(Path("runs", "warmup-c"))
    assert folder_of("warmup", "--model_name_or_path", "a/b/c") == "runs/warmup-c-2"


def test_the_default_of_stages_is_named_after_their_file_and_holds_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stages(Path("runs", "stages"))
    before = contents(Path("runs"))
    assert cli.main([*command("stages", tmp_path), "--data", "/no/such/data"]) == 2
    assert "runs/stages-2" in capsys.readouterr().err
    assert contents(Path("runs")) == before


def test_a_default_that_holds_an_unfinished_run_is_left_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("runs", "base"))
    assert cli.main(command("train", tmp_path)) == 2
    assert "--resume_from_checkpoint true" in capsys.readouterr().err


def test_a_run_is_resumed_in_the_folder_that_the_default_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model_name_or_path", str(adapter(Path("runs", "warm"))), "--resume_from_checkpoint"]
    own = checkpoint(Path("runs", "warm-grpo"))
    assert folder_of("train", *words, "true") == folder_of("train", *words, str(own)) == "runs/warm-grpo"
    adapter(Path("runs", "warm-grpo", "model"))
    Path("runs", "warm-grpo", "evaluations").mkdir()
    assert folder_of("train", *words, "true") == "runs/warm-grpo", "its policy is its own"


@pytest.mark.parametrize("name", ["train", "warmup"])
def test_no_run_of_another_kind_is_resumed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for other in (stages, *([adapter, model] if name == "train" else [run_of_grpo])):
        folder = other(tmp_path / other.__name__)
        for resumed in (str(checkpoint(folder)), "true"):
            words = ["--output_dir", str(folder), "--resume_from_checkpoint", resumed]
            assert cli.main([*command(name, tmp_path), *words]) == 2
            assert str(folder) in capsys.readouterr().err
    elsewhere = ["--output_dir", str(adapter(tmp_path / "a")), "--resume_from_checkpoint", str(checkpoint(tmp_path))]
    assert cli.main([*command(name, tmp_path), *elsewhere]) == 2


def begin(folder: Path, error: type[BaseException]) -> None:
    (folder / "evaluations").mkdir(parents=True)
    (folder / "evaluations" / "before.json").touch()
    (folder / "config.json").touch()
    raise error


def fail_in(folder: Path, *, nothing: bool = True, error: type[BaseException] = ValueError) -> None:
    with pytest.raises(error), remove_on_failure(folder, lambda: nothing):
        begin(folder, error)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_new_folder_is_removed_with_those_above_it_that_were_made(tmp_path: Path, error: type[BaseException]) -> None:
    fail_in(tmp_path / "runs" / "first", error=error)
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (folder / "weights").symlink_to(tmp_path / "elsewhere")
    fail_in(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.md", "weights"]


def test_folders_above_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    fail_in(tmp_path / "runs" / "deep" / "first")
    assert (tmp_path / "runs").is_dir()
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_came_to_something_stays_and_so_does_what_succeeds(tmp_path: Path) -> None:
    fail_in(tmp_path / "failed", nothing=False)
    with remove_on_failure(tmp_path / "done", lambda: True):
        (tmp_path / "done").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "failed"]
    assert (tmp_path / "failed" / "config.json").exists()
