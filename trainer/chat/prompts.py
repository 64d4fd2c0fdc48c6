"""What the policy reads: the messages of an episode, and their token ids.

Training, evaluation and the warm-up data use this one module, so that a policy sees the same words everywhere.

`ChatRenderer` promises:

1. **Append only.** The ids after a turn of the model follow the ids it generated; nothing is rendered or tokenised
   again. A chat template that rewrites earlier turns (Qwen3 drops their thoughts) is used by appending all the
   same: the text between two turns is taken once, from a dummy conversation, and then filled in.
2. **Content is data.** A question or a database cell that spells a special token (`<|im_end|>`) is encoded as the
   characters it consists of; only the template's own text yields special tokens, so no cell can close a turn.
   Markup that a tokenizer spells with ordinary tokens cannot be told apart from text; its end-of-turn token can.
3. For a template that is itself append-only, prompt, turns and observations in sequence are the ids of the whole
   conversation rendered at once, as long as each turn's ids are what the tokenizer makes of its text. Where they
   are not, the sequence is still what the model saw and said, which is what is trained on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from env_server.errors import SQLEnvError
from env_server.types import AnswerMode, SQLObservation

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

_LAST_STEPS = 3
_MARKER = re.compile(r"MESSAGE(\d+)CONTENT")
_RULES = """\
You answer a question about a SQLite database that you cannot see. Explore it first. Take small steps.

Every message from you is exactly one action, and nothing else:
DESCRIBE table - show a table's columns. Example: DESCRIBE employees
SAMPLE table - show a few rows. Example: SAMPLE employees
QUERY sql - run one SELECT. Example: QUERY SELECT COUNT(*) FROM employees WHERE age > 30
ANSWER {argument}

After each action you see its result, then you choose the next one. Your steps are limited; ANSWER before they \
run out.

Strategy:
1. DESCRIBE the tables that the question is about. Never guess a name.
2. SAMPLE a table to see how its values are written.
3. QUERY for what the question asks. When you get an error, read it and correct the query.
4. {last}
"""
_ANSWER_VALUE = """\
value - give the answer and finish. Example: ANSWER 42
Write one value as it is, a list separated by commas (ANSWER Rome, Oslo), and rows as a | b, one row per line. \
Write [] when nothing fits."""
_ANSWER_SQL = """\
sql - give the query that answers the question and finish. \
Example: ANSWER SELECT COUNT(*) FROM employees WHERE age > 30"""


class TemplateUseError(SQLEnvError):
    """A tokenizer's chat template is missing or cannot be used by appending; the text says why."""


def system_prompt(mode: AnswerMode) -> str:
    """Return the system message that teaches the actions; under 350 tokens of a usual tokenizer."""
    if mode is AnswerMode.SQL:
        last = "ANSWER with the query once its result is what the question asks for."
        return _RULES.format(argument=_ANSWER_SQL, last=last).strip()
    last = "ANSWER with the values that your query returned."
    return _RULES.format(argument=_ANSWER_VALUE, last=last).strip()


SYSTEM_PROMPT = system_prompt(AnswerMode.VALUE)


def first_message(observation: SQLObservation) -> str:
    """Return the user message that opens an episode: the question and the table names."""
    return f"Question: {observation.question}\n{observation.schema_info}"


def opening_messages(mode: AnswerMode, first: str) -> list[dict[str, str]]:
    """Return the messages that an episode opens with; `first` is the user's, from `first_message`."""
    return [{"role": "system", "content": system_prompt(mode)}, {"role": "user", "content": first}]


def observation_message(observation: SQLObservation) -> str:
    """Return the user message after a step; the steps left are told only when few are."""
    text = f"Error: {observation.error}" if observation.error else observation.result
    left = observation.budget_remaining
    if observation.done or left > _LAST_STEPS:
        return text
    return f"{text}\n{left} {'step' if left == 1 else 'steps'} left."


