"""A server with a tiny application instead of SQLEnv's, run as a script by the tests of the processes around it.

    python stand_in_server.py [--stuck_checks=N] [--fail=FILE] [--wait=FILE] [flags of `sqlenv serve`]

A WebSocket takes a place, says its worker's process id, and echoes; `block` stops the worker's event loop, `exit` ends
the process without a word. GET /active and /files answer what they are called; /grow keeps 200,000 more objects, and
answers how often the collector has looked at everything meanwhile. `--fail` names a file: while
it exists, no worker starts. `--wait` names a file: while it is locked, no application is made.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from env_server.errors import SQLEnvError
from env_server.service.capacity import Capacity
from env_server.service.logs import log
from env_server.service.metrics import Metrics
from env_server.service.settings import ServiceSettings, read_settings
from env_server.service.workers import supervisor
from env_server.service.workers.run import serve

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Application:
    """The application, as the server wants it: ASGI, with `state.service.drain()`."""

    def __init__(self, settings: ServiceSettings, capacity: Capacity, fail: Path | None) -> None:
        self._settings = settings
        self._capacity = capacity
        self._fail = fail
        self._sessions = 0
        self._gone = asyncio.Event()
        self._kept: list[list[int]] = []
        self.state = SimpleNamespace(service=self)

    async def drain(self) -> None:
        """Wait until the sessions are gone, for the grace period at most."""
        log(logging.INFO, "draining", count=self._sessions)
        self._capacity.close()
        try:
            async with asyncio.timeout(self._settings.grace_s):
                while self._sessions:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            return

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        match scope["type"]:
            case "lifespan":
                await self._live(receive, send)
            case "websocket":
                await self._session(receive, send)
            case "http":
                await self._answer(scope["path"], receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if self._fail is not None and self._fail.exists():
            await send({"type": "lifespan.startup.failed", "message": "told to"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _session(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        assert self._capacity.try_acquire()
        self._sessions += 1
        try:
            await send({"type": "websocket.send", "text": str(os.getpid())})
            while (message := await receive())["type"] == "websocket.receive":
                match message.get("text"):
                    case "block":
                        time.sleep(3600)
                    case "exit":
                        os._exit(3)
                await send({"type": "websocket.send", "text": message["text"]})
        finally:
            self._sessions -= 1
            self._capacity.release()
            self._gone.set()

    async def _answer(self, path: str, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        match path:
            case "/active":
                body = json.dumps(self._capacity.active()).encode()
            case "/files":
                body = json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).encode()
            case "/grow":
                before = gc.get_stats()[2]["collections"]
                self._kept += [[number] for number in range(200_000)]
                body = json.dumps(gc.get_stats()[2]["collections"] - before).encode()
            case _:
                body = b"ok"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def main(arguments: list[str]) -> int:
    """Serve."""
    own = dict(
        each.removeprefix("--").split("=") for each in arguments if each.startswith(("--stuck", "--fail", "--wait"))
    )
    settings, _ = read_settings([each for each in arguments if not each.startswith(("--stuck", "--fail", "--wait"))])
    if "stuck_checks" in own:
        supervisor.STUCK_CHECKS = int(own["stuck_checks"])

    def create_app(settings: ServiceSettings, dataset: object, *, capacity: Capacity, metrics: Metrics) -> Application:
        if "wait" in own:
            with Path(own["wait"]).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        return Application(settings, capacity, Path(own["fail"]) if "fail" in own else None)

    try:
        return serve(
            settings,
            create_app,
            load=lambda _: None,
            announce=lambda url: print(f"serving at {url}", flush=True),
        )
    except SQLEnvError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
