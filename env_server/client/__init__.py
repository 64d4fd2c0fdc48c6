"""The client of environment servers: sessions on one server or several, with async and without.

It needs pydantic and websockets, and nothing of what a server runs on. Its errors are in `errors`.
"""

from env_server.client.async_client import SQLEnvClient
from env_server.client.connection import Timeouts
from env_server.client.sync_client import SyncSQLEnvClient

__all__ = ["SQLEnvClient", "SyncSQLEnvClient", "Timeouts"]
