"""`sqlenv chat --web`: the playground, with policies that play in it, one or two side by side.

The page, the environment behind it and its token and Origin checks are `sqlenv serve`'s; this process adds the
policies. So an environment server needs no model and no torch, and the page no second address: it gets the policies'
names with its questions, and offers what needs them only where there are some. Where there is no token, it answers
under this machine's own names alone.

`POST /policies/NUMBER/play` plays a question of the data set (`question_id`) or one of a person's own (`question`,
`database`), and answers with one JSON object a line: each turn as it is taken, then the reply, or why there is none.
A client that disconnects cancels the play.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.middleware.trustedhost import TrustedHostMiddleware

from env_server.dataset import Dataset
from env_server.errors import SQLEnvError
from env_server.service.app import create_app
from env_server.service.pages import LOCAL_NAMES, SECURITY_HEADERS
from env_server.service.serve import serve
from env_server.service.settings import ServiceSettings, is_loopback, read_settings
from trainer.cli.session import PolicySession, Reply, written
from trainer.config import TOKEN_VARIABLE, ConfigError
from trainer.rollout.episodes import Outcome, Turn

MAX_QUESTION_CHARS = 2_000

Event = dict[str, Any]


class Wanted(BaseModel):
    """What is to be played."""

    model_config = ConfigDict(extra="forbid")

    question_id: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    question: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION_CHARS, pattern=r"\S")] | None = None
    database: Annotated[str, Field(max_length=255)] | None = None

    @model_validator(mode="after")
    def _one_question(self) -> Wanted:
        if (self.question_id is None) == (self.question is None):
            raise ValueError("give either question_id or question")
        return self


def serve_policies(
    policies: Sequence[PolicySession], dataset: Dataset, host: str, port: int, announce: Callable[[str], None]
) -> int:
    """Serve the playground with these policies until a stop signal; return the exit status.

    Raises SQLEnvError, among others where the address is in use or reaches other machines without a token.
    """
    if not is_loopback(host) and not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(
            f"--host {host} lets other machines in: set {TOKEN_VARIABLE} to a secret, for which the page asks"
        )
    flags = {"host": host, "port": port, "workers": 1, "query_workers": "1,1", "grace_s": 0, "log_level": "warning"}
    settings, _ = read_settings([word for name, value in flags.items() for word in (f"--{name}", str(value))])

    def application(settings: ServiceSettings, dataset: Dataset) -> FastAPI:
        return with_policies(settings, dataset, policies)

    async def close() -> None:
        for policy in policies:
            await policy.aclose()

    try:
        return serve(settings, application, load=lambda _: dataset, announce=announce)
    finally:
        asyncio.run(close())


def with_policies(settings: ServiceSettings, dataset: Dataset, policies: Sequence[PolicySession]) -> FastAPI:
    """Return the environment's application with policies in its playground."""
    app = create_app(settings, dataset, policies=tuple(policy.name for policy in policies))

    @app.post("/policies/{number}/play", dependencies=[Depends(app.state.service.authorize)], include_in_schema=False)
    async def play(number: int, wanted: Wanted) -> StreamingResponse:
        if not 0 <= number < len(policies):
            raise HTTPException(404, f"there is no policy {number}")
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
        lines = played_lines(policies[number], wanted)
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)

    if settings.token is None:
        # Else a page elsewhere could read along, by a name of its own that it lets lead here.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, settings.host, f"[{settings.host}]"])
    return app


async def played_lines(policy: PolicySession, wanted: Wanted) -> AsyncGenerator[str]:
    """Play, and yield what happens; a reader that goes away ends the play."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    playing = asyncio.create_task(_play(policy, wanted, events.put_nowait))
    playing.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield json.dumps(event, ensure_ascii=False) + "\n"
        await playing
    finally:
        playing.cancel()
        with suppress(asyncio.CancelledError):
            await playing


async def _play(policy: PolicySession, wanted: Wanted, send: Callable[[Event], None]) -> None:
    def on_turn(turn: Turn) -> None:
        send(_turn_event(turn))

    try:
        if wanted.question_id is not None:
            reply = await policy.ask_known(wanted.question_id, on_turn)
        else:
            reply = await policy.ask(str(wanted.question), wanted.database, on_turn)
    except SQLEnvError as error:
        send({"type": "error", "message": str(error)})
        return
    send(_reply_event(reply))


def _turn_event(turn: Turn) -> Event:
    words = turn.text.strip()
    return {
        "type": "turn",
        "action": turn.action_type,
        "argument": turn.argument,
        "words": "" if words == written(turn) else words,
        "parseable": turn.parseable,
        "result": turn.result,
        "error": turn.error,
        "reward": turn.reward.total,
    }


def _reply_event(reply: Reply) -> Event:
    episode = reply.episode
    if episode.outcome is Outcome.FAILED:
        return {"type": "error", "message": episode.failure}
    timing = episode.timing
    return {
        "type": "reply",
        "outcome": episode.outcome.value,
        "answer": reply.answer,
        "query": reply.query,
        "rows": reply.rows,
        "basis": reply.basis,
        "reward": episode.reward,
        "steps": len(episode.turns),
        "tokens": sum(episode.row.env_mask),
        "seconds": None if timing is None else timing.ended - timing.started,
    }
