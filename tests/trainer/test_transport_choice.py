"""Which transport weights take, decided on what trainer and servers say of their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.weights.device_facts import Sender, WorkerFacts
from trainer.engines import choose_weight_sync

SENDER = Sender(has_cuda=True, has_vllm=True, ranks=1)
HERE = WorkerFacts(gpu="GPU-a", nccl="2.28.9")


def server(transfer: str, *gpus: str, nccl: str = "2.28.9") -> list[WorkerFacts]:
    """Return what the workers of a server say that was prepared for `transfer`."""
    return [WorkerFacts(f"process {gpu}", transfer, gpu, nccl) for gpu in gpus]


@pytest.mark.parametrize("asked", ["disk", "lora", "nccl", "ipc"])
def test_a_transport_that_is_asked_for_is_taken(asked: str) -> None:
    assert choose_weight_sync(asked, True, SENDER, HERE, ()) == asked


@pytest.mark.parametrize(
    ("servers", "transport"),
    [
        ([server("ipc", "GPU-a")], "ipc"),
        ([server("nccl", "GPU-b")], "nccl"),
        ([server("nccl", "GPU-b"), server("nccl", "GPU-c", "GPU-d")], "nccl"),
        # Two GPUs of one machine, of which trainer and server each see one.
        ([server("ipc", "GPU-b")], "disk"),
        ([server("nccl", "GPU-a")], "disk"),
        ([server("nccl", "GPU-b"), server("nccl", "GPU-a")], "disk"),
        ([server("nccl", "GPU-b"), server("ipc", "GPU-a")], "disk"),
        ([server("nccl", "GPU-b", nccl="2.27.5")], "disk"),
        ([server("", "GPU-b")], "disk"),
        ([[]], "disk"),
        ([], "disk"),
    ],
)
def test_auto_goes_where_all_servers_are(servers: list[list[WorkerFacts]], transport: str) -> None:
    assert choose_weight_sync("auto", False, SENDER, HERE, servers) == transport
    assert choose_weight_sync("auto", True, SENDER, HERE, servers) == "lora", "an adapter alone"


@pytest.mark.parametrize(
    ("sender", "by_ipc", "by_nccl"),
    [
        (replace(SENDER, has_cuda=False), "disk", "disk"),
        (replace(SENDER, has_vllm=False), "disk", "disk"),
        (replace(SENDER, ranks=2), "disk", "nccl"),
        (replace(SENDER, allocator="expandable_segments:True"), "disk", "nccl"),
    ],
)
def test_auto_chooses_no_transport_that_is_refused(sender: Sender, by_ipc: str, by_nccl: str) -> None:
    assert choose_weight_sync("auto", False, sender, HERE, [server("ipc", "GPU-a")]) == by_ipc
    assert choose_weight_sync("auto", False, sender, HERE, [server("nccl", "GPU-b")]) == by_nccl
