"""Whatever is sent to a server: no 500, no traceback, no hang, replies in order, and the next client is served.

`schemathesis` makes HTTP requests from the served OpenAPI document; a Hypothesis state machine drives `/ws` through
valid and invalid frames, pipelines, pings, garbage bytes and all ways to leave, against a model of what the session
must know.
"""

from __future__ import annotations

import json
import socket as sockets
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from benchmarks.server_process import ServerProcess
from env_server.dataset import Dataset
from tests.integration.service import (
    WAIT_S,
    ask,
    complaints,
    get_json,
    open_socket,
    receive,
    serving,
    until,
    write_data,
)

MAX_FRAME = 65_536
BUDGET = 6
CHATTY = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that must have no session left at the end, and nothing to complain of."""
    flags = ("--max_frame_bytes", str(MAX_FRAME), "--step_budget", str(BUDGET), "--messages_per_s", "0")
    data = write_data(pets, tmp_path_factory.mktemp("pets"))
    with serving(tmp_path_factory.mktemp("log"), data, *flags) as running:
        yield running
        until(lambda: get_json(running, "/ready")["active_sessions"] == 0)
        assert running.stop() == 0
        assert complaints(running) == []


# --- HTTP ----------------------------------------------------------------------------------------------------------


def test_http(server: ServerProcess) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations() if isinstance(found, Ok)]
    assert {"/reset", "/step", "/state", "/mcp"} <= {operation.path for operation in operations}
    for operation in operations:

        @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        @settings(CHATTY, max_examples=25)
        def requests(case: Any) -> None:
            response = case.call(timeout=WAIT_S)
            assert response.status_code < 500, response.text
            case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])

        requests()


# --- WebSocket -----------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=()), max_size=40) | st.sampled_from(["\ud800", "a\udfff", "\0"])
"""Any text; half characters too, which JSON can carry and which the server refuses."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
KINDS = st.sampled_from(["reset", "step", "state", "mcp", "close", "observation", ""])
ALMOST = st.fixed_dictionaries({"type": KINDS | JSON}, optional={"data": JSON, "extra": JSON}).filter(
    lambda frame: frame["type"] not in ("close", "reset", "step")
)
"""Frames that are no request, or one that changes nothing."""
BAD_RESETS = st.fixed_dictionaries(
    {"seed": st.integers(max_value=-1) | TEXT.filter(lambda text: not text.strip().isdigit()) | st.lists(JSON)}
)
BAD_ACTIONS = st.dictionaries(TEXT, JSON, max_size=3).filter(lambda data: "action_type" not in data)
SQL = st.sampled_from(
    [
        "SELECT 1",
        "SELECT 1;;",
        "SELEKT",
        "SELECT * FROM sqlite_master",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 20000) SELECT count(*) FROM n",
        "SELECT hex(zeroblob(400000))",
        "DROP TABLE sqlite_master",
        "SELECT '" + "x" * 3_000 + "'",
        "SELECT " + "(" * 500 + "1" + ")" * 500,
    ]
)
ACTIONS = st.fixed_dictionaries(
    {"action_type": st.sampled_from(["DESCRIBE", "sample", "QUERY", "ANSWER", "", "DANCE"]) | TEXT},
    optional={"argument": SQL | TEXT, "metadata": st.dictionaries(TEXT, JSON, max_size=2)},
)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
GARBAGE = st.sampled_from(
    [
        b"\x83\x80\x00\x00\x00\x00",  # a reserved opcode
        b"\xf1\x80\x00\x00\x00\x00",  # reserved bits
        b"\x81\x02{}",  # a frame without a mask
        b"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00",  # a length with the highest bit set
        b"\x89\xfe\x00\x7e\x00\x00\x00\x00" + b"p" * 126,  # a ping too long for a control frame
        b"\x80\x81\x00\x00\x00\x00x",  # a continuation of nothing
        b"\x81\x81\x00\x00\x00\x00\xff",  # text that is no UTF-8
        b"GET / HTTP/1.1\r\n\r\n",
    ]
)


