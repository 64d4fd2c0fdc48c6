"""The server's log: one JSON object a line, nothing in it that an agent wrote, never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from env_server.service import logs
from env_server.service.logs import (
    FIELDS,
    LOGGER,
    BackgroundHandler,
    JSONFormatter,
    LineHandler,
    configure,
    describe,
    log,
    log_loop_errors,
)

SECRET = "SELECT secret FROM gold"
Entry = dict[str, Any]


class Pipe:
    """A pipe that a handler writes to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def fill(self) -> None:
        """Write to it until whoever writes more would have to wait."""
        os.set_blocking(self.writing, False)
        self._filling = 0
        with suppress(BlockingIOError):
            while True:
                self._filling += os.write(self.writing, b"x" * 4096)
        os.set_blocking(self.writing, True)

    def drain(self) -> None:
        """Read what filled it."""
        while self._filling:
            self._filling -= len(os.read(self.reading, self._filling))

    def text(self) -> str:
        """Close the writing end and read everything."""
        os.close(self.writing)
        with open(self.reading, encoding="utf-8") as file:  # noqa: PTH123
            return file.read()

    def entries(self) -> list[Entry]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def restored() -> Iterator[None]:
    """Logging is global; put it back."""
    names = ("", LOGGER.name, "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "websockets")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    logging.getLogger().handlers.clear()
    show = warnings.showwarning
    yield
    logging.captureWarnings(capture=False)
    warnings.showwarning = show
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def pipe(restored: None) -> Pipe:
    """Everything from debug on, to a pipe."""
    pipe = Pipe()
    configure("debug", LineHandler(pipe.writing))
    return pipe


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


def test_an_event_is_one_line(pipe: Pipe) -> None:
    log(logging.INFO, "session_opened", worker=3, seconds=0.5, reason="first\nsecond")
    log(logging.WARNING, "session_closed", active=None)
    first, second = pipe.entries()
    assert first.pop("ts").endswith("Z")
    assert first == {
        "level": "info",
        "event": "session_opened",
        "worker": 3,
        "seconds": 0.5,
        "reason": "first\nsecond",
    }
    assert (second["level"], second["active"]) == ("warning", None)


def test_a_level_keeps_what_is_below_it_out(restored: None) -> None:
    pipe = Pipe()
    configure("warning", LineHandler(pipe.writing))
    log(logging.INFO, "session_opened")
    log(logging.ERROR, "worker_died")
    assert [entry["event"] for entry in pipe.entries()] == ["worker_died"]


@given(st.text(), st.text(min_size=1))
def test_whatever_the_text_it_stays_one_line_of_json(text: str, name: str) -> None:
    record = LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, "event", (), None)
    record.fields = {"reason": text, name: text}
    line = JSONFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["reason"] == text[:500]
    if name not in FIELDS:
        assert entry["unknown_fields"] == [name]


def test_a_field_that_is_not_known_is_named_and_not_logged(pipe: Pipe) -> None:
    log(logging.INFO, "step", action=SECRET, count=1)
    (entry,) = pipe.entries()
    assert entry["unknown_fields"] == ["action"]
    assert entry["count"] == 1
    assert SECRET not in json.dumps(entry)


def test_of_an_exception_only_the_classes_and_the_places_are_logged(pipe: Pipe) -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error
    except ValueError as error:
        log(logging.ERROR, "step_failed", error=error)
    text = pipe.text()
    assert SECRET not in text
    entry = json.loads(text)
    assert entry["error"] == "ValueError from KeyError"
    (place,) = entry["trace"]
    assert place.startswith("test_logs.py:")
    assert place.endswith(" test_of_an_exception_only_the_classes_and_the_places_are_logged")


def test_an_exception_without_a_trace_is_described() -> None:
    assert describe(ValueError(SECRET)) == {"error": "ValueError", "trace": []}


def test_what_libraries_say_is_left_out_and_who_and_where_is_kept(pipe: Pipe) -> None:
    logging.getLogger("sqlglot").warning("'%s' contains unsupported syntax", SECRET)
    logging.getLogger("sqlglot").warning("contains unsupported syntax: " + SECRET)
    logging.getLogger("sqlglot").info("not even who")
    logging.getLogger("asyncio").error("failed: %r", SECRET, exc_info=raised(ValueError(SECRET)))
    text = pipe.text()
    assert SECRET not in text
    entries = [json.loads(line) for line in text.splitlines()]
    assert [entry["logger"] for entry in entries] == ["sqlglot", "sqlglot", "asyncio"]
    assert all(entry["trace"][0].startswith("test_logs.py:") for entry in entries)
    assert entries[2]["error"] == "ValueError"


