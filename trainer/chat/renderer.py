"""A conversation as token ids, under whatever chat template the policy comes with.

`ChatRenderer` guarantees:

1. **Append only.** The ids after a turn of the model follow the ids it generated; nothing is rendered or tokenised
   again. A chat template that rewrites earlier turns (Qwen3 drops their reasoning blocks) is used by appending all the
   same: the text between two turns is taken once, from a dummy conversation, and then filled in.
2. **Content is data.** Only the template's own text yields special tokens: a question or a database cell that spells
   one (`<|im_end|>`) is encoded as the characters it consists of, so no cell can close a turn. Markup that a tokenizer
   spells with ordinary tokens cannot be told apart from text.
3. For a template that is itself append-only, prompt, turns and results in sequence are the ids of the whole
   conversation rendered at once, as long as each turn's ids are what the tokenizer makes of its text. Where they
   are not, the sequence is still what the model saw and said, which is what is trained on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trainer.chat.reasoning import TAGS, tags_of
from trainer.chat.template import (
    Template,
    TemplateUseError,
    TurnText,
    call_texts,
    opened_reasoning,
    result_text,
    turn_text,
)
from trainer.chat.tools import Schema, ToolCall

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

Piece = str | int
"""Text, or the id of a token that only the template may write."""

_KEPT_TEXTS = 1_024
"""Texts whose ids are kept: a template's own come again with every turn, a question with every episode of its group."""


class ChatRenderer:
    """Renders an episode into token ids by appending.

    `stop_ids` are the tokens at which generation of a turn stops: the template's end-of-turn tokens first, then
    the tokenizer's EOS where it is another one. `opened_reasoning` is the tag of the reasoning block that the template
    opens for the model ("" for none), `thinks` whether a turn may begin with one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Schema] = (),
    ) -> None:
        """Probe the template with dummy conversations. `template_kwargs` are the template's variables.

        `tools` are declared to the model; results then come back in the tool's role. Raises TemplateUseError where
        the template cannot be used so (`template.py`), or a turn does not end with a special token.
        """
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, template_kwargs or {}, tools)
        user = turn_text(self._template)
        result = result_text(self._template, user) if tools else user
        self._calls = call_texts(self._template, result) if tools else {}
        tags = tags_of(self._template.source)
        called = "".join(before + after for before, after, _ in self._calls.values())
        self._special_tokens = SpecialTokenEncoder(
            tokenizer, user.all + result.all + called + (tags.closing if tags else "")
        )
        self._user, self._result = self._split(user), self._split(result)
        self._style = result.style
        self._has_system_role = self._template.renders(["system", "user"])
        self.opened_reasoning = opened_reasoning(user.after)
        self.thinks = bool(self.opened_reasoning) or (tags is not None and tags.closing not in user.after)
        self._closing = f"\n{(tags or TAGS[0]).closing}\n\n"
        ends = [before[0] for before, _ in (self._result, self._user)]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(int(end) for end in (*ends, *eos)))
        marks = " ".join(tag for each in TAGS for tag in (each.opening, each.closing))
        kept = {index for index, token in tokenizer.added_tokens_decoder.items() if token.content in marks}
        kept |= {piece for piece in self._special_tokens.split(called) if isinstance(piece, int)}
        self._unspoken = (frozenset(tokenizer.all_special_ids) - kept) | set(self.stop_ids)

    @property
    def closing_ids(self) -> list[int]:
        """The ids that close a reasoning block in the model's place."""
        return self._special_tokens.encode(self._special_tokens.split(self._closing))

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, up to where the model begins to speak.

        `messages` carry `role` and `content`. A system message that the template drops is left out; where the
        template knows no system role, it opens the first user message. Raises TemplateUseError when the
        template refuses the roles, or loses any other message.
        """
        shown = messages if self._has_system_role else _system_folded(messages)
        pieces: list[Piece] = []
        for text in self._template.parts([message["role"] for message in shown]):
            pieces += [shown[text]["content"]] if isinstance(text, int) else self._special_tokens.split(text)
        return self._special_tokens.encode(pieces)

    def turn_ids(self, text: str) -> list[int]:
        """Return the ids of a turn that a demonstration says in the model's place, closed."""
        return self._special_tokens.encode([*self._close_reasoning(), text, self.stop_ids[0]])

    def call_ids(self, call: ToolCall) -> list[int]:
        """Return the ids of a turn that a demonstration says in the model's place: a call, in the model's format."""
        before, argument, after = self._call(call)
        split = self._special_tokens.split
        pieces = [*self._close_reasoning(), *split(before), argument, *split(after), self.stop_ids[0]]
        return self._special_tokens.encode(pieces)

    def call_text(self, call: ToolCall) -> str:
        """Return a call as the model is to write it, without the end of its turn."""
        return "".join(self._call(call))

    def user_ids(self, text: str, *, closed: bool) -> list[int]:
        """Return the ids that follow a turn: its end, a user's message and the start of the next turn.

        `closed` says that the turn's own ids end with one of `stop_ids`.
        """
        before, after = self._user
        return self._special_tokens.encode([*before[closed:], text, *after])

    def observation_ids(self, text: str, *, closed: bool) -> list[int]:
        """Return the ids that follow an action: the same with its result, which with tools is the tool's message."""
        before, after = self._result
        return self._special_tokens.encode([*before[closed:], self._style.write(text), *after])

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return the model's words: no special tokens but those of reasoning blocks and calls."""
        ids = [token for token in token_ids if token not in self._unspoken]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _split(self, turn: TurnText) -> tuple[list[Piece], list[Piece]]:
        before = self._special_tokens.split(turn.before)
        if not before or isinstance(before[0], str):
            raise TemplateUseError(
                "the chat template does not end the model's turn with a special token, so that generation could "
                f"not stop: the turn is followed by {turn.before!r}"
            )
        return before, self._special_tokens.split(turn.after)

    def _close_reasoning(self) -> list[Piece]:
        """What a demonstration says first: it closes the reasoning block that the template has opened."""
        return self._special_tokens.split(self._closing) if self.opened_reasoning else []

    def _call(self, call: ToolCall) -> tuple[str, str, str]:
        before, after, style = self._calls[call.name]
        ((_, argument),) = call.arguments.items()
        return before, style.write(str(argument)), after


