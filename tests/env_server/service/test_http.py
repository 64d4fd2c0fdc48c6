"""The HTTP routes on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from pydantic import TypeAdapter

from env_server.service.http import schemas
from tests.env_server.conftest import RunningServer, Serve

GUARDED = ("/ready", "/metrics", "/metadata", "/schema", "/state", "/questions")
RIGHT = {"Authorization": "Bearer s3cret"}


def test_health_ready_and_metadata(server: RunningServer) -> None:
    assert httpx.get(f"{server.http}/health").json() == {"status": "healthy"}
    load = httpx.get(f"{server.http}/ready").json()
    assert (load["status"], load["active_sessions"], load["max_sessions"], load["waiting"]) == ("ready", 0, 1024, 0)
    assert load["data"]["questions"] == 4
    metadata = httpx.get(f"{server.http}/metadata").json()
    assert metadata["name"] == "sqlenv"
    assert "DESCRIBE" in metadata["readme_content"]


def test_an_episode_of_one_request(server: RunningServer) -> None:
    first = httpx.post(f"{server.http}/reset", json={"seed": 1, "question_id": "cats", "colour": "red"})
    assert first.status_code == 200
    assert first.json()["reward"] == 0
    assert first.json()["observation"]["question"] == "How many cats are there?"
    assert httpx.post(f"{server.http}/reset").status_code == 200
    body = {"action": {"action_type": "QUERY", "argument": "SELECT COUNT(*) FROM pets"}, "timeout_s": 3}
    reply = httpx.post(f"{server.http}/step", json=body).json()
    assert reply["observation"]["step_count"] == 1
    assert reply["metadata"]["reward_components"]["success"] > 0
    slow = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 9000) SELECT COUNT(*) FROM r"
    body = {"action": {"action_type": "QUERY", "argument": slow}}
    assert "9000" in httpx.post(f"{server.http}/step", json=body).json()["observation"]["result"]
    assert httpx.get(f"{server.http}/state").json() == {"episode_id": None, "step_count": 0}


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/reset", {"seed": -1}, 422),
        ("/reset", {"episode_id": "x" * 256}, 422),
        ("/reset", {"question_id": "nobody"}, 409),
        ("/reset", [], 422),
        ("/step", {}, 422),
        ("/step", {"action": {"action_type": 3}}, 422),
        ("/step", {"action": {"action_type": "QUERY", "sql": "SELECT secret"}}, 422),
    ],
)
def test_bad_bodies_are_told(server: RunningServer, route: str, body: object, status: int) -> None:
    reply = httpx.post(server.http + route, json=body)
    assert reply.status_code == status
    assert reply.json()["detail"]
    assert "secret" not in reply.text


def test_half_a_surrogate_pair_is_told(server: RunningServer) -> None:
    for route, body in (
        ("/reset", r'{"episode_id":"\ud800"}'),
        ("/step", r'{"action":{"action_type":"QUERY","argument":"\udfff"}}'),
    ):
        assert httpx.post(server.http + route, content=body).status_code == 422


def test_the_observation_fits_the_schema(server: RunningServer) -> None:
    served = httpx.get(f"{server.http}/schema").json()
    assert served == json.loads(json.dumps(schemas()))
    observation = httpx.post(f"{server.http}/reset", json={}).json()["observation"]
    assert set(observation) == set(served["observation"]["required"])
    types = {"string": str, "integer": int, "array": list}
    for name, value in observation.items():
        TypeAdapter(types[served["observation"]["properties"][name]["type"]]).validate_python(value, strict=True)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", -32600),
        (b"{nope", -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}', -32603),
        (b"\xff", -32700),
    ],
)
def test_mcp(server: RunningServer, body: bytes, code: int) -> None:
    reply = httpx.post(f"{server.http}/mcp", content=body)
    assert reply.status_code == 200
    assert reply.json()["error"]["code"] == code


def test_with_a_token_only_health_and_the_page_are_open(serve: Serve) -> None:
    server = serve(token="s3cret")
    for route in ("/health", "/"):
        assert httpx.get(server.http + route).status_code == 200
    for route in GUARDED:
        refused = httpx.get(server.http + route)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert httpx.get(server.http + route, headers=RIGHT).status_code == 200
    for route in ("/reset", "/step", "/mcp"):
        assert httpx.post(server.http + route, json={}).status_code == 401
    for route in ("/docs", "/openapi.json"):
        assert httpx.get(server.http + route).status_code == 404
    text = httpx.get(f"{server.http}/metrics", headers=RIGHT).text
    assert f'sqlenv_refused_total{{reason="token"}} {len(GUARDED) + 3}.0' in text
    assert "s3cret" not in text


def test_the_docs_are_there_without_a_token_or_when_asked_for(server: RunningServer, serve: Serve) -> None:
    assert httpx.get(f"{server.http}/docs").status_code == 200
    document = httpx.get(f"{serve(token='s3cret', docs=True).http}/openapi.json").json()
    assert isinstance(document["info"]["version"], str)
    assert {"/reset", "/step", "/state"} <= set(document["paths"])


def test_a_page_of_another_origin_may_not_ask(server: RunningServer) -> None:
    for origin, status in (("http://evil.example.org", 403), (server.http, 200)):
        assert httpx.get(f"{server.http}/ready", headers={"Origin": origin}).status_code == status
    assert "access-control-allow-origin" not in httpx.get(f"{server.http}/ready").headers


def test_a_body_that_is_too_large_is_refused(serve: Serve) -> None:
    server = serve(max_frame_bytes=2_000)
    large = json.dumps({"episode_id": "x" * 5_000}).encode()
    assert httpx.post(f"{server.http}/reset", content=large).status_code == 413

    def chunks() -> Iterator[bytes]:
        yield large[:1_500]
        yield large[1_500:]

    assert httpx.post(f"{server.http}/reset", content=chunks()).status_code == 413
