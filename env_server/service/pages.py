"""The playground: a page on which a person plays episodes and watches the server, and the list of questions it offers.

Routes: `GET /` (the page), `GET /playground/{file}` (its script, style and icon) and `GET /questions`. Promises:

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
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from env_server.actions import ACTIONS
from env_server.dataset import Dataset, Question
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

    model_config = ConfigDict(frozen=True)

    id: str
    questions: int


class QuestionEntry(BaseModel):
    """What anybody may know of a question before playing it."""

    model_config = ConfigDict(frozen=True)

    question_id: str
    db_id: str
    text: str
    hardness: str
    split: str


class ActionEntry(BaseModel):
    """An action: its name, what it takes, and what it shows."""

    model_config = ConfigDict(frozen=True)

    name: str
    argument: str
    shows: str


class QuestionPage(BaseModel):
    """A slice of the questions, in the data set's order; `total` counts them before `offset` and `limit`."""

    model_config = ConfigDict(frozen=True)

    dataset: str
    answer_mode: AnswerMode = Field(description="what ANSWER carries: the value itself, or a query that yields it")
    actions: list[ActionEntry]
    databases: list[DatabaseEntry]
    questions: list[QuestionEntry]
    total: int
    policies: list[str] = Field(default=[], description="policies that can be asked to play, by /policies/NUMBER/play")


class QuestionIndex:
    """The questions as the page lists them, filed by database once; databases without any are listed, too."""

    def __init__(self, dataset: Dataset, answer_mode: AnswerMode, policies: Sequence[str] = ()) -> None:
        self._policies = list(policies)
        self._dataset = dataset.name
        self._answer_mode = answer_mode
        self._actions = [
            ActionEntry(name=kind, argument=each.argument.name, shows=each.shows) for kind, each in ACTIONS.items()
        ]
        self._all = [_entry(question) for question in dataset.questions]
        self._by_database: dict[str, list[QuestionEntry]] = {db_id: [] for db_id in dataset.databases}
        for entry in self._all:
            self._by_database[entry.db_id].append(entry)
        self._databases = [DatabaseEntry(id=key, questions=len(found)) for key, found in self._by_database.items()]

    def page(self, db: str | None, offset: int, limit: int) -> QuestionPage:
        """Return the questions of one database, or of all when None. Raises KeyError when none is about `db`."""
        found = self._all if db is None else self._by_database[db]
        return QuestionPage(
            dataset=self._dataset,
            answer_mode=self._answer_mode,
            actions=self._actions,
            databases=self._databases,
            questions=found[offset : offset + limit],
            total=len(found),
            policies=self._policies,
        )


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
    questions: Dataset,
    authorized: Callable[..., Awaitable[None]],
    answer_mode: AnswerMode = AnswerMode.VALUE,
    policies: Sequence[str] = (),
) -> APIRouter:
    """Return the routes; `authorized` is a FastAPI dependency that raises where a request lacks the server's token.

    `policies` names those that whoever puts the application together lets play.
    """
    routes = APIRouter()
    files = PlaygroundFiles()
    index = QuestionIndex(questions, answer_mode, policies)

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response(PAGE, request.scope)

    @routes.api_route("/" + FOLDER + "/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return await files.get_response(name, request.scope)

    @routes.get(
        "/questions",
        dependencies=[Depends(authorized)],
        response_model=QuestionPage,
        responses={404: {"description": "No question is about this database."}},
    )
    async def list_questions(
        db: Annotated[str | None, Query(description="only questions about this database")] = None,
        offset: Annotated[int, Query(ge=0, description="questions to leave out at the beginning")] = 0,
        limit: Annotated[int, Query(ge=0, le=MAX_QUESTIONS, description="questions to return at most")] = 100,
    ) -> Response:
        """The data set's databases, and a slice of its questions: what can be asked for in `reset`."""
        try:
            found = index.page(db, offset, limit)
        except KeyError:
            raise HTTPException(404, "no question is about this database; /questions?limit=0 lists them") from None
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
        return JSONResponse(found.model_dump(mode="json"), headers=headers)

    return routes


def _entry(question: Question) -> QuestionEntry:
    return QuestionEntry(
        question_id=question.question_id,
        db_id=question.db_id,
        text=question.text,
        hardness=question.hardness.value,
        split=question.split.value,
    )
