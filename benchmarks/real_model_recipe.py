"""What `benchmarks/real_model.py` is to do: a recipe file, read and checked before anything is started. Pure.

Sections are phases, keys are flags of the command that does them. Promises: a section or a key that nothing honours is
an error, and so is one that the benchmark itself decides; a section beside another adds to its keys, and wins.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from env_server.errors import SQLEnvError
from inference.launch.launcher import read_arguments
from trainer.evaluation.arguments import build_parser
from trainer.stages.plan import Kind
from trainer.stages.run import known_flags

Keys = Mapping[str, Any]

SECTIONS = ("few_shot", "server", "evaluation", "text_to_sql", "sampling", "warmup", "replay", "grpo", "control")
NEEDED = ("evaluation", "warmup", "grpo", "control")
OURS = (
    *("model_name_or_path", "model", "policy", "seed", "output_dir", "use_cpu", "device", "use_vllm", "split"),
    *("vllm_server_base_url", "max_minutes", "resume_from_checkpoint", "protocol", "json", "episodes_out", "port"),
    *("few_shot", "share_gpu"),
)
"""What the benchmark says itself."""
DATA = "data"
"""What a policy learns from, where a section says so; `{data}` in it stands for the benchmark's own."""


class RecipeError(SQLEnvError, ValueError):
    """The recipe cannot be run as it is written; the text names the section and the key."""


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
    """Check a recipe. Raises RecipeError."""
    if unknown := [name for name in written if name not in SECTIONS]:
        raise RecipeError(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if missing := [name for name in NEEDED if name not in written]:
        raise RecipeError(f"the section {missing[0]} is missing")
    if ("sampling" in written) != ("replay" in written):
        raise RecipeError("a second round needs both sections, sampling and replay")
    flags = known_flags()
    plays = {option[2:] for action in build_parser()._actions for option in action.option_strings}
    for section in ("evaluation", "text_to_sql"):
        _check(section, written.get(section), plays, (*OURS, DATA, "episodes"))
    _check("sampling", written.get("sampling"), plays)
    for section in ("warmup", "replay", "control"):
        _check(section, written.get(section), flags[Kind.WARMUP].honoured)
    try:
        read_arguments(["--model", "m", *words(written.get("server", {}))])
    except SystemExit:
        raise RecipeError(
            "server: a key is no flag of sqlenv inference, or its value does not fit; see above"
        ) from None
    _check("server", written.get("server"), {*written.get("server", {})})
    return Recipe(
        few_shot=int(written.get("few_shot", 2)),
        server=written.get("server", {}),
        evaluation=written["evaluation"],
        text_to_sql={**written["evaluation"], **written.get("text_to_sql", {})},
        sampling={**written["evaluation"], **written["sampling"]} if "sampling" in written else None,
        warmup=written["warmup"],
        replay={**written["warmup"], **written["replay"]} if "replay" in written else None,
        grpo=tuple(_stages(written["grpo"], flags[Kind.GRPO].honoured)),
        control={**written["warmup"], **written["control"]},
    )


def check_grpo(section: str, keys: Keys) -> None:
    """Check flags of GRPO that are no recipe's. Raises RecipeError."""
    _check(section, keys, known_flags()[Kind.GRPO].honoured)


def on_data(keys: Keys, data: str) -> dict[str, Any]:
    """The keys, with the data set that they name, or the benchmark's own."""
    return {**keys, DATA: str(keys.get(DATA, "{data}")).replace("{data}", data)}


def words(keys: Keys) -> list[str]:
    """Flags as a command line has them; a switch that is true stands alone, one that is false is left out."""
    found: list[str] = []
    for name, value in keys.items():
        if value is not False:
            text = value if isinstance(value, str) else json.dumps(value)
            found += [f"--{name}"] if value is True else [f"--{name}", text]
    return found


def _stages(section: Mapping[str, Any], known: frozenset[str]) -> list[GRPOStage]:
    entries = section.get("stages")
    if not isinstance(entries, Sequence) or not entries:
        raise RecipeError("grpo: stages must be a list, each with a name and its share of the minutes")
    shared = {name: value for name, value in section.items() if name != "stages"}
    stages = []
    for entry in entries:
        own = {name: value for name, value in entry.items() if name not in ("name", "share")}
        keys = {**shared, **own}
        _check("grpo", keys, known)
        stages.append(GRPOStage(str(entry.get("name", "")), float(entry.get("share", 0)), keys))
    if len({stage.name for stage in stages}) < len(stages) or not all(stage.name.isidentifier() for stage in stages):
        raise RecipeError("grpo: each stage has a name of its own, of letters, digits and _")
    if any(stage.share <= 0 for stage in stages) or abs(sum(stage.share for stage in stages) - 1) > 1e-6:
        raise RecipeError("grpo: the shares of the stages are positive, and their sum is 1")
    return stages


def _check(section: str, keys: Keys | None, known: Container[str], ours: Container[str] = OURS) -> None:
    for name in keys or {}:
        if name in ours:
            raise RecipeError(f"{section}: {name} is the benchmark's to say, by a flag of its own")
        if name not in known:
            raise RecipeError(f"{section}: no flag is called {name}")
