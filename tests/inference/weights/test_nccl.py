"""Weights over NCCL: what is in the way, and what a failed transfer means; GPUs and libraries are data here.

tests/integration/test_device_sync.py makes real transfers.
"""

from __future__ import annotations

import json
import re
import socket

import pytest
import torch

from inference.engine import EngineError
from inference.vllm.api import ReplicaRejectedError, ReplicaUnavailableError, VLLMServer, WorkerFacts
from inference.vllm.engine import VLLMSettings
from inference.weights.nccl import (
    BUFFER_BYTES,
    NCCLTransport,
    Transfer,
    _interface,
    address_towards,
    buffer_bytes,
    explain,
    interfaces_towards,
    is_here,
    why_not_between,
    why_not_from,
)
from inference.weights.transport import WeightSyncError
from tests.fork_server import ForkServer
from tests.integration.vllm_server import PYTHON, START_S
from tests.not_vllm import Answer, Fault, answering

HERE = WorkerFacts(gpu="GPU-a", nccl="2.28.9")
URL = "http://127.0.0.1:8000"


def test_a_trainer_that_cannot_use_it_is_told_why() -> None:
    assert why_not_from(True, True) == ""
    assert "the trainer has none" in why_not_from(False, False)
    assert "pip install" in why_not_from(True, False)


def worker(gpu: str = "GPU-b", nccl: str = "2.28.9", transfer: str = "nccl") -> WorkerFacts:
    return WorkerFacts("process", transfer, gpu, nccl)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ([worker()], ""),
        ([worker("GPU-b"), worker("GPU-c")], ""),
        ([worker("GPU-b"), worker("GPU-a")], "shares GPU-a .* use --weight_sync disk"),
        ([worker(nccl="2.27.5")], r"the trainer has NCCL 2\.28\.9, and it has 2\.27\.5"),
        ([worker(nccl="")], "and it has none"),
        ([worker(transfer="ipc")], "was prepared for ipc: .* --weight_sync nccl"),
        ([worker(transfer="")], "no transfer between GPUs"),
        ([], "no transfer between GPUs"),
    ],
)
def test_what_trainer_and_server_do_not_have_in_common_is_named(there: list[WorkerFacts], says: str) -> None:
    found = why_not_between(HERE, there)
    assert (found == "") == (says == "")
    assert re.search(says, found)


@pytest.mark.parametrize(
    ("status", "answer", "known"),
    [
        (200, {"results": [{"process": "p", "gpu": "GPU-b", "of a later version": "x"}]}, 1),
        (500, {"error": {"message": "failed: Method 'sqlenv_facts' is not implemented."}}, 0),
        (404, {"detail": "Not Found"}, 0),
    ],
)
async def test_a_server_says_what_it_is_if_we_started_it(status: int, answer: object, known: int) -> None:
    fault = Fault("/collective_rpc", lambda _: Answer(json.dumps(answer).encode(), status))
    with answering("m", fault) as url:
        async with VLLMSettings().client() as client:
            assert await VLLMServer(url, client).facts() == (WorkerFacts("p", gpu="GPU-b"),) * known


async def test_a_server_that_cannot_answer_now_is_asked_again_later() -> None:
    with answering("m", Fault("/collective_rpc", lambda _: Answer(b"starting", 503))) as url:
        async with VLLMSettings().client() as client:
            with pytest.raises(ReplicaUnavailableError):
                await VLLMServer(url, client).facts()


def test_only_this_machines_addresses_are_here() -> None:
    assert is_here("http://127.0.0.1:8000")
    assert is_here("http://localhost:8000")
    assert not is_here("http://192.0.2.1:8000")  # reserved for documentation
    assert not is_here("http://no-such-host.invalid:8000")


def test_a_local_server_sees_the_trainer_at_the_loopback_address() -> None:
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"


def test_the_interface_that_leads_to_a_server() -> None:
    assert _interface("127.0.0.1") == "lo"
    assert _interface("192.0.2.1") == ""
    assert interfaces_towards(["http://127.0.0.1:8000", "http://no-such-host.invalid:8000"]) == "", "any will do"
    try:
        name = _interface(address_towards("http://192.0.2.1:8000"))
    except OSError:
        pytest.skip("this machine has no route to others")
    assert name in {known for _, known in socket.if_nameindex()}
    assert interfaces_towards(["http://192.0.2.1:8000", "http://192.0.2.2:8000"]) == f"={name}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_transport_is_refused_when_it_is_made() -> None:
    with pytest.raises(WeightSyncError, match="--weight_sync nccl moves weights between GPUs"):
        NCCLTransport(dict, torch.device("cuda"), timeout_s=1.0)


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
        (RuntimeError("NCCL error: invalid usage (run with"), WeightSyncError, "NCCL_DEBUG=INFO"),
        (RuntimeError("NCCL error: remote process exited"), ReplicaUnavailableError, "remote process"),
    ],
)
def test_a_failure_stops_the_run_only_where_no_retry_helps(
    error: Exception, kind: type[EngineError], says: str
) -> None:
    found = explain(URL, error)
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
from vllm.distributed.weight_transfer import base, nccl_engine

nccl_engine.NCCLTrainerInitInfo(
    master_address="127.0.0.1", master_port=1, world_size=2, packed_buffer_size_bytes=1, rank=0)
sender = nccl_engine.NCCLTrainerWeightTransferEngine
inspect.signature(sender.trainer_init).bind(None, client=None, source=None)
inspect.signature(sender.send_weights).bind(None)
assert callable(PyNcclCommunicator.destroy) and callable(NCCLLibrary.ncclGetVersion)
for engine in (nccl_engine.NCCLTrainerWeightTransferEngine, nccl_engine.NCCLWeightTransferEngine):
    assert "self.model_update_group" in inspect.getsource(engine)
calls = [name for name in vars(base.VLLMWeightSyncClient) if not name.startswith("_")]
print(",".join(sorted(calls)))
"""


def test_what_it_takes_from_vllm_is_there(vllm_forks: ForkServer) -> None:
    done = vllm_forks.run([str(PYTHON), "-c", CHECK], timeout=START_S)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = done.stdout.strip().splitlines()[-1].split(",")
    assert all(callable(getattr(Transfer, name)) for name in calls)
    assert len(calls) == 4
