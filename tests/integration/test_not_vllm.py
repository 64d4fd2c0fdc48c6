"""Commands that talk to inference servers, with one that is none of vLLM's, or none at all: one line that names the
server and the fix, and status 2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.server_process import reserved_ports
from env_server.dataset import Dataset
from inference.launch.launcher import read_arguments
from inference.vllm.api import VLLMServer
from inference.vllm.engine import VLLMSettings, ask_all
from sqlenv import cli
from tests.integration.service import write_data
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


@pytest.mark.parametrize("command", ["train", "dry run", "evaluate"])
def test_without_a_server_nothing_is_prepared_or_played_and_the_error_names_the_command_that_starts_one(
    command: str, pets: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    data = write_data(pets, tmp_path / "data")
    with surroundings_in(tmp_path / "cache"), reserved_ports() as (port,):
        url = f"http://127.0.0.1:{port}"
        arguments = [*COMMANDS[command](url, tmp_path), "--data", str(data), "--answer_mode", "sql"]
        if command != "evaluate":
            arguments += ["--eval_episodes", "1", "--vllm_server_timeout", "0.5"]
        assert cli.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert url in line
    assert f"sqlenv inference --model {BASE_CHECKPOINT}" in line
    assert not list((tmp_path / "cache").glob("variants-*")), "what judging takes is made before anything is played"


def test_a_wait_for_a_server_is_reported_and_ends_when_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    settings = VLLMSettings(server_timeout_s=60.0)
    with reserved_ports() as (port,), ExitStack() as stack:
        url = f"http://127.0.0.1:{port}"

        class Start(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                logging.getLogger("inference").removeHandler(self)
                stack.enter_context(answering(str(BASE_CHECKPOINT), None, port))

        logging.getLogger("inference").addHandler(Start())
        (served,) = asyncio.run(ask_all([url], settings, VLLMServer.served_model))
    assert served.name == str(BASE_CHECKPOINT)
    (line,) = caplog.messages
    assert url in line
    assert " s left" in line


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("--use_peft", "true", "--lora_r", "64"), {"lora", "64"}),
        (("--weight_sync", "disk"), {"disk"}),
    ],
)
def test_the_command_starts_a_server_for_the_run_s_weights(
    flags: tuple[str, ...], options: set[str], generated_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with surroundings_in(generated_cache):
        assert cli.main([*_dry_run("http://127.0.0.1:9", tmp_path), *flags]) == 2
    _, _, command = capsys.readouterr().err.splitlines()[-1].partition("`sqlenv ")
    settings, _ = read_arguments(command.partition("`")[0].split()[1:])
    assert settings.model == str(BASE_CHECKPOINT)
    assert options <= {settings.weight_sync, str(settings.max_lora_rank)}


def test_a_question_that_such_a_server_breaks_off_is_left_without_an_answer(
    generated_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(str(BASE_CHECKPOINT), FAULTS["null logprobs"]) as url, surroundings_in(generated_cache):
        assert cli.main(_chat(url, tmp_path)) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "".join(url.split()) in "".join(said.out.split()) + "".join(said.err.split())
