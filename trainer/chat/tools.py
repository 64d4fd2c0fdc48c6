"""The actions as tools that a chat template can declare, and the formats in which families of models call them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from env_server.actions import ACTIONS
from env_server.types import AnswerMode, SQLAction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    AnyTokenizer = TypeVar("AnyTokenizer", bound=PreTrainedTokenizerBase)


Schema = dict[str, Any]
"""A tool as chat templates know it: the JSON schema of a function."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a model wrote it: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def tool_schemas(mode: AnswerMode) -> list[Schema]:
    """Return the declarations of the tools, one for each action."""
    return [_schema(kind, mode) for kind in ACTIONS]


def call_of(action: SQLAction, mode: AnswerMode) -> ToolCall:
    """Return the call that stands for an action."""
    kind = action.action_type
    return ToolCall(kind.lower(), {ACTIONS[kind].parameter(mode).name: action.argument})


def _schema(kind: str, mode: AnswerMode) -> Schema:
    action = ACTIONS[kind]
    argument = action.parameter(mode)
    parameters = {
        "type": "object",
        "properties": {argument.name: {"type": "string", "description": argument.meaning}},
        "required": [argument.name],
    }
    function = {"name": kind.lower(), "description": action.description, "parameters": parameters}
    return {"type": "function", "function": function}


Reader = Callable[[str], ToolCall | None]

_DECODER = json.JSONDecoder(strict=False)  # models put raw newlines into JSON strings
_NAME = r"[\w.-]{1,64}"
_FUNCTION = re.compile(rf"<function=({_NAME})>")
_PARAMETER = re.compile(
    rf"\s*<parameter=({_NAME})>\n?(.*?)\n?(?:</parameter>|(?=</function>|</tool_call>)|\Z)", re.DOTALL
)
_GLM = re.compile(rf"<tool_call>\s*({_NAME})\s*(?=<arg_key>|</tool_call>)")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL_NAMED = re.compile(rf"\s*({_NAME})\s*(?:\[CALL_ID\][^\[{{]*)?(?:\[ARGS\])?\s*(?=\{{)")
_PYTHONIC = re.compile(rf"\s*\[?\s*({_NAME})\(\s*(?:(\w+)\s*=\s*)?")


def hermes(text: str) -> ToolCall | None:
    """Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    start = text.find("<tool_call>")
    return None if start < 0 else _from_object(_decoded(text, start + len("<tool_call>")))


def qwen_coder(text: str) -> ToolCall | None:
    """Qwen3-Coder, Qwen3.5, Nemotron 3: `<function=name><parameter=key>value</parameter></function>`."""
    function = _FUNCTION.search(text)
    if function is None:
        return None
    arguments: dict[str, Any] = {}
    position = function.end()
    while (parameter := _PARAMETER.match(text, position)) is not None:
        arguments[parameter[1]] = parameter[2]
        position = parameter.end()
    return ToolCall(function[1], arguments)


def glm(text: str) -> ToolCall | None:
    """GLM 4.5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    head = _GLM.search(text)
    if head is None:
        return None
    arguments: dict[str, Any] = {}
    position = head.end()
    while (argument := _GLM_ARGUMENT.match(text, position)) is not None:
        arguments[argument[1].strip()] = argument[2]
        position = argument.end()
    return ToolCall(head[1], arguments)


def llama(text: str) -> ToolCall | None:
    """Llama 3.1 and 3.2: the turn is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or bare."""
    bare = text.strip().removeprefix("<|python_tag|>").lstrip()
    return _from_object(_decoded(bare, 0)) if bare.startswith("{") else None


def mistral(text: str) -> ToolCall | None:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}`."""
    _, mark, calls = text.partition("[TOOL_CALLS]")
    if not mark:
        calls = text.strip()
        if not calls.startswith('[{"'):
            return None
    named = _MISTRAL_NAMED.match(calls)
    if named is not None:
        arguments = _decoded(calls, named.end())
        return ToolCall(named[1], arguments) if isinstance(arguments, dict) else None
    listed = _decoded(calls, 0)
    return _from_object(listed[0] if isinstance(listed, list) and listed else listed)


def pythonic(text: str) -> ToolCall | None:
    """LFM2, Llama 3.2, Llama 4: `[name(key="value")]`, LFM2's between `<|tool_call_start|>` and `<|tool_call_end|>`.

    LFM2's first templates do not escape quotes: a value that is no Python string ends with the last quote.
    """
    _, mark, calls = text.partition("<|tool_call_start|>")
    calls = calls.partition("<|tool_call_end|>")[0] if mark else text.strip()
    head = _PYTHONIC.match(calls)
    if head is None or not (mark or calls.startswith("[")):
        return None
    rest = calls[head.end() :].rstrip().removesuffix("]").rstrip().removesuffix(")").rstrip()
    try:
        return ToolCall(head[1], {head[2] or "argument": ast.literal_eval(rest)})
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    quoted = len(rest) >= 2 and rest[0] in "'\"" and rest[-1] == rest[0]
    return ToolCall(head[1], {head[2] or "argument": rest[1:-1]}) if quoted else None


READERS: Mapping[str, Reader] = {
    reader.__name__: reader for reader in (hermes, qwen_coder, glm, llama, mistral, pythonic)
}
"""Every family by name."""


def _from_object(value: Any) -> ToolCall | None:
    """Read `{"name": ..., "arguments" or "parameters": {...}}`."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _decoded(arguments, 0)
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _decoded(text: str, position: int) -> Any:
    """Return the JSON value that begins at the position, white space aside; None when there is none."""
    try:
        return _DECODER.raw_decode(text[position:].lstrip())[0]
    except (ValueError, RecursionError):
        return None


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
