"""The client of environment servers: sessions on one server or several, with async and without.

It needs pydantic and websockets, and nothing of what a server runs on. Its errors are in `errors`.
"""

from env_server.client.async_client import EnvClient, Reply, SQLEnvClient
from env_server.client.connection import Timeouts
from env_server.client.session_pool import SessionPool
from env_server.client.sync_client import SyncEnvClient, SyncSQLEnvClient

__all__ = ["EnvClient", "Reply", "SQLEnvClient", "SessionPool", "SyncEnvClient", "SyncSQLEnvClient", "Timeouts"]
