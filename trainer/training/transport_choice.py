"""Which transport brings the trainer's weights to the servers: decided on what both sides say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from inference.launch.plan import WeightSyncMode
from inference.weights.device_facts import Sender, WorkerFacts, disagreement


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
