"""Commands that talk to inference servers, with one that is none of vLLM's: one line that names it, and status 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sqlenv import cli
from tests.integration.training import surroundings_in
from tests.integration.vllm_runs import FLAGS
from tests.not_vllm import BROKEN_MODEL, NOT_VLLM, answering
from trainer.tiny import BASE_CHECKPOINT

FAULTS = NOT_VLLM | BROKEN_MODEL
Command = Callable[[str, Path], list[str]]


def _servers(url: str) -> list[str]:
    return ["--use_vllm", "true", "--vllm_server_base_url", url]


def _train(url: str, folder: Path) -> list[str]:
    quick = ["--eval_episodes", "0", "--save_strategy", "no", "--vllm_server_timeout", "5"]
    return ["train", "--output_dir", str(folder / "run"), *FLAGS, *_servers(url), *quick]


def _dry_run(url: str, folder: Path) -> list[str]:
    return [*_train(url, folder), "--dry_run"]


def _evaluate(url: str, folder: Path) -> list[str]:
    flags = ["--policy", str(BASE_CHECKPOINT), "--data", "synthetic", "--episodes", "4"]
    return ["evaluate", *flags, "--use_vllm", "--vllm_server_base_url", url]


def _chat(url: str, folder: Path) -> list[str]:
    (folder / "pets.csv").write_text("pet_id,name\n1,Rex\n", encoding="utf-8")
    flags = ["--data", str(folder / "pets.csv"), "--question", "How many pets are there?"]
    return ["chat", str(BASE_CHECKPOINT), *flags, "--use_vllm", "--vllm_server_base_url", url]


COMMANDS: dict[str, Command] = {"train": _train, "dry run": _dry_run, "evaluate": _evaluate, "chat": _chat}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        *((command, "no max_model_len") for command in COMMANDS),
        *((command, "models in HTML") for command in ("evaluate", "dry run")),
        *((command, "null logprobs") for command in ("train", "evaluate")),
        *((command, "half of a completion") for command in ("train", "evaluate")),
        ("train", "NaN"),
        ("evaluate", "positive"),
    ],
)
def test_a_server_that_is_not_vllm_is_one_line_and_status_2(
    command: str, fault: str, generated_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(str(BASE_CHECKPOINT), FAULTS[fault]) as url, surroundings_in(generated_cache):
        status = cli.main(COMMANDS[command](url, tmp_path))
    said = capsys.readouterr().err
    assert status == 2, said
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    assert line.startswith("sqlenv ")
    assert url in line
    assert ("sqlenv inference" in line) or fault in BROKEN_MODEL


def test_a_question_that_such_a_server_breaks_off_is_left_without_an_answer(
    generated_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(str(BASE_CHECKPOINT), FAULTS["null logprobs"]) as url, surroundings_in(generated_cache):
        assert cli.main(_chat(url, tmp_path)) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "".join(url.split()) in "".join(said.out.split()) + "".join(said.err.split())
