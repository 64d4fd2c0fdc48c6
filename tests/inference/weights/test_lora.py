from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from inference.adapters import unserved_settings
from inference.vllm.api import ReplicaError, ReplicaRejectedError, ReplicaUnavailableError
from inference.weights.lora import KEPT, LoraTransport, explain
from inference.weights.transport import WeightSyncError

URL = "http://127.0.0.1:8000"
FOLDER = Path("/shared/sync")
# The errors as `VLLMServer` words them, with the texts of vLLM 0.31.
NO_ROUTE = ReplicaRejectedError(URL, "/v1/load_lora_adapter answered 404: Not Found")
NO_LORA = ReplicaUnavailableError(
    URL,
    "/v1/load_lora_adapter answered 500: Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to "
    "enable LoRA.",
    answered=True,
)
TOO_LARGE = ReplicaUnavailableError(
    URL,
    "/v1/load_lora_adapter answered 500: Call to add_lora method failed: Worker failed with error 'LoRA rank 32 is "
    "greater than max_lora_rank 16.', please check the stack trace above for the root cause",
    answered=True,
)
UNSEEN = ReplicaRejectedError(
    URL, "/v1/load_lora_adapter answered 404: Loading lora x failed: No adapter found for <path>"
)
MODULES = ReplicaUnavailableError(
    URL,
    "/v1/load_lora_adapter answered 500: While loading /x, expected target modules in {'qkv_proj'} but received ['y']",
    answered=True,
)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, None),
        ({"use_rslora": True}, None),
        ({"init_lora_weights": "gaussian"}, None),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
    ],
)
def test_what_vllm_does_not_compute_exactly_is_named(settings: dict[str, Any], names: str | None) -> None:
    found = unserved_settings(LoraConfig(r=8, target_modules=["q_proj"], **settings).to_dict())
    assert found == [] if names is None else len(found) == 1 and names in found[0]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (NO_ROUTE, "sqlenv inference --weight_sync lora"),
        (NO_LORA, "sqlenv inference --weight_sync lora"),
        (TOO_LARGE, "--max_lora_rank 32"),
        (UNSEEN, "--weight_sync_dir"),
        (MODULES, "--weight_sync disk"),
        (ReplicaUnavailableError(URL, "ConnectError: refused"), None),
        (ReplicaUnavailableError(URL, "/v1/load_lora_adapter answered 500: disk is tired", answered=True), None),
    ],
)
def test_a_refusal_says_what_to_do_unless_it_may_pass(error: ReplicaError, advice: str | None) -> None:
    found = explain(error, rank=32, folder=FOLDER)
    if advice is None:
        assert found is None
    else:
        assert found is not None
        assert advice in str(found)
        assert str(error) in str(found)


def transport(folder: Path, main: bool = True, **settings: Any) -> LoraTransport:
    config = LoraConfig(r=2, target_modules=["q_proj"], **settings)
    weights = {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 4)} if main else {}
    return LoraTransport(lambda: (weights, config), folder)


def test_the_last_adapters_stay_and_close_removes_them(tmp_path: Path) -> None:
    folder = tmp_path / "sync"
    found = transport(folder)
    for version in (1, 1, 2, 3, 4):
        found.prepare(version)
    kept = sorted(folder.iterdir())
    assert [path.name[:15] for path in kept] == [f"adapter-v{version:06d}" for version in (1, 2, 3, 4)][-KEPT:]
    for path in kept:
        assert json.loads((path / "adapter_config.json").read_text())["r"] == 2
        assert (path / "adapter_model.safetensors").is_file()
    found.close()
    assert not folder.exists()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    transport(tmp_path / "sync", main=False).prepare(1)
    assert list(tmp_path.iterdir()) == []


def test_close_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    found = transport(tmp_path)
    found.prepare(1)
    found.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_adapter_that_cannot_be_served_is_refused_on_every_rank(tmp_path: Path) -> None:
    for main in (True, False):
        with pytest.raises(WeightSyncError, match=r"DoRA.*--weight_sync disk"):
            transport(tmp_path, main, use_dora=True).prepare(1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match="cannot be written"):
        transport(tmp_path / "file" / "sync").prepare(1)
