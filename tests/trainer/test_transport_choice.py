"""Which transport weights take, decided on what trainer and servers say of their GPUs."""

from __future__ import annotations

import pytest

from inference.vllm.api import WorkerFacts
from trainer.engines import choose_weight_sync

HERE = WorkerFacts(gpu="GPU-a", nccl="2.28.9")


def server(transfer: str, *gpus: str, nccl: str = "2.28.9") -> list[WorkerFacts]:
    """Return what the workers of a server say that was prepared for `transfer`."""
    return [WorkerFacts(f"process {gpu}", transfer, gpu, nccl) for gpu in gpus]


@pytest.mark.parametrize("asked", ["disk", "lora", "nccl"])
def test_a_transport_that_is_asked_for_is_taken(asked: str) -> None:
    assert choose_weight_sync(asked, True, HERE, ()) == asked


@pytest.mark.parametrize(
    ("servers", "transport"),
    [
        ([server("ipc", "GPU-b")], "disk"),
        ([server("nccl", "GPU-b")], "nccl"),
        ([server("nccl", "GPU-b"), server("nccl", "GPU-c", "GPU-d")], "nccl"),
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
    assert choose_weight_sync("auto", False, HERE, servers) == transport
    assert choose_weight_sync("auto", False, WorkerFacts(), servers) == "disk", "a trainer without a GPU"
    assert choose_weight_sync("auto", True, HERE, servers) == "lora", "an adapter alone"
