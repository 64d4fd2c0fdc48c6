"""The playground's routes: what is served, to whom, under which policy, and that nothing of the gold is in it."""

from __future__ import annotations

import itertools
import mimetypes
import re
from importlib import resources
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request

from env_server.actions import ACTIONS
from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.service.pages import (
    FOLDER,
    MAX_QUESTIONS,
    PAGE,
    SECURITY_HEADERS,
    router,
)
from env_server.types import AnswerMode

FILES = {file.name: file.read_text() for file in resources.files("env_server.service").joinpath(FOLDER).iterdir()}
TOKEN = "s3cret"
DATABASES = ("alpha", "beta", "naïve / 100%")


def _question(number: int) -> Question:
    return Question(
        question_id=f"q{number}",
        text=f"How many? ({number}) <b>",
        db_id=DATABASES[number % 3],
        gold_sql=f"SELECT 'GOLDSQL{number}'",
        hardness=list(Hardness)[number % 4],
        split=Split.EVAL if number % 3 == 2 else Split.TRAIN,
        gold=Gold((("GOLDROW", number),), ordered=False),
        family="GOLDFAMILY",
        evidence="GOLDEVIDENCE",
        duplicate_of="q0" if number else "",
    )


DATASET = Dataset(
    "letters", tuple(_question(number) for number in range(20)), {name: Path("GOLDPATH") for name in DATABASES}
)


def _app(answer_mode: AnswerMode = AnswerMode.VALUE) -> FastAPI:
    async def authorized(request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise HTTPException(401, "a token is needed")

    app = FastAPI()
    app.include_router(router(DATASET, authorized, answer_mode))
    return app


def _client(app: FastAPI | None = None, *, token: str | None = TOKEN) -> httpx.AsyncClient:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app or _app()), base_url="http://server", headers=headers)


# --- the files ---


@pytest.mark.parametrize("path", ["/", *(f"/playground/{name}" for name in FILES)])
async def test_files_are_served_to_anybody_under_a_strict_policy(path: str) -> None:
    async with _client(token=None) as client:
        got = await client.get(path)
        again = await client.get(path, headers={"If-None-Match": got.headers["etag"]})
        head = await client.head(path)
        older = await client.get(path, headers={"If-None-Match": '"another"'})
    name = path.rsplit("/", 1)[1] or PAGE
    assert (got.status_code, got.content) == (200, FILES[name].encode())
    assert got.headers["content-type"].partition(";")[0] == mimetypes.guess_type(name)[0]
    assert (again.status_code, again.content) == (304, b"")
    assert (head.status_code, head.content) == (200, b"")
    assert older.status_code == 200
    for reply in (got, again, head):
        assert {key: reply.headers[key] for key in SECURITY_HEADERS} == SECURITY_HEADERS
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["etag"] == got.headers["etag"]


def test_the_policy_lets_nothing_foreign_or_inline_run() -> None:
    policy = dict(part.strip().split(" ", 1) for part in SECURITY_HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]
    assert SECURITY_HEADERS["X-Content-Type-Options"] == "nosniff"
    assert SECURITY_HEADERS["Referrer-Policy"] == "no-referrer"


def test_the_page_needs_nothing_but_its_own_files() -> None:
    html = FILES[PAGE]
    scripts = [text for name, text in FILES.items() if name.endswith(".js")]
    wanted = set(re.findall(r'(?:src|href)="playground/([^"]+)"', html))
    for text in scripts:
        wanted |= set(re.findall(r'from "\./([^"]+)"', text))
    assert wanted == set(FILES) - {PAGE}
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", html)
    for name, text in FILES.items():
        foreign = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert foreign <= {"http://www.w3.org/2000/svg"}, name


@pytest.mark.parametrize(
    "path",
    [
        "/playground/nothing.js",
        "/playground/..%2fpages.py",
        "/playground/%2e%2e/pages.py",
        "/playground/",
        "/playground/pages.py",
        "/playground/app.js/..",
    ],
)
async def test_no_other_file_is_served(path: str) -> None:
    async with _client() as client:
        reply = await client.get(path)
    assert reply.status_code == 404
    assert "router" not in reply.text


