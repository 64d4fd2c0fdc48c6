"""Training when memory runs out: how small a micro-batch gets, and what to change where that is no way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trl import GRPOConfig

from env_server.errors import SQLEnvError
from inference.out_of_memory import is_out_of_memory, release

_LOG = logging.getLogger(__name__)


class TrainingMemoryError(SQLEnvError):
    """Memory is too small for this run; the text says what makes it fit."""


@contextmanager
def memory_errors(args: GRPOConfig, what: str) -> Iterator[None]:
    """Raise what runs out of memory in the block as a TrainingMemoryError that begins with `what`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingMemoryError(f"{what}: memory ran out; {_advice(args)} ({release(error)})") from None


def halved(args: GRPOConfig, rows: int, step: int, one_process: bool, reason: str) -> int:
    """Return half of a micro-batch's rows, and log how a run starts with them. Raises TrainingMemoryError."""
    half = (rows + 1) // 2
    flags = smaller_batch(args, half)
    if not one_process:
        raise TrainingMemoryError(
            f"step {step} ran out of memory with micro-batches of {rows}, and several ranks cannot retry a step; start "
            f"again with {flags}, the same batch in smaller parts, and --resume_from_checkpoint true where there is a "
            f"checkpoint ({reason})"
        )
    if rows == 1:
        raise TrainingMemoryError(f"step {step} ran out of memory with one row at a time; {_advice(args)} ({reason})")
    _LOG.warning(
        f"step {step} ran out of memory: the micro-batch is halved to {half}, and the step is retried with the same "
        f"rollouts; a run that starts with {flags} takes less time ({reason})"
    )
    return half


def smaller_batch(args: GRPOConfig, rows: int) -> str:
    """The flags of the same batch in micro-batches of `rows`."""
    accumulation = -(-args.per_device_train_batch_size * args.gradient_accumulation_steps // rows)
    return f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {accumulation}"


def _advice(args: GRPOConfig) -> str:
    """What makes a run smaller, of what it does not do yet."""
    ways = [f"a --max_completion_length below {args.max_completion_length}"]
    if not args.gradient_checkpointing:
        ways.append("--gradient_checkpointing true")
    ways += ["--use_peft true (LoRA)", "--load_in_4bit true", "a smaller model"]
    return f"what helps is {', '.join(ways[:-1])} or {ways[-1]}"
