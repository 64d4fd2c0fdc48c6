"""What a failed transfer from GPU to GPU means; tests/integration/test_device_sync.py makes real ones."""

from __future__ import annotations

import pytest
import torch

from inference.engine import EngineError
from inference.vllm.api import ReplicaRejectedError, ReplicaUnavailableError
from inference.weights.device import BUFFER_BYTES, DeviceTransport, buffer_bytes, explain
from inference.weights.transport import WeightSyncError
from tests.fork_server import ForkServer
from tests.integration.vllm_server import PYTHON, START_S

URL = "http://127.0.0.1:8000"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_transport_is_refused_when_it_is_made() -> None:
    with pytest.raises(WeightSyncError, match="--weight_sync nccl moves weights between GPUs"):
        DeviceTransport("nccl", dict, torch.device("cuda"), timeout_s=1.0)


def answered(text: str) -> ReplicaUnavailableError:
    return ReplicaUnavailableError(URL, text, answered=True)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ReplicaUnavailableError(URL, "ConnectError: refused"), ReplicaUnavailableError, "refused"),
        (RuntimeError("DistStoreError: Timed out after 301 seconds"), ReplicaUnavailableError, "301"),
        (answered("answered 503: later"), ReplicaUnavailableError, "later"),
        (answered("an earlier update of the weights has not ended"), ReplicaUnavailableError, "earlier update"),
        (ReplicaRejectedError(URL, "answered 404: Not Found"), WeightSyncError, "sqlenv inference --weight_sync nccl"),
        (answered("Method 'sqlenv_expect_update' is not implemented."), WeightSyncError, "start the server with"),
        (answered("Please set weight_transfer_config to enable"), WeightSyncError, "--weight_sync nccl"),
        (answered("Invalid init_info for IPCWeightTransferEngine"), WeightSyncError, "--weight_sync nccl"),
        (answered("Refusing: VLLM_ALLOW_INSECURE_SERIALIZATION=1"), WeightSyncError, "sqlenv inference"),
        (answered("IPC handle not found for GPU UUID x"), WeightSyncError, "use --weight_sync nccl"),
        (RuntimeError("NCCL error: invalid usage (run with"), WeightSyncError, "NCCL_DEBUG=INFO"),
        (RuntimeError("NCCL error: remote process exited"), ReplicaUnavailableError, "remote process"),
    ],
)
def test_a_failure_stops_the_run_only_where_no_retry_helps(
    error: Exception, kind: type[EngineError], says: str
) -> None:
    found = explain("nccl", URL, error)
    assert type(found) is kind
    assert says in str(found)
    assert str(found).count(URL) == 1


def test_the_buffer_holds_the_largest_tensor() -> None:
    small = torch.empty(10)
    assert buffer_bytes({"a": small}) == BUFFER_BYTES
    large = torch.empty(BUFFER_BYTES, dtype=torch.float16, device="meta")
    assert buffer_bytes({"a": small, "b": large}) == 2 * BUFFER_BYTES


CHECK = """
import inspect
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer import base, ipc_engine, nccl_engine

nccl_engine.NCCLTrainerInitInfo(
    master_address="127.0.0.1", master_port=1, world_size=2, packed_buffer_size_bytes=1, rank=0)
ipc_engine.IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=1, rank=0)
assert "ipc_handles_pickled" in inspect.signature(ipc_engine.IPCWeightTransferUpdateInfo).parameters
for engine in (nccl_engine.NCCLTrainerWeightTransferEngine, ipc_engine.IPCTrainerWeightTransferEngine):
    inspect.signature(engine.trainer_init).bind(None, client=None, source=None)
    inspect.signature(engine.send_weights).bind(None)
assert callable(PyNcclCommunicator.destroy) and callable(NCCLLibrary.ncclGetVersion)
for engine in (nccl_engine.NCCLTrainerWeightTransferEngine, nccl_engine.NCCLWeightTransferEngine):
    assert "self.model_update_group" in inspect.getsource(engine)
calls = [name for name in vars(base.VLLMWeightSyncClient) if not name.startswith("_")]
print(",".join(sorted(calls)))
"""


def test_what_it_takes_from_vllm_is_there(vllm_forks: ForkServer) -> None:
    from inference.weights.device_transfer import Transfer

    done = vllm_forks.run([str(PYTHON), "-c", CHECK], timeout=START_S)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = done.stdout.strip().splitlines()[-1].split(",")
    assert all(callable(getattr(Transfer, name)) for name in calls)
    assert len(calls) == 4
