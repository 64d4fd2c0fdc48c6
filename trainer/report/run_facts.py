"""The report's tables of what a run was made with, and of the flags that were not left at their defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainer.eval.run_files import PLACES, SECTIONS, redacted
from trainer.report.replays import cut
from trainer.report.tables import NONE, Table, clock

VALUE_LIMIT = 200


def facts_table(config: Mapping[str, Any], training_s: float, steps: int) -> Table | None:
    """Return versions, commit, hardware and time; None where nothing is known. `training_s`: of all steps together."""
    machine = config.get("machine", {})
    versions = ", ".join(f"{name} {number}" for name, number in config.get("versions", {}).items())
    named = ("processor", "cores", "memory_gib", "system")
    units = {"cores": "{} cores", "memory_gib": "{} GiB of memory"}
    hardware = ", ".join(units.get(name, "{}").format(machine[name]) for name in named if name in machine)
    rows = [
        ["began", str(machine.get("started", ""))],
        ["training took", f"{clock(training_s)} ({steps} steps, with what lies between them)" if training_s else ""],
        ["versions", ", ".join(filter(None, (versions, f"Python {machine['python']}" if "python" in machine else "")))],
        ["commit", str(machine.get("commit", ""))],
        ["hardware", hardware],
        ["GPUs", ", ".join(machine.get("gpus", []))],
    ]
    known = [[name, cut(text, 300)] for name, text in rows if text]
    return Table("What it was made with", ["", ""], known) if known else None


def departures_table(config: Mapping[str, Any]) -> Table | None:
    """Return the flags that were not left at their defaults; None where that was not written down, as by older runs."""
    if "departures" not in config:
        return None
    values = {name: value for section in SECTIONS for name, value in redacted(config.get(section, {})).items()}
    rows = [
        [name, _text(values.get(name)), _text(default)]
        for name, default in redacted(config["departures"]).items()
        if not PLACES.fullmatch(name)
    ]
    return Table("Flags that were not left at their defaults", ["flag", "this run", "default"], rows)


def _text(value: Any) -> str:
    if value is None:
        return NONE
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), VALUE_LIMIT)
