"""Policies that write their actions as text, in a loop that knows calls of tools alone: TRL's.

`text_as_calls` prepares a tokenizer: whatever the policy writes in a turn is then the argument of one call of the tool
`act`, and a tool's result is shown to it as a user's message. So each turn and each reply are the ids that
`trainer.chat.renderer` makes of them, and a policy plays in TRL's loop as it was trained here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    AnyTokenizer = TypeVar("AnyTokenizer", bound=PreTrainedTokenizerBase)

_AS_TEXT = """\
{%- set spoken = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- set spoken.messages = spoken.messages + [{'role': 'user', 'content': message.content}] -%}
{%- elif message.tool_calls -%}
{%- set call = message.tool_calls[0].function -%}
{%- set text = call.arguments.turn if call.name == 'act' and call.arguments.turn is defined else call | string -%}
{%- set spoken.messages = spoken.messages + [{'role': 'assistant', 'content': text}] -%}
{%- else -%}
{%- set spoken.messages = spoken.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = spoken.messages -%}
{%- set tools = none -%}
"""
"""Before a chat template: it sees calls as the assistant's words, and results as the user's."""


def text_as_calls(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Have the tokenizer read a turn's text as a call of `act`, and write results as users' messages; returns it.

    For chat templates whose turns end with the tokenizer's EOS, which is where TRL lets generation stop.
    """
    tokenizer.chat_template = _AS_TEXT + str(tokenizer.chat_template)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\Z",  # no part of a turn is written by the template
        "fields": {
            "tool_calls": {
                "close_pattern": re.escape(str(tokenizer.eos_token)),
                "repeats": True,
                "content": "text",
                "transform": {"type": "function", "function": {"name": "act", "arguments": {"turn": "{content}"}}},
            }
        },
    }
    return tokenizer
