"""`sqlenv evaluate --use_vllm`: the same numbers as in process, and none from a server with other weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sqlenv
from benchmarks.server_process import reserved_ports
from env_server.cache import CACHE_VARIABLE
from inference.vllm import VLLMEngine
from inference.vllm_api import NEW_PROCESS, VLLMServer
from tests.integration.vllm_server import VLLMHandle, vllm_server
from trainer.tiny import BASE_CHECKPOINT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        with vllm_server(BASE_CHECKPOINT, tmp_path_factory.mktemp("vllm")) as handle:
            yield handle


def evaluate(policy: Path | str, *flags: str) -> int:
    return sqlenv.main(["evaluate", "--policy", str(policy), "--episodes", "24", "--max_turn_length", "64", *flags])


def on(server: VLLMHandle) -> tuple[str, ...]:
    return ("--use_vllm", "--vllm_server_base_url", server.url)


def test_it_plays_as_the_model_does_in_process(server: VLLMHandle, tmp_path: Path, capsys: Captured) -> None:
    found = []
    for name, flags in (("hf", ()), ("vllm", on(server))):
        file = tmp_path / f"{name}.jsonl"
        assert evaluate(BASE_CHECKPOINT, "--json", "--episodes_out", str(file), *flags) == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        found.append((summary, sorted(file.read_text().splitlines())))
    assert found[0] == found[1]


def test_another_model_is_refused(server: VLLMHandle, tmp_path: Path, capsys: Captured) -> None:
    other = shutil.copytree(BASE_CHECKPOINT, tmp_path / "other")
    assert evaluate(other, *on(server)) == 2
    said = capsys.readouterr().err
    assert f"serves {BASE_CHECKPOINT}, and the policy is {other}" in said
    assert f"sqlenv inference --model {other}" in said


def test_the_weights_of_a_training_run_are_refused(server: VLLMHandle, capsys: Captured) -> None:
    async def mark(version: str) -> None:
        async with VLLMEngine([server.url], stop_ids=[0], vocab_size=1).client() as client:
            await VLLMServer(server.url, client).set_weight_version(version)

    asyncio.run(mark("run/7"))
    try:
        assert evaluate(BASE_CHECKPOINT, *on(server)) == 2
    finally:
        asyncio.run(mark(NEW_PROCESS))
    assert "has served a training run, and has its weights (version run/7)" in capsys.readouterr().err


def test_no_server_is_said_at_once(capsys: Captured, tmp_path: Path) -> None:
    with reserved_ports() as (port,):
        assert evaluate(BASE_CHECKPOINT, "--use_vllm", "--vllm_server_base_url", f"http://127.0.0.1:{port}") == 2
    assert "sqlenv inference --model" in capsys.readouterr().err
    assert evaluate(BASE_CHECKPOINT, "--use_vllm", "--vllm_server_base_url", "nowhere") == 2
    assert "--vllm_server_base_url: 'nowhere'" in capsys.readouterr().err
    assert evaluate(tmp_path, "--use_vllm") == 2
    assert "cannot be loaded" in capsys.readouterr().err
