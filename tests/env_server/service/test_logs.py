"""The server's log: one JSON object a line, nothing in it that an agent wrote, never in anybody's way."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from env_server.service import logs
from env_server.service.logs import LOGGER, configure, log, log_loop_errors

SECRET = "SELECT secret FROM gold"
Entries = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def restored() -> Iterator[None]:
    """Logging is global; put it back."""
    names = ("", LOGGER.name, "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "websockets")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each, list(each.handlers), each.level, each.propagate, list(each.filters)) for each in loggers]
    show = warnings.showwarning
    yield
    logging.captureWarnings(capture=False)
    warnings.showwarning = show
    for each, handlers, level, propagate, filters in before:
        each.propagate = propagate
        each.handlers[:], each.filters[:] = handlers, filters
        each.setLevel(level)


@pytest.fixture
def entries(restored: None) -> Iterator[Entries]:
    """Log everything from debug on; what was logged, once."""
    stream = io.StringIO()
    stops = [configure("debug", stream).stop]

    def stop() -> list[dict[str, Any]]:
        stops.pop()()
        assert SECRET not in stream.getvalue()
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield stop
    for each in stops:
        each()


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.dictionaries(st.sampled_from(["count", "reason", "url"]), st.text() | st.integers() | st.none()))
def test_an_event_is_a_line_with_its_fields(restored: None, fields: dict[str, Any]) -> None:
    stream = io.StringIO()
    listener = configure("info", stream)
    log(logging.WARNING, "event", **fields)
    log(logging.DEBUG, "too little")
    listener.stop()
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("ts").endswith("Z")
    assert entry == {"level": "warning", "event": "event", **fields}


def test_of_an_exception_only_the_classes_and_the_places_are_logged(entries: Entries) -> None:
    try:
        raise ValueError(SECRET) from KeyError(SECRET)
    except ValueError as error:
        log(logging.ERROR, "failed", error=error)
    (entry,) = entries()
    assert entry["error"] == "ValueError from KeyError"
    assert entry["trace"][0].startswith("test_logs.py:")


def test_what_libraries_say_is_left_out_and_who_and_where_is_kept(entries: Entries) -> None:
    logging.getLogger("sqlglot").warning("'%s' contains unsupported syntax", SECRET)
    logging.getLogger("sqlglot").info("not even who")
    logging.getLogger("asyncio").error("failed: %r", SECRET, exc_info=raised(ValueError(SECRET)))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn(SECRET, stacklevel=1)
    found = entries()
    assert [entry["logger"] for entry in found] == ["sqlglot", "asyncio", "py.warnings"]
    assert all("test_logs.py:" in entry["trace"][0] for entry in found[:2])
    assert found[1]["error"] == "ValueError"


def test_the_texts_of_uvicorn_and_our_own_are_kept_but_for_what_any_client_can_cause(entries: Entries) -> None:
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").info('%s - "WebSocket %s" [accepted]', "127.0.0.1", "/ws?token=abc")
    logging.getLogger("uvicorn.error").error("Invalid UTF-8 sequence received from client.")
    logging.getLogger("env_server.service").warning("process %d is replaced", 7)
    protocol = ServerProtocol(logger=logging.getLogger("uvicorn.error"))
    protocol.state = type(protocol.state).OPEN
    protocol.send_frame(Frame(Opcode.TEXT, SECRET.encode()))
    assert [entry["message"] for entry in entries()] == ["Invalid HTTP request received.", "process 7 is replaced"]


async def test_unhandled_errors_are_logged_without_their_messages(entries: Entries) -> None:
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)
    done = asyncio.Event()

    def fail(text: str) -> None:
        loop.call_soon(done.set)
        raise ValueError(text)

    loop.call_soon(fail, SECRET)
    await done.wait()
    loop.call_exception_handler({"message": "Task was destroyed but it is pending!"})
    failed, destroyed = entries()
    assert (failed["event"], failed["error"], failed["reason"]) == ("unhandled_error", "ValueError", None)
    assert destroyed["reason"] == "Task was destroyed but it is pending!"


class Stalled(io.StringIO):
    """A stream whose reader has stalled until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        assert self.go_on.wait(60)
        return super().write(text)


def test_a_reader_that_stalls_stalls_nobody(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "QUEUE_LINES", 50)
    stream = Stalled()
    listener = configure("info", stream)
    for number in range(500):
        log(logging.INFO, "event", count=number)
    stream.go_on.set()
    while not listener.queue.empty():  # type: ignore[attr-defined]
        threading.Event().wait(0.001)
    listener.stop()
    kept = [json.loads(line)["count"] for line in stream.getvalue().splitlines()]
    assert kept == sorted(kept)
    assert 50 <= len(kept) < 500
