"""What two runs were started with, flag by flag: where they differ, with nothing secret. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS = ("sqlenv", "grpo", "model", "versions")
"""The parts of a run's config.json that are made of flags, and the versions of what it was built on."""
PLACES = re.compile(
    r"output_dir|run_name|resume_from_checkpoint|hub_.*|push_to_hub|report_to|project|trackio_.*|save_.*|log_.*|"
    r"logging_.*"
)
"""Flags that say what a run writes, where, and who is told; they change nothing about what it learns."""
_SECRET = re.compile(r"(token|secret|password|api_key|credential)s?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Differing:
    """One flag or setting that is not the same on both sides; None where a side does not have it."""

    name: str
    a: Any
    b: Any


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Differing]:
    """Return what is not the same on both sides, in the order of the first, then of the second."""
    names = dict.fromkeys((*a, *b))
    return [Differing(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that decide what a run learns, as its config.json has them."""
    flags: dict[str, Any] = {}
    for section in SECTIONS:
        values = redacted(config.get(section, {}))
        prefix = "version of " if section == "versions" else ""
        flags |= {prefix + name: value for name, value in values.items() if not PLACES.fullmatch(name)}
    return flags


def redacted(value: Any) -> Any:
    """Hide what a config holds under a secret's name: what we print and write is passed around."""
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if isinstance(item, str) and item and _SECRET.search(key) else redacted(item)
            for key, item in value.items()
        }
    return [redacted(item) for item in value] if isinstance(value, list) else value
