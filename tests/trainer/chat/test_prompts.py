"""What the policy reads: the messages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from env_server.types import AnswerMode, SQLObservation
from trainer.chat.prompts import SYSTEM_PROMPT, first_message, observation_message, system_prompt
from trainer.config import ActionFormat


def observation(**changes: Any) -> SQLObservation:
    values = {"question": "How many pets?", "schema_info": "Tables: owners, pets", "budget_remaining": 15}
    return SQLObservation.model_validate(values | changes)


@pytest.mark.parametrize("mode", list(AnswerMode))
def test_the_system_prompt_is_short_and_shows_every_action(mode: AnswerMode) -> None:
    prompt = system_prompt(mode)
    examples = re.findall(r"Example: ([A-Z]+) \S", prompt)
    assert examples == ["DESCRIBE", "SAMPLE", "QUERY", "ANSWER"]
    # Usual tokenizers make about one token of each word and mark.
    assert len(re.findall(r"\w+|[^\w\s]", prompt)) < 300
    assert "{" not in prompt


def test_the_modes_differ_in_what_answer_carries() -> None:
    assert system_prompt(AnswerMode.VALUE) == SYSTEM_PROMPT
    assert "a | b" in SYSTEM_PROMPT
    assert "ANSWER SELECT" not in SYSTEM_PROMPT
    assert "ANSWER SELECT" in system_prompt(AnswerMode.SQL)
    assert "a | b" not in system_prompt(AnswerMode.SQL)


def test_the_first_message_is_the_question_and_the_tables() -> None:
    assert first_message(observation()) == "Question: How many pets?\nTables: owners, pets"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"result": "3"}, "3"),
        ({"error": "missing: no such table: pet"}, "Error: missing: no such table: pet"),
        ({"result": "3", "budget_remaining": 4}, "3"),
        ({"result": "3", "budget_remaining": 3}, "3\n3 steps left."),
        ({"error": "syntax: x", "budget_remaining": 1}, "Error: syntax: x\n1 step left."),
        ({"result": "correct", "budget_remaining": 2, "done": True}, "correct"),
    ],
)
def test_the_message_after_a_step(changes: dict[str, Any], message: str) -> None:
    assert observation_message(observation(**changes)) == message


def test_tools_are_called_and_not_written() -> None:
    for mode in AnswerMode:
        prompt = system_prompt(mode, ActionFormat.TOOLS)
        assert "Example:" not in prompt
        assert all(name in prompt for name in ("describe", "sample", "query", "answer"))
