"""Does GRPO teach the tiny policy to explore? Three seeds, and the control, on unseen databases.

Runs `sqlenv train --config configs/tiny.yaml` once per seed, each evaluated before and after on the same questions.
The control spends the wall-clock time of the first seed's GRPO on supervised warm-up with clean play only, from
the same base policy. Prints one JSON line; about half an hour on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import compare
from trainer.tiny import BASE_CHECKPOINT


def sqlenv(*arguments: str) -> str:
    """Run a `sqlenv` subcommand, its progress on stderr; return its stdout. Raises CalledProcessError."""
    command = [sys.executable, "-m", "sqlenv", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(seed: int, folder: Path, flags: list[str]) -> RunFolder:
    """One GRPO run."""
    sqlenv("train", "--config", "configs/tiny.yaml", "--seed", str(seed), "--output_dir", str(folder), *flags)
    return RunFolder.open(folder)


def outcome(run: RunFolder) -> dict[str, Any]:
    """Success before and after, with intervals, the paired difference and the minutes that GRPO took."""
    before, after = (next(e.summary for e in run.evaluations() if e.label == label) for label in ("before", "after"))
    difference = compare(run.evaluation_episodes("before"), run.evaluation_episodes("after"))
    gaps = [row["sampling/sampling_logp_difference/max"] for row in run.metrics()]
    return {
        "episodes": after.episodes,
        "before": before.success_rate,
        "before_interval": [before.interval.low, before.interval.high],
        "after": after.success_rate,
        "after_interval": [after.interval.low, after.interval.high],
        "gain": difference.mean,
        "gain_interval": [difference.interval.low, difference.interval.high],
        "intervals_apart": before.interval.high < after.interval.low,
        "max_logprob_gap": max(gaps),
        "minutes": sum(row["step_time"] for row in run.metrics() if "step_time" in row) / 60,
    }


def control(minutes: float, episodes: int, folder: Path) -> dict[str, Any]:
    """Clean supervised play for the same time, from the same base policy, on the same evaluation questions."""
    sqlenv(
        *("warmup", "--model_name_or_path", str(BASE_CHECKPOINT), "--data", "synthetic"),
        *("--max_minutes", str(minutes), "--num_train_epochs", "1000", "--output_dir", str(folder)),
        *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
        *("--per_device_train_batch_size", "16", "--train_sampling_strategy", "group_by_length"),
        *("--learning_rate", "0.001", "--lr_scheduler_type", "constant_with_warmup"),
        *("--warmup_steps", "20", "--save_strategy", "no", "--report_to", "none", "--max_length", "512"),
    )
    flags = ["--episodes", str(episodes), "--max_turn_length", "64", "--json"]
    line = sqlenv("evaluate", "--policy", str(folder), *flags).strip().splitlines()[-1]
    summary = json.loads(line)
    return {
        "success": summary["success_rate"],
        "interval": summary["interval"],
        "minutes": minutes,
    }


def main() -> None:
    """Train, control, print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder (default: a temporary one)")
    parser.add_argument("train_flags", nargs="*", help="flags of sqlenv train, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        outcomes = {seed: outcome(train(seed, folder / f"seed-{seed}", args.train_flags)) for seed in args.seeds}
        first = next(iter(outcomes.values()))
        baseline = control(first["minutes"], int(first["episodes"]), folder / "control")
    before, after = ([o[key] for o in outcomes.values()] for key in ("before", "after"))
    ratio = sum(after) / sum(before)
    harness.report("learning", ratio=ratio, seeds=outcomes, control=baseline)


if __name__ == "__main__":
    main()
