"""Generation settings that transformers loads and does not save are mended before training, as little as can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3ForCausalLM

from policies.tiny.tokenizer import build_tokenizer
from trainer.models import repair_generation_settings

TOKENS = {"eos_token_id": 3, "pad_token_id": 0}


@pytest.fixture(scope="module")
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    random_policy(build_tokenizer(["How many pets are there"])).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8, "do_sample": True}),
        ({"top_p": 0.9}, {"top_p": 0.9, "do_sample": True}),
        ({"min_p": 0.1}, {"min_p": 0.1, "do_sample": True}),
        ({"temperature": 0.0}, {"temperature": None, "do_sample": None}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": None, "do_sample": None}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
        ({"length_penalty": 1.5, "temperature": 0.7}, {"length_penalty": None}),
        ({"early_stopping": True}, {"early_stopping": None}),
    ],
    ids=str,
)
def test_what_could_not_be_saved_can_be(
    settings: dict[str, Any], saved: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    (policy / "generation_config.json").write_text(json.dumps(TOKENS | settings), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(policy)
    with pytest.raises(ValueError, match="save the configuration"):
        model.save_pretrained(tmp_path)
    assert repair_generation_settings(model) is not None
    model.save_pretrained(tmp_path)
    found = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(found, name) for name in saved} == saved
    assert found.eos_token_id == TOKENS["eos_token_id"]


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.7}, {"max_new_tokens": 20}], ids=str)
def test_what_can_be_saved_is_left_alone(settings: dict[str, Any], policy: Path) -> None:
    (policy / "generation_config.json").write_text(json.dumps(TOKENS | settings), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(policy)
    before = model.generation_config.to_dict()
    assert repair_generation_settings(model) is None
    assert model.generation_config.to_dict() == before
