"""GET /ready: what is read from it, what is said when it is something else, and whose certificates are trusted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from env_server.client import SyncSQLEnvClient
from env_server.client.connection import CA_VARIABLE, Connection, Server, parse_servers
from env_server.client.errors import (
    AuthenticationError,
    CertificateError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    ProtocolError,
    ServerDrainingError,
)
from env_server.client.ready import fetch_ready
from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, Ready, ReadyStatus
from tests.env_server.conftest import RunningServer
from tests.env_server.serving import PlayingServer, running_server


def fetch(url: str, token: str | None = None, timeout_s: float = 30.0) -> Ready:
    (server,) = parse_servers(url)
    return asyncio.run(fetch_ready(server, token, timeout_s))


def test_load_and_data(service: RunningServer, pets: Dataset) -> None:
    ready = fetch(service.http, "geheim")
    assert ready.data == served_data(pets, AnswerMode.VALUE, EnvSettings())
    assert (ready.status, ready.max_sessions, ready.waiting) == (ReadyStatus.READY, 1, 0)
    with pytest.raises(AuthenticationError, match="SQLENV_TOKEN"):
        fetch(service.http)


def test_another_kind_of_server_and_none(server: PlayingServer) -> None:
    there = Server("ws", "some.name.invalid", server.port, address="127.0.0.1")
    assert asyncio.run(fetch_ready(there, None, 30.0)).status is ReadyStatus.READY, "the very address is asked"
    with pytest.raises(ProtocolError, match="no GET /ready"):
        fetch(f"{server.url}/elsewhere")
    server.status = "draining"
    assert fetch(server.url).status is ReadyStatus.DRAINING
    served: dict[str, Any] = {"name": "a blog"}
    server.served = served
    with pytest.raises(ServerDrainingError):
        fetch(server.url)
    server.status = "ready"
    with pytest.raises(ProtocolError, match="no SQLEnv server"):
        fetch(server.url)
    server.die()
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        fetch(server.url)


async def answering(replies: dict[bytes, bytes], timeout_s: float = 30.0) -> Ready:
    """Ask a server that answers a path with these bytes; with none, it does not answer."""
    talks: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(writer)
        if reply := replies.get((await reader.readuntil(b"\r\n\r\n")).split()[1], b""):
            writer.write(reply)
            writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        return await fetch_ready(Server("ws", "127.0.0.1", listening.sockets[0].getsockname()[1]), None, timeout_s)
    finally:
        listening.close()
        for writer in talks:
            writer.close()


MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS), "sqlenv inference"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "no GET /ready"),
        (MISSING, "no GET /ready"),
    ],
)
def test_an_inference_server_is_recognised(models: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        asyncio.run(answering({b"/ready": MISSING, b"/v1/models": models}))


def test_what_is_no_http_and_no_answer_in_time() -> None:
    with pytest.raises(ProtocolError, match="is not HTTP"):
        asyncio.run(answering({b"/ready": b"220 mail.example ESMTP\r\n\r\n"}))
    with pytest.raises(DeadlineError, match=r"no answer to GET /ready in 0\.2 s"):
        asyncio.run(answering({}, 0.2))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    monkeypatch.setenv(CA_VARIABLE, str(file))
    return file


def context(certificate: trustme.LeafCert) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(made)
    return made


@pytest.fixture
def secure(pets: Dataset, authority: trustme.CA) -> Iterator[PlayingServer]:
    with running_server(pets, tls=context(authority.issue_cert("localhost"))) as running:
        yield running


def connect(url: str) -> None:
    (server,) = parse_servers(url)
    asyncio.run(Connection.open(server))


CALLS: list[Callable[[str], object]] = [fetch, connect]


def test_an_authority_of_ones_own(secure: PlayingServer, trusted: Path) -> None:
    assert fetch(secure.url).status is ReadyStatus.READY
    with SyncSQLEnvClient(secure.url) as environment:
        assert environment.reset(question_id="cats").question == "How many cats are there?"


@pytest.mark.parametrize("call", CALLS)
def test_certificates_that_do_not_hold(
    secure: PlayingServer,
    pets: Dataset,
    authority: trustme.CA,
    trusted: Path,
    call: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    old = authority.issue_cert("localhost", not_before=yesterday - timedelta(days=1), not_after=yesterday)
    with running_server(pets, tls=context(old)) as expired, pytest.raises(CertificateError, match="expired"):
        call(expired.url)
    with pytest.raises(CertificateError, match="must hold the name"):
        call(secure.url.replace("localhost", "127.0.0.1"))
    monkeypatch.delenv(CA_VARIABLE)
    with pytest.raises(CertificateError, match=CA_VARIABLE):
        call(secure.url)


def test_a_file_that_holds_no_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL says nothing about it, and trusts nobody; nothing is asked of a server before it is right."""
    file = tmp_path / "ca.pem"
    monkeypatch.setenv(CA_VARIABLE, str(file))
    with pytest.raises(CertificateError, match=r"ca\.pem, cannot be read"):
        SyncSQLEnvClient("wss://localhost:1")
    file.write_text("no certificate")
    with pytest.raises(CertificateError, match="holds no certificate"):
        SyncSQLEnvClient("wss://localhost:1")


@pytest.mark.parametrize("call", CALLS)
def test_tls_where_there_is_none_and_none_where_there_is(
    secure: PlayingServer, call: Callable[[str], object], trusted: Path, server: PlayingServer
) -> None:
    with pytest.raises(ClientError, match=r"wss://"):
        call(secure.url.replace("wss://", "ws://"))
    with pytest.raises(ClientError, match=r"ws://"):
        call(server.url.replace("ws://127.0.0.1", "wss://localhost"))
