"""Who is let in: tokens in both places, origins, and what a rejection says."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.service.access import Access

TOKEN = "s3cret-token"
SUBPROTOCOL = "bearer." + base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")


def status(access: Access, authorization: str | None = None, origin: str | None = None, *subprotocols: str) -> int:
    rejection = access.check(authorization, origin, "env.example.org:8000", subprotocols)
    assert rejection is None or TOKEN not in rejection.text
    return 200 if rejection is None else rejection.status


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


@pytest.mark.parametrize(
    ("host", "without_token"),
    [
        ("127.0.0.1:8000", 200),
        ("10.0.0.7:8000", 200),
        ("[::1]:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("sqlenv.localhost:8000", 200),
        ("env.example.org:8000", 403),
        ("ENV.example.org:8000", 403),
        ("127.0.0.1.evil.com", 403),
        ("localhost.evil.com", 403),
        ("[", 403),
        ("lab.example.org", 200),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_page_of_the_servers_own_needs_a_token_or_a_host_that_nobody_can_rebind(
    host: str, without_token: int, named: bool
) -> None:
    """A browser names the origin when a page opens a socket or posts, and leaves it out when it reads."""
    origin = f"https://{host}" if named and host != "[" else None

    def status_of(access: Access, authorization: str | None) -> int:
        rejection = access.check(authorization, origin, host, page=not named or origin is None)
        return 200 if rejection is None else rejection.status

    assert status_of(Access(None, ["https://lab.example.org"]), None) == without_token
    assert status_of(Access(TOKEN), f"Bearer {TOKEN}") == 200


def test_a_program_may_call_a_server_what_it_likes() -> None:
    assert Access(None).check(None, None, "env.example.org:8000") is None


def test_a_page_by_a_name_is_told_what_to_do() -> None:
    rejection = Access(None).check(None, "http://box:8000", "box:8000")
    assert rejection is not None
    assert "start it with a token or --allowed_origins http://box:8000" in rejection.text


def test_a_right_token_does_not_open_the_door_to_another_origin() -> None:
    assert status(Access(TOKEN), f"Bearer {TOKEN}", "http://evil.com") == 403


def test_a_refusal_says_what_to_send() -> None:
    rejection = Access(TOKEN).check(None, None, None)
    assert rejection is not None
    assert "Authorization: Bearer" in rejection.text


@given(authorization=st.none() | st.text(), subprotocol=st.text())
def test_nothing_but_the_token_opens(authorization: str | None, subprotocol: str) -> None:
    assert status(Access(TOKEN), authorization, None, subprotocol) == 401
