"""An environment server for the tests of clients: real sockets, the real environment, and failures on demand.

It speaks OpenEnv's wire format with a few lines of its own instead of the service's, so that the tests of the client
say what the format is, and so that it can do what the service never does: hang, lie, send garbage, die. What the client
does with the service itself is tested beside it, by the same tests.
"""

from __future__ import annotations

import asyncio
import http
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from env_server.client.loop_thread import LoopThread
from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset, Split
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.types import SERVES_HEADER, AnswerMode, ServedData, SQLAction, SQLObservation

WAIT_S = 30
"""How long a test waits for what must happen."""
EPISODE = (
    "DESCRIBE pets",
    "SAMPLE owners",
    "QUERY SELECT nothing",
    "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'",
    "QUERY SELECT 1e999, -1.5, NULL, '猫'",
    "DANCE",
    "ANSWER 2",
)
"""The actions of an episode about the cats among the pets: every kind of reply."""


@dataclass(frozen=True)
class Close:
    """Instead of answering, close the socket."""

    code: int = 1000
    reason: str = ""


@dataclass(frozen=True)
class Hang:
    """Do not answer at all."""


@dataclass(frozen=True)
class Die:
    """Drop every connection and stop listening."""


Deed = str | bytes | Close | Hang | Die
Script = Callable[[dict[str, Any]], Deed | None]
"""What to do about a request instead of answering it: a str is the frame to send; None answers it."""


def action(text: str) -> SQLAction:
    kind, _, argument = text.partition(" ")
    return SQLAction(action_type=kind, argument=argument)


def played_locally(environment: SQLEnvironment) -> list[SQLObservation]:
    """What EPISODE shows, from its reset on."""
    first = environment.reset(question_id="cats", episode_id="e")
    return [first, *(environment.step(action(text)) for text in EPISODE)]


def shorten_backoffs(patch: pytest.MonkeyPatch) -> None:
    """Let servers that failed be tried again at once, for tests that do not depend on how long they are left alone."""
    patch.setattr("env_server.client.pool.FIRST_BACKOFF_S", 0.002)
    patch.setattr("env_server.client.pool.LONGEST_BACKOFF_S", 0.1)


def error_frame(code: str, message: str = "said the server", **details: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **details}})


