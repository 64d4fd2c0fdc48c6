"""What `benchmarks/real_model.py` is to do: a recipe file. Pure.

Sections are phases, keys are flags of the command that does them, which refuses those that it does not have. A section
beside another (`replay` and `control` beside `warmup`, `text_to_sql` and `sampling` beside `evaluation`) adds to its
keys, and wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from env_server.errors import SQLEnvError

Keys = Mapping[str, Any]

SECTIONS = ("few_shot", "server", "evaluation", "text_to_sql", "sampling", "warmup", "replay", "grpo", "control")
NEEDED = ("evaluation", "warmup", "grpo", "control")
OURS = (
    *("model_name_or_path", "model", "policy", "seed", "output_dir", "use_cpu", "device", "use_vllm", "split"),
    *("vllm_server_base_url", "max_minutes", "resume_from_checkpoint", "protocol", "json", "episodes_out", "port"),
    *("few_shot", "share_gpu"),
)
"""Flags that the benchmark gives itself, which would win in silence."""


class RecipeError(SQLEnvError, ValueError):
    """The recipe cannot be run as it is written; the text names the section."""


@dataclass(frozen=True, slots=True)
class GRPOStage:
    """A stage of GRPO: its part of the minutes, and its flags."""

    name: str
    share: float
    keys: Keys


@dataclass(frozen=True, slots=True)
class Recipe:
    """The flags of each phase; `sampling` and `replay` are None without a second round."""

    few_shot: int
    server: Keys
    evaluation: Keys
    text_to_sql: Keys
    sampling: Keys | None
    warmup: Keys
    replay: Keys | None
    grpo: tuple[GRPOStage, ...]
    control: Keys


def read_recipe(written: Mapping[str, Any]) -> Recipe:
    """Read a recipe. Raises RecipeError."""
    if unknown := [name for name in written if name not in SECTIONS]:
        raise RecipeError(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if missing := [name for name in NEEDED if name not in written]:
        raise RecipeError(f"the section {missing[0]} is missing")
    if ("sampling" in written) != ("replay" in written):
        raise RecipeError("a second round needs both sections, sampling and replay")
    for section in SECTIONS[1:]:
        refuse_ours(section, written.get(section) or {})
    evaluation, warmup = written["evaluation"], written["warmup"]
    shared = {name: value for name, value in written["grpo"].items() if name != "stages"}
    stages = tuple(
        GRPOStage(
            entry["name"], entry["share"], shared | {k: v for k, v in entry.items() if k not in ("name", "share")}
        )
        for entry in written["grpo"].get("stages") or ()
    )
    if len({stage.name for stage in stages}) < len(stages) or abs(sum(stage.share for stage in stages) - 1) > 1e-6:
        raise RecipeError("grpo: each of the stages has its own name and share of the minutes, whose sum is 1")
    return Recipe(
        few_shot=int(written.get("few_shot", 2)),
        server=written.get("server", {}),
        evaluation=evaluation,
        text_to_sql={**evaluation, **written.get("text_to_sql", {})},
        sampling={**evaluation, **written["sampling"]} if "sampling" in written else None,
        warmup=warmup,
        replay={**warmup, **written["replay"]} if "replay" in written else None,
        grpo=stages,
        control={**warmup, **written["control"]},
    )


def refuse_ours(section: str, keys: Keys) -> None:
    """Raise RecipeError for a key that the benchmark gives itself."""
    if ours := [name for name in keys if name in OURS]:
        raise RecipeError(f"{section}: {ours[0]} is the benchmark's to say, by a flag of its own")


def on_data(keys: Keys, data: str) -> dict[str, Any]:
    """The keys, with the data set that they name, where `{data}` stands for the benchmark's own, or with that."""
    return {**keys, "data": str(keys.get("data", "{data}")).replace("{data}", data)}


def words(keys: Keys) -> list[str]:
    """Flags as a command line has them; a switch that is true stands alone, one that is false is left out."""
    found: list[str] = []
    for name, value in keys.items():
        if value is not False:
            text = value if isinstance(value, str) else json.dumps(value)
            found += [f"--{name}"] if value is True else [f"--{name}", text]
    return found
