"""The formats in which families of models call tools, read. Pure.

Each family has one function, which finds the first call in a text that is in its format, or None. They are total: any
text is read in time linear in its length, and nothing raises. A call is read as it was written; whether there is such
a tool is for the caller to say.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.chat.tools import ToolCall

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