class PlayingServer:
    """A server on loopback, in a thread of its own; its attributes may be changed while it runs."""

    def __init__(
        self,
        dataset: Dataset,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        token: str | None = None,
        max_sessions: int = 1_000,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.settings = settings or EnvSettings()
        self.token = token
        self.max_sessions = max_sessions
        self.served: dict[str, Any] = served_data(dataset, answer_mode, self.settings).model_dump()
        self.status = "ready"
        self.script: Script = lambda _: None
        self.refuse_with: int | None = None
        """HTTP status for every handshake."""
        self.sessions = 0
        """Sockets that are open."""
        self.opened = 0
        """Sockets that were ever opened."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Headers] = []
        """Of each handshake."""
        self._changed = threading.Condition()
        self._factory = EnvironmentFactory(dataset, self.settings, answer_mode)
        self._thread = LoopThread("playing-server")
        self._host, self._port, self._tls = host, port, tls
        self._server: Server | None = None
        self._sockets: set[ServerConnection] = set()
        """Those that were let in. A client may know of it before the server counts them among its connections."""
        self.start()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"wss://localhost:{self._port}" if self._tls else f"ws://127.0.0.1:{self._port}"

    @property
    def listening(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._thread.call(self._listen())

    def die(self) -> None:
        """Drop every connection and stop listening, as a killed process does."""
        self._thread.call(self._die())

    def hang_up(self) -> None:
        """Drop every connection, and go on listening."""
        self._thread.call(self._hang_up())

    def say_and_close(self, frame: str) -> None:
        """Send a frame that nobody asked for on every socket, and close it."""
        self._thread.call(self._say_and_close(frame))

    def stop(self) -> None:
        """Give everything back."""
        if not self._thread.closed:
            self.die()
            self._thread.close()
            self._factory.close()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a connection's coming, going or request makes true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), "what the test waits for did not happen"

    def played(self, kind: str) -> list[dict[str, Any]]:
        """The requests of a kind so far."""
        return [request for request in self.requests if request["type"] == kind]

    async def _listen(self) -> None:
        self._server = await serve(
            self._session,
            self._host,
            self._port,
            process_request=self._http,
            process_response=self._say_what_is_served,
            ping_interval=None,
            compression=None,
            ssl=self._tls,
        )
        self._port = next(iter(self._server.sockets)).getsockname()[1]

    async def _hang_up(self) -> None:
        for socket in self._sockets:
            socket.transport.abort()

    async def _say_and_close(self, frame: str) -> None:
        for socket in list(self._sockets):
            await socket.send(frame)
            await socket.close()

    async def _die(self) -> None:
        if self._server is not None:
            self._server.server.close()
            await self._hang_up()
            server, self._server = self._server, None
            server.close()
            await server.wait_closed()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is no WebSocket; None lets the handshake go on."""
        authorization = request.headers.get("Authorization")
        if self.token is not None and authorization != f"Bearer {self.token}":
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "a token is needed")
        if request.path == "/ready":
            load = {"active_sessions": self.sessions, "max_sessions": self.max_sessions, "waiting": 0}
            body = json.dumps({"status": self.status, **load, "data": self.served}, default=str)
            return connection.respond(http.HTTPStatus(200 if self.status == "ready" else 503), body)
        if request.path != "/ws":
            return connection.respond(http.HTTPStatus.NOT_FOUND, "nothing here")
        self.headers.append(request.headers)
        if self.refuse_with is not None:
            return connection.respond(http.HTTPStatus(self.refuse_with), "not now")
        self._sockets.add(connection)
        return None

    def _say_what_is_served(self, connection: ServerConnection, request: Request, response: Response) -> None:
        with suppress(ValidationError):  # a server of something else says nothing
            response.headers[SERVES_HEADER] = ServedData.model_validate(self.served).version_tag

    async def _session(self, socket: ServerConnection) -> None:
        self._count(opened=1)
        try:
            if self.sessions > self.max_sessions:
                counts = {"active_sessions": self.max_sessions, "max_sessions": self.max_sessions}
                await socket.send(error_frame("CAPACITY_REACHED", "all in use", **counts))
                return
            environment = self._factory.make()
            async for frame in socket:
                request = json.loads(frame)
                self.requests.append(request)
                self._count()
                if request["type"] == "close":
                    return
                await self._answer(socket, environment, request)
        except ConnectionClosed:
            pass
        finally:
            self._sockets.discard(socket)
            self._count(closed=1)

    async def _answer(self, socket: ServerConnection, environment: SQLEnvironment, request: dict[str, Any]) -> None:
        match self.script(request):
            case None:
                await socket.send(_reply(environment, request))
            case Close(code, reason):
                await socket.close(code, reason)
            case Hang():
                await socket.wait_closed()
            case Die():
                # In a task of its own: it waits for this one.
                self._dying = asyncio.ensure_future(self._die())
                await socket.wait_closed()
            case str() | bytes() as frame:
                await socket.send(frame)

    def _count(self, opened: int = 0, closed: int = 0) -> None:
        with self._changed:
            self.opened += opened
            self.sessions += opened - closed
            self._changed.notify_all()


def _reply(environment: SQLEnvironment, request: dict[str, Any]) -> str:
    """Play, and word it as the format has it."""
    kind, data = request["type"], request.get("data", {})
    try:
        if "split" in data:
            data = {**data, "split": Split(data["split"])}
        if kind == "state":
            return json.dumps({"type": "state", "data": environment.state.model_dump()})
        played = environment.reset(**data) if kind == "reset" else environment.step(SQLAction(**data))
    except (SQLEnvError, TypeError, ValueError) as error:
        return error_frame("EXECUTION_ERROR" if isinstance(error, SQLEnvError) else "VALIDATION_ERROR", str(error))
    observation = played.model_dump()
    beside = {name: observation.pop(name) for name in ("reward", "done", "metadata")}
    return json.dumps({"type": "observation", "data": {"observation": observation, **beside}})


@contextmanager
def running_server(dataset: Dataset, **options: Any) -> Iterator[PlayingServer]:
    """A server for the `with` block; `options` as `PlayingServer` takes them."""
    server = PlayingServer(dataset, **options)
    try:
        yield server
    finally:
        server.stop()
