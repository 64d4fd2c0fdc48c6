"""A server that is none of vLLM's, recognised by what it says; calls to real servers are in `tests/integration`."""

from __future__ import annotations

import asyncio
import gc
from typing import NoReturn

import pytest

from env_server.dataset import Dataset
from inference.engine import FinishReason, Sampling
from inference.vllm.api import NotVLLMError, ReplicaRejectedError, ServerCompletion, VLLMServer
from inference.vllm.engine import VLLMEngine, VLLMSettings
from tests.env_server.conftest import RunningServer, settings
from tests.not_vllm import BROKEN_MODEL, NOT_VLLM, STOP, Answer, Fault, answering


@pytest.mark.parametrize("token", [None, "geheim"])
async def test_an_environment_server_is_told_from_one_that_generates(
    pets: Dataset, token: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = RunningServer(settings(tmp_path_factory.mktemp("server"), token=token), pets)
    try:
        async with VLLMSettings().client() as client:
            with pytest.raises(ReplicaRejectedError, match="an environment server of `sqlenv serve`, which --env"):
                await VLLMServer(server.http, client).served_model()
    finally:
        server.stop()


async def completed(url: str) -> ServerCompletion:
    """Ask as a client does: what is served, then for a completion."""
    async with VLLMSettings().client() as client:
        server = VLLMServer(url, client)
        server.model = (await server.served_model()).name
        return await server.complete((5, 6), Sampling(4), seed=1, stop_ids=(STOP,))


async def test_the_stand_in_without_a_fault_is_taken_for_vllm() -> None:
    with answering("m", None) as url:
        assert await completed(url) == ServerCompletion((7, 8, STOP), (-0.1, -0.2, -0.3), FinishReason.STOP, None)


@pytest.mark.parametrize("fault", NOT_VLLM)
async def test_a_server_that_is_not_vllm_is_one_error_that_says_what_to_do(fault: str) -> None:
    with answering("m", NOT_VLLM[fault]) as url:
        with pytest.raises(NotVLLMError) as caught:
            await completed(url)
        assert caught.value.url == url
    text = str(caught.value)
    assert text.startswith(f"{url}: {NOT_VLLM[fault].path} answered ")
    assert "sqlenv inference --model" in text
    assert "\n" not in text


@pytest.mark.parametrize("fault", BROKEN_MODEL)
async def test_logprobs_of_no_distribution_are_refused(fault: str) -> None:
    with answering("m", BROKEN_MODEL[fault]) as url, pytest.raises(ReplicaRejectedError) as caught:
        await completed(url)
    assert not isinstance(caught.value, NotVLLMError)
    assert caught.value.url == url


async def _cancelled_as_it_fails() -> None:
    async def play() -> None:
        async with engine.session(1) as session:
            await session.generate((5, 6), Sampling(4), seed=1)

    async def fail(server: VLLMServer, *_: object, **__: object) -> NoReturn:
        playing.cancel()
        raise ReplicaRejectedError(server.url, "no")

    with answering("m", None) as url, pytest.MonkeyPatch.context() as patch:
        engine = VLLMEngine([url], stop_ids=[STOP], vocab_size=10)
        patch.setattr(VLLMServer, "complete", fail)
        playing = asyncio.create_task(play())
        with pytest.raises(asyncio.CancelledError):
            await playing
        await engine.aclose()


def test_a_turn_that_fails_as_it_is_cancelled_leaves_no_error_that_nobody_retrieved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(_cancelled_as_it_fails())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_workers_that_tell_nothing_readable_are_not_vllms() -> None:
    for reply in (b"[]", b'{"results": 1}', b'{"results": [1]}', b"<html>"):
        fault = Fault("/collective_rpc", lambda _, reply=reply: Answer(reply))  # type: ignore[misc]
        with answering("m", fault) as url:
            async with VLLMSettings().client() as client:
                with pytest.raises(NotVLLMError):
                    await VLLMServer(url, client).facts()
