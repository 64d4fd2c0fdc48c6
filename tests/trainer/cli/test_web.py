"""Policies in the playground: the route by which the page lets them play."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from env_server.dataset import Dataset
from env_server.service.settings import ServiceSettings
from tests.trainer.cli.conftest import Reciting
from trainer.cli.session import PolicySession
from trainer.cli.web import Wanted, played_lines, serve_policies, with_policies
from trainer.config import ConfigError

COUNT = "SELECT COUNT(*) FROM pets WHERE species = 'cat'"
TURNS = ("DESCRIBE pets", f"I count them.\nQUERY {COUNT}", "ANSWER 2")


@asynccontextmanager
async def client(
    dataset: Dataset, *policies: PolicySession, token: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServiceSettings.model_validate({"port": 0, "token": token})
    app = with_policies(settings, dataset, policies)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        yield http
    for policy in policies:
        await policy.aclose()


async def play(http: httpx.AsyncClient, number: int = 0, **wanted: str) -> list[dict[str, Any]]:
    reply = await http.post(f"/policies/{number}/play", json=wanted)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_a_question_of_the_data_set_is_judged(reciting: Reciting, pets: Dataset) -> None:
    async with client(pets, reciting(*TURNS)) as http:
        *turns, reply = await play(http, question_id="cats")
    assert [(turn["type"], turn["action"], turn["argument"], turn["words"]) for turn in turns] == [
        ("turn", "DESCRIBE", "pets", ""),
        ("turn", "QUERY", COUNT, TURNS[1]),
        ("turn", "ANSWER", "2", ""),
    ]
    assert turns[1]["result"] == "COUNT(*)\n2"
    assert reply["outcome"] == "correct"
    assert (reply["answer"], reply["query"], reply["basis"]) == ("2", COUNT, "which this query returned:")
    assert reply["reward"] == pytest.approx(sum(turn["reward"] for turn in turns))


async def test_a_question_of_ones_own_is_not(reciting: Reciting, pets: Dataset) -> None:
    async with client(pets, reciting(*TURNS), reciting("ANSWER 7", name="other")) as http:
        assert (await http.get("/questions?limit=0")).json()["policies"] == ["parrot", "other"]
        for number, answer in enumerate("27"):
            *_, reply = await play(http, number, question="How many cats?", database="pets")
            assert (reply["outcome"], reply["answer"]) == ("unjudged", answer)


async def test_several_may_ask_one_policy_at_once(reciting: Reciting, pets: Dataset) -> None:
    async with client(pets, reciting(*TURNS)) as http:
        all_events = await asyncio.gather(*(play(http, question="How many cats?") for _ in range(5)))
    assert [events[-1]["answer"] for events in all_events] == ["2"] * 5


async def test_what_cannot_be_played_is_said(reciting: Reciting, pets: Dataset) -> None:
    async with client(pets, reciting(*TURNS)) as http:
        (event,) = await play(http, question="How many?", database="nope")
        assert event == {"type": "error", "message": "there is no database 'nope'; there is pets"}
        (event,) = await play(http, question_id="nope")
        assert event["message"].startswith("data set pets holds no question 'nope'")
        for wanted, status in (({}, 422), ({"question": "?", "question_id": "cats"}, 422), ({"question": " "}, 422)):
            assert (await http.post("/policies/0/play", json=wanted)).status_code == status
        assert (await http.post("/policies/1/play", json={"question": "?"})).status_code == 404


async def test_the_servers_token_is_asked_for(reciting: Reciting, pets: Dataset) -> None:
    async with client(pets, reciting(*TURNS), token="geheim") as http:
        assert (await http.post("/policies/0/play", json={"question": "?"})).status_code == 401
        http.headers["Authorization"] = "Bearer geheim"
        assert (await play(http, question="?"))[-1]["answer"] == "2"
        http.headers["Origin"] = "http://elsewhere.example"
        assert (await http.post("/policies/0/play", json={"question": "?"})).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8002"])
async def test_without_a_token_no_other_name_leads_here(reciting: Reciting, pets: Dataset, host: str) -> None:
    async with client(pets, reciting(*TURNS)) as http:
        http.headers.update({"Host": host, "Origin": f"http://{host}"})
        assert (await http.post("/policies/0/play", json={"question": "?"})).status_code == 400
        assert (await http.get("/questions")).status_code == 400


async def test_nor_to_a_session(pets: Dataset) -> None:
    """A session goes past what is around routes, and not past this."""
    app = with_policies(ServiceSettings(port=0), pets, [])
    scope = {"type": "websocket", "path": "/ws", "headers": [(b"host", b"evil.example")], "subprotocols": []}
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect" if not sent else "websocket.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app(scope, receive, send)
    assert sent
    assert "websocket.accept" not in sent


def test_other_machines_need_a_token(reciting: Reciting, pets: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SQLENV_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="lets other machines in: set SQLENV_TOKEN"):
        serve_policies([reciting(*TURNS)], pets, "0.0.0.0", 0, print)


async def test_who_goes_away_ends_the_play(reciting: Reciting, pets: Dataset) -> None:
    policy = reciting(*["SAMPLE pets"] * 15)
    lines = played_lines(policy, Wanted(question="How many?"))
    assert json.loads(await anext(lines))["action"] == "SAMPLE"
    await lines.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await policy.aclose()
