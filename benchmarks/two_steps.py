"""Do two steps of a config work here, and what do they take? Time, memory, importance ratios.

    python -m benchmarks.two_steps configs/NAME.yaml [--use_vllm] [--model FOLDER] [--server_gpu 1]

`sqlenv train` as it is, in this process, for two steps without evaluation; the servers that the config wants, an
environment server or vLLM, are started beside it. One JSON line: means over the steps, the extremes of the ratio, and
the peak of memory in GiB beside what the dry run finds for the longest rows, `longest_gib`: measured on a GPU,
estimated on a CPU. On a CPU the peak is the process's resident memory, on a GPU what torch reserved, and `server_gib`
is what else was in use there in the end. A run that the dry run finds impossible is one line, `not_run`, with the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from rich.console import Console

from benchmarks import harness
from benchmarks.engines import INFERENCE, VLLM_START_S
from benchmarks.server_process import ROOT, SERVE, ServerProcess
from env_server.errors import SQLEnvError
from sqlenv import cli
from trainer.training.arguments import parse_train
from trainer.training.dry_run import dry_run
from trainer.training.memory import GIB

STEPS = 2
PROMPT_ROOM = 1_024
"""Tokens of a context beside those of the completion."""
RATIO = "sampling/importance_sampling_ratio"


def server_flags(config: Mapping[str, Any], model: str, *, gpu: bool, own_gpu: bool) -> list[str]:
    """What `sqlenv inference` is told, so that its server fits the run; `own_gpu`: the trainer uses another."""
    sync = config.get("weight_sync") or ("lora" if config.get("use_peft") else "disk")
    found = ["--model", model, "--weight_sync", sync]
    if sync == "lora":
        found += ["--max_lora_rank", str(config.get("lora_r", 16))]
    if gpu:
        found += ["--max_model_len", str(int(config["max_completion_length"]) + PROMPT_ROOM)]
        found += [] if own_gpu else ["--share_gpu"]
    return found


def run_flags(config: str, model: str, folder: Path, more: Sequence[str]) -> list[str]:
    """What `sqlenv train` is told."""
    steps = ("--max_steps", str(STEPS), "--eval_episodes", "0", "--save_strategy", "no", "--report_to", "none")
    return ["--config", config, "--model_name_or_path", model, "--output_dir", str(folder), *steps, *more]


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the steps took."""
    return {
        "step_s": round(fmean(row["step_time"] for row in rows), 2),
        "rollout_s": round(fmean(row["rollout/seconds"] for row in rows), 2),
        "episodes_per_s": round(fmean(row["rollout/episodes_per_second"] for row in rows), 3),
        "tokens_per_s": round(fmean(row["rollout/trained_tokens"] / row["rollout/seconds"] for row in rows), 1),
        "failed": sum(row.get("rollout/failed", 0.0) for row in rows),
        "ratio_min": min((row[f"{RATIO}/min"] for row in rows if f"{RATIO}/min" in row), default=float("nan")),
        "ratio_mean": fmean([row[f"{RATIO}/mean"] for row in rows if f"{RATIO}/mean" in row] or [float("nan")]),
        "ratio_max": max((row[f"{RATIO}/max"] for row in rows if f"{RATIO}/max" in row), default=float("nan")),
    }


@contextmanager
def servers(
    config: Mapping[str, Any], model: str, folder: Path, server_gpu: str
) -> Iterator[tuple[list[str], ServerProcess | None]]:
    """Start what the config wants; yields the flags that lead there, and the server of the policy."""
    if "env_server" in config:
        with ServerProcess([*SERVE, "--data", str(config["data"])], folder / "environments.log") as environments:
            yield ["--env", f"ws://127.0.0.1:{environments.port}"], None
    elif config.get("use_vllm"):
        gpu = torch.cuda.is_available()
        command = [*INFERENCE, *server_flags(config, model, gpu=gpu, own_gpu=bool(server_gpu))]
        environment = {"CUDA_VISIBLE_DEVICES": server_gpu} if server_gpu else {}
        with ServerProcess(command, folder / "vllm.log", environment, VLLM_START_S) as server:
            yield ["--use_vllm", "true", "--vllm_server_base_url", server.url], server
    else:
        yield [], None


def memory(server: ServerProcess | None) -> dict[str, float]:
    """The peak of this process, and what the server holds."""
    if torch.cuda.is_available():
        free, there = torch.cuda.mem_get_info()
        held = there - free - torch.cuda.memory_reserved()
        return {"peak_gib": torch.cuda.max_memory_reserved() / GIB, "server_gib": held / GIB if server else 0.0}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024
    return {"peak_gib": peak / GIB, "server_gib": server.rss() / GIB if server else 0.0}


def measure(config: Mapping[str, Any], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Estimate, run, and read what the run wrote. Raises SQLEnvError where the dry run says that it cannot work."""
    model = args.model or str(config["model_name_or_path"])
    with servers(config, model, folder, args.server_gpu) as (found, server):
        flags = run_flags(args.config, model, folder / "run", found)
        run, model_config = parse_train([*flags, "--dry_run", "true"])
        longest = dry_run(run, model_config, Console(file=sys.stderr))
        status = cli.main(["train", *flags])
        if status:
            raise SystemExit(status)
        text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
        rows = [row for row in map(json.loads, text.splitlines()) if "step_time" in row]
        found_memory = {name: round(value, 2) for name, value in memory(server).items()}
        return {"steps": len(rows), **summary(rows), **found_memory, "longest_gib": round(longest / GIB, 2)}


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("config", help="a file of configs/")
    parser.add_argument("--use_vllm", action="store_true", help="generate with a server where the config does not")
    parser.add_argument("--model", help="another model than the config's")
    parser.add_argument("--server_gpu", default="", help="vLLM's GPU, where it is not the trainer's")
    args = parser.parse_args()
    os.chdir(ROOT)  # a config names the tiny policy from here
    config = yaml.safe_load(Path(args.config).read_text(encoding="utf-8"))
    config["use_vllm"] = config.get("use_vllm") or args.use_vllm
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = measure(config, args, Path(folder))
        except SQLEnvError as error:
            result = {"not_run": str(error)}
    harness.report("two_steps", config=Path(args.config).stem, **result)


if __name__ == "__main__":
    main()
