"""What a chat template writes around contents, found out by rendering dummy conversations.

Nothing is assumed of a template but that it shows what it is given. What cannot be used by appending is refused with
the reason: a template that shows a message twice or not at all, whose text between turns depends on how long the
dialogue is, or that puts the model's words into a channel which generation would have to open first (gpt-oss). With
tools, also one that does not declare them, or that shows no result without the call that it belongs to (Gemma 4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from env_server.errors import SQLEnvError
from trainer.chat.reasoning import TAGS, is_thinking, strip_reasoning
from trainer.chat.tools import Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"MESSAGE(\d+)CONTENT")
_CALL_ID = "abcdefghi"
"""Where a template shows calls' ids, a result carries this one: nine characters, as Mistral's asks for."""
_AWKWARD = "\"\n'"
"""A text that each way to write strings writes differently."""
_USE_TEXT = "use --action_format text"
_TAG = re.compile("|".join(re.escape(tag) for tags in TAGS for tag in (tags.opening, tags.closing)))


class TemplateUseError(SQLEnvError):
    """A tokenizer's chat template is missing or cannot be used by appending; the text says why."""


@dataclass(frozen=True, slots=True)
class StringStyle:
    """A way to write a string into a template's text. `sample` is `_AWKWARD` so written."""

    sample: str
    write: Callable[[str], str]


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_python(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")


AS_IT_IS = StringStyle(_AWKWARD, str)
_STYLES = (AS_IT_IS, StringStyle(_in_json(_AWKWARD), _in_json), StringStyle(_in_python(_AWKWARD), _in_python))


@dataclass(frozen=True, slots=True)
class TurnText:
    """The text from the end of a model's turn to what it is answered, and from there to its next words.

    `header` precedes the model's words where a conversation shows them afterwards.
    """

    header: str
    before: str
    after: str
    style: StringStyle = AS_IT_IS

    @property
    def all(self) -> str:
        """Everything that the template writes there."""
        return self.header + self.before + self.after


class Template:
    """A tokenizer's chat template with its variables, and the tools that it is to declare."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], tools: Sequence[Schema] = ()
    ) -> None:
        if not tokenizer.chat_template:
            raise TemplateUseError("the tokenizer has no chat template; use an instruct model, or set one")
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self.tools = list(tools)

    @property
    def source(self) -> str:
        """The template itself."""
        found = self._tokenizer.chat_template
        return found if isinstance(found, str) else json.dumps(found)

    def render(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool = True) -> str:
        """Return the conversation's text up to where the model begins to speak. Raises TemplateUseError."""
        declared = self.tools if with_tools and self.tools else None
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=declared, tokenize=False, add_generation_prompt=True, **self._variables
                )
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = " / ".join(message["role"] for message in messages)
            raise TemplateUseError(f"the chat template cannot render {roles}: {error}") from error

    def parts(self, roles: Sequence[str], *, with_tools: bool = True) -> list[str | int]:
        """Return a conversation's text, with the index of each message in the place of its content.

        A system message may be left out. Raises TemplateUseError when any other message is, or comes twice.
        """
        messages = [{"role": role, "content": marker(index)} for index, role in enumerate(roles)]
        parts = split_markers(self.render(messages, with_tools=with_tools))
        shown = parts[1::2]
        if shown != [index for index, role in enumerate(roles) if role != "system" or index in shown]:
            raise TemplateUseError(
                f"the chat template must show each message once and in order; of {' / '.join(roles)} it shows "
                f"the messages {shown}"
            )
        return parts

    def renders(self, roles: Sequence[str]) -> bool:
        """Whether the template takes these roles."""
        try:
            self.parts(roles)
        except TemplateUseError:
            return False
        return True


def turn_text(template: Template) -> TurnText:
    """Find what lies between one turn of the model and the next, where a user answers. Raises TemplateUseError."""
    found: dict[tuple[str, str], str] = {}
    for turns in (1, 2, 3):
        parts = template.parts(["user", *["assistant", "user"] * turns], with_tools=False)
        header, before, after = str(parts[2]), str(parts[-3]), str(parts[-1])
        found[before.lstrip(), after] = header
    if len(found) > 1:
        raise TemplateUseError("the chat template's text between turns depends on how long the dialogue is")
    ((before, after), header) = found.popitem()
    extra = _TAG.sub("", header.removeprefix(after)).strip() if header.startswith(after) else ""
    if extra:
        raise TemplateUseError(
            f"the chat template writes {extra!r} before the model's words: they go into a channel that the model has "
            "to open itself, after others that end with the same token. Such templates are not supported"
        )
    return TurnText(header, before, after)


