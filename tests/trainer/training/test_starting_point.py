"""What becomes of an adapter that training starts from, by the flags that were given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.starting_point import AdapterUse, starting_point

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
def adapter(tmp_path: Path) -> str:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_a_full_checkpoint_implies_nothing() -> None:
    start = starting_point({"model_name_or_path": str(BASE_CHECKPOINT), "use_peft": True})
    assert start.use is None
    assert start.implied == {}


def test_an_adapter_goes_on_as_it_is(adapter: str) -> None:
    start = starting_point({"model_name_or_path": adapter})
    assert start.use is AdapterUse.CONTINUE
    assert start.implied == {
        "adapter": "continue",
        "use_peft": True,
        "lora_r": 8,
        "lora_alpha": 12,
        "lora_target_modules": ["v_proj", "q_proj"],
        "use_rslora": False,
    }
    assert "rank 8, q_proj, v_proj" in start.describe()


@pytest.mark.parametrize(
    "flags",
    [
        {"lora_r": 8, "lora_alpha": 12},
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_target_modules": "all-linear"},
        {"lora_modules_to_save": None, "use_dora": False},
    ],
)
def test_flags_that_agree_with_it_may_be_given(adapter: str, flags: dict[str, Any]) -> None:
    assert starting_point({"model_name_or_path": adapter, **flags}).use is AdapterUse.CONTINUE


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_r": 16}, r"--lora_r 16: the adapter .* was made with 8.*--adapter merge"),
        ({"lora_target_modules": ["q_proj"]}, r"made with v_proj q_proj"),
        ({"use_dora": True}, "--use_dora True"),
        ({"use_peft": False}, "add --adapter merge"),
        ({"adapter": "merge", "weight_sync": "lora"}, "sqlenv export"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(adapter: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        starting_point({"model_name_or_path": adapter, **flags})


@pytest.mark.parametrize("flags", [{}, {"use_peft": True, "lora_r": 16}, {"use_peft": False}])
def test_merged_it_is_whatever_the_user_wants(adapter: str, flags: dict[str, Any]) -> None:
    start = starting_point({"model_name_or_path": adapter, "adapter": "merge", **flags})
    assert start.use is AdapterUse.MERGE
    assert start.implied == {"adapter": "merge"}


def test_a_full_checkpoint_cannot_be_merged() -> None:
    with pytest.raises(ConfigError, match="is a full checkpoint"):
        starting_point({"model_name_or_path": str(BASE_CHECKPOINT), "adapter": "continue"})
