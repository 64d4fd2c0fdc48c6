"""docs/architecture.md names modules, classes and functions; each of them exists."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
NAMES = sorted(set(re.findall(r"`((?:env_server|inference|trainer)\.[\w.]+(?::[\w.]+)?)`", PAGE.read_text("utf-8"))))


def test_the_page_names_the_hops() -> None:
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_names_exists(name: str) -> None:
    module, _, attributes = name.partition(":")
    found = importlib.import_module(module)
    assert reduce(getattr, attributes.split(".") if attributes else [], found)
