"""From what a policy writes to one action, and back to the canonical text.

Guarantees:

1. `parse_action` is total: any str gives one action, in time linear in the text's length.
2. `parse_action(format_action(t, a))` is the action (t, a), parseable, for every argument that is valid Unicode.
3. One text is one action, the first. Models run on after their action and invent the observation and further
   actions; what follows was written without having seen the real observation, so the last action would act on
   invented facts.

What counts as an action, once reasoning blocks and an `<answer>` around what is said are gone (`reasoning.py`):

- a line `ACTION argument` or `ACTION: argument`, any case, in Markdown or after the label `Action:`;
- JSON at the start of a line, or in a Hermes `<tool_call>`: an object that names the action and its argument.

A line whose keyword is in lower case reads like prose ("Query the table first."), so it gives way to a line that
does not. A table is named on one line. SQL and answers take several, up to a blank line, a code fence, a
tool call, an invented observation or a further action; a fence around the argument bounds it instead. JSON
arguments are exact.

Everything else is a QUERY of the raw text with `parseable` False; that includes bare SQL, which is then executed
as it was meant but does not count as well-formed. A turn that is nothing but a reasoning block is an empty QUERY.

A policy that calls tools is read by `parse_call`: a call counts in the format of the model's own chat template. Calls
in other families' formats, and actions that are written as text, are executed as they were meant and do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from env_server.actions import ACTIONS, ANSWER, SQL, TABLE, Argument
from env_server.types import ActionType, SQLAction
from trainer.chat.reasoning import strip_reasoning
from trainer.chat.tools import READERS


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """An action, and whether the text was one: False when it was taken as a raw QUERY for want of anything else."""

    action: SQLAction
    parseable: bool


_NAME_KEYS = ("name", "action_type", "action")

_TYPES = "|".join(ACTIONS).lower()
_FLAGS = re.IGNORECASE | re.ASCII  # beyond ASCII, ignoring case would take a dotted capital I for an i
# All repetitions are possessive: a failed match never tries again, which keeps the time linear.
_DECORATION = r"[\s>*_#`+\-\u2022]*+"
_PREFIX = rf"(?:```(?!{_TYPES})[a-z]++\s)?+{_DECORATION}(?:\d{{1,3}}+[.)])?+{_DECORATION}"
_LABEL = rf"(?:(?P<label>(?:next\s)?+action(?:\s\d{{1,3}}+)?+[*`]*+\s*+:){_DECORATION})?+"
_HEAD = re.compile(
    rf"(?P<open>{_PREFIX}{_LABEL})"
    rf"(?P<type>{_TYPES})(?P<close>\*\*|`(?!``))?+"
    r"(?=[\s:]|```|\Z)\s*+(?P<colon>:)?+",
    _FLAGS,
)
_JSON = re.compile(rf"{_PREFIX}{_LABEL}(?=\{{)", _FLAGS)
_JSON_ACTION = re.compile(rf"{_PREFIX}{_LABEL}\{{\s*+\"(?:{'|'.join(_NAME_KEYS)})\"", _FLAGS)
_INVENTED = re.compile(
    rf"{_DECORATION}(?:observation|obs|result|output|thought|user|assistant)[*`]*+\s*+:", re.IGNORECASE
)
_FENCE_TAG = re.compile(r"```(?:[\w+-]*+[^\S\n]*+\n|(?:sql|sqlite)\s)?+", re.IGNORECASE)
_SIGNS: Mapping[Argument, re.Pattern[str]] = {
    TABLE: re.compile(r"(?:\S++|[\"'\[].*)\Z"),
    SQL: re.compile(r"(?:select|with|values|explain|pragma)\b", re.IGNORECASE),
}
"""What the argument of a keyword in lower case looks like, where the line is an action and not prose."""

_TOOL_CALL = "<tool_call>"
_ARGUMENT_KEYS = ("argument", "table", "table_name", "sql", "query", "value", "answer")
_DECODER = json.JSONDecoder(strict=False)  # models put raw newlines into JSON strings


def parse_action(text: str) -> ParsedAction:
    """Find the action in a policy's turn. Never raises."""
    said = strip_reasoning(text)
    first = _first_action(said)
    if first is not None:
        return ParsedAction(_action(*first), parseable=True)
    raw = _unfenced(said.strip()) or said.strip()
    return ParsedAction(_action(ActionType.QUERY, raw), parseable=False)


def parse_call(text: str, native: Collection[str]) -> ParsedAction:
    """Find the action in a turn of a policy that calls tools; `native` names its formats. Never raises."""
    said = strip_reasoning(text)
    for name in sorted(READERS, key=lambda name: name not in native):
        call = READERS[name](said)
        found = None if call is None else _named_action(call.name, call.arguments)
        if found is not None:
            return ParsedAction(_action(*found), parseable=name in native)
    return replace(parse_action(text), parseable=False)


def format_action(action_type: str, argument: str) -> str:
    """Return the canonical text of an action, such as `DESCRIBE pets`.

    An argument that this form cannot carry exactly (blank lines, white space around it, a line that reads as
    another action, a tag of reasoning) is written as JSON on one line. Raises ValueError for an unknown action type.
    """
    kind = action_type.strip().upper()
    if kind not in ACTIONS:
        raise ValueError(f"{action_type!r} is not one of {', '.join(ACTIONS)}")
    plain = f"{kind} {argument}" if argument else kind
    if parse_action(plain) == ParsedAction(_action(kind, argument), parseable=True):
        return plain
    written = json.dumps({"action_type": kind, "argument": argument})
    return written.replace("<", "\\u003c").replace("[", "\\u005b")


