"""A policy that writes text, in TRL's loop: it reads and says the ids that it reads and says here."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response, supports_tool_calling

from env_server.types import SQLObservation
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.format import ChatFormat
from trainer.chat.prompts import SYSTEM_PROMPT, observation_message
from trainer.chat.tools import text_as_calls
from trainer.tiny import BASE_CHECKPOINT

ENDS = {"qwen3_instruct_2507": "<|im_end|>", "qwen2_5": "<|im_end|>", "llama3": "<|eot_id|>"}
"""Templates that write the tools' and the results' own way, or not at all, and the token that ends a turn."""
TINY = "tiny"
OPENING = "Question: How many pets?\nTables: pets"


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    if name == TINY:
        return AutoTokenizer.from_pretrained(BASE_CHECKPOINT)
    tokenizer = copy.deepcopy(family_tokenizer(name))
    tokenizer.eos_token = ENDS[name]
    return tokenizer


def suffix_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """What TRL appends for a tool's result."""
    trainer: Any = SimpleNamespace(
        _is_vlm=False,
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
    )
    found: list[int] = GRPOTrainer._get_tool_suffix_ids(trainer, [{"role": "tool", "name": "act", "content": text}])
    return found


@pytest.mark.parametrize("name", [TINY, *ENDS])
def test_prompts_and_results_are_the_same_ids_as_here(name: str) -> None:
    chat = ChatFormat(tokenizer_of(name))
    tokenizer = text_as_calls(tokenizer_of(name))
    assert supports_tool_calling(tokenizer)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": OPENING}]
    tools: Any = [{"type": "function", "function": {"name": "act", "description": "unseen", "parameters": {}}}]
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert prompt == chat.prompt_ids(OPENING)
    observation = SQLObservation(question="", schema_info="", result="pets: name TEXT", budget_remaining=9)
    assert suffix_of(tokenizer, observation_message(observation)) == chat.reply_ids(observation, closed=True)


@pytest.mark.parametrize("name", [TINY, *ENDS])
@pytest.mark.parametrize("text", ["DESCRIBE pets", 'QUERY SELECT "a"\nFROM b -- {content}', "Let me see.\n\nSAMPLE b"])
def test_a_turn_is_one_call_that_holds_its_text(name: str, text: str) -> None:
    tokenizer = text_as_calls(tokenizer_of(name))
    ids = tokenizer(f"{text}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
    for said in (ids, ids[:-1]):  # one that was cut short has no end
        message = parse_response(tokenizer, said, prefix=tokenizer(OPENING)["input_ids"], tools=[])
        (call,) = message["tool_calls"]
        assert call == {"type": "function", "function": {"name": "act", "arguments": {"turn": text}}}


def test_silence_is_no_call() -> None:
    tokenizer = text_as_calls(tokenizer_of(TINY))
    message = parse_response(tokenizer, [tokenizer.eos_token_id], prefix=[], tools=[])
    assert not message.get("tool_calls")
