"""docs/wire.md: each request that it shows is sent to a real server, and the reply is the one that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from websockets.sync.client import connect

from env_server.cache import CACHE_VARIABLE
from env_server.types import ErrorCode
from tests.integration.service import serving

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```json\n(.*?)\n```", re.DOTALL)


def test_requests_and_replies_are_what_happens(
    generated_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(generated_cache))
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) >= 12
    with (
        serving(tmp_path, Path("synthetic")) as server,
        connect(f"ws://{server.url.removeprefix('http://')}/ws") as socket,
    ):
        for request, reply in zip(blocks[::2], blocks[1::2], strict=True):
            socket.send(request)
            assert json.loads(socket.recv()) == json.loads(reply)


def test_every_code_is_explained() -> None:
    for code in ErrorCode:
        assert f"| `{code}` |" in PAGE