def _action(kind: str, argument: str) -> SQLAction:
    """Build the action; a lone surrogate, which no wire and no database can carry, becomes `?`."""
    return SQLAction(action_type=kind, argument=argument.encode("utf-8", "replace").decode("utf-8"))


def _first_action(text: str) -> tuple[str, str] | None:
    """Find the first action that is written as such; failing that, the first line that may be meant as one."""
    lines = text.split("\n")
    weak: tuple[re.Match[str], list[str]] | None = None
    tried: set[str] = set()  # each kind of JSON once: an attempt may read to the end of the text
    for index, line in enumerate(lines):
        if (head := _HEAD.match(line)) is not None:
            if _is_strong(head) or _is_plausible(head):
                return _spoken_action(head, lines[index + 1 :])
            weak = weak or (head, lines[index + 1 :])
            continue
        if (prefix := _JSON.match(line)) is not None:
            mark, start = "{", prefix.end()
        else:
            mark, start = _TOOL_CALL, line.find(_TOOL_CALL)
        if start < 0 or mark in tried:
            continue
        tried.add(mark)
        found = _json_action("\n".join((line[start:], *lines[index + 1 :])).removeprefix(_TOOL_CALL))
        if found is not None:
            return found
    return None if weak is None else _spoken_action(*weak)


def _is_strong(head: re.Match[str]) -> bool:
    """Whether a line is an action and not prose: labelled, with a colon, or the keyword in capitals."""
    written_as_action = head["label"] is not None or head["colon"] is not None or head["type"].isupper()
    return written_as_action and not _rest(head).startswith("|")  # a row such as `SAMPLE | 4` is an answer's


def _is_plausible(head: re.Match[str]) -> bool:
    """Whether the argument of a keyword in lower case fits: one name, or SQL. ANSWER has no such sign."""
    sign = _SIGNS.get(ACTIONS[_kind(head)].argument)
    return sign is not None and sign.match(_rest(head).strip("`*")) is not None


def _kind(head: re.Match[str]) -> str:
    return head["type"].upper()


def _rest(head: re.Match[str]) -> str:
    return head.string[head.end() :].strip()


def _spoken_action(head: re.Match[str], following: list[str]) -> tuple[str, str]:
    """Read the argument of the action whose line begins with `head`."""
    kind = _kind(head)
    opened = "" if head["close"] else head["open"]
    text = "\n".join((head.string[head.end() :], *following)).lstrip()
    if text.startswith("```"):
        return kind, _unfenced(text)
    if not _rest(head) and following and _starts_another(text.partition("\n")[0]):
        return kind, ""
    lines = list(takewhile(lambda line: not _ends_argument(line), text.split("\n")[1:]))
    first = text.partition("\n")[0]
    argument = first if ACTIONS[kind].argument is TABLE else "\n".join((first, *lines))
    return kind, _undecorated(argument.strip().removesuffix("```").strip(), opened)


def _ends_argument(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("```") or _starts_another(line)


def _starts_another(line: str) -> bool:
    """Whether a line begins what a model invents after its action."""
    head = _HEAD.match(line)
    if _INVENTED.match(line) or _JSON_ACTION.match(line) or line.lstrip().startswith(_TOOL_CALL):
        return True
    return head is not None and _is_strong(head)


def _unfenced(text: str) -> str:
    """Return what a leading code fence holds, or the text itself when it has none."""
    tag = _FENCE_TAG.match(text)
    return text if tag is None else text[tag.end() :].partition("```")[0].strip()


def _undecorated(argument: str, opened: str) -> str:
    """Drop Markdown marks around the argument, or begun before it in `opened`."""
    for mark in ("**", "`"):
        if mark in opened:
            bare = argument.removeprefix(mark)
            argument = bare if bare != argument else argument.removesuffix(mark)
        elif len(argument) > 2 * len(mark) and argument.startswith(mark) and argument.endswith(mark):
            inner = argument[len(mark) : -len(mark)]
            argument = argument if mark in inner else inner
    return argument.strip()


def _json_action(text: str) -> tuple[str, str] | None:
    """Read the JSON object that the text begins with, as an action; None when it is none."""
    value = _decoded(_unfenced(text.lstrip()))
    if not isinstance(value, dict):
        return None
    names = [key for key in _NAME_KEYS if isinstance(value.get(key), str)]
    if not names:
        return None
    return _named_action(value[names[0]], {key: item for key, item in value.items() if key != names[0]})


def _named_action(name: str, rest: Mapping[str, Any]) -> tuple[str, str] | None:
    """Read an action from its name and an object's other members; None when it is none."""
    kind = name.strip().upper()
    if kind not in ACTIONS:
        return None
    try:
        argument = _json_argument(rest)
        if isinstance(argument, str) or argument is None:
            return kind, argument or ""
        # Answers may be lists and numbers; a table's name and a query are texts.
        return (kind, json.dumps(argument, ensure_ascii=False)) if ACTIONS[kind].argument is ANSWER else None
    except RecursionError:  # nested too deep to be written again
        return None


def _json_argument(rest: Mapping[str, Any]) -> Any:
    """Choose the argument among an object's other members; "" where there is none."""
    for wrapper in ("arguments", "parameters"):
        if wrapper in rest:
            arguments = rest[wrapper]
            if isinstance(arguments, str):
                decoded = _decoded(arguments)
                arguments = decoded if isinstance(decoded, dict) else arguments
            if not isinstance(arguments, dict):
                return arguments
            rest = arguments
            break
    for key in _ARGUMENT_KEYS:
        if key in rest:
            return rest[key]
    values = list(rest.values())
    return values[0] if len(values) == 1 else ""


def _decoded(text: str) -> Any:
    """Return the JSON value that the text begins with, or None."""
    try:
        return _DECODER.raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None