def _system_folded(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Put a leading system message before the first user message's text."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return list(messages)
    system, first, *others = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *others]


class SpecialTokenEncoder:
    """The tokens that only a template may write: special ones, and added ones that the template uses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_text: str) -> None:
        added = {
            index: token
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content.strip() and token.content in template_text)
        }
        # A copy: encoding sets a flag on it, and the template's own tokens are made special in it.
        self._encoder = copy.deepcopy(tokenizer)
        self._encoder.add_tokens([_as_special(token) for token in added.values()], special_tokens=True)
        # Longest first, because one may begin with another.
        longest_first = sorted(added.items(), key=lambda item: -len(item[1].content))
        self._ids = [index for index, _ in longest_first]
        self._pattern = re.compile("|".join(_spelling(token) for _, token in longest_first) or r"(?!)")
        self._forbidden = frozenset(self._ids) - {tokenizer.unk_token_id}  # unknown words are content
        self._text_ids = lru_cache(maxsize=_KEPT_TEXTS)(self._encode_text)

    def split(self, template_text: str) -> list[Piece]:
        """Split a template's text into control tokens and plain text."""
        pieces: list[Piece] = []
        position = 0
        for match in self._pattern.finditer(template_text):
            if match.start() > position:
                pieces.append(template_text[position : match.start()])
            pieces.append(self._ids[(match.lastindex or 0) - 1])
            position = match.end()
        if position < len(template_text):
            pieces.append(template_text[position:])
        return pieces

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """Encode control tokens and texts. Neighbouring texts are encoded as one, as in a whole conversation."""
        ids: list[int] = []
        for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
            run = list(group)
            ids += self._text_ids("".join(map(str, run))) if is_text else map(int, run)
        return ids

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Encode a text without control tokens; lone surrogates, which no tokenizer takes, become `?`."""
        valid = text.encode("utf-8", "replace").decode("utf-8")
        encoded = self._encoder(valid, add_special_tokens=False, split_special_tokens=True, verbose=False)
        # A word-level model may hold a control token's spelling as a word of its own.
        return tuple(index for index in encoded["input_ids"] if index not in self._forbidden)


def _spelling(token: AddedToken) -> str:
    """Return the pattern, with one group, of a token and the white space that it swallows."""
    left, right = (r"\s*" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
    return f"{left}({re.escape(token.content)}){right}"


def _as_special(token: AddedToken) -> AddedToken:
    # Imported here, since the texts of prompts are used without transformers.
    from transformers import AddedToken

    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
