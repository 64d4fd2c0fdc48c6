"""Who may use the server: the bearer token and the Origin check. Pure.

A token comes in the `Authorization` header or, from a browser's WebSocket, which cannot set headers, as the
subprotocol `bearer.<base64url of the token>` beside `openenv`. It is compared in constant time. A page of another
origin may not use the server, whatever token it has, unless that origin is allowed by name.

A page is of the server's own origin when both call the server the same. Without a token a name does not suffice, but
for localhost: whoever owns a name can let it stand for 127.0.0.1 once their page is loaded (DNS rebinding).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

SUBPROTOCOL = "openenv"
_BEARER = "bearer."


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is rejected: an HTTP status, a sentence for its sender, and a word for the metrics."""

    status: int
    text: str
    reason: str


NO_TOKEN = Rejection(401, "a token is needed: send the header 'Authorization: Bearer TOKEN'", "token")
WRONG_TOKEN = Rejection(
    401, "the token is not this server's; it is the value that SQLENV_TOKEN had at its start", "token"
)
DRAINING = Rejection(503, "the server is shutting down; connect to another one", "draining")


class Access:
    """Decides on requests by their headers."""

    def __init__(self, token: str | None, allowed_origins: Collection[str] = ()) -> None:
        self._token = None if token is None else token.encode()
        self._origins = {origin.rstrip("/").lower() for origin in allowed_origins}
        self._hosts = {urlsplit(origin).netloc for origin in self._origins}

    def check(
        self,
        authorization: str | None,
        origin: str | None,
        host: str | None,
        subprotocols: Sequence[str] = (),
        *,
        page: bool = False,
    ) -> Rejection | None:
        """Return why a request is rejected; None when it is allowed.

        `page`: only the playground asks for this, and a browser names no origin when a page reads from its own.
        """
        if origin is not None and origin.rstrip("/").lower() not in self._origins:
            if not _is_own(origin, host):
                text = (
                    f"pages of another origin may not use this server; start it with --allowed_origins {origin[:200]}"
                )
                return Rejection(403, text, "origin")
            page = True
        if page and host is not None and not self._is_trusted(host):
            fix = f"Open it by its address, or start it with a token or --allowed_origins http://{host[:200]}"
            return Rejection(403, f"a server without a token has no pages at a name but localhost. {fix}", "origin")
        if self._token is None:
            return None
        sent = _token_in(authorization, subprotocols)
        if sent is None:
            return NO_TOKEN
        return None if hmac.compare_digest(sent, self._token) else WRONG_TOKEN

    def _is_trusted(self, host: str) -> bool:
        return self._token is not None or host.lower() in self._hosts or _cannot_be_rebound(host)


def _is_own(origin: str, host: str | None) -> bool:
    try:
        return host is not None and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _cannot_be_rebound(host: str) -> bool:
    """Tell whether a host is an address or localhost, which no name server decides."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
