"""wss://: whose certificates are trusted, and what is said about one that is not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from env_server.client.connection import Connection
from env_server.client.errors import CertificateError, ClientError, ConnectionLostError
from env_server.client.ready import fetch_ready
from env_server.client.servers import parse_servers
from env_server.client.sync_client import SyncSQLEnvClient
from env_server.client.tls import CA_VARIABLE
from env_server.dataset import Dataset
from env_server.types import ReadyStatus
from tests.env_server.serving import PlayingServer, running_server


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    monkeypatch.setenv(CA_VARIABLE, str(file))
    return file


def showing(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


@pytest.fixture
def server(pets: Dataset, authority: trustme.CA) -> Iterator[PlayingServer]:
    with running_server(pets, tls=showing(authority.issue_cert("localhost"))) as running:
        yield running


def ask(url: str) -> ReadyStatus:
    (server,) = parse_servers(url)
    return asyncio.run(fetch_ready(server, None, 30.0)).status


def connect(url: str) -> None:
    (server,) = parse_servers(url)
    asyncio.run(Connection.open(server))


def test_an_authority_of_ones_own(server: PlayingServer, trusted: Path) -> None:
    assert ask(server.url) is ReadyStatus.READY
    with SyncSQLEnvClient(server.url) as environment:
        assert environment.reset(question_id="cats").question == "How many cats are there?"


@pytest.mark.parametrize("call", [ask, connect])
def test_an_authority_that_nobody_knows(
    server: PlayingServer, call: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert callable(call)
    monkeypatch.delenv(CA_VARIABLE, raising=False)
    with pytest.raises(CertificateError, match=rf"not trusted: .*; if its authority is your own.*set {CA_VARIABLE} to"):
        call(server.url)
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    monkeypatch.setenv(CA_VARIABLE, str(other))
    with pytest.raises(CertificateError, match=rf"other\.pem, which {CA_VARIABLE} names, does not hold"):
        call(server.url)


def test_a_file_that_holds_no_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL says nothing about it, and trusts nobody; nothing is asked of a server before it is right."""
    file = tmp_path / "ca.pem"
    monkeypatch.setenv(CA_VARIABLE, str(file))
    with pytest.raises(
        CertificateError, match=rf"the file that {CA_VARIABLE} names, .*ca\.pem, cannot be read: No such"
    ):
        SyncSQLEnvClient("wss://localhost:1")
    file.write_text("no certificate")
    with pytest.raises(CertificateError, match="holds no certificate"):
        SyncSQLEnvClient("wss://localhost:1")
    with pytest.raises(ConnectionLostError), SyncSQLEnvClient("ws://localhost:1"):
        pass


def test_a_certificate_for_another_name(server: PlayingServer, trusted: Path) -> None:
    with pytest.raises(CertificateError, match="put the name that the certificate was made for into the URL"):
        ask(server.url.replace("localhost", "127.0.0.1"))


def test_a_certificate_that_is_over(pets: Dataset, authority: trustme.CA, trusted: Path) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    old = authority.issue_cert("localhost", not_before=yesterday - timedelta(days=1), not_after=yesterday)
    with (
        running_server(pets, tls=showing(old)) as server,
        pytest.raises(CertificateError, match="has expired; renew it on the server"),
    ):
        ask(server.url)


@pytest.mark.parametrize("call", [ask, connect])
def test_tls_where_there_is_none_and_none_where_there_is(
    server: PlayingServer, call: object, trusted: Path, pets: Dataset
) -> None:
    assert callable(call)
    with pytest.raises(ConnectionLostError, match=r"does it want wss:// instead\?"):
        call(server.url.replace("wss://", "ws://"))
    with running_server(pets) as plain, pytest.raises(ClientError, match=r"(is it|want) ws:// instead\?"):
        call(plain.url.replace("ws://127.0.0.1", "wss://localhost"))
