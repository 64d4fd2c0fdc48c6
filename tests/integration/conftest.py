"""The small data set as a folder, as servers are given it; modules that need another one say so themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from tests.integration.service import write_data


@pytest.fixture(scope="module")
def data(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(pets, tmp_path_factory.mktemp("pets"))


@pytest.fixture(scope="module")
def dataset(data: Path) -> Dataset:
    return load_dataset(str(data))
