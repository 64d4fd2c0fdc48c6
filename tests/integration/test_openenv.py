"""OpenEnv's wire format, as upstream's own client and validators judge it, against a real server process.

What it is judged by is in `conformance.py`. The same episodes give the same bytes on any server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import ServerProcess
from env_server.dataset import Dataset
from tests.integration.conformance import (
    check_the_client,
    check_validators_and_graders,
    plan,
    played_here,
    replies,
    script,
    upstream,
)
from tests.integration.service import complaints, metric, open_socket, serving


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the tests that leave no trace in it. Whatever they did, it had nothing to complain of."""
    with serving(tmp_path_factory.mktemp("log"), data) as running:
        yield running
        assert running.stop() == 0
        assert complaints(running) == []


# --- upstream's client ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("old", [False, True], ids=["0.10.0", "0.3.0"])
def test_the_real_client_sees_what_an_environment_in_process_gives(
    server: ServerProcess, dataset: Dataset, mode: str, old: bool
) -> None:
    check_the_client(server.url, dataset, mode, old=old)


def test_the_real_client_is_told_when_there_is_no_place(dataset: Dataset, data: Path, tmp_path: Path) -> None:
    with serving(tmp_path, data, "--max_sessions", "1", "--queue_size", "0") as server:
        with open_socket(server):
            refused = upstream("play.py", server.url, "async", given=plan(dataset)[:1])["episodes"][0]
        assert "CAPACITY_REACHED" in refused["raised"]
        assert metric(server, "sqlenv_refused_total", reason="capacity") >= 1
        # The place is free again the moment the socket is gone.
        admitted = upstream("play.py", server.url, "async", given=plan(dataset)[:1])["episodes"][0]
        assert admitted["states"][-1]["step_count"] == len(admitted["steps"]) - 1


def test_the_real_client_needs_the_token(dataset: Dataset, data: Path, tmp_path: Path) -> None:
    episodes = plan(dataset)[:1]
    with serving(tmp_path, data, "--token", "open-sesame") as server:
        for wrong in ((), ("open-sesam",)):
            refused = upstream("play.py", server.url, "async", *wrong, given=episodes)["episodes"][0]
            assert "401" in refused["raised"]
        admitted = upstream("play.py", server.url, "async", "open-sesame", given=episodes)["episodes"]
        assert admitted == played_here(dataset, episodes, metadata=True)
        assert "open-sesam" not in server.log_text()


def test_upstreams_validators_and_graders_pass(server: ServerProcess, dataset: Dataset) -> None:
    check_validators_and_graders(server.url, dataset)


# --- the same bytes everywhere -------------------------------------------------------------------------------------


def test_a_replay_on_another_server_gives_the_same_bytes(
    server: ServerProcess, dataset: Dataset, data: Path, tmp_path: Path
) -> None:
    requests = script(dataset)
    first = replies(server.ws_url, requests)
    assert '"result":"count(*)\\n200000"' in first[-2], "the slow pool has answered"
    assert "needs more than" in first[-1], "the last query runs out of budget"
    assert replies(server.ws_url, requests) == first, "from the cache of results"
    with serving(tmp_path, data, "--workers", "2", "--query_workers", "2,2") as other:
        assert replies(other.ws_url, requests) == first
