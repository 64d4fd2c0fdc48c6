"""Which servers a run's flags mean, and which transport weights take; what the whole does is in tests/integration."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig

from inference.vllm.api import WorkerFacts
from inference.vllm.pressure import PressureGauge
from trainer.config import ConfigError
from trainer.engines import LogPressure, choose_weight_sync, server_urls


@pytest.fixture
def grpo(tmp_path: Path) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, vllm_mode="server")


def test_servers_are_named_as_for_trl(grpo: GRPOConfig) -> None:
    assert server_urls(grpo) == ("http://127.0.0.1:8000",), "TRL's default host is one to listen on"
    grpo.vllm_server_host, grpo.vllm_server_port = "gpu1", 9000
    assert server_urls(grpo) == ("http://gpu1:9000",)
    grpo.vllm_server_base_url = "http://a:1, http://b:2/"
    assert server_urls(grpo) == ("http://a:1", "http://b:2")
    grpo.vllm_server_base_url = "gpu1:9000"
    with pytest.raises(ConfigError, match="--vllm_server_base_url"):
        server_urls(grpo)


def test_what_servers_said_in_a_step_is_logged_with_it(grpo: GRPOConfig) -> None:
    gauge = PressureGauge()
    metrics: dict[str, list[float]] = defaultdict(list)
    trainer: Any = SimpleNamespace(_metrics={"train": metrics})
    log = LogPressure(gauge, trainer)

    def look(waiting: int, queries: int) -> None:
        names = ("num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
        texts = [f'vllm:{name}{{engine="0"}} {waiting}' for name in names]
        texts += [f'vllm:prefix_cache_{name}_total{{engine="0"}} {queries}' for name in ("queries", "hits")]
        gauge.add("a", "\n".join(texts))

    look(waiting=9, queries=0)
    log.on_step_begin(grpo, TrainerState(), TrainerControl())
    log.on_step_end(grpo, TrainerState(), TrainerControl())
    assert not metrics, "what was before the step is an evaluation's, and nobody looked in it"
    look(waiting=1, queries=0)
    log.on_step_end(grpo, TrainerState(), TrainerControl())
    look(waiting=2, queries=10)
    log.on_step_end(grpo, TrainerState(), TrainerControl())
    assert metrics["engine/waiting"] == metrics["engine/kv_cache"] == [1, 2]
    assert metrics["engine/preemptions"] == [1, 1]
    assert metrics["engine/prefix_hits"] == [1.0], "in the step that had prompts"


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
