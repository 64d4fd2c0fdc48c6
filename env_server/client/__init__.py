"""The client of environment servers: sessions on one server or several, with async and without.

It needs pydantic and websockets, and nothing of what a server runs on (`ready`, which a trainer asks, needs httpx).
"""

from env_server.client.clients import SQLEnvClient, SyncSQLEnvClient
from env_server.client.connection import Timeouts

__all__ = ["SQLEnvClient", "SyncSQLEnvClient", "Timeouts"]
