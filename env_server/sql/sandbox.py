"""The SQL sandbox: one read-only connection, on which any statement text may be tried.

The text comes from a language model and is treated as hostile. Guarantees:

- `query` returns a QueryResult or raises SQLError, whatever the text is; the database file never changes, no
  other file is read or written, and the connection serves the next statement as if it were new.
- The same text on the same file gives the same columns, rows, row count and error, on a fresh connection and on
  a used one. What decides is counted (virtual-machine steps, bytes), not timed; the deadline, in processor time,
  and the process's heap limit, which `limit_memory` sets, are last resorts for a slow or small machine. Sources of
  chance and of the date are refused or fixed (`env_server.sql.vfs`), and so are the words that ask for the machine's
  time zone; where a statement computes them, the process's own zone decides, which is UTC on a server.
- At most `max_rows + 1` rows are fetched, and no more than a bounded number of bytes.

Layers, from the outside in: the text's admission (`statement_body`), the authorizer (`authorize`), SQLite's own
read-only modes and limits, the step budget (`_Meter`), and the file layer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import apsw

from env_server.dataset import Row, SQLValue
from env_server.errors import DataError, SQLError
from env_server.settings import SandboxSettings
from env_server.sql.cost import SORTING, STEPS_OF_SORTS, Program, RunLimits
from env_server.sql.statements import authorize, classify, statement_body
from env_server.sql.vfs import SANDBOX_VFS, VFS_NAME

GAP_S = 0.5
"""Processor time between two looks at the budget, at most: a second would break the promise on a slower machine."""
LIMITS = RunLimits(gap_s=GAP_S, interval=1_000, opcodes=700, pattern_bytes=100)
"""A statement is first tried under these. No gold query of Spider needs more than 160 opcodes, or patterns of 15."""
ANALYSED_LIMITS = RunLimits(gap_s=GAP_S, interval=20, opcodes=50_000, pattern_bytes=100)
"""For one with larger values, or a longer program."""
CACHE_KIB = 1_024
"""Page cache of one connection; a sort larger than this spills."""
RESULT_VALUES = 32
"""A result may hold this many times `value_bytes`."""
MEMORY_RETRIES = 2
"""Times that a statement runs again when the process's heap was full."""
SPILL_SHARE = 4
"""A statement may write `heap_bytes / SPILL_SHARE` bytes of temporary space."""

_LIMITS = {
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 500,
    apsw.SQLITE_LIMIT_PARSER_DEPTH: 400,
    apsw.SQLITE_LIMIT_FUNCTION_ARG: 100,
    apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    apsw.SQLITE_LIMIT_VARIABLE_NUMBER: 10,
    apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
}

_memory_hungry = threading.Lock()
"""Held by a statement that ran out of memory while it runs again: one at a time, since the heap is shared."""


def limit_memory(settings: SandboxSettings) -> None:
    """Bound what SQLite may allocate in this process, in all sandboxes together; for whoever starts or sets up one.

    The bound is `heap_bytes`; a later call replaces it.
    """
    apsw.hard_heap_limit(settings.heap_bytes)


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a statement returned. `row_count` is exact, or None where counting failed or cost too much."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    row_count: int | None
    vm_steps: int

    @property
    def more(self) -> bool:
        """Whether rows exist beyond `rows`."""
        return self.row_count is None or self.row_count > len(self.rows)


class _Meter:
    """The budget of one statement; `tick` is SQLite's progress handler, in the thread that made the meter."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._limit = settings.vm_steps
        self._interval = 0
        self._spent = 0
        self._deadline_s = settings.deadline_s
        self._due = time.thread_time() + settings.deadline_s
        self._look_at = time.monotonic() + settings.deadline_s
        self.steps = 0
        self.exceeded = ""
        self.out_of_steps = False
        self.interrupted = False

    def attach(self, connection: apsw.Connection, interval: int) -> None:
        """Look at the budget every so many steps of the connection from now on."""
        self._interval = min(interval, self._limit)
        connection.set_progress_handler(self.tick, self._interval)
        connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._record)

    def limit(self, steps: int) -> None:
        """Allow no more than so many steps."""
        self._limit = min(self._limit, steps)

    def spent(self) -> tuple[int, int]:
        """Return what has been spent so far, for `restore`."""
        return self._spent, self.steps

    def restore(self, spent: tuple[int, int]) -> None:
        """Forget the steps since `spent`, though not the time: what took them is tried again."""
        self._spent, self.steps = spent

    def tick(self) -> bool:
        """Return whether to stop; `exceeded` then says why."""
        self._spent += self._interval
        if self._spent > self._limit:
            self.exceeded = f"the query needs more than {self._limit} steps"
            self.out_of_steps = True
        elif self._is_due():
            self.exceeded = self.late
        elif self.interrupted:
            self.exceeded = "the query was interrupted"
        return bool(self.exceeded)

    @property
    def late(self) -> str:
        """What is said of a statement that is not done by the deadline."""
        return f"the query takes longer than {self._deadline_s:g} s"

    def check_deadline(self) -> None:
        """Raise SQLError where the deadline has passed: no look may have come after the last step."""
        if self._is_due():
            raise SQLError("budget", self.late, deterministic=False)

    def _is_due(self) -> bool:
        """Whether the thread has used the time; it is asked for only when that may be, since asking is slow."""
        now = time.monotonic()
        if now <= self._look_at:
            return False
        left = self._due - time.thread_time()
        self._look_at = now + left
        return left < 0

    def _record(self, event: dict[str, object]) -> None:
        """Add the steps of a finished statement, a virtual table's own ones included; SQLite's profile trace."""
        status = event["stmt_status"]
        if isinstance(status, dict):
            self.steps += status["SQLITE_STMTSTATUS_VM_STEP"]


def _without_samples(_action: int, first: str | None, *_: str | None) -> int:
    """Hide ANALYZE's samples of values: comparing with them calls constant functions before a step is counted."""
    return apsw.SQLITE_IGNORE if (first or "").lower() == "sqlite_stat4" else apsw.SQLITE_OK


