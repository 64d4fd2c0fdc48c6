"""The server's log: one JSON object a line on stderr, with `ts`, `level`, `event` and the event's fields.

Promises:

- No action, no observation, nothing of a question or its gold, and no token is ever logged. An event carries only the
  fields named in `FIELDS`, none of which can hold them; any other is dropped, and its name is logged instead. Of an
  exception the class and the places in the code are logged, not its message, which may quote a statement.
- What libraries log comes through the same format, from warnings up, without its text, which may quote a statement:
  who logged it and where. Our own texts and uvicorn's are kept; they hold nothing of a request.
- A reader of stderr that stalls does not stall the server: a worker's lines are written by a thread of their own, and
  the ones that do not fit into its queue are dropped and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import threading
from datetime import UTC, datetime
from pathlib import PurePath
from traceback import extract_tb
from types import TracebackType
from typing import Any

LOGGER = logging.getLogger("sqlenv.service")
"""The server's own events; written through `log`."""

FIELDS = frozenset(
    {
        "active",
        "count",
        "databases",
        "dropped",
        "fix",
        "grace_s",
        "limit",
        "needed",
        "pid",
        "questions",
        "reason",
        "seconds",
        "signal",
        "status",
        "url",
        "worker",
        "workers",
    }
)
"""What an event may carry: numbers, and words of the server's own. None holds what a client has sent."""

_QUOTED = frozenset(("env_server", "uvicorn"))
"""Packages whose texts are logged."""

QUEUE_LINES = 10_000
"""Lines that wait for a reader of stderr."""
_FLUSH_S = 1.0
_TEXT_CHARS = 500

Field = str | int | float | bool | None


def log(level: int, event: str, /, *, error: BaseException | None = None, **fields: Field) -> None:
    """Log an event of the server; `error` adds the class of an exception and where it comes from."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, exc_info=error, extra={"fields": fields})


class JSONFormatter(logging.Formatter):
    """Makes a record one line of JSON, leaving out what must not be logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line, without its end."""
        entry: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        if record.name == LOGGER.name:
            entry["event"] = record.msg
            entry.update(_fields(getattr(record, "fields", {})))
        else:
            entry |= {"event": "library", "logger": record.name, "trace": [f"{record.filename}:{record.lineno}"]}
            if record.name.partition(".")[0] in _QUOTED:
                entry["message"] = record.getMessage().strip()
        if record.exc_info and record.exc_info[1] is not None:
            entry |= describe(record.exc_info[1])
        return json.dumps(entry, default=str)


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as fields that quote nothing: its class, its cause's, and the lines that it went through."""
    cause = error.__cause__ or error.__context__
    classes = [type(error).__name__, *([type(cause).__name__] if cause else [])]
    return {"error": " from ".join(classes), "trace": _trace(error.__traceback__)}


class LineHandler(logging.Handler):
    """Writes lines to a file descriptor, each with one call, so that those of several processes do not mix."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        self._write(self.format(record))

    def _write(self, line: str) -> None:
        left = memoryview((line + "\n").encode("utf-8", "backslashreplace"))
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            return  # Nobody reads stderr any more, and there is nowhere else to say so.


class BackgroundHandler(LineHandler):
    """A LineHandler that never waits: a thread writes, and what does not fit into its queue is dropped and counted."""

    def __init__(self, descriptor: int = 2, lines: int = QUEUE_LINES) -> None:
        super().__init__(descriptor)
        self._lines: queue.Queue[str | None] = queue.Queue(lines)
        self._dropped = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave the record to the thread."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            with self._counting:
                self._dropped += 1

    def close(self) -> None:
        """Write what is left, for as long as a second."""
        try:
            self._lines.put(None, timeout=_FLUSH_S)
        except queue.Full:
            pass  # The reader has stalled; the thread dies with the process.
        else:
            self._thread.join(_FLUSH_S)
        super().close()

    def _run(self) -> None:
        line: str | None = ""
        while line is not None:
            line = self._lines.get()
            if line is not None:
                self._write(line)
            if self._dropped and self._lines.empty():
                self._write(self.format(self._loss()))

    def _loss(self) -> logging.LogRecord:
        with self._counting:
            dropped, self._dropped = self._dropped, 0
        record = LOGGER.makeRecord(LOGGER.name, logging.WARNING, "", 0, "log_lines_dropped", (), None)
        record.fields = {"dropped": dropped}
        return record


def configure(level: str, handler: LineHandler) -> None:
    """Send all logging of the process to the handler: the server's from `level` on, the libraries' from warnings."""
    handler.setFormatter(JSONFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    LOGGER.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "websockets"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        # websockets logs the content of frames, and uvicorn the queries of URLs, below warnings.
        library.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(unprovoked)
    logging.captureWarnings(capture=True)


def unprovoked(record: logging.LogRecord) -> bool:
    """Drop what uvicorn logs as an error and any client can cause, as often as it likes: text that is not UTF-8."""
    return not str(record.msg).startswith("Invalid UTF-8 sequence received from client")


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log the errors that nobody awaits on the loop as events; asyncio's own report would quote their messages."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # With an exception, the message shows the callback's arguments.
        log(logging.ERROR, "unhandled_error", error=error, reason=None if error else str(context.get("message")))

    loop.set_exception_handler(handle)


def _fields(fields: dict[str, Field]) -> dict[str, Any]:
    kept: dict[str, Any] = {name: _short(value) for name, value in fields.items() if name in FIELDS}
    if len(kept) < len(fields):
        kept["unknown_fields"] = sorted(fields.keys() - kept.keys())
    return kept


def _short(value: Field) -> Field:
    return value[:_TEXT_CHARS] if isinstance(value, str) else value


def _trace(trace: TracebackType | None) -> list[str]:
    return [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in extract_tb(trace)]
