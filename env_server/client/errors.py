"""What a client of an environment server can be told, sorted by what to do about it.

    ClientError
      RetryableError          the call was fine: it may succeed elsewhere or later
        ServerBusyError         every session of the server is taken
        ServerDrainingError     the server takes no new sessions, as it is about to stop
        ConnectionLostError     the server cannot be reached, went away, or ended the session
        DeadlineError           no answer in time
        NoServerError           each server failed in one of these ways
      FixTheCallError         trying again changes nothing
        AddressError            what was given is not the URL of a server
        ServerRefusesError      this server will never serve this client as it is
          AuthenticationError     the token is missing or wrong
          CertificateError        the server's TLS certificate is not trusted
          ProtocolError           what answers does not speak OpenEnv's wire format
        RemoteActionError       the server took the request and says what is wrong with it; the session lives on

After a RetryableError the session, and with it the episode, is gone: `reset` starts another one. The text of each
names the server, never the token, and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from env_server.errors import SQLEnvError


class ClientError(SQLEnvError):
    """Base of all. `server` names the server, or servers, as a user knows them."""

    def __init__(self, server: str, message: str) -> None:
        super().__init__(f"environment server {server}: {message}")
        self.server = server
        self.message = message


class RetryableError(ClientError):
    """The same call may succeed on another server, or on this one later."""


class ServerBusyError(RetryableError):
    """Every session of the server is taken; `active_sessions` and `max_sessions` are None where it does not say."""

    def __init__(
        self, server: str, message: str, active_sessions: int | None = None, max_sessions: int | None = None
    ) -> None:
        super().__init__(server, message)
        self.active_sessions = active_sessions
        self.max_sessions = max_sessions


class ServerDrainingError(RetryableError):
    """The server is about to stop: it finishes its episodes and takes no new ones."""


class ConnectionLostError(RetryableError):
    """The server cannot be reached, closed the connection, or ended the session."""


class DeadlineError(RetryableError):
    """The server did not answer in time; the connection was dropped, since its answer could still come."""


class NoServerError(RetryableError):
    """No server gave a session. `failures` holds each server's error, by its name."""

    def __init__(self, failures: Mapping[str, ClientError], patience_s: float) -> None:
        causes = "; ".join(f"{name}: {error.message}" for name, error in failures.items())
        waited = f"in {patience_s:.2g} s" if patience_s else "at the first attempt"
        super().__init__(", ".join(failures), f"no session {waited} ({causes})")
        self.failures = dict(failures)


class FixTheCallError(ClientError):
    """Something on this side has to change first."""


class AddressError(FixTheCallError, ValueError):
    """What was given is not the URL of an environment server."""


class ServerRefusesError(FixTheCallError):
    """This server will never serve this client as it is; another one may."""


class AuthenticationError(ServerRefusesError):
    """The token is missing, wrong, or not allowed to do this."""


class CertificateError(ServerRefusesError):
    """The server's TLS certificate is not trusted here, or what is to be trusted cannot be read."""


class ProtocolError(ServerRefusesError):
    """What answers at the URL does not speak OpenEnv's wire format, or not this part of it."""


class RemoteActionError(FixTheCallError):
    """The server's own complaint about a request: its `code`, its text and what else it says in `details`.

    Nothing was lost: the session is open and its episode is as it was before.
    """

    def __init__(self, server: str, code: str, message: str, details: Mapping[str, Any]) -> None:
        super().__init__(server, f"{code}: {message}")
        self.code = code
        self.details = dict(details)
