"""Reasoning blocks: what a model writes before it acts, separated from its text. Pure.

Models reason between tags of their family. A reasoning block is no action, however it ends: after one that is cut off
nothing was said. Some chat templates open the block themselves, so that its first tag is in the prompt; who reads such
a turn puts the tag before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """How a family of models opens and closes a reasoning block."""

    opening: str
    closing: str


TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("<thinking>", "</thinking>"),
    ReasoningTags("<reasoning>", "</reasoning>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|channel>thought", "<channel|>"),
)
"""Qwen, DeepSeek and most others; models distilled from Claude; recipes for GRPO; Mistral; Cohere; Gemma 4."""

_CLOSERS = {tags.opening.lower(): tags.closing.lower() for tags in TAGS}
_ANY_TAG = re.compile("|".join(re.escape(tag) for tags in TAGS for tag in (tags.opening, tags.closing)), re.IGNORECASE)
_WRAPPED = re.compile(r"\s*<answer>(.*?)(?:</answer>|\Z)", re.IGNORECASE | re.DOTALL)


def strip_reasoning(text: str) -> str:
    """Return what is left of a turn without its reasoning blocks, and without the `<answer>` tags around it."""
    said = "".join(_parts(text)[0])
    wrapped = _WRAPPED.match(said)
    return said if wrapped is None else wrapped[1]


def is_thinking(text: str) -> bool:
    """Whether a turn ends within a reasoning block."""
    return _parts(text)[1]


def tags_of(template: str) -> ReasoningTags | None:
    """Return the tags that a chat template knows; None where it has no notion of reasoning."""
    return next((tags for tags in TAGS if tags.closing in template), None)


def _parts(text: str) -> tuple[list[str], bool]:
    """Split off reasoning blocks: what lies outside of them, and whether the last one is open.

    A closing tag without an opening one ends a reasoning block that began with the turn.
    """
    outside: list[str] = []
    position, closing = 0, ""
    for tag in _ANY_TAG.finditer(text):
        name = tag[0].lower()
        if closing:
            if name == closing:
                position, closing = tag.end(), ""
        elif name in _CLOSERS:
            outside.append(text[position : tag.start()])
            position, closing = tag.start(), _CLOSERS[name]
        else:
            outside.clear()
            position = tag.end()
    if not closing:
        outside.append(text[position:])
    return outside, bool(closing)
