"""The errors of a client of environment servers, sorted by what to do about them.

    ClientError
      RetryableError          the call was fine: it may succeed elsewhere or later
        ServerBusyError         every session of the server is taken
        ServerDrainingError     the server takes no new sessions, as it is about to stop
        ConnectionLostError     the server cannot be reached, went away, or ended the session
        DeadlineError           no answer in time
        NoServerError           each server failed in one of these ways
      FixTheCallError         trying again changes nothing
        AddressError            not the URL of a server
        ServerRefusesError      this server will never serve this client as it is; another one may
          AuthenticationError     the token is missing, wrong or not allowed to do this
          CertificateError        the server's TLS certificate is not trusted, or the trusted ones cannot be read
          ProtocolError           what answers does not speak OpenEnv's wire format
        RemoteActionError       the server says what is wrong with the request; the session lives on

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
    """See the module."""


class ServerBusyError(RetryableError):
    """`active_sessions` and `max_sessions` are None where the server does not say."""

    def __init__(
        self, server: str, message: str, active_sessions: int | None = None, max_sessions: int | None = None
    ) -> None:
        super().__init__(server, message)
        self.active_sessions = active_sessions
        self.max_sessions = max_sessions


class ServerDrainingError(RetryableError):
    """See the module."""


class ConnectionLostError(RetryableError):
    """See the module."""


class DeadlineError(RetryableError):
    """The connection was dropped, since the answer could still come."""


class NoServerError(RetryableError):
    """`failures` holds each server's error, by its name."""

    def __init__(self, failures: Mapping[str, ClientError], timeout_s: float) -> None:
        causes = "; ".join(f"{name}: {error.message}" for name, error in failures.items())
        waited = f"in {timeout_s:.2g} s" if timeout_s else "at the first attempt"
        super().__init__(", ".join(failures), f"no session {waited} ({causes})")
        self.failures = dict(failures)


class FixTheCallError(ClientError):
    """See the module."""


class AddressError(FixTheCallError, ValueError):
    """See the module."""


class ServerRefusesError(FixTheCallError):
    """See the module."""


class AuthenticationError(ServerRefusesError):
    """See the module."""


class CertificateError(ServerRefusesError):
    """See the module."""


class ProtocolError(ServerRefusesError):
    """See the module."""


class RemoteActionError(FixTheCallError):
    """The server's complaint: its `code`, its text and what else it says in `details`. The episode is as before."""

    def __init__(self, server: str, code: str, message: str, details: Mapping[str, Any]) -> None:
        super().__init__(server, f"{code}: {message}")
        self.code = code
        self.details = dict(details)
