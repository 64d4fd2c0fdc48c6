"""How long does a push of the weights take, by each transport, and how many bytes does it move?

    python -m benchmarks.weight_sync [--policy DIR] [--transports disk lora nccl] [--dtype bfloat16] [--rounds N]

One JSON line: for each transport the seconds of a push with its comparison, the bytes that were written or sent, and
the gap in logprobs after the first push (nats). Each gets its own server (`sqlenv inference --weight_sync NAME`). What
this machine cannot use is named with the reason.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase

from benchmarks import harness
from benchmarks.engines import INFERENCE, VLLM_START_S
from benchmarks.server_process import ServerProcess
from inference.engine import EngineError
from inference.vllm.engine import VLLMEngine
from inference.weights.check import token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import adapter_weights, full_weights
from inference.weights.lora import LoraTransport
from inference.weights.nccl import NCCLTransport
from inference.weights.push import WeightPusher
from inference.weights.transport import Transport
from trainer.chat.renderer import ChatRenderer
from trainer.models import load_policy
from trainer.tiny import BASE_CHECKPOINT

TIMEOUT_S = 120.0


def make_transport(name: str, model: nn.Module, accelerator: Accelerator, folder: Path) -> Transport:
    """Return a transport by its name. Raises WeightSyncError where it cannot be used."""
    if name == "lora":
        return LoraTransport(lambda: adapter_weights(model, accelerator), folder)
    if name == "disk":
        return DiskTransport(lambda: full_weights(model, accelerator), folder)
    return NCCLTransport(lambda: full_weights(model, accelerator), accelerator.device, TIMEOUT_S)


def sent_bytes(transport: Transport, folder: Path) -> int:
    """Return the bytes of weights that the last push wrote, or sent."""
    if isinstance(transport, NCCLTransport):
        return sum(tensor.nbytes for tensor in transport._weights.values())
    last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    return sum(file.stat().st_size for file in last.glob("*.safetensors"))


def change(model: nn.Module) -> None:
    """Make the weights others, by a hundredth of their spread: a model goes on being one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * parameter.std().clamp(min=0.01) * 0.01)


def measure(name: str, args: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Push `--rounds` times, after the first push, which checks the transport. Raises EngineError."""
    loaded, tokenizer = load_policy(args.policy, dtype=args.dtype and getattr(torch, args.dtype))
    model: nn.Module = loaded
    if name == "lora":
        model = get_peft_model(loaded, LoraConfig(r=16, target_modules="all-linear"))
    accelerator = Accelerator(cpu=loaded.device.type == "cpu")
    transport = make_transport(name, model, accelerator, scratch / "weights")
    command = [*INFERENCE, "--model", args.policy, "--weight_sync", name, *shlex.split(args.inference_flags)]
    served = args.server_dtype or args.dtype
    command += ["--dtype", served] if served else []
    environment = {"CUDA_VISIBLE_DEVICES": args.server_gpu} if args.server_gpu else {}
    with ServerProcess(command, scratch / f"{name}.log", environment, VLLM_START_S) as server:
        pusher = pusher_to(server, model, tokenizer, loaded.config.vocab_size, transport)
        pusher.push(0)
        first_seconds, gap = pusher.last_seconds, pusher.last_gap
        seconds = []
        for version in range(1, args.rounds + 1):
            change(model)
            pusher.push(version)
            seconds.append(pusher.last_seconds)
        sent = sent_bytes(transport, scratch / "weights")
        pusher.close()
    return {
        "seconds": round(median(seconds), 4),
        "bytes": sent,
        "first_seconds": round(first_seconds, 4),
        "gap": gap,
    }


def pusher_to(
    server: ServerProcess,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    transport: Transport,
) -> WeightPusher:
    """Return a pusher to one server."""
    renderer = ChatRenderer(tokenizer)
    engine = VLLMEngine([server.url], stop_ids=renderer.stop_ids, vocab_size=vocab_size)
    probe = renderer.prompt_ids([{"role": "user", "content": "Which tables are there?"}])
    pusher = WeightPusher(lambda: model, engine, transport, partial(token_logprobs, model), probe)
    engine.restore_with(pusher.restore)
    return pusher


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="a checkpoint's folder")
    parser.add_argument("--transports", nargs="+", default=["disk", "lora", "nccl"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="on both sides (default: the policy's own)")
    parser.add_argument("--server_dtype", choices=("bfloat16", "float32"), help="the server's (default: --dtype)")
    parser.add_argument("--inference_flags", default="", help="more flags of `sqlenv inference`, in one word")
    parser.add_argument("--server_gpu", default="", help="the server's GPU, where it is not the trainer's")
    args = parser.parse_args()
    results: dict[str, object] = {}
    for name in args.transports:
        harness.progress(name)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                results[name] = measure(name, args, Path(scratch))
            except EngineError as error:
                results[name] = {"cannot": str(error)}
    harness.report("weight_sync", policy=args.policy, rounds=args.rounds, transports=results)


if __name__ == "__main__":
    main()
