"""How an adapter that training starts from goes on, by the flags that were given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference.adapters import NamedPolicy
from trainer.config import ConfigError
from trainer.policy.loading import resolve_policy
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.starting_point import implied_flags, starting_line

CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 12,
    "target_modules": ["v_proj", "q_proj"],
    "use_rslora": False,
    "modules_to_save": None,
    "base_model_name_or_path": str(BASE_CHECKPOINT),
}


@pytest.fixture
def adapter(tmp_path: Path) -> NamedPolicy:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return resolve_policy(str(tmp_path))


def test_a_full_checkpoint_implies_nothing() -> None:
    checkpoint = resolve_policy(str(BASE_CHECKPOINT))
    assert implied_flags(checkpoint, {"use_peft": True, "lora_r": 2}) == {}
    assert starting_line(checkpoint) == []


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lora_r": 8, "lora_alpha": 12},
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_target_modules": "all-linear"},
        {"lora_modules_to_save": None, "use_dora": False},
    ],
)
def test_an_adapter_goes_on_as_it_is(adapter: NamedPolicy, given: dict[str, Any]) -> None:
    assert implied_flags(adapter, given) == {
        "use_peft": True,
        "lora_r": 8,
        "lora_alpha": 12,
        "lora_target_modules": ["v_proj", "q_proj"],
        "use_rslora": False,
    }
    (line,) = starting_line(adapter)
    assert "rank 8, q_proj, v_proj" in line


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_r": 16}, r"--lora_r 16: the adapter .* was made with 8.*merge it first \(sqlenv export"),
        ({"lora_target_modules": ["q_proj"]}, r"made with v_proj q_proj"),
        ({"use_dora": True}, "--use_dora True"),
        ({"use_peft": False}, "merge it first"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(adapter: NamedPolicy, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        implied_flags(adapter, given)
