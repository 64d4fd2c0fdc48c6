"""Asking servers for an adapter: loaded under the name of its contents, or found where it was started with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from inference.adapters import Adapter, ModelRef, NamedPolicy
from inference.vllm.api import ReplicaError, VLLMServer
from inference.vllm.engine import VLLMSettings
from inference.vllm.fleet import Replica
from policies.tiny.tokenizer import build_tokenizer
from trainer.engines import ServedPolicy, ServedPolicyError, _name_by_contents
from trainer.tiny import BASE_CHECKPOINT


class Server:
    """The routes of a vLLM server that know of adapters, with the texts of vLLM 0.31."""

    def __init__(self, started_with: dict[str, str], *, takes_adapters: bool) -> None:
        self.adapters = started_with
        self.takes_adapters = takes_adapters
        self.loads = 0

    async def models(self, _: web.Request) -> web.Response:
        cards = [{"id": "base", "max_model_len": 512, "parent": None}]
        cards += [{"id": name, "root": root, "parent": "base"} for name, root in self.adapters.items()]
        return web.json_response({"data": cards})

    async def load(self, request: web.Request) -> web.Response:
        call = await request.json()
        self.adapters[call["lora_name"]] = call["lora_path"]
        self.loads += 1
        return web.Response(text="Success")

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        if self.takes_adapters:
            app.router.add_post("/v1/load_lora_adapter", self.load)
        return app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    return tmp_path


async def name_at(server: Server, folder: Path) -> str:
    """Return what requests to the server would ask for."""
    adapter = Adapter(ModelRef(str(folder)), {"r": 8})
    policy = NamedPolicy(str(folder), ModelRef("base"), adapter, ModelRef("base"))
    served = ServedPolicy(policy, build_tokenizer([]), 512, 300, _name_by_contents(adapter))
    async with TestServer(server.app()) as running, VLLMSettings().client() as client:
        url = str(running.make_url(""))
        here, replica = VLLMServer(url, client), Replica(url)
        await served._ask_for_it(here, replica)
        assert here.model == replica.model
        return here.model


async def test_an_adapter_is_loaded_once_and_again_when_it_was_trained_further(folder: Path) -> None:
    server = Server({}, takes_adapters=True)
    first = await name_at(server, folder)
    assert await name_at(server, folder) == first
    assert server.loads == 1
    assert server.adapters == {first: str(folder)}
    (folder / "adapter_model.safetensors").write_bytes(b"second")
    assert await name_at(server, folder) != first


async def test_a_server_that_was_started_with_it_needs_no_loading(folder: Path) -> None:
    server = Server({"other": "/other", "mine": f"{folder}/."}, takes_adapters=False)
    assert await name_at(server, folder) == "mine"


async def test_a_server_without_it_is_refused(folder: Path) -> None:
    with pytest.raises(ReplicaError, match="404: Not Found"):
        await name_at(Server({"other": "/other"}, takes_adapters=False), folder)


def test_an_adapter_that_vllm_computes_otherwise_is_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 8, "use_dora": True, "base_model_name_or_path": str(BASE_CHECKPOINT)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ServedPolicyError, match=r"DoRA.*sqlenv export"):
        ServedPolicy.load(str(tmp_path))
