"""The application for an ASGI server that is already there: `uvicorn env_server.service.asgi:app`.

`openenv.yaml` names it for OpenEnv's sandboxes, which start it that way. One worker, settings from SQLENV_* variables.
It cannot see what the server binds, so it requires a token or SQLENV_INSECURE=true. `sqlenv serve` is the better way:
it also replaces workers and bounds requests. Made when `app` is first used, not on import.
"""

from __future__ import annotations

from env_server.service.app import create_app
from env_server.service.serve import load_data
from env_server.service.settings import PREFIX, SettingsError, read_settings


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    settings, _ = read_settings(())
    if settings.token is None and not settings.insecure:
        raise SettingsError(
            f"other machines may reach this application, and no token is set. Set {PREFIX}TOKEN to a secret that "
            f"clients send, or, where the network is trusted, {PREFIX}INSECURE=true"
        )
    app = globals()["app"] = create_app(settings.model_copy(update={"workers": 1}), load_data(settings))
    return app
