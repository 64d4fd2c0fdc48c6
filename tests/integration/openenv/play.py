"""Play episodes with upstream's real client; runs in upstream's virtual environment.

    PYTHON play.py URL async|sync [TOKEN] < PLAN

The plan is JSON: a list of episodes, {"reset": {...}, "actions": [{...}, ...]}. With `async` the episodes are played
at the same time, each on a client of its own; with `sync` one after the other on one client. Prints JSON: the client's
version and, for each episode, what the client returned for the reset, each action and each state. What the client
raised is {"raised": text}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import openenv
from openenv.core import GenericEnvClient


def shown(result: Any) -> dict[str, Any]:
    """Return the client's result as plain data; in 0.3.0 it has no metadata."""
    return {
        "observation": result.observation,
        "reward": result.reward,
        "done": result.done,
        "metadata": getattr(result, "metadata", None),
    }


async def attempt(call: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    try:
        return shown(await call())
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the result
        return {"raised": str(error)}


def client_of(url: str, token: str) -> GenericEnvClient:
    """Return a client; the one of 0.3.0 cannot send headers."""
    return GenericEnvClient(base_url=url, **({"headers": {"Authorization": f"Bearer {token}"}} if token else {}))


async def play_async(client: GenericEnvClient, episode: dict[str, Any]) -> dict[str, Any]:
    async with client:
        found: dict[str, Any] = {"reset": await attempt(partial(client.reset, **episode["reset"]))}
        if "raised" in found["reset"]:
            return dict(found["reset"])
        found["steps"], found["states"] = [], [await client.state()]
        for action in episode["actions"]:
            found["steps"].append(await attempt(partial(client.step, action)))
            found["states"].append(await client.state())
        return found


async def play_all(url: str, token: str, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    playing = (play_async(client_of(url, token), episode) for episode in plan)
    played = await asyncio.gather(*playing, return_exceptions=True)
    return [{"raised": str(each)} if isinstance(each, BaseException) else each for each in played]


def play_sync(client: Any, episode: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"reset": shown(client.reset(**episode["reset"]))}
    found["steps"], found["states"] = [], [client.state()]
    for action in episode["actions"]:
        try:
            found["steps"].append(shown(client.step(action)))
        except Exception as error:  # noqa: BLE001 - whatever the client raises is the result
            found["steps"].append({"raised": str(error)})
        found["states"].append(client.state())
    return found


def main(url: str, mode: str, token: str = "") -> None:
    plan = json.load(sys.stdin)
    if mode == "async":
        episodes = asyncio.run(play_all(url, token, plan))
    else:
        with client_of(url, token).sync() as client:
            episodes = [play_sync(client, episode) for episode in plan]
    print(json.dumps({"version": openenv.__version__, "episodes": episodes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
