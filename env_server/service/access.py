"""Who may use the server: the bearer token and the Origin check. Pure.

A token comes in the `Authorization` header or, from a browser's WebSocket, which cannot set headers, as the
subprotocol `bearer.<base64url of the token>` beside `openenv`. It is compared in constant time. A page of another
origin may not use the server, whatever token it has, unless that origin is allowed by name.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

SUBPROTOCOL = "openenv"
_BEARER = "bearer."


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused: an HTTP status, a sentence for its sender, and a word for the metrics."""

    status: int
    text: str
    reason: str


NO_TOKEN = Refusal(401, "a token is needed: send the header 'Authorization: Bearer TOKEN'", "token")
WRONG_TOKEN = Refusal(
    401, "the token is not this server's; it is the value that SQLENV_TOKEN had at its start", "token"
)
DRAINING = Refusal(503, "the server is shutting down; connect to another one", "draining")


class Access:
    """Decides on requests by their headers."""

    def __init__(self, token: str | None, allowed_origins: Collection[str] = ()) -> None:
        self._token = None if token is None else token.encode()
        self._origins = {origin.rstrip("/").lower() for origin in allowed_origins}

    def refusal(
        self, authorization: str | None, origin: str | None, host: str | None, subprotocols: Sequence[str] = ()
    ) -> Refusal | None:
        """Return why a request is refused; None when it is welcome."""
        if origin is not None and not self._is_allowed(origin, host):
            text = f"pages of another origin may not use this server; start it with --allowed_origins {origin[:200]}"
            return Refusal(403, text, "origin")
        if self._token is None:
            return None
        sent = _token_in(authorization, subprotocols)
        if sent is None:
            return NO_TOKEN
        return None if hmac.compare_digest(sent, self._token) else WRONG_TOKEN

    def _is_allowed(self, origin: str, host: str | None) -> bool:
        if origin.rstrip("/").lower() in self._origins:
            return True
        try:
            return host is not None and urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False


def _token_in(authorization: str | None, subprotocols: Sequence[str]) -> bytes | None:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode()
    for each in subprotocols:
        if each.startswith(_BEARER):
            encoded = each.removeprefix(_BEARER)
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            except (binascii.Error, ValueError):
                return b""
    return None
