"""The card of an exported policy says what the run's files say, and nothing of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml

from env_server.types import AnswerMode
from trainer.eval.run_files import Evaluation
from trainer.eval.statistics import EvaluationSummary, GroupSummary, Interval
from trainer.export.model_card import CardFacts, model_card
from trainer.policy import PlaySettings

PLAY = PlaySettings(data="spider:/home/me/spider", max_turn_length=64, max_context_length=2_048)
CONFIG: Mapping[str, Any] = {
    "grpo": {"reward_weights": [1.0, 0.2, 0.2, 0.1], "learning_rate": 2e-4, "num_generations": 8, "beta": 0.0},
    "model": {"model_name_or_path": "Qwen/Qwen3-0.6B"},
    "versions": {"sqlenv": "0.1.0", "trl": "1.16.0"},
}


def evaluation(label: str, rate: float, order: int) -> Evaluation:
    interval = Interval(rate - 0.1, rate + 0.1)
    groups = {"hard": GroupSummary(4, 1, 0.25, Interval(0.016, 0.869)), "easy": GroupSummary(20, 10, rate, interval)}
    summary = EvaluationSummary(
        24, 12, 0, 16, rate, interval, groups if label == "after" else {}, {}, 0.3, 2.75, 0.995, {}, {}
    )
    return Evaluation(label, "/home/me/runs/x/model", "spider:/home/me/spider", "eval", "value", order, summary)


FACTS = CardFacts(
    "me/policy",
    PLAY,
    "bfloat16",
    596_049_920,
    base="Qwen/Qwen3-0.6B",
    step=300,
    config=CONFIG,
    evaluations=[evaluation("before", 0.2, 1), evaluation("after", 0.5, 2)],
    versions={"sqlenv": "0.1.1"},
)


def changed(**fields: Any) -> str:
    return model_card(replace(FACTS, **fields))


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_tables_show_success_with_its_interval() -> None:
    card = model_card(FACTS)
    assert "| before training | 20.0% | 10.0 to 30.0 | +0.30 | 2.8 | 99.5% | 24 |" in card
    assert "| **this policy** | 50.0% | 40.0 to 60.0 | +0.30 | 2.8 | 99.5% | 24 |" in card
    assert "| difficulty | before training | **this policy** |" in card
    assert "| easy (20) | - | 50.0% (40.0 to 60.0) |\n| hard (4) | - | 25.0% (1.6 to 86.9) |" in card
    assert (
        "24 questions over 16 databases of `spider:spider`, databases that no training question is about"
        in in_one_line(card)
    )


def test_it_says_how_the_policy_was_made() -> None:
    card = model_card(FACTS)
    for line in (
        "- All weights were trained",
        "- Reward weights: correctness 1, progress 0.2, operational 0.2, format 0.1",
        "- Learning rate 0.0002; episodes per question 8; KL weight 0.0",
        "- Training steps: 300",
        "- Trained with sqlenv 0.1.0, trl 1.16.0",
        "- Exported with sqlenv 0.1.1",
    ):
        assert line in card.splitlines()
    assert "596,049,920 parameters, in bfloat16" in card
    unset = changed(config={"grpo": {**CONFIG["grpo"], "reward_weights": None}})
    assert "- Reward weights: correctness 1, progress 1, operational 1, format 1" in unset


def test_the_hub_reads_its_head() -> None:
    _, head, _ = model_card(FACTS).split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-0.6B",
        "tags": ["sqlenv", "text-to-sql", "grpo"],
    }


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("/home/me/models/base", "- Base model: `base` (a folder)"),
        ("Qwen/Qwen3-0.6B", "- Base model: [Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)"),
        (None, "a derivative of the base model"),
    ],
)
def test_the_base_is_named_without_a_path_of_the_machine_and_no_licence_is_claimed(base: str | None, said: str) -> None:
    card = changed(base=base)
    assert said in card
    assert "/home" not in card
    assert ("base_model: " in card) == (base == "Qwen/Qwen3-0.6B")
    assert "license:" not in card
    assert "whose licence applies" in card


def test_an_adapter_is_said_to_be_merged_and_a_quantised_base_to_be_another() -> None:
    adapter = {"r": 16, "lora_alpha": 32}
    card = changed(adapter=adapter)
    assert "- LoRA of rank 16 and alpha 32, merged into the base" in card
    assert "All weights" not in card
    assert "quantised" not in card
    quantised = changed(adapter=adapter, config={**CONFIG, "model": {"load_in_4bit": True}})
    assert "quantised to 4 bits" in quantised


def test_a_checkpoint_was_not_evaluated() -> None:
    assert "was not evaluated itself" in changed(evaluations=FACTS.evaluations[:1])
    card = model_card(FACTS)
    assert "was not evaluated itself" not in card
    assert "overestimated" not in card


def test_a_policy_that_was_chosen_by_its_evaluation_says_so() -> None:
    best = replace(evaluation("after", 0.5, 2), best_of=6)
    card = changed(evaluations=[best])
    assert "the best of 6 evaluations on these very questions, so that its success is overestimated" in in_one_line(
        card
    )
    assert "- Training steps: 300, of which the policy of the best evaluation was kept" in card


def test_of_a_policy_without_its_run_less_is_said() -> None:
    card = changed(base=None, config={}, evaluations=(), step=None)
    assert "has not been evaluated" in card
    assert "GRPO" not in card
    assert "Reward weights" not in card


def test_the_scripts_name_the_policy_and_can_be_compiled() -> None:
    blocks = model_card(FACTS).split("```python\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        script = block.split("```")[0]
        compile(script, "script", "exec")
        assert 'policy = "me/policy"' in script


@pytest.mark.parametrize(
    ("mode", "words"), [(AnswerMode.VALUE, "the answer's values"), (AnswerMode.SQL, "a SQL query")]
)
def test_it_says_what_the_policy_answers_with(mode: AnswerMode, words: str) -> None:
    assert words in changed(play=PlaySettings(answer_mode=mode))
