"""What does playing the next batch while this one is trained on save? Staleness 0 against 1, a core for each side.

    python -m benchmarks.pipeline [--policy FOLDER] [--episodes 16] [--steps 6] [-- FLAGS OF sqlenv train]

`sqlenv train --use_vllm` as it is, on one vLLM server. The server has one core and the trainer another, so neither
takes the other's time; the episodes' client and environments are the trainer's. One run with --staleness 0, one with 1,
the same flags and seed otherwise. The first two steps of each are left out: the first push is checked there, and the
pipeline is empty.

One JSON line: medians over the steps, in seconds. `generation` and `training` are those of staleness 0, a push counted
as training; `to_longer` is staleness 1's step against the longer of the two, 1 where nothing is wasted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines import INFERENCE, VLLM_START_S
from benchmarks.server_process import ROOT, SQLENV, ServerProcess
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT

WARM_UP_STEPS = 2
GROUP = 4


def on_core(core: int, command: Sequence[str]) -> list[str]:
    """The command, kept to one core."""
    return ["taskset", "--cpu-list", str(core), *command]


def train(args: argparse.Namespace, server: ServerProcess, staleness: int, folder: Path) -> list[dict[str, float]]:
    """Run `sqlenv train`, and return the metrics of the steps that count."""
    flags = {
        "model_name_or_path": args.policy,
        "data": args.data,
        "output_dir": str(folder),
        "max_steps": args.steps + WARM_UP_STEPS,
        "per_device_train_batch_size": GROUP,
        "num_generations": GROUP,
        "gradient_accumulation_steps": args.episodes // GROUP,
        "max_completion_length": args.max_completion_length,
        "max_turn_length": 64,
        "learning_rate": 1e-6,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_server_base_url": server.url,
        "eval_episodes": 0,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "seed": args.seed,
    }
    switches = ("--use_vllm", "true", "--use_cpu", "true", "--bf16", "false", "--staleness", str(staleness))
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    command = [*SQLENV, "train", *given, *switches, *args.flags]
    subprocess.run(on_core(1, command), check=True, cwd=ROOT, stdout=sys.stderr)
    rows = [row for row in RunFolder.open(folder).metrics() if "loss" in row]
    return rows[WARM_UP_STEPS:]


def step_s(row: Mapping[str, float]) -> float:
    """A step's wall-clock time."""
    return sum(row[f"time/{part}"] for part in ("rollout", "push", "training", "other"))


def summary(turns: Sequence[Mapping[str, float]], overlapped: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Compare the two runs."""
    generation = median(row["rollout/seconds"] for row in turns)
    training = median(step_s(row) - row["time/rollout"] for row in turns)
    one_after_the_other, both = median(map(step_s, turns)), median(map(step_s, overlapped))
    return {
        "generation": round(generation, 2),
        "training": round(training, 2),
        "step_0": round(one_after_the_other, 2),
        "step_1": round(both, 2),
        "ratio": round(one_after_the_other / both, 3),
        "best_ratio": round((generation + training) / max(generation, training), 3),
        "to_longer": round(both / max(generation, training), 3),
        "waited_1": round(median(row["time/rollout"] for row in overlapped), 2),
        "idle_1": round(median(row["rollout/idle_seconds"] for row in overlapped), 2),
        "staleness_mean_1": round(median(row["rollout/staleness/mean"] for row in overlapped), 3),
        "failed": sum(row["rollout/failed"] for row in (*turns, *overlapped)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="folder of the model (default: the tiny policy)")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--episodes", type=int, default=64, help=f"of a batch, a multiple of {GROUP}")
    parser.add_argument("--steps", type=int, default=6, help="that are measured, of each run")
    parser.add_argument("--max_completion_length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags of sqlenv train, after --")
    args = parser.parse_args()
    if args.episodes % GROUP or args.episodes < GROUP or args.steps < 1:
        parser.error(f"--episodes must be a multiple of {GROUP}, and --steps positive")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("each side needs a core of its own, and there is but one")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = on_core(0, [*INFERENCE, "--model", args.policy])
        environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with ServerProcess(command, folder / "vllm.log", environment, VLLM_START_S) as server:
            runs = {
                staleness: train(args, server, staleness, folder / f"staleness-{staleness}") for staleness in (0, 1)
            }
    print(json.dumps({"benchmark": "pipeline", "policy": Path(args.policy).name, **summary(runs[0], runs[1])}))


if __name__ == "__main__":
    main()
