"""`nccl` without a GPU: vLLM's own weight transfer between a trainer's process and a real server.

Only the communicator is another one: see in_vllm/store_group.py. What NCCL itself does is not tested here.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.server_process import ROOT
from inference.launch.process import EXTENSION
from inference.vllm.api import ReplicaUnavailableError
from tests.fork_server import ForkServer
from tests.integration.service import until
from tests.integration.test_weight_sync import complete, exact
from tests.integration.vllm_server import PYTHON, START_S, VLLMHandle, vllm_server
from trainer.tiny import BASE_CHECKPOINT

STORE_GROUP = Path(__file__).parent / "in_vllm" / "store_group.py"
PROMPT = tuple(range(40, 70))
HASTY_S = 10.0
"""The deadline of an update that will not end."""

Push = Callable[..., str | None]


@pytest.fixture(scope="module")
def _server(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    flags = ["--weight-transfer-config", '{"backend": "nccl"}', "--worker-extension-cls", "store_group.StoreWorker"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STORE_GROUP.parent))
        with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path_factory.mktemp("vllm"), *flags) as handle:
            yield handle


@pytest.fixture
def server(_server: VLLMHandle) -> VLLMHandle:
    """A server that runs, started again where an earlier test has ended it, as `--restart` does."""
    if not _server.is_running:
        _server.start()
    return _server


@pytest.fixture
def push(vllm_forks: ForkServer, server: VLLMHandle) -> Push:
    """Pushes to the server as a trainer's process does; returns its error, "" when there is none, None when it died."""

    def run(scale: float, how: str = "well", deadline_s: float = START_S) -> str | None:
        surroundings = {"PYTHONPATH": os.pathsep.join([str(EXTENSION), str(ROOT)]), "HTTP_PROXY": "http://127.0.0.1:9"}
        done = vllm_forks.run(
            [str(PYTHON), str(STORE_GROUP), server.url, str(scale), str(deadline_s), how],
            environment={**os.environ, **surroundings},
            timeout=2 * START_S,
        )
        if done.returncode == 9:
            return None
        assert done.returncode == 0, done.stderr[-4000:]
        found: str = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def generates_with(server: VLLMHandle, scale: float) -> bool:
    """Whether the server has the weights that a push with this scale brings."""
    model = Qwen3ForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return all(exact(model, PROMPT, asyncio.run(complete(server.url, PROMPT, 12))))


def ended_by_itself(server: VLLMHandle) -> bool:
    """Wait until the server has ended, rather than serve half of an update."""
    until(lambda: not server.is_running)
    return "rather than serve half of it" in server.log_text()


def test_a_second_run_finds_the_group_of_the_first_and_a_cancelled_one_ends_the_server(
    push: Push, server: VLLMHandle
) -> None:
    assert push(1.5) == ""
    assert generates_with(server, 1.5)
    assert push(0.7) == "", "the server is still in the group of a process that is gone"
    assert generates_with(server, 0.7)
    found = push(1.2, "late", HASTY_S)
    assert found is not None
    assert "TimeoutError" in found
    assert ended_by_itself(server)


def test_a_trainer_that_dies_in_the_middle_leaves_no_server_with_half_of_its_weights(
    push: Push, server: VLLMHandle
) -> None:
    assert push(1.2) == "", "a server that was started again"
    assert generates_with(server, 1.2)
    assert push(1.5, "dies", HASTY_S) is None
    with pytest.raises(ReplicaUnavailableError):
        asyncio.run(complete(server.url, PROMPT, 12))
    assert ended_by_itself(server)
