"""The environment as tools of the Model Context Protocol, and `/mcp` of a server.

The tool `start` begins an episode and returns its id with the question. Each action is a tool that takes that id and
the action's argument. MCP's own sessions are not used: its version of 2026-07-28 has none over HTTP.

Guarantees:
- An episode is a `Session`, as a WebSocket has one: the same sandbox, budgets, replies and metrics.
- It holds one of the server's slots from its start until it is over or has been idle for `idle_timeout_s`.
- Its calls run one after another. Only a client that has its id can play it.

Needs the package `mcp` (extra `mcp`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from env_server.actions import ACTIONS, ANSWER
from env_server.dataset import Split
from env_server.service.capacity import Capacity, CapacityReachedError
from env_server.service.metrics import Metrics
from env_server.service.session import Session
from env_server.types import AnswerMode

START = "start"
INSTRUCTIONS = (
    f"Answer a question about a database that you cannot see. `{START}` gives you a question, the names of the tables "
    "and the id of your episode; explore with the other tools, then answer. Steps are limited."
)


@dataclass(slots=True)
class _Episode:
    session: Session
    used_at: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class MCPTools:
    """The tools over the sessions of one worker. `workers`: how many the server has."""

    def __init__(
        self,
        new_session: Callable[[], Session],
        capacity: Capacity,
        metrics: Metrics,
        answer_mode: AnswerMode,
        idle_timeout_s: float,
        workers: int = 1,
    ) -> None:
        self._new_session = new_session
        self._capacity = capacity
        self._metrics = metrics
        self._idle_timeout_s = idle_timeout_s
        self._answer_mode = answer_mode
        self._workers = workers
        self._episodes: dict[str, _Episode] = {}
        self._tools = [_start_tool(), *(_action_tool(kind, answer_mode) for kind in ACTIONS)]

    def server(self) -> Server[Any]:
        """Return an MCP server with the tools."""

        async def tools(_: object, __: PaginatedRequestParams | None) -> ListToolsResult:
            return ListToolsResult(tools=self._tools)

        async def call(_: object, params: CallToolRequestParams) -> CallToolResult:
            return await self.call(params.name, params.arguments or {})

        about = {"version": version("sqlenv"), "title": "SQLEnv", "instructions": INSTRUCTIONS}
        return Server("sqlenv", **about, on_list_tools=tools, on_call_tool=call)

    def endpoint(self) -> MCPEndpoint:
        """Return the tools as `/mcp`."""
        return MCPEndpoint(self.server())

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Begin an episode, or take one of its actions."""
        if name == START:
            return await self._start(arguments)
        action = ACTIONS.get(name.upper())
        if action is None:
            return _failed(f"there is no tool {name[:80]!r}; there are {', '.join(tool.name for tool in self._tools)}")
        episode_id = str(arguments.get("episode"))
        episode = self._episodes.get(episode_id)
        if episode is None:
            return _failed(f"there is no such episode, or it is over; `{START}` begins one and gives its id")
        step = {"action_type": name, "argument": arguments.get(action.parameter(self._answer_mode).name, "")}
        async with episode.lock:
            reply = episode.session.answer(json.dumps({"type": "step", "data": step}))
            assert reply is not None, "only a request to close has no reply"
            frame = json.loads(reply if isinstance(reply, str) else await reply)
            episode.used_at = time.monotonic()
        if not episode.session.playing:
            self._end(episode_id, "client")
        return _result(frame)

    def close_idle(self) -> None:
        """End the episodes that nobody has played for too long."""
        oldest = time.monotonic() - self._idle_timeout_s
        for name, episode in list(self._episodes.items()):
            if episode.used_at < oldest and not episode.lock.locked():
                self._end(name, "idle")

    async def _start(self, arguments: dict[str, Any]) -> CallToolResult:
        if self._workers > 1:
            return _failed("this server has several workers, and an episode lives in one; start it with --workers 1")
        try:
            await self._capacity.acquire(timeout_s=0.0)
        except CapacityReachedError as error:
            self._metrics.refused.labels(error.reason).inc()
            return _failed(str(error))
        name, session = uuid4().hex, self._new_session()
        try:
            reply = session.answer(json.dumps({"type": "reset", "data": {**arguments, "episode_id": name}}))
        finally:
            if not session.playing:
                self._capacity.release()
        assert isinstance(reply, str), "a reset waits for nothing"
        if not session.playing:
            return _result(json.loads(reply))
        self._metrics.opened.inc()
        self._metrics.sessions.inc()
        self._episodes[name] = _Episode(session, time.monotonic())
        return _result(json.loads(reply), name)

    def _end(self, name: str, reason: str) -> None:
        if self._episodes.pop(name, None) is not None:
            self._capacity.release()
            self._metrics.closed.labels(reason).inc()
            self._metrics.sessions.dec()


def _start_tool() -> Tool:
    properties = {
        "question_id": {"type": "string", "description": "This question, instead of one that is drawn."},
        "split": {"type": "string", "enum": [split.value for split in Split], "description": "Draw from this split."},
        "seed": {"type": "integer", "minimum": 0, "description": "Draw the same question again."},
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Tool(name=START, description="Begin an episode: a question, its tables, and an id.", input_schema=schema)


def _action_tool(kind: str, mode: AnswerMode) -> Tool:
    action = ACTIONS[kind]
    argument = action.parameter(mode)
    properties = {
        "episode": {"type": "string", "description": f"The id that {START} gave."},
        argument.name: {"type": "string", "description": argument.meaning},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    hints = ToolAnnotations(read_only_hint=action.argument is not ANSWER, open_world_hint=False)
    return Tool(name=kind.lower(), description=action.description, input_schema=schema, annotations=hints)


def _result(frame: dict[str, Any], episode: str = "") -> CallToolResult:
    """Return what a session's reply says. `episode`: the id, of the first one."""
    data = frame["data"]
    if frame["type"] == "error":
        return _failed(data["message"])
    seen = data["observation"]
    left = seen["budget_remaining"]
    facts = {"reward": data["reward"], "done": data["done"], "steps_left": left}
    text = seen["error"] or seen["result"]
    if episode:
        facts |= {"episode": episode, "question": seen["question"]}
        text = f"Episode: {episode}\nQuestion: {seen['question']}\n{seen['schema_info']}\nSteps: {left}"
    if data["done"]:
        verdict = data["metadata"].get("verdict")
        facts["verdict"] = verdict
        text = f"{text}\nThe episode is over: {str(verdict).replace('_', ' ')}.".lstrip()
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=facts, is_error=bool(seen["error"])
    )


def _failed(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


class MCPEndpoint:
    """`/mcp`, an ASGI application: streamable HTTP without sessions. The route before it authenticates."""

    def __init__(self, server: Server[Any]) -> None:
        self._manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve for the `with` block."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        await self._manager.handle_request(scope, receive, send)
