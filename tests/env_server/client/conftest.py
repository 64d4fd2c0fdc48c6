"""The service that the tests of clients play on, and servers' backoffs that need not be waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from env_server.dataset import Dataset
from env_server.service.settings import ServiceSettings
from tests.env_server.conftest import RunningServer
from tests.env_server.serving import PlayingServer, running_server, shorten_backoffs


@pytest.fixture(scope="session")
def service(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A service with one place, which a session keeps for a moment after its client has left."""
    options = {"token": "geheim", "max_sessions": 1, "queue_size": 0, "messages_per_s": 0}
    running = RunningServer(ServiceSettings(cache_dir=tmp_path_factory.mktemp("cache"), **options), pets)  # type: ignore[arg-type]
    yield running
    running.stop()


@pytest.fixture
def short_backoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_backoffs(monkeypatch)


@pytest.fixture
def server(pets: Dataset) -> Iterator[PlayingServer]:
    with running_server(pets) as running:
        yield running
