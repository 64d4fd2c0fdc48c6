"""Whether weights can go from one GPU to another, and what is in the way; GPUs and libraries are data here."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from inference.vllm.api import ReplicaUnavailableError, VLLMServer
from inference.vllm.engine import VLLMSettings
from inference.weights.device_facts import (
    Sender,
    WorkerFacts,
    _interface,
    address_towards,
    ask,
    disagreement,
    interfaces_towards,
    is_here,
)
from tests.not_vllm import Answer, Fault, answering

HERE = WorkerFacts(gpu="GPU-a", nccl="2.28.9")


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
        (
            "ipc",
            {"allocator": "max_split_size_mb:512,expandable_segments:True"},
            "leave that out of PYTORCH_CUDA_ALLOC",
        ),
        ("ipc", {"allocator": ",expandable_segments: True"}, "leave that out"),
        ("ipc", {"allocator": "expandable_segments:False"}, ""),
        ("nccl", {"allocator": "expandable_segments:True"}, ""),
    ],
)
def test_a_trainer_that_cannot_use_it_is_told_why(name: str, facts: Mapping[str, Any], says: str) -> None:
    given: dict[str, Any] = {"has_vllm": True, "has_cuda": True, "ranks": 1, **facts}
    found = Sender(**given).refusal(name)
    assert (found == "") == (says == "")
    assert says in found


def worker(gpu: str = "GPU-b", nccl: str = "2.28.9", transfer: str = "nccl") -> WorkerFacts:
    return WorkerFacts("process", transfer, gpu, nccl)


@pytest.mark.parametrize(
    ("name", "there", "says"),
    [
        ("nccl", [worker()], ""),
        ("nccl", [worker("GPU-b"), worker("GPU-c")], ""),
        ("nccl", [worker("GPU-b"), worker("GPU-a")], "shares GPU-a .* use --weight_sync ipc or disk"),
        ("nccl", [worker(nccl="2.27.5")], r"the trainer has NCCL 2\.28\.9, and it has 2\.27\.5"),
        ("nccl", [worker(nccl="")], "and it has none"),
        ("nccl", [worker(transfer="ipc")], "was prepared for ipc: .* --weight_sync nccl"),
        ("nccl", [worker(transfer="")], "no transfer between GPUs"),
        ("nccl", [], "no transfer between GPUs"),
        ("ipc", [worker("GPU-a", "2.27.5", "ipc")], ""),
        ("ipc", [worker("GPU-b", transfer="ipc")], "the trainer is on GPU-a, and it is on GPU-b: use .* nccl"),
        ("ipc", [worker("GPU-a")], "was prepared for nccl"),
    ],
)
def test_what_trainer_and_server_do_not_have_in_common_is_named(name: str, there: list[WorkerFacts], says: str) -> None:
    found = disagreement(name, HERE, there)
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
            assert await ask(VLLMServer(url, client)) == (WorkerFacts("p", gpu="GPU-b"),) * known


async def test_a_server_that_cannot_answer_now_is_asked_again_later() -> None:
    with answering("m", Fault("/collective_rpc", lambda _: Answer(b"starting", 503))) as url:
        async with VLLMSettings().client() as client:
            with pytest.raises(ReplicaUnavailableError):
                await ask(VLLMServer(url, client))


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
