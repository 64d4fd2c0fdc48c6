"""The application for an ASGI server that is already there: `uvicorn env_server.service.asgi:app`.

`openenv.yaml` names it for OpenEnv's sandboxes, which start it that way. One worker, settings from SQLENV_* variables.
It cannot see what the server binds, so it wants a token or SQLENV_INSECURE=true whatever that is. `sqlenv serve` is the
better way: it also drains, replaces workers and bounds requests. Made when `app` is first asked for, not on import.
"""

from __future__ import annotations

from env_server.service.app import create_app
from env_server.service.capacity import Capacity
from env_server.service.metrics import Metrics
from env_server.service.settings import PREFIX, SettingsError, read_settings
from env_server.service.workers.run import load_data


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    settings, _ = read_settings(())
    if settings.token is None and not settings.insecure:
        raise SettingsError(
            f"other machines may reach this application, and no token is set. Set {PREFIX}TOKEN to a secret that "
            f"clients send, or, where the network is trusted, {PREFIX}INSECURE=true"
        )
    capacity = Capacity(settings.max_sessions, settings.queue_size)
    app = globals()["app"] = create_app(settings, load_data(settings), capacity=capacity, metrics=Metrics(capacity))
    return app
