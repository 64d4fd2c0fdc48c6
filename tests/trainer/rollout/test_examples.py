"""Worked episodes in the prompt: which they are, how they are written, and that their questions are not asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from env_server.types import AnswerMode
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.config import ActionFormat
from trainer.rollout.players import Examples, FewShotError


def test_they_are_right_and_about_different_databases(generated_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLENV_CACHE_DIR", str(generated_cache))
    dataset = load_dataset("synthetic")
    examples = Examples.play(dataset, 3, AnswerMode.VALUE, 15)
    assert len({conversation.opening.splitlines()[1] for conversation in examples.conversations}) == 3
    for conversation in examples.conversations:
        *_, (query, _), (answer, reply) = conversation.turns
        assert (query.action_type, answer.action_type, reply) == ("QUERY", "ANSWER", "")
    questions = dataset.select(Split.TRAIN)
    left = examples.without(questions)
    assert len(left) == len(questions) - 3
    again = Examples.play(dataset, 3, AnswerMode.VALUE, 15)
    assert again.conversations == examples.conversations


def test_none_are_none(pets: Dataset) -> None:
    examples = Examples.play(pets, 0, AnswerMode.VALUE, 15)
    assert examples.without(pets.questions) == list(pets.questions)
    assert examples.conversations == []


def test_more_than_there_are_is_told(pets: Dataset) -> None:
    with pytest.raises(FewShotError, match=r"--few_shot 9: the training questions of pets give 3 episodes"):
        Examples.play(pets, 9, AnswerMode.VALUE, 15)


@pytest.mark.parametrize("action_format", list(ActionFormat))
def test_they_are_turns_of_the_same_conversation(action_format: ActionFormat, pets: Dataset) -> None:
    tokenizer = family_tokenizer("qwen2_5")
    settings = ChatSettings(action_format=action_format, custom_system_prompt="Explore.")
    (example, *_) = conversations = Examples.play(pets, 2, AnswerMode.VALUE, 15).conversations
    chat = ChatFormat(tokenizer, settings, conversations)
    prompt = tokenizer.decode(chat.prompt_ids("Question: How many?"))
    start = tokenizer.decode(ChatFormat(tokenizer, settings).prompt_ids(example.opening))
    assert prompt.startswith(start)
    assert prompt.count("Explore.") == 1
    assert prompt.endswith("<|im_end|>\n<|im_start|>user\nQuestion: How many?<|im_end|>\n<|im_start|>assistant\n")
    said = [tokenizer.decode(chat.turn_ids(action)) for action, _ in example.turns]
    assert all(turn in prompt for turn in said)
    assert prompt.count("<|im_start|>assistant") == 1 + sum(len(each.turns) for each in conversations)