def result_text(template: Template, user: TurnText) -> TurnText:
    """Find what lies between one turn of the model and the next, where a tool answers. Raises TemplateUseError."""
    names = [tool["function"]["name"] for tool in template.tools]
    bare = template.render([{"role": "user", "content": marker(0)}], with_tools=False)
    declared = template.render([{"role": "user", "content": marker(0)}])
    if declared == bare or not all(name in declared for name in names):
        raise TemplateUseError(f"the chat template declares no tools; {_USE_TEXT}")
    try:
        parts = split_markers(template.render([_user(), {"role": "assistant", "content": marker(1)}, _tool(names[0])]))
    except TemplateUseError as error:
        raise TemplateUseError(f"{error}; {_USE_TEXT}") from error
    if parts[1::2] != [0, 1, 2]:
        raise TemplateUseError(f"the chat template shows no result of a tool without its call; {_USE_TEXT}")
    style, after = _style_of(str(parts[6]))
    return TurnText(user.header, str(parts[4]).lstrip(), after, style)


def call_texts(template: Template, result: TurnText) -> dict[str, tuple[str, str, StringStyle]]:
    """Find how the model calls each tool: the text before and after its argument. Raises TemplateUseError."""
    found = {}
    for tool in template.tools:
        name = tool["function"]["name"]
        (argument,) = tool["function"]["parameters"]["properties"]
        parts = split_markers(_rendered_call(template, name, argument))
        if parts[1::2] != [0, 1, 2]:
            raise TemplateUseError(f"the chat template does not show the calls of tools; {_USE_TEXT}")
        style, rest = _style_of(str(parts[4]))
        head, end = str(parts[2]), rest.find(result.before)
        if not head.startswith(result.header) or end < 0:
            raise TemplateUseError(f"the chat template writes a call otherwise than words: {head!r}; {_USE_TEXT}")
        # Some templates show an empty reasoning block before the call.
        found[name] = strip_reasoning(head[len(result.header) :]).lstrip(), rest[:end], style
    return found


def opened_reasoning(after: str) -> str:
    """Return the tag of the reasoning block that the template opens where the model begins to speak, or ""."""
    return next((tags.opening for tags in TAGS if after.rstrip().endswith(tags.opening) and is_thinking(after)), "")


def _rendered_call(template: Template, name: str, argument: str) -> str:
    """Render a call whose argument is a marker. Raises TemplateUseError."""
    function = {"name": name, "arguments": {argument: marker(1) + _AWKWARD}}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    try:
        return template.render([_user(), {"role": "assistant", "content": "", "tool_calls": [call]}, _tool(name)])
    except TemplateUseError as error:
        raise TemplateUseError(f"{error}; {_USE_TEXT}") from error


def _user() -> dict[str, str]:
    return {"role": "user", "content": marker(0)}


def _tool(name: str) -> dict[str, str]:
    return {"role": "tool", "name": name, "tool_call_id": _CALL_ID, "content": marker(2) + _AWKWARD}


def _style_of(text: str) -> tuple[StringStyle, str]:
    """Tell how a text that begins with `_AWKWARD` has been written; return what follows it, too."""
    for style in _STYLES:
        if text.startswith(style.sample):
            return style, text.removeprefix(style.sample)
    raise TemplateUseError(f"the chat template writes texts in a way of its own: {text[:20]!r}; {_USE_TEXT}")


def marker(index: int) -> str:
    """Return what stands for a message's content."""
    return f"MESSAGE{index}CONTENT"


def split_markers(rendered: str) -> list[str | int]:
    """Split a text at its markers: texts, and the markers' numbers between them."""
    parts = _MARKER.split(rendered)
    return [int(part) if position % 2 else part for position, part in enumerate(parts)]
