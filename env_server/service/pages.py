"""The playground: a page on which a person plays episodes and watches the server, and the list of questions it offers.

Routes: `GET /` (the page), `GET /playground/{file}` (its script, style and icon) and `GET /questions`. Guarantees:

- Nothing of the gold leaves here: of a question, its id, text, database, hardness and split. The page's files are the
  same for everybody and need no token; `/questions` asks `authorized`.
- The page cannot be made to run what is not ours: no inline script or style, nothing from another host, no framing,
  and the browser refuses to parse text as HTML (Trusted Types). It uses `/ws`, `/ready` and `/metrics` of its server.
- Only the page's files are served, whatever path is asked for; a browser that has them gets 304.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from env_server.actions import ACTIONS
from env_server.dataset import Dataset, Hardness, Split
from env_server.types import AnswerMode

MAX_QUESTIONS = 500
"""Questions in one reply."""
LOCAL_NAMES = ("127.0.0.1", "localhost")
"""What this machine calls itself; a page under any other name comes from elsewhere."""
PAGE = "index.html"
FOLDER = "playground"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""On every reply from here. `connect-src 'self'` allows the WebSocket of the same host and port."""


class DatabaseEntry(BaseModel):
    """A database and how many questions ask about it."""

    id: str
    questions: int


class QuestionEntry(BaseModel):
    """What anybody may know of a question before playing it."""

    model_config = ConfigDict(from_attributes=True)

    question_id: str
    db_id: str
    text: str
    hardness: Hardness
    split: Split


class ActionEntry(BaseModel):
    """An action: its name, what it takes, and what it shows."""

    name: str
    argument: str
    shows: str


class QuestionPage(BaseModel):
    """A slice of the questions, in the data set's order; `total` counts them before `offset` and `limit`."""

    dataset: str
    answer_mode: AnswerMode = Field(description="what ANSWER carries: the value itself, or a query that yields it")
    actions: list[ActionEntry]
    databases: list[DatabaseEntry]
    questions: list[QuestionEntry]
    total: int
    policies: list[str] = Field(default=[], description="policies that can be asked to play, by /policies/NUMBER/play")


class PlaygroundFiles(StaticFiles):
    """The page's files, under the policy.

    `no-cache` makes a browser ask each time, so that after an upgrade no old script meets a new page.
    """

    def __init__(self) -> None:
        super().__init__(packages=[("env_server.service", FOLDER)])

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file, or 304 to a browser that has it."""
        response = super().file_response(*args, **kwargs)
        response.headers.update({**SECURITY_HEADERS, "Cache-Control": "no-cache"})
        return response


def router(
    dataset: Dataset,
    authorized: Callable[..., Awaitable[None]],
    answer_mode: AnswerMode = AnswerMode.VALUE,
    policies: Sequence[str] = (),
) -> APIRouter:
    """Return the routes; `authorized` is a FastAPI dependency that raises where a request lacks the server's token.

    `policies` are those that the application, which has the route for it, lets play.
    """
    routes = APIRouter()
    files = PlaygroundFiles()
    entries = [QuestionEntry.model_validate(question) for question in dataset.questions]
    by_database: dict[str, list[QuestionEntry]] = {db_id: [] for db_id in dataset.databases}
    for entry in entries:
        by_database[entry.db_id].append(entry)
    databases = [DatabaseEntry(id=db_id, questions=len(found)) for db_id, found in by_database.items()]
    actions = [ActionEntry(name=kind, argument=each.argument.name, shows=each.shows) for kind, each in ACTIONS.items()]

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response(PAGE, request.scope)

    @routes.api_route("/" + FOLDER + "/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return await files.get_response(name, request.scope)

    @routes.get(
        "/questions",
        dependencies=[Depends(authorized)],
        responses={404: {"description": "No question is about this database."}},
    )
    async def list_questions(
        response: Response,
        db: Annotated[str | None, Query(description="only questions about this database")] = None,
        offset: Annotated[int, Query(ge=0, description="questions to leave out at the beginning")] = 0,
        limit: Annotated[int, Query(ge=0, le=MAX_QUESTIONS, description="questions to return at most")] = 100,
    ) -> QuestionPage:
        """The data set's databases, and a slice of its questions: what can be asked for in `reset`."""
        found = entries if db is None else by_database.get(db)
        if found is None:
            raise HTTPException(404, "no question is about this database; /questions?limit=0 lists them")
        response.headers.update({**SECURITY_HEADERS, "Cache-Control": "no-store"})
        return QuestionPage(
            dataset=dataset.name,
            answer_mode=answer_mode,
            actions=actions,
            databases=databases,
            questions=found[offset : offset + limit],
            total=len(found),
            policies=list(policies),
        )

    return routes