class _TooLargeError(Exception):
    """The statement's program has more opcodes than the limits allow."""


class Sandbox:
    """One read-only connection to one database, a file or the image of one in memory; one thread at a time.

    The constructor and `query` raise DataError when the file cannot be opened as a database.
    """

    def __init__(
        self,
        database: Path | bytes,
        settings: SandboxSettings,
        *,
        functions: Collection[str] | None = None,
        limits: RunLimits = LIMITS,
    ) -> None:
        """`functions`: the only ones that may be called, in lower case; None: all but those that nobody may.

        `limits`: what a statement is first tried under.
        """
        self._database = database
        self._functions = functions
        self._settings = settings
        self._limits = limits
        self._refusal = ""
        self._called: set[str] = set()
        """Functions of the statement that is being prepared, in lower case."""
        self._encoding = "utf-8"
        self._own_tables: frozenset[str] = frozenset()
        self.has_collations = False
        """Whether the schema names a collation: comparing texts then takes ten times as long."""
        self._has_virtual_tables = False
        self._meter: _Meter | None = None
        self._connection: apsw.Connection | None = None
        # Held to close the connection and to interrupt it, which must not meet.
        self._closing = threading.Lock()
        with suppress(MemoryError):  # the first query tries again, and waits for its turn
            self._connected()

    def query(self, sql: str, max_rows: int) -> QueryResult:
        """Run one read-only statement and return at most `max_rows` of its rows. Raises SQLError, DataError."""
        body = statement_body(sql, self._settings.sql_bytes)
        try:
            return self._attempt(body, max_rows)
        except MemoryError:
            self.close()
        # The heap belongs to the whole process: a statement is only to blame when it keeps failing while no
        # other one that ran out of memory runs.
        with _memory_hungry:
            for _ in range(MEMORY_RETRIES):
                try:
                    return self._attempt(body, max_rows)
                except MemoryError:
                    self.close()
        raise SQLError("size", "the query needs too much memory", deterministic=False)

    def interrupt(self) -> None:
        """Stop the running statement, from another thread; it raises SQLError. Without one, do nothing."""
        with self._closing:
            # Read once: the statement may end at any moment.
            meter = self._meter
            if meter is not None and self._connection is not None:
                meter.interrupted = True
                self._connection.interrupt()

    def close(self) -> None:
        """Close the connection. A later query opens it again."""
        with self._closing:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(True)

    def _attempt(self, body: str, max_rows: int) -> QueryResult:
        """Run the statement under one budget; raises SQLError, and MemoryError when the heap is full."""
        if self._has_virtual_tables:
            # Modules of virtual tables keep statements and caches, whose counters a new statement would inherit.
            self.close()
        connection = self._connected()
        meter = _Meter(self._settings)
        with self._metered(connection, meter):
            try:
                columns, rows = self._fetch(connection, body, max_rows + 1, meter)
            except UnicodeDecodeError:
                columns, rows = self._fetch_undecodable(connection, body, max_rows + 1, meter)
        row_count: int | None = len(rows)
        if len(rows) > max_rows:
            row_count = self._count(connection, body, meter)
        return QueryResult(columns, tuple(rows[:max_rows]), row_count, meter.steps)

    def _count(self, connection: apsw.Connection, body: str, meter: _Meter) -> int | None:
        """Count the statement's rows with what is left of the budget; None where that cannot be done."""
        try:
            with self._metered(connection, meter):
                _, rows = self._fetch(connection, f"SELECT COUNT(*) FROM (\n{body}\n)", 1, meter)
        except SQLError as error:
            if not error.deterministic:
                raise
            return None
        count = rows[0][0]
        return count if isinstance(count, int) else None

    def _fetch(
        self, connection: apsw.Connection, sql: str, limit: int, meter: _Meter
    ) -> tuple[tuple[str, ...], list[Row]]:
        """Return the column names and at most `limit` rows, bytes bounded. A limit of 0 runs nothing."""
        spent = meter.spent()
        try:
            return self._run(connection, sql, limit, meter, self._limits)
        except (_TooLargeError, apsw.TooBigError):
            if not self._limits.analysed:
                raise SQLError("size", "the statement is too large for these limits") from None
        meter.restore(spent)
        connection.limit(apsw.SQLITE_LIMIT_VDBE_OP, ANALYSED_LIMITS.opcodes)
        program = Program(connection.execute(f"EXPLAIN {sql}"))
        value_bytes = program.value_bytes(ANALYSED_LIMITS, self._settings.value_bytes)
        meter.restore(spent)
        return self._run(connection, sql, limit, meter, ANALYSED_LIMITS, value_bytes)

    def _run(
        self,
        connection: apsw.Connection,
        sql: str,
        limit: int,
        meter: _Meter,
        limits: RunLimits,
        value_bytes: int | None = None,
    ) -> tuple[tuple[str, ...], list[Row]]:
        """Fetch under some limits. Raises _TooLargeError where the program has too many opcodes for them."""
        columns: tuple[str, ...] | None = None

        def inspect(cursor: apsw.Cursor, _sql: str, _bindings: object) -> bool:
            nonlocal columns
            if cursor.is_explain or not cursor.is_readonly:
                raise SQLError("denied", "only SELECT queries are allowed")
            columns = tuple(name for name, _ in cursor.get_description())
            largest = limits.value_bytes(self._called) if value_bytes is None else value_bytes
            connection.limit(apsw.SQLITE_LIMIT_LENGTH, min(largest, self._settings.value_bytes))
            if not SORTING.isdisjoint(self._called):
                meter.limit(STEPS_OF_SORTS)
            return limit > 0

        self._called.clear()
        connection.limit(apsw.SQLITE_LIMIT_LENGTH, self._settings.value_bytes)
        connection.limit(apsw.SQLITE_LIMIT_VDBE_OP, limits.opcodes)
        connection.limit(apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, limits.pattern_bytes)
        meter.attach(connection, limits.interval)
        cursor = connection.cursor()
        cursor.exec_trace = inspect
        rows: list[Row] = []
        size = 0
        try:
            for row in cursor.execute(sql):
                size += self._row_bytes(row)
                if size > RESULT_VALUES * self._settings.value_bytes:
                    raise SQLError("size", "the result is too large")
                rows.append(row)
                if len(rows) == limit:
                    break
        except apsw.ExecTraceAbort:
            return columns or (), []
        except apsw.NoMemError:
            if columns is None and limits is self._limits:
                raise _TooLargeError from None
            raise
        finally:
            cursor.close(True)
        return columns or (), rows

    def _row_bytes(self, row: Row) -> int:
        size = 0
        for value in row:
            if isinstance(value, (str, bytes)):  # once for each cell: `str | bytes` takes twice as long
                size += len(value)
        if size > self._settings.value_bytes:
            raise SQLError("size", "a row of the result is too large")
        return size

    def _fetch_undecodable(
        self, connection: apsw.Connection, body: str, limit: int, meter: _Meter
    ) -> tuple[tuple[str, ...], list[Row]]:
        """Fetch text that is not valid Unicode: as bytes, then decoded with replacement characters."""
        columns, _ = self._fetch(connection, body, 0, meter)
        names = [f"c{i}" for i in range(len(columns))]
        cells = ", ".join(f"typeof({n}), iif(typeof({n}) = 'text', CAST({n} AS BLOB), {n})" for n in names)
        wrapped = f"WITH r({', '.join(names)}) AS (\n{body}\n) SELECT {cells} FROM r"
        _, raw = self._fetch(connection, wrapped, limit, meter)
        return columns, [self._decoded(row) for row in raw]

    def _decoded(self, row: Row) -> Row:
        values: list[SQLValue] = []
        for kind, value in zip(row[::2], row[1::2], strict=True):
            if kind == "text" and isinstance(value, bytes):
                values.append(value.decode(self._encoding, errors="replace"))
            else:
                values.append(value)
        return tuple(values)

    @contextmanager
    def _metered(self, connection: apsw.Connection, meter: _Meter) -> Iterator[None]:
        """Count what runs inside against the meter, allow it temporary space, and type its errors."""
        self._refusal = ""
        self._meter = meter
        try:
            with SANDBOX_VFS.spill_allowance(self._settings.heap_bytes // SPILL_SHARE):
                yield
            meter.check_deadline()
        except apsw.NoMemError as error:
            raise MemoryError from error
        except apsw.Error as error:
            raise self._as_sql_error(error, meter) from None
        except UnicodeDecodeError:
            raise SQLError("runtime", "a name in the result is not valid Unicode text") from None
        finally:
            self._meter = None
            connection.set_progress_handler(None)
            connection.trace_v2(0, None)

    def _as_sql_error(self, error: apsw.Error, meter: _Meter) -> SQLError:
        if isinstance(error, apsw.InterruptError):
            message = meter.exceeded or "the query was interrupted"
            return SQLError("budget", message, deterministic=meter.out_of_steps)
        if self._refusal and isinstance(error, apsw.AuthError | apsw.SQLError):
            return SQLError("denied", self._refusal)
        return classify(error)

    def _authorizer(
        self, action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None
    ) -> int:
        reason = authorize(action, first, second, self._own_tables)
        if action == apsw.SQLITE_FUNCTION:
            name = (second or "").lower()
            self._called.add(name)
            if self._functions is not None and name not in self._functions:
                reason = reason or f"function {second} is not allowed here"
        if not reason:
            return apsw.SQLITE_OK
        self._refusal = self._refusal or reason
        return apsw.SQLITE_DENY

    def _connected(self) -> apsw.Connection:
        """Return the connection, opened where there is none. Raises DataError, and MemoryError."""
        if self._connection is None:
            try:
                connection = self._connect()
                self._harden(connection)
            except apsw.NoMemError as error:
                raise MemoryError from error
            except (apsw.Error, UnicodeDecodeError) as error:
                name = self._database if isinstance(self._database, Path) else "the image"
                problem = f"cannot be opened as a SQLite database: {error}"
                if isinstance(error, UnicodeDecodeError):
                    problem = f"has a table or column called {error.object!r}, which is not UTF-8. Rename it"
                raise DataError(f"{name} {problem}") from error
            self._connection = connection
        return self._connection

    def _connect(self) -> apsw.Connection:
        # Without a statement cache, every execution is prepared afresh: counters and plans have no history.
        if isinstance(self._database, bytes):
            connection = apsw.Connection(":memory:", vfs=VFS_NAME, statementcachesize=0)
            connection.deserialize("main", self._database)
            return connection
        # SQLite tells of a symbolic link with a status that its binding takes for an error.
        uri = f"file:{quote(str(self._database.resolve()))}?mode=ro&immutable=1"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        return apsw.Connection(uri, flags=flags, vfs=VFS_NAME, statementcachesize=0)

    def _harden(self, connection: apsw.Connection) -> None:
        """Load the schema, then shut everything but reading. The order matters: loading needs more rights."""
        for option, value in (
            (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
            (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
            (apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0),
            (apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, 0),
            (apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_CREATE, 0),
            (apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_WRITE, 0),
        ):
            connection.config(option, value)
        connection.authorizer = _without_samples
        for pragma in ("query_only = 1", f"cache_size = -{CACHE_KIB}", "mmap_size = 0", "temp_store = FILE"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        self._encoding = str(connection.pragma("encoding"))
        is_virtual = "lower(substr(sql, 1, 14)) = 'create virtual'"
        stored = f"SELECT name, {is_virtual}, CAST(sql AS BLOB) FROM sqlite_master WHERE type = 'table'"
        tables = connection.execute(stored).fetchall()
        for name, _, sql in tables:
            if isinstance(sql, bytes) and not sql.isascii():  # its columns' names must be texts, too
                connection.execute("SELECT name FROM pragma_table_info(?)", (name,)).fetchall()
        collated = "SELECT count(*) FROM sqlite_master WHERE instr(lower(sql), 'collate')"
        self.has_collations = connection.execute(collated).get > 0
        self._own_tables = frozenset(str(name).lower() for name, *_ in tables)
        virtual = [str(name) for name, is_virtual, _ in tables if is_virtual]
        self._has_virtual_tables = bool(virtual)
        for name in virtual:
            self._connect_virtual_table(connection, name)
        limits = {
            **_LIMITS,
            apsw.SQLITE_LIMIT_LENGTH: self._settings.value_bytes,
            # The wrapped forms of a statement are longer than the statement.
            apsw.SQLITE_LIMIT_SQL_LENGTH: 4 * self._settings.sql_bytes + 100_000,
        }
        for limit, value in limits.items():
            connection.limit(limit, value)
        connection.authorizer = self._authorizer

    @staticmethod
    def _connect_virtual_table(connection: apsw.Connection, name: str) -> None:
        """Let the module prepare its statements, writes among them, before the authorizer is set."""
        quoted = name.replace('"', '""')
        try:
            connection.execute(f'SELECT * FROM "{quoted}" LIMIT 0').fetchall()
        except apsw.SQLError:
            # A module that this build lacks: a query on the table will say so.
            return
