"""The server's log: one JSON object per line on stderr, with `ts`, `level`, `event` and the event's fields.

Guarantees:

- No action, observation, question, gold or token is logged. Of an exception the class and the places in the code are
  logged, not its message, which may quote a statement; of what libraries log (from warnings up) who logged it and
  where. Our own texts and uvicorn's are kept; they hold nothing of a request.
- A reader of stderr that stalls does not stall the server: a thread writes, and lines beyond `QUEUE_LINES` are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import sys
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import PurePath
from traceback import extract_tb
from typing import Any, TextIO

LOGGER = logging.getLogger("sqlenv.service")
"""The server's own events; written through `log`."""
QUEUE_LINES = 10_000

Field = str | int | float | bool | None
_QUOTED = ("env_server", "uvicorn")
"""Packages whose texts are logged."""
_LIBRARIES = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "websockets")


def log(level: int, event: str, /, *, error: BaseException | None = None, **fields: Field) -> None:
    """Log an event of the server; `error` adds the class of an exception and where it comes from."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, exc_info=error, extra={"fields": fields})


class JSONFormatter(logging.Formatter):
    """Makes a record one line of JSON, without what must not be logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line, without its end."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry: dict[str, Any] = {"ts": time, "level": record.levelname.lower()}
        if record.name == LOGGER.name:
            entry |= {"event": record.msg, **getattr(record, "fields", {})}
        else:
            entry |= {"event": "library", "logger": record.name, "trace": [f"{record.filename}:{record.lineno}"]}
            if record.name.partition(".")[0] in _QUOTED:
                entry["message"] = record.getMessage().strip()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            cause = error.__cause__ or error.__context__
            entry["error"] = " from ".join(type(each).__name__ for each in (error, cause) if each is not None)
            frames = extract_tb(error.__traceback__)
            entry["trace"] = [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(entry, default=str)


class _Queue(QueueHandler):
    """A QueueHandler that drops what the queue has no room for."""

    def enqueue(self, record: logging.LogRecord) -> None:
        """Add a record."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)


def configure(level: str, stream: TextIO | None = None) -> QueueListener:
    """Send all logging of the process to stderr: the server's from `level` on, the libraries' from warnings.

    `stop` of what is returned writes what is left, once.
    """
    lines: queue.Queue[Any] = queue.Queue(QUEUE_LINES)
    handler = _Queue(lines)
    handler.setFormatter(JSONFormatter())
    listener = QueueListener(lines, logging.StreamHandler(stream or sys.stderr))
    listener.start()
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    LOGGER.setLevel(level.upper())
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        # websockets logs the content of frames, and uvicorn the queries of URLs, below warnings.
        library.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_unprovoked)
    logging.captureWarnings(capture=True)
    return listener


def _unprovoked(record: logging.LogRecord) -> bool:
    """Drop what any client can cause, as often as it likes: text that is not UTF-8, an error for uvicorn."""
    return not str(record.msg).startswith("Invalid UTF-8 sequence received from client")


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log the loop's unhandled errors as events; asyncio's own report would quote their messages."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # With an exception, the message shows the callback's arguments.
        log(logging.ERROR, "unhandled_error", error=error, reason=None if error else str(context.get("message")))

    loop.set_exception_handler(handle)
