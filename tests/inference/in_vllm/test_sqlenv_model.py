"""Which model a folder holds: a copy and a cached snapshot are the same one, a trained one is another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.in_vllm.sqlenv_model import identity
from inference.vllm.api import WorkerFacts
from trainer.engines import is_served
from trainer.tiny import BASE_CHECKPOINT

SERVED = WorkerFacts(**identity(str(BASE_CHECKPOINT)))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE_CHECKPOINT, tmp_path / "elsewhere"))


def test_a_copy_is_the_same_model_whatever_it_is_called(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_name_or_path": "me", "transformers_version": "9"}))
    assert is_served(str(copy), str(BASE_CHECKPOINT), [SERVED, SERVED])
    assert not is_served(str(copy), str(BASE_CHECKPOINT), []), "of that server nothing is known"


def test_a_model_that_was_trained_is_another_one(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    changed = {name: torch.nextafter(tensor, tensor + 1) for name, tensor in weights.items()}
    save_file(changed, copy / "model.safetensors")
    assert not is_served(str(copy), str(BASE_CHECKPOINT), [SERVED])


@pytest.mark.parametrize("change", [{"rope_theta": 1.0}, {"tie_word_embeddings": True}])
def test_a_model_that_computes_otherwise_is_another_one(copy: Path, change: dict[str, object]) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    assert not is_served(str(copy), str(BASE_CHECKPOINT), [SERVED])


def test_the_cached_snapshot_of_a_name_is_the_model_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--someone--tiny"
    snapshot = Path(shutil.copytree(BASE_CHECKPOINT, repository / "snapshots" / "c0ffee"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    server = [WorkerFacts(**identity(str(snapshot)))]
    assert is_served("someone/tiny", str(snapshot), server), "as vLLM calls it, offline"
    assert is_served(str(snapshot), "someone/tiny", server)
    assert is_served("someone/tiny", str(snapshot), server, "c0ffee")
    assert not is_served("someone/other", str(snapshot), server)


@pytest.mark.parametrize("location", ["someone/nothing", "not a name, nor a folder", "/no/such/folder"])
def test_what_is_not_here_is_the_same_as_nothing(location: str) -> None:
    found = identity(location)
    assert found == {"location": location, "config": "", "weights": ""}
    assert not WorkerFacts(**found).has_same_model(WorkerFacts(**found))