class ChatRenderer:
    """Renders an episode into token ids by appending.

    `stop_ids` are the tokens at which generation of a turn stops: the template's end-of-turn token first, then
    the tokenizer's EOS where it is another one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Probe the template with a dummy conversation. `template_kwargs` are the template's variables.

        Raises TemplateUseError when there is no template, when it does not show what users say exactly once and
        in order, when the text between turns changes as the conversation grows, or when a turn of the model
        does not end with a special token.
        """
        if not tokenizer.chat_template:
            raise TemplateUseError("the tokenizer has no chat template; use an instruct model, or set one")
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        between, after = self._between_turns()
        self._controls = _Controls(tokenizer, between + after)
        self._before, self._after = self._controls.split(between), self._controls.split(after)
        end = self._before[0] if self._before else ""
        if isinstance(end, str):
            raise TemplateUseError(
                "the chat template does not end the model's turn with a special token, so that generation could "
                f"not stop: the turn is followed by {between!r}"
            )
        self._has_system_role = self._renders(["system", "user"])
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((end, *_eos_ids(tokenizer))))

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, up to where the model begins to speak.

        `messages` carry `role` and `content`. A system message that the template drops is left out; where the
        template knows no system role, it opens the first user message. Raises TemplateUseError when the
        template refuses the roles, or loses any other message.
        """
        shown = messages if self._has_system_role else _system_folded(messages)
        rendered = self._rendered([message["role"] for message in shown])
        pieces: list[str | int] = []
        for position, text in enumerate(_MARKER.split(rendered)):
            is_marker = position % 2 == 1
            pieces += [shown[int(text)]["content"]] if is_marker else self._controls.split(text)
        return self._controls.encode(pieces)

    def turn_ids(self, text: str) -> list[int]:
        """Return the ids of a turn that a demonstration says in the model's place, closed."""
        return self._controls.encode([text, self.stop_ids[0]])

    def observation_ids(self, text: str, *, closed: bool) -> list[int]:
        """Return the ids that follow a turn: its end, the user's message and the start of the next turn.

        `closed` says that the turn's own ids end with one of `stop_ids`.
        """
        before = self._before[1:] if closed else self._before
        return self._controls.encode([*before, text, *self._after])

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return the model's words, without special tokens."""
        ids = list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _between_turns(self) -> tuple[str, str]:
        """Find the text from the end of a model's turn to the user's message, and the text after that."""
        found = set()
        for turns in (1, 2, 3):
            rendered = self._rendered(["user", *["assistant", "user"] * turns])
            *_, between, _, after = _MARKER.split(rendered)
            found.add((between.lstrip(), after))
        if len(found) > 1:
            raise TemplateUseError("the chat template's text between turns depends on how long the dialogue is")
        return found.pop()

    def _renders(self, roles: Sequence[str]) -> bool:
        try:
            self._rendered(roles)
        except TemplateUseError:
            return False
        return True

    def _rendered(self, roles: Sequence[str]) -> str:
        """Render a conversation in which a marker stands for each message's content."""
        messages = [{"role": role, "content": _marker(index)} for index, role in enumerate(roles)]
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise TemplateUseError(f"the chat template cannot render {' / '.join(roles)}: {error}") from error
        shown = [int(index) for index in _MARKER.findall(rendered)]
        spoken = [index for index, role in enumerate(roles) if role != "system" or index in shown]
        if shown != spoken:
            raise TemplateUseError(
                f"the chat template must show each message once and in order; of {' / '.join(roles)} it shows "
                f"the messages {shown}"
            )
        return str(rendered)


class _Controls:
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

    def split(self, template_text: str) -> list[str | int]:
        """Split a template's text into control tokens and plain text."""
        pieces: list[str | int] = []
        position = 0
        for match in self._pattern.finditer(template_text):
            if match.start() > position:
                pieces.append(template_text[position : match.start()])
            pieces.append(self._ids[(match.lastindex or 0) - 1])
            position = match.end()
        if position < len(template_text):
            pieces.append(template_text[position:])
        return pieces

    def encode(self, pieces: Iterable[str | int]) -> list[int]:
        """Encode control tokens and texts. Neighbouring texts are encoded as one, as in a whole conversation."""
        ids: list[int] = []
        for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
            run = list(group)
            ids += self._encode_text("".join(map(str, run))) if is_text else map(int, run)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        """Encode a text without control tokens; lone surrogates, which no tokenizer takes, become `?`."""
        valid = text.encode("utf-8", "replace").decode("utf-8")
        encoded = self._encoder(valid, add_special_tokens=False, split_special_tokens=True, verbose=False)
        # A word-level model may hold a control token's spelling as a word of its own.
        return [index for index in encoded["input_ids"] if index not in self._forbidden]


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


def _eos_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _system_folded(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Put a leading system message before the first user message's text."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return list(messages)
    system, first, *others = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *others]


def _marker(index: int) -> str:
    return f"MESSAGE{index}CONTENT"
