"""The tokens that only a chat template may write, kept apart from content.

Content is data: a question or a database cell that spells a special token (`<|im_end|>`) is encoded as the characters
it consists of, so no cell can close a turn. Markup that a tokenizer spells with ordinary tokens cannot be told apart
from text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

Piece = str | int
"""Text, or the id of a token that only the template may write."""

_KEPT_TEXTS = 1_024
"""Texts whose ids are kept: a template's own come again with every turn, a question with every episode of its group."""


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
    # Whoever has a tokenizer has imported it; the texts of prompts are used without one.
    from transformers import AddedToken

    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
