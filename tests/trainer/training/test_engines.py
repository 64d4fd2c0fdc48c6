"""Which servers a run's flags mean, and which flags cannot work; what the whole does is in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl import GRPOConfig, ModelConfig

from trainer.config import ConfigError, SQLEnvArguments
from trainer.training.engines import check_vllm_flags, server_urls


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


@pytest.mark.parametrize(
    ("transport", "complaint"),
    [("lora", "add --use_peft"), ("nccl", "the trainer has none"), ("ipc", "the trainer has none")],
)
def test_what_cannot_work_is_refused(grpo: GRPOConfig, transport: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_vllm_flags(SQLEnvArguments(weight_sync=transport), grpo, ModelConfig())


def test_what_works_is_not_refused(grpo: GRPOConfig) -> None:
    check_vllm_flags(SQLEnvArguments(), grpo, ModelConfig())
    check_vllm_flags(SQLEnvArguments(weight_sync="lora"), grpo, ModelConfig(use_peft=True))