def is_text(value: object) -> bool:
    """Say whether the value, as it arrives, can be encoded: it holds no half characters."""
    try:
        json.dumps(json.loads(json.dumps(value)), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def code_of(frame: object, reply: dict[str, Any]) -> str | None:
    """Return the error that a request was answered with; a frame with half characters must be refused as such."""
    code: str | None = reply["data"]["code"] if reply["type"] == "error" else None
    assert (code == "INVALID_JSON") == (not is_text(frame)), reply
    return code


def closing_code(connection: ClientConnection) -> int | None:
    """Read until the server closes; return the code that it gave."""
    while True:
        try:
            receive(connection)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None


class Session(RuleBasedStateMachine):
    """One client after another; the model is how many steps the episode has taken and whether it is over."""

    server: ClassVar[ServerProcess]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.connection: ClientConnection
        self.episode: str | None = None
        self.steps = 0
        self.over = False

    @initialize()
    def connect(self) -> None:
        self.stack.close()
        self.connection = self.stack.enter_context(open_socket(self.server, ping_interval=None))
        self.episode, self.steps, self.over = None, 0, False

    @rule(seed=st.none() | st.integers(0, 2**63), name=st.none() | TEXT, more=JSON)
    def reset(self, seed: int | None, name: str | None, more: Any) -> None:
        request = {"type": "reset", "data": {"seed": seed, "episode_id": name, "more": more}}
        reply = ask(self.connection, request)
        if code_of(request, reply) is not None:
            return
        assert (reply["type"], reply["data"]["done"]) == ("observation", False)
        assert reply["data"]["observation"]["budget_remaining"] == BUDGET
        self.episode, self.steps, self.over = self.ask_state()["episode_id"], 0, False
        assert self.episode == (name or self.episode)

    @rule(action=ACTIONS)
    def step(self, action: dict[str, Any]) -> None:
        self.expect_step(action, ask(self.connection, {"type": "step", "data": action}))

    @rule()
    def state(self) -> None:
        assert self.ask_state() == {"episode_id": self.episode, "step_count": self.steps}

    @rule(frame=JSON.filter(lambda value: not isinstance(value, dict)) | ALMOST)
    def almost_a_request(self, frame: Any) -> None:
        reply = ask(self.connection, json.dumps(frame))
        assert code_of(frame, reply) or reply["type"] in ("state", "mcp")

    @rule(data=BAD_RESETS)
    def bad_reset(self, data: dict[str, Any]) -> None:
        request = {"type": "reset", "data": data}
        assert code_of(request, ask(self.connection, request)) in ("VALIDATION_ERROR", "INVALID_JSON")

    @rule(data=BAD_ACTIONS)
    def bad_step(self, data: dict[str, Any]) -> None:
        request = {"type": "step", "data": data}
        assert code_of(request, ask(self.connection, request)) in ("VALIDATION_ERROR", "INVALID_JSON")

    @rule(data=st.binary(max_size=200))
    def binary(self, data: bytes) -> None:
        assert ask(self.connection, data)["data"]["code"] == "INVALID_JSON"

    @rule(text=st.text(max_size=200))
    def no_json(self, text: str) -> None:
        assert ask(self.connection, "{" + text)["type"] in ("error", "state", "mcp")

    @rule(data=st.binary(max_size=125))
    def ping(self, data: bytes) -> None:
        assert self.connection.ping(data).wait(WAIT_S)

    @rule(cuts=st.integers(2, 9))
    def fragments(self, cuts: int) -> None:
        text = json.dumps({"type": "state"})
        size = -(-len(text) // cuts)
        self.connection.send([text[start : start + size] for start in range(0, len(text), size)])
        assert receive(self.connection)["data"] == {"episode_id": self.episode, "step_count": self.steps}

    @rule(actions=st.lists(ACTIONS, min_size=2, max_size=8))
    def pipeline(self, actions: list[dict[str, Any]]) -> None:
        for action in actions:
            self.connection.send(json.dumps({"type": "step", "data": action}))
            self.connection.send('{"type":"state"}')
        for action in actions:
            self.expect_step(action, receive(self.connection))
            assert receive(self.connection)["data"] == {"episode_id": self.episode, "step_count": self.steps}

    @rule(size=st.integers(MAX_FRAME + 1, 4 * MAX_FRAME))
    def huge_frame(self, size: int) -> None:
        with suppress(ConnectionClosed):
            self.connection.send("x" * size)
        self.expect_close(1009)

    @rule(data=GARBAGE)
    def garbage(self, data: bytes) -> None:
        self.connection.socket.sendall(data)
        with suppress(OSError):
            self.connection.socket.shutdown(sockets.SHUT_WR)
        self.expect_close()

    @rule()
    def close_request(self) -> None:
        self.connection.send('{"type":"close"}')
        self.expect_close(1000)

    @rule()
    def half_close(self) -> None:
        self.connection.socket.shutdown(sockets.SHUT_WR)
        self.expect_close()

    @precondition(lambda self: self.episode is not None and not self.over)
    @rule(waiting=st.integers(0, 3), rudely=st.booleans())
    def leave_while_a_query_runs(self, waiting: int, rudely: bool) -> None:
        for _ in range(1 + waiting):
            self.connection.send(json.dumps({"type": "step", "data": {"action_type": "QUERY", "argument": ENDLESS}}))
        self.hang_up(rudely=rudely)

    @rule(rudely=st.booleans())
    def leave(self, rudely: bool) -> None:
        self.hang_up(rudely=rudely)

    def hang_up(self, *, rudely: bool) -> None:
        """Drop the connection without a word: a reset, or the end of the stream."""
        if rudely:
            linger = struct.pack("ii", 1, 0)
            self.connection.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, linger)
        self.connection.socket.shutdown(sockets.SHUT_RDWR)
        self.connection.close_socket()
        self.connect()

    def ask_state(self) -> dict[str, Any]:
        reply = ask(self.connection, {"type": "state"})
        assert reply["type"] == "state"
        state: dict[str, Any] = reply["data"]
        return state

    def expect_step(self, action: dict[str, Any], reply: dict[str, Any]) -> None:
        """The reply to a well-formed action: an observation, or an error where there is no episode to step."""
        code = code_of(action, reply)
        if code == "INVALID_JSON":
            return
        if self.episode is None or self.over:
            assert code == "EXECUTION_ERROR"
            return
        assert reply["type"] == "observation", reply
        self.steps += 1
        assert reply["data"]["observation"]["step_count"] == self.steps
        assert isinstance(reply["data"]["reward"], float)
        self.over = reply["data"]["done"]
        assert self.over or self.steps < BUDGET

    def expect_close(self, code: int | None = None) -> None:
        """Read until the server closes, and connect again."""
        found = closing_code(self.connection)
        assert code in (None, found)
        self.connect()

    def teardown(self) -> None:
        self.stack.close()


def test_websocket(server: ServerProcess) -> None:
    class Served(Session):
        pass

    Served.server = server
    run_state_machine_as_test(Served, settings=settings(CHATTY, max_examples=40, stateful_step_count=50))
