"""Which transport brings the trainer's weights to the servers: decided on what both sides say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.launch.plan import WeightSyncMode
from inference.weights.device_facts import WorkerFacts, disagreement, refusal
from inference.weights.transport import Pause


@dataclass(frozen=True, slots=True)
class Sender:
    """What decides, on the trainer's side, whether weights can go from GPU to GPU. `allocator` is torch's settings."""

    has_cuda: bool
    has_vllm: bool
    ranks: int
    pause: Pause
    allocator: str = ""

    def refusal(self, transport: str) -> str:
        """Return why weights cannot leave by `nccl` or `ipc`, "" when they can."""
        if self.pause is Pause.NONE:
            return (
                f"--weight_sync_pause none does not go with --weight_sync {transport}: requests that run while tensors "
                "arrive one by one would be computed with half of them; use wait or keep"
            )
        return refusal(
            transport, has_vllm=self.has_vllm, has_cuda=self.has_cuda, ranks=self.ranks, allocator=self.allocator
        )


def choose_weight_sync(
    asked: str, adapter: bool, sender: Sender, here: WorkerFacts, servers: Sequence[Sequence[WorkerFacts]]
) -> WeightSyncMode:
    """Return the transport of the weights from `here` to servers whose workers say this of themselves.

    `auto`: adapters alone where there are any; from GPU to GPU where all servers were prepared for the same transport
    and it can work, so `ipc` from the GPU that they are on and `nccl` from another one; else by disk, which always
    works.
    """
    if asked != "auto":
        return WeightSyncMode(asked)
    if adapter:
        return WeightSyncMode.LORA
    for mode in (WeightSyncMode.IPC, WeightSyncMode.NCCL):
        if not sender.refusal(mode) and servers and not any(disagreement(mode, here, each) for each in servers):
            return mode
    return WeightSyncMode.DISK
