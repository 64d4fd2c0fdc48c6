"""The processes of one run: which one this is, their collectives, and how the run ends when one of them fails.

`accelerate launch` and `torchrun` start the same command several times; each process is a rank, rank 0 is the main
one. Promises:

1. What is marked as collective is called by every rank, in the same order, and returns when all have come. In a
   process that is alone it returns at once, and `torch.distributed` is not touched.
2. `gather` returns every rank's items in the order of the ranks, and `share` cuts a sequence so that gathering the
   shares restores it.
3. A rank that fails ends at once, whatever the others wait for; the launcher then ends the others. What went wrong
   is said once, by the rank that failed first: the others fail too when it is gone, and what they would say hides
   the cause.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed
from accelerate import Accelerator, DistributedType
from transformers import TrainingArguments
from transformers.utils import logging

from env_server.errors import SQLEnvError
from trainer.config import ConfigError

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=6)
"""How long a rank waits for the slowest one in a collective.

A wait is as long as the slowest rank's work: a rollout whose engine comes back late, the data set's curation, or
the scripted players, which rank 0 plays while the others wait. That can be hours on large databases, where the
usual 30 minutes would end a run that is well. A rank that is gone is no reason to be short: its peers see the broken
connection, and the launcher ends them.
"""
_STORE_WAIT = timedelta(seconds=10)
"""How long a failed rank waits for the launcher's store, or for the rank that reports the failure."""


class Ranks:
    """The ranks of a run, seen from one of them; without arguments a process that is alone.

    `local_index` counts the ranks of one machine; `group` is for the collectives.
    """

    def __init__(
        self, index: int = 0, count: int = 1, local_index: int = 0, group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        self.index = index
        self.count = count
        self._local_index = local_index
        self._group = group

    @classmethod
    def of(cls, arguments: TrainingArguments) -> Ranks:
        """The ranks that the launcher has started. Collective: every rank calls it."""
        if arguments.world_size == 1:
            return cls()
        if arguments.device.type == "cpu":
            _resume_on_numbered_cpus()
        # A group of our own: it needs no GPU, and its patience is ours, not that of the gradients' collectives.
        group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
        return cls(arguments.process_index, arguments.world_size, arguments.local_process_index, group)

    @property
    def is_main(self) -> bool:
        """True on the rank that writes the run's folder and speaks."""
        return self.index == 0

    def log_on_rank_0(self) -> None:
        """Keep libraries from talking on the other ranks, errors apart."""
        if not self.is_main:
            logging.set_verbosity_error()
            logging.disable_progress_bar()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's contiguous part of `items`, as even as can be."""
        return items[len(items) * self.index // self.count : len(items) * (self.index + 1) // self.count]

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of every rank, rank by rank, on every rank. Collective: every rank calls it."""
        if self._group is None:
            return list(items)
        # Every rank gets them, also where only the main one needs them: so all go on together, and a slow rank is
        # waited for here rather than in a collective of the trainer, which has less patience.
        gathered: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(gathered, list(items), group=self._group)
        return [item for part in gathered for item in part]

    def gather_on_main(self, item: T) -> list[T]:
        """The item of every rank, rank by rank, on the main one; nothing on the others.

        Collective: every rank calls it. For what is large, and only the main one needs.
        """
        if self._group is None:
            return [item]
        gathered: list[Any] | None = [None] * self.count if self.is_main else None
        torch.distributed.gather_object(item, gathered, group=self._group)
        return gathered or []

    def broadcast(self, value: T) -> T:
        """The main rank's value, on every rank. Collective: every rank calls it."""
        return self.gather([value])[0]

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let one rank of each machine through the block before its others, which find what it cached.

        Collective: every rank calls it. One that fails in the block does not reach the barrier.
        """
        first = self._local_index == 0
        if not first:
            self._barrier()
        yield
        if first:
            self._barrier()

    def disconnect(self) -> None:
        """End the connections, after the last collective. Collective: every rank calls it."""
        if self._group is not None:
            self._barrier()
            torch.distributed.destroy_process_group()
            self._group = None

    def _barrier(self) -> None:
        if self._group is not None:
            torch.distributed.barrier(group=self._group)


@cache
def _resume_on_numbered_cpus() -> None:
    """Have torch know what Accelerate names a rank's device, and transformers resumes onto: cpu:0, cpu:1 and so on."""
    torch.serialization.register_package(11, lambda _: None, _on_numbered_cpu)


def _on_numbered_cpu(storage: T, location: str) -> T | None:
    """Restore a tensor where it is, on the CPU, when the location is one that is numbered."""
    return storage if location.startswith("cpu:") else None


def require_whole_model(accelerator: Accelerator) -> None:
    """Refuse to generate in this process with a model that the ranks have shared out. Raises ConfigError."""
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
    """On several ranks, end this process where the block raises; see promise 3. A process that is alone just raises."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        _end(command, error)


def _end(command: str, error: BaseException) -> NoReturn:
    """Say what went wrong, unless another rank does, and exit."""
    status, reason = _exit_reason(command, error)
    with _reports_the_failure() as speaks:
        if speaks:
            sys.stderr.write(reason)
        sys.stdout.flush()
        sys.stderr.flush()
    # Not by `sys.exit`: at the interpreter's end, threads and process groups may wait for ranks that wait for this one.
    os._exit(status)


def _exit_reason(command: str, error: BaseException) -> tuple[int, str]:
    """The exit status, as `sqlenv` has it for one process, and what to say."""
    rank = os.environ.get("RANK", "?")
    match error:
        case KeyboardInterrupt():
            return 130, f"{command}: interrupted\n"
        case SQLEnvError():
            return 2, f"{command}: rank {rank}: {error}\n"
    return 1, f"{''.join(traceback.format_exception(error))}{command}: rank {rank} failed\n"


@contextmanager
def _reports_the_failure() -> Iterator[bool]:
    """Yield whether this rank is the first to fail. One that is not waits until the first has spoken.

    It must wait: the launcher ends all ranks as soon as one exits, and would cut the first one short. The ranks agree
    through the launcher's store, which outlives them. Without one, each speaks.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # torch does not list it in __all__
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_STORE_WAIT
        )
        speaks = store.add(f"sqlenv/failed/{attempt}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        yield True
        return
    said = f"sqlenv/said/{attempt}"
    yield speaks
    with suppress(RuntimeError):
        if speaks:
            store.set(said, "yes")
        else:
            store.wait([said], _STORE_WAIT)