def test_the_texts_of_uvicorn_and_our_own_are_kept(pipe: Pipe) -> None:
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").info('%s - "WebSocket %s" [accepted]', "127.0.0.1", "/ws?token=abc")
    logging.getLogger("env_server.service.execution.query_pool").warning(
        "process %d of the %s queue is replaced", 7, "slow"
    )
    invalid, replaced = pipe.entries()
    assert invalid["message"] == "Invalid HTTP request received."
    assert replaced["message"] == "process 7 of the slow queue is replaced"


def test_frames_are_not_logged_even_at_debug(pipe: Pipe) -> None:
    protocol = ServerProtocol(logger=logging.getLogger("uvicorn.error"))
    protocol.state = type(protocol.state).OPEN
    protocol.send_frame(Frame(Opcode.TEXT, SECRET.encode()))
    protocol.receive_data(Frame(Opcode.TEXT, SECRET.encode()).serialize(mask=True))
    assert pipe.text() == ""


def test_warnings_of_libraries_are_left_out_too(pipe: Pipe) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn(SECRET, stacklevel=1)
    text = pipe.text()
    assert SECRET not in text
    assert json.loads(text)["logger"] == "py.warnings"


async def test_errors_that_nobody_awaits_are_logged_without_their_messages(pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)
    done = asyncio.Event()

    def fail(text: str) -> None:
        loop.call_soon(done.set)
        raise ValueError(text)

    loop.call_soon(fail, SECRET)
    await done.wait()
    loop.call_exception_handler({"message": "Task was destroyed but it is pending!"})
    text = pipe.text()
    assert SECRET not in text
    failed, destroyed = [json.loads(line) for line in text.splitlines()]
    assert (failed["event"], failed["error"], failed["reason"]) == ("unhandled_error", "ValueError", None)
    assert destroyed["reason"] == "Task was destroyed but it is pending!"


@pytest.mark.parametrize("make", [LineHandler, BackgroundHandler])
def test_lines_come_out_whole_and_in_order(make: Callable[[int], LineHandler], restored: None) -> None:
    pipe = Pipe()
    handler = make(pipe.writing)
    configure("info", handler)
    for number in range(300):
        log(logging.INFO, "event", count=number)
    handler.close()
    assert [entry["count"] for entry in pipe.entries()] == list(range(300))


def test_a_reader_that_stalls_stalls_nobody_and_what_is_lost_is_counted(restored: None) -> None:
    pipe = Pipe()
    pipe.fill()
    handler = BackgroundHandler(pipe.writing, lines=50)
    configure("info", handler)
    for number in range(5000):
        log(logging.INFO, "event", count=number)
    pipe.drain()
    handler.close()
    entries = pipe.entries()
    kept = [entry["count"] for entry in entries if entry["event"] == "event"]
    assert kept == sorted(kept)
    assert 50 <= len(kept) < 5000
    assert len(kept) + sum(entry["dropped"] for entry in entries if entry["event"] == "log_lines_dropped") == 5000


def test_a_reader_that_is_gone_does_no_harm(restored: None) -> None:
    pipe = Pipe()
    configure("info", LineHandler(pipe.writing))
    os.close(pipe.reading)
    log(logging.INFO, "event")
    os.close(pipe.writing)


def test_a_stalled_reader_does_not_hold_up_the_end(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FLUSH_S", 0.01)
    pipe = Pipe()
    pipe.fill()
    handler = BackgroundHandler(pipe.writing, lines=1)
    configure("info", handler)
    for _ in range(3):
        log(logging.INFO, "event")
    handler.close()
    pipe.drain()
    os.close(pipe.reading)


def test_what_any_client_can_cause_does_not_fill_the_log(pipe: Pipe) -> None:
    logging.getLogger("uvicorn.error").error("Invalid UTF-8 sequence received from client.")
    logging.getLogger("uvicorn.error").error("something else")
    assert "UTF-8" not in (text := pipe.text())
    assert "something else" in text
