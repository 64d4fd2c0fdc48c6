"""Who is let in: tokens in both places, origins, and what a refusal says."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.service.access import Access

TOKEN = "s3cret-token"
SUBPROTOCOL = "bearer." + base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")


def status(access: Access, authorization: str | None = None, origin: str | None = None, *subprotocols: str) -> int:
    refusal = access.refusal(authorization, origin, "env.example.org:8000", subprotocols)
    assert refusal is None or TOKEN not in refusal.text
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN} ", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer \u00e9", 401),
    ],
)
def test_the_header(authorization: str | None, expected: int) -> None:
    assert status(Access(TOKEN), authorization) == expected


@pytest.mark.parametrize(
    ("subprotocols", "expected"),
    [
        (("openenv", SUBPROTOCOL), 200),
        ((SUBPROTOCOL,), 200),
        (("openenv",), 401),
        (("bearer.",), 401),
        (("bearer.!!!",), 401),
        (("bearer." + base64.urlsafe_b64encode(b"other").decode(),), 401),
    ],
)
def test_the_subprotocol_of_a_browser(subprotocols: tuple[str, ...], expected: int) -> None:
    assert status(Access(TOKEN), None, None, *subprotocols) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 200),
        ("http://env.example.org:8000", 200),
        ("https://ENV.example.org:8000", 200),
        ("https://lab.example.org", 200),
        ("https://lab.example.org.evil.com", 403),
        ("http://evil.com", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_the_origin(origin: str | None, expected: int) -> None:
    access = Access(None, ["https://lab.example.org"])
    assert status(access, None, origin) == expected


def test_a_right_token_does_not_open_the_door_to_another_origin() -> None:
    assert status(Access(TOKEN), f"Bearer {TOKEN}", "http://evil.com") == 403


def test_a_refusal_says_what_to_send() -> None:
    refusal = Access(TOKEN).refusal(None, None, None)
    assert refusal is not None
    assert "Authorization: Bearer" in refusal.text


@given(authorization=st.none() | st.text(), subprotocol=st.text())
def test_nothing_but_the_token_opens(authorization: str | None, subprotocol: str) -> None:
    assert status(Access(TOKEN), authorization, None, subprotocol) == 401