def _contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_aa_asks_for(theme: str) -> None:
    style = FILES["base.css"]
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style)
    color = {name: light if theme == "light" else dark for name, light, dark in pairs}
    for text, ground in itertools.product(("ink", "muted", "accent", "good", "bad"), ("page", "card", "sunk")):
        assert _contrast(color[text], color[ground]) >= 4.5, (text, ground)
    assert _contrast(color["on-accent"], color["accent"]) >= 4.5
    assert _contrast(color["edge"], color["card"]) >= 3


# --- the questions ---


async def test_questions_are_told_with_what_anybody_may_know() -> None:
    async with _client() as client:
        reply = (await client.get("/questions", params={"db": "beta", "offset": 1, "limit": 2})).json()
    assert reply == {
        "dataset": "letters",
        "answer_mode": "value",
        "actions": [
            {"name": kind, "argument": each.argument.name, "shows": each.shows} for kind, each in ACTIONS.items()
        ],
        "databases": [
            {"id": "alpha", "questions": 7},
            {"id": "beta", "questions": 7},
            {"id": "naïve / 100%", "questions": 6},
        ],
        "questions": [
            {
                "question_id": f"q{number}",
                "db_id": "beta",
                "text": f"How many? ({number}) <b>",
                "hardness": hardness,
                "split": "train",
            }
            for number, hardness in ((4, "easy"), (7, "extra"))
        ],
        "total": 7,
        "policies": [],
    }


async def test_nothing_of_the_gold_is_in_any_reply() -> None:
    async with _client() as client:
        params: list[dict[str, str]] = [{"limit": str(MAX_QUESTIONS)}, *({"db": name} for name in DATABASES)]
        told = [await client.get("/questions", params=each) for each in params]
        refused = [await client.get("/questions", params=each) for each in ({"db": "GOLD"}, {"offset": "x"})]
        replies = [*told, *refused, await client.get("/openapi.json")]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 200, 404, 422, 200]
    for reply in replies:
        assert "GOLD" not in reply.text
        assert "duplicate" not in reply.text


@pytest.mark.parametrize("db", [None, *DATABASES])
@pytest.mark.parametrize(("offset", "limit"), [(0, 100), (0, 0), (3, 2), (5, 100), (100, 1)])
async def test_pages_are_slices_in_the_order_of_the_data_set(db: str | None, offset: int, limit: int) -> None:
    params = {"offset": offset, "limit": limit} | ({"db": db} if db else {})
    async with _client() as client:
        page = (await client.get("/questions", params=params)).json()
    wanted = [question.question_id for question in DATASET.questions if db in (None, question.db_id)]
    assert page["total"] == len(wanted)
    assert [entry["question_id"] for entry in page["questions"]] == wanted[offset : offset + limit]


@pytest.mark.parametrize("params", [{"offset": "-1"}, {"limit": "-1"}, {"limit": str(MAX_QUESTIONS + 1)}])
async def test_what_is_out_of_range_is_refused(params: dict[str, str]) -> None:
    async with _client() as client:
        assert (await client.get("/questions", params=params)).status_code == 422


async def test_an_unknown_database_is_an_error_that_says_where_the_known_ones_are() -> None:
    async with _client() as client:
        reply = await client.get("/questions", params={"db": "gamma"})
        named = await client.get("/questions?limit=0")
    assert reply.status_code == 404
    assert "/questions?limit=0" in reply.json()["detail"]
    assert [entry["id"] for entry in named.json()["databases"]] == list(DATABASES)
    assert named.json()["questions"] == []


async def test_the_answer_mode_is_told() -> None:
    async with _client(_app(AnswerMode.SQL)) as client:
        assert (await client.get("/questions?limit=0")).json()["answer_mode"] == "sql"


async def test_the_api_description_has_the_questions_and_not_the_page() -> None:
    async with _client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert list(paths) == ["/questions"]
    assert set(paths["/questions"]["get"]["responses"]) == {"200", "404", "422"}
