"""Do stages pay? One stage of GRPO on all questions against easy ones first, at the same number of episodes.

    python -m benchmarks.stages --runs runs/stages-benchmark

Both sides begin with the tiny policy and train with the flags of `configs/tiny.yaml` for as many steps in all, so on as
many episodes; each stage begins with a new optimizer and schedule. They are evaluated on the same unseen questions, and
compared in pairs of question and seed, clustered by database. What is in --runs already is not run again, and a run
that was broken off goes on, so that the command can be killed and given again. One JSON line; with three seeds it takes
six times as long as the tiny demo.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import PairedDifference, judged, paired_difference, successful
from trainer.rollout.episodes import EpisodeRecord

CONFIG = Path("configs/tiny.yaml")
SIDES: Mapping[str, Sequence[str]] = {
    "one": ("easy,medium,hard,extra",),
    "several": ("easy", "easy,medium", "easy,medium,hard,extra"),
}
"""The levels of each side's stages."""


def staged(tiny: Mapping[str, Any], levels: Sequence[str], steps: int) -> dict[str, Any]:
    """Return the config of a run: the tiny demo's keys, in stages that share its steps; the last one is evaluated."""
    shared = {key: value for key, value in tiny.items() if key not in ("output_dir", "max_steps")}
    stages: list[dict[str, Any]] = []
    for number, level in enumerate(levels):
        part = steps * (number + 1) // len(levels) - steps * number // len(levels)
        stages.append({"kind": "grpo", "name": level.replace(",", "-"), "difficulty": level, "max_steps": part})
        if number + 1 < len(levels):
            stages[-1]["eval_episodes"] = 0
    return {**shared, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 2, "stages": stages}


def trained(side: str, seed: int, runs: Path, tiny: Mapping[str, Any], steps: int, flags: Sequence[str]) -> RunFolder:
    """Run one side to its end, or go on with it; returns the folder of its last stage. Raises CalledProcessError."""
    folder = runs / f"{side}-{seed}"
    file = runs / f"{side}.yaml"
    config = staged(tiny, SIDES[side], steps)
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    command = ["train", "--config", str(file), "--seed", str(seed), "--output_dir", str(folder), *flags]
    command += ["--resume_from_checkpoint", "true"]
    subprocess.run([sys.executable, "-m", "sqlenv", *command], check=True, stdout=sys.stderr)
    return RunFolder.open(folder / f"{len(config['stages'])}-{config['stages'][-1]['name']}")


def pooled(pairs: Mapping[int, tuple[Sequence[EpisodeRecord], Sequence[EpisodeRecord]]]) -> PairedDifference:
    """Compare the sides of all seeds in pairs of question and seed, clustered by database."""
    sides: tuple[dict[str, bool], dict[str, bool]] = ({}, {})
    databases: dict[str, str] = {}
    for seed, records in pairs.items():
        for results, episodes in zip(sides, records, strict=True):
            for episode in judged(episodes):
                results[f"{seed}/{episode.question_id}"] = successful(episode)
                databases[f"{seed}/{episode.question_id}"] = episode.db_id
    return paired_difference(*sides, databases)


def shown(difference: PairedDifference) -> dict[str, Any]:
    """A difference, several stages less one, as the line has it."""
    interval = [difference.interval.low, difference.interval.high]
    return {"difference": difference.mean, "interval": interval, "pairs": difference.n}


def main() -> None:
    """Train both sides with each seed, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--steps", type=int, default=60, help="steps of each side, over all of its stages")
    parser.add_argument("train_flags", nargs="*", help="flags of sqlenv train, after --")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    tiny = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    pairs: dict[int, tuple[list[EpisodeRecord], list[EpisodeRecord]]] = {}
    success: dict[str, list[float]] = {side: [] for side in SIDES}
    for seed in args.seeds:
        played = []
        for side, rates in success.items():
            run = trained(side, seed, args.runs, tiny, args.steps, args.train_flags)
            rates.append(next(e.summary.success_rate for e in run.evaluations() if e.label == "after"))
            played.append(run.evaluation_episodes("after"))
        pairs[seed] = (played[0], played[1])
    one, several = (sum(rates) / len(rates) for rates in success.values())
    line = {
        "benchmark": "stages",
        "ratio": several / one if one else None,
        "steps": args.steps,
        "success": {side: dict(zip(args.seeds, rates, strict=True)) for side, rates in success.items()},
        "seeds": {seed: shown(pooled({seed: pair})) for seed, pair in pairs.items()},
        **shown(pooled(pairs)),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
