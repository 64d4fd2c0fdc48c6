"""What is set up with the environments of a data set, or with the application that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.errors import DataError
from env_server.factory import EnvironmentFactory
from env_server.service.app import create_app
from env_server.service.settings import ServiceSettings
from env_server.settings import EnvSettings, SandboxSettings
from env_server.sql.sandbox import limit_memory


def make_factory(dataset: Dataset, settings: EnvSettings, _: Path) -> None:
    EnvironmentFactory(dataset, settings).close()


def make_app(dataset: Dataset, _settings: EnvSettings, _: Path) -> None:
    create_app(ServiceSettings(), dataset)


def load(_: Dataset, settings: EnvSettings, folder: Path) -> None:
    with pytest.raises(DataError):
        load_dataset(str(folder), settings=settings)


@pytest.fixture
def unbounded() -> Iterator[None]:
    apsw.hard_heap_limit(0)
    yield
    limit_memory(SandboxSettings())


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize("make", [make_factory, make_app, load])
def test_whoever_runs_sql_bounds_the_memory_of_the_process(
    make: Callable[[Dataset, EnvSettings, Path], None], pets: Dataset, tmp_path: Path
) -> None:
    settings = EnvSettings()
    make(pets, settings, tmp_path)
    assert apsw.hard_heap_limit(-1) == settings.sandbox.heap_bytes
