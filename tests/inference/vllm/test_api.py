"""A server that is none of vLLM's, recognised by what it says; calls to real servers are in `tests/integration`."""

from __future__ import annotations

import httpx
import pytest

from env_server.dataset import Dataset
from inference.vllm.api import ReplicaRejectedError, VLLMServer
from tests.env_server.conftest import RunningServer, settings


@pytest.mark.parametrize("token", [None, "geheim"])
async def test_an_environment_server_is_told_from_one_that_generates(
    pets: Dataset, token: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = RunningServer(settings(tmp_path_factory.mktemp("server"), token=token), pets)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(ReplicaRejectedError, match="an environment server of `sqlenv serve`, which --env"):
                await VLLMServer(server.http, client).served_model()
    finally:
        server.stop()
