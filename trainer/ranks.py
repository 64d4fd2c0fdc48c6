"""The processes of one run: which one this is, their collectives, and how the run ends when one of them fails.

`accelerate launch` and `torchrun` start the same command several times; each process is a rank, rank 0 is the main
one. `Ranks` is accelerate's PartialState, with what a run says to its ranks. Guarantees:

1. What is marked as collective is called by every rank, in the same order, and returns when all have come. In a
   process that is alone it returns at once, and `torch.distributed` is not touched.
2. `gather` returns every rank's items in the order of the ranks, and `share` cuts a sequence so that gathering the
   shares restores it.
3. A rank that fails ends at once, whatever the others wait for; the launcher then ends the others. The rank that failed
   first says why; the others fail too when it is gone, and what they would say hides the cause.

A collective waits as long as the slowest rank works: a rollout whose engine comes back late, or the data set's
curation, which can be hours on large databases. `--ddp_timeout` bounds it, at six hours by default.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import gather_object
from transformers import TrainingArguments
from transformers.utils import logging

from env_server.errors import SQLEnvError
from trainer.config import ConfigError

T = TypeVar("T")

STORE_WAIT = timedelta(seconds=10)
"""How long a failed rank waits for the launcher's store, or for the rank that reports the failure."""


class Ranks:
    """The ranks of a run, seen from one of them; without a state a process that is alone."""

    def __init__(self, state: PartialState | None = None) -> None:
        self._state = state
        self.index: int = 0 if state is None else state.process_index
        self.count: int = 1 if state is None else state.num_processes

    @classmethod
    def of(cls, arguments: TrainingArguments) -> Ranks:
        """The ranks that the launcher has started. Collective: every rank calls it."""
        if arguments.world_size == 1:
            return cls()
        if arguments.device.type == "cpu":
            _resume_on_numbered_cpus()
        return cls(arguments.distributed_state)

    @property
    def is_main(self) -> bool:
        """True on the rank that writes the run's folder and its output."""
        return self.index == 0

    def log_on_rank_0(self) -> None:
        """Keep libraries from logging on the other ranks, errors apart."""
        if not self.is_main:
            logging.set_verbosity_error()
            logging.disable_progress_bar()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's contiguous part of `items`, as even as can be."""
        return items[len(items) * self.index // self.count : len(items) * (self.index + 1) // self.count]

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of every rank, rank by rank, on every rank. Collective: every rank calls it."""
        return list(items) if self._state is None else gather_object(list(items))

    def gather_on_main(self, item: T) -> list[T]:
        """The item of every rank, rank by rank, on the main one; nothing on the others.

        Collective: every rank calls it. For what is large, and only the main one needs.
        """
        if self._state is None:
            return [item]
        gathered: list[Any] | None = [None] * self.count if self.is_main else None
        torch.distributed.gather_object(item, gathered)
        return gathered or []

    def broadcast(self, value: T) -> T:
        """The main rank's value, on every rank. Collective: every rank calls it."""
        return self.gather([value])[0]

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let one rank of each machine through the block before its others, which find what it cached.

        Collective: every rank calls it. One that fails in the block does not reach the barrier.
        """
        return nullcontext() if self._state is None else self._state.local_main_process_first()

    def disconnect(self) -> None:
        """End the connections, after the last collective. Collective: every rank calls it."""
        if self._state is not None:
            self._state.wait_for_everyone()
            self._state.destroy_process_group()
            self._state = None


@cache
def _resume_on_numbered_cpus() -> None:
    """Have torch know what Accelerate names a rank's device, and transformers resumes onto: cpu:0, cpu:1 and so on."""

    def restore(storage: T, location: str) -> T | None:
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(11, lambda _: None, restore)


def require_whole_model(accelerator: Accelerator) -> None:
    """Refuse to generate in this process with a model that the ranks have sharded. Raises ConfigError."""
    plugin = accelerator.state.deepspeed_plugin
    kind = accelerator.distributed_type
    if kind is DistributedType.FSDP or (plugin is not None and plugin.zero_stage == 3):
        name = "FSDP" if kind is DistributedType.FSDP else "DeepSpeed ZeRO-3"
        raise ConfigError(
            f"{name} leaves each rank a part of the model, and generation in the trainer's process needs all of it; "
            "let a vLLM server generate (--use_vllm true), or train with DDP"
        )


@contextmanager
def abort_together(command: str) -> Iterator[None]:
    """On several ranks, end this process where the block raises; see guarantee 3. Alone, it just raises."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        _abort(command, error)


def _abort(command: str, error: BaseException) -> NoReturn:
    """Say what went wrong, unless another rank does, and exit with the status that `sqlenv` has for one process."""
    rank = os.environ.get("RANK", "?")
    match error:
        case KeyboardInterrupt():
            status, reason = 130, f"{command}: interrupted\n"
        case SQLEnvError():
            status, reason = 2, f"{command}: rank {rank}: {error}\n"
        case _:
            status, reason = 1, f"{''.join(traceback.format_exception(error))}{command}: rank {rank} failed\n"
    with _first_to_fail() as first:
        if first:
            sys.stderr.write(reason)
        sys.stdout.flush()
        sys.stderr.flush()
    # Not by `sys.exit`: at the interpreter's end, threads and process groups may wait for ranks that wait for this one.
    os._exit(status)


@contextmanager
def _first_to_fail() -> Iterator[bool]:
    """Yield whether this rank is the first to fail. Another one waits until the first has reported.

    It must wait: the launcher ends all ranks as soon as one exits, and would cut the first one short. The ranks agree
    through the launcher's store, which outlives them. Without one, each reports.
    """
    key = f"sqlenv/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # torch does not list it in __all__
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=STORE_WAIT
        )
        first = store.add(key, 1) == 1
    except (KeyError, ValueError, RuntimeError):
        yield True
        return
    yield first
    with suppress(RuntimeError):
        if first:
            store.set(f"{key}/reported", "yes")
        else:
            store.wait([f"{key}/reported"], STORE_WAIT)
