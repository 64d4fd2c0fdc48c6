"""What moves a real model, and what does not: short runs of GRPO that differ in one thing, from the same warmed policy.

    python -m benchmarks.real_model_trials --out DIR [--trials FILE] [--only NAME,NAME] [--device cpu|cuda]

DIR is a folder of `benchmarks.real_model` whose warm-up is finished and evaluated; its model, data, seed and questions
are used again. A trial is a name and a few flags in the file: they win over those of the recipe's first stage of GRPO.
Each trial takes the same number of steps, and is then played greedily on the questions of the others, which is paired
with the warmed policy's play. A trial that was killed goes on when the same command is given again; one that is
finished is not run again, and stays what it was; a new one can be added to the file at any time. The table of all that
are finished goes to stderr and to DIR/trials.txt, one JSON line to stdout and to DIR/trials.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.real_model import WIDTH, Experiment, publish, same_as_before
from benchmarks.real_model_phases import Finished
from benchmarks.real_model_recipe import Keys, RecipeError, read_recipe, refuse_ours
from benchmarks.server_process import ROOT, ServerError
from env_server.errors import SQLEnvError
from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import Interval, interval_text, percent
from trainer.report.comparison import compare_sides
from trainer.report.sides import find_side

TRIALS = Path("configs/real-model/trials.yaml")
FOLDER = "trials"
"""Of the trials, beside the phases."""


@dataclass(frozen=True, slots=True)
class Trials:
    """How many steps each takes, and what each says otherwise than the recipe."""

    steps: int
    flags: Mapping[str, Keys]


def read_trials(written: Mapping[str, Any]) -> Trials:
    """Check a file of trials. Raises RecipeError."""
    if unknown := [name for name in written if name not in ("steps", "trials")]:
        raise RecipeError(f"there is no section {unknown[0]!r}; there are steps and trials")
    steps, trials = written.get("steps"), written.get("trials")
    if not isinstance(steps, int) or steps < 1 or not isinstance(trials, Mapping) or not trials:
        raise RecipeError("steps must be a number of at least 1, trials a name and flags for each")
    for name, keys in trials.items():
        if not str(name).isidentifier():
            raise RecipeError(f"trials: {name} is no name; letters, digits and _ are")
        if "max_steps" in (keys or {}):
            raise RecipeError(f"trials: {name}: max_steps is what steps says, for all trials")
        refuse_ours(f"trials: {name}", keys or {})
    return Trials(steps, {str(name): keys or {} for name, keys in trials.items()})


def check_unchanged(folder: Path, trials: Trials, chosen: Sequence[str]) -> None:
    """Keep what the chosen trials are, and check that those of before are what they were. Raises RecipeError."""
    for name, keys in trials.flags.items():
        place = folder / FOLDER / name
        if name in chosen:
            place.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            same_as_before(place, {"steps": trials.steps, "flags": keys}, "give the trial another name")


def summary_of(folder: Path, before: Path, flags: Keys) -> dict[str, Any]:
    """What a finished trial came to: its play, paired with that of the policy it began with, and its training."""
    paired = compare_sides(*(find_side(str(place / "out" / "episodes.jsonl")) for place in (before, folder / "after")))
    rows = RunFolder(folder / "grpo" / "out").metrics()
    success = [row["rollout/success_rate"] for row in rows if "rollout/success_rate" in row]
    quarter = max(1, len(success) // 4)
    played = json.loads((folder / "after" / "out" / "summary.json").read_bytes())
    gain = paired.success.difference
    return {
        "flags": dict(flags),
        "success_rate": played["success_rate"],
        "interval": played["interval"],
        "episodes": played["episodes"],
        "gain": gain.mean,
        "gain_interval": [gain.interval.low, gain.interval.high],
        "sampled_first": fmean(success[:quarter]),
        "sampled_last": fmean(success[-quarter:]),
        "entropy_first": rows[0].get("entropy"),
        "entropy_last": rows[-1].get("entropy"),
        "seconds_a_step": fmean(row["step_time"] for row in rows if "step_time" in row),
        "steps": len(rows),
    }


def print_trials(found: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print the table of what is finished."""
    steps = max((trial["steps"] for trial in found.values()), default=0)
    table = Table(
        title=f"{steps} steps of GRPO each; success on unseen databases, greedy; sampled: first, last quarter"
    )
    for name in ("trial", "flags"):
        table.add_column(name, overflow="fold")
    for name in ("success", "gain, in points", "sampled", "entropy", "s/step"):
        table.add_column(name, justify="right")
    for name, trial in found.items():
        table.add_row(
            name,
            ", ".join(f"{key} {value}" for key, value in trial["flags"].items()) or "those of the recipe",
            percent(trial["success_rate"]),
            f"{100 * trial['gain']:+.1f} ({interval_text(Interval(*trial['gain_interval']))})",
            f"{percent(trial['sampled_first'])}, {percent(trial['sampled_last'])}",
            ", ".join(
                "-" if value is None else f"{value:.2f}" for value in (trial["entropy_first"], trial["entropy_last"])
            ),
            f"{trial['seconds_a_step']:.0f}",
        )
    console.print(table)


def _warmed(folder: Path) -> tuple[Path, Path]:
    """The policy that GRPO begins with, and its evaluation. Raises RecipeError."""
    for warmed, played in (("replay", "after_replay"), ("warmup", "after_warmup")):
        finished = folder / warmed / "finished.json"
        if finished.is_file() and (folder / played / "finished.json").is_file():
            made = Finished(**json.loads(finished.read_bytes()))
            return folder / warmed / made.policy, folder / played
    raise RecipeError(f"{folder} has no warm-up that is finished and evaluated: run benchmarks.real_model on it first")


def _experiment(folder: Path, device: str, console: Console) -> Experiment:
    asked = folder / "asked.json"
    if not asked.is_file():
        raise RecipeError(f"{folder} is no folder of benchmarks.real_model: run that first")
    known = json.loads(asked.read_bytes())
    return Experiment(folder, device=device, console=console, **{**known, "recipe": read_recipe(known["recipe"])})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials that are left, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder of benchmarks.real_model")
    parser.add_argument("--trials", type=Path, default=ROOT / TRIALS, help=f"default: {TRIALS}")
    parser.add_argument("--only", help="some of them, by name, separated by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    folder = args.out.resolve()
    try:
        trials = read_trials(yaml.safe_load(args.trials.read_text(encoding="utf-8")))
        chosen = args.only.split(",") if args.only else list(trials.flags)
        if unknown := [name for name in chosen if name not in trials.flags]:
            raise RecipeError(f"{args.trials} has no trial {unknown[0]!r}; there are {', '.join(trials.flags)}")
        warmed, before = _warmed(folder)
        experiment = _experiment(folder, args.device, console)
        check_unchanged(folder, trials, chosen)
        for name in chosen:
            keys = {**experiment.recipe.grpo[0].keys, **trials.flags[name], "max_steps": trials.steps}
            experiment.trial(f"{FOLDER}/{name}", str(warmed), keys)
    except (SQLEnvError, ServerError, OSError) as error:
        console.print(f"benchmarks.real_model_trials: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    finished = [name for name in trials.flags if (folder / FOLDER / name / "after" / "finished.json").is_file()]
    found = {name: summary_of(folder / FOLDER / name, before, trials.flags[name]) for name in finished}
    result = {"benchmark": "real_model_trials", "before": json.loads((before / "out" / "summary.json").read_bytes())}
    result |= {"trials": found}
    publish(result, folder / "trials.json", folder / "trials.txt", lambda shown: print_trials(found, shown), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
