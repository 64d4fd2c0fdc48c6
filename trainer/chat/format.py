"""How episodes are written for one policy: its prompt, its actions, what it is answered.

Used wherever a policy plays or learns, so that it sees the same words everywhere.

`ChatSettings` are what a user chooses, and what is kept with a policy; `ChatFormat` applies them to a tokenizer.

Reasoning: where turns have a budget for it, a reasoning block that is open when the budget is spent is closed in the
model's place, and the action follows. A template's switch for it is off unless somebody chose: reasoning blocks fill
the row, whose oldest turns, the exploration, are then dropped and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from env_server.types import AnswerMode, SQLAction, SQLObservation
from trainer.chat.actions import ParsedAction, format_action, parse_action, parse_call
from trainer.chat.prompts import observation_message, system_prompt
from trainer.chat.reasoning import is_thinking
from trainer.chat.renderer import ChatRenderer
from trainer.chat.template import TemplateUseError
from trainer.chat.tools import READERS, Schema, call_of, tool_schemas
from trainer.config import ActionFormat, EpisodeArguments, SQLEnvArguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINKING_TOKENS = 512
"""The default budget of a reasoning block, for policies whose template knows of reasoning blocks."""
THINKING_SWITCH = "enable_thinking"
"""The variable by which most templates that have a switch for thinking are switched."""
THINKING_OFF = (
    "thinking is off by default, since reasoning fills an episode's row and its oldest turns would not be trained; "
    f"--chat_template_kwargs '{{\"{THINKING_SWITCH}\": true}}', of train, warmup and evaluate, turns it on"
)
_PROBE = SQLAction(action_type="QUERY", argument="SELECT \"name\", 'it''s' FROM t\nWHERE a < 1 -- [x]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode as a chat: the opening message, then each action and the reply to it ("" after the last)."""

    opening: str
    turns: tuple[tuple[SQLAction, str], ...]
    masked_turns: frozenset[int] = frozenset()
    """Turns, by number, that a warm-up shows without learning to take them: mistakes, from which others recover."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How a policy is prompted.

    `max_thinking_length` in tokens: None is THINKING_TOKENS where the model thinks, else none; 0 closes at once a
    reasoning block that the template opens. `custom_system_prompt` replaces SQLEnv's own.
    """

    answer_mode: AnswerMode = AnswerMode.VALUE
    action_format: ActionFormat = ActionFormat.TEXT
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_thinking_length: int | None = None
    custom_system_prompt: str | None = None

    @classmethod
    def of(cls, arguments: EpisodeArguments, template_kwargs: Mapping[str, Any] | None) -> ChatSettings:
        """Return what a command's arguments say."""
        return cls(
            AnswerMode(arguments.answer_mode),
            ActionFormat(arguments.action_format),
            template_kwargs or {},
            arguments.max_thinking_length if isinstance(arguments, SQLEnvArguments) else None,
            arguments.custom_system_prompt,
        )

    @property
    def system_prompt(self) -> str:
        """The system message of every episode."""
        return self.custom_system_prompt or system_prompt(self.answer_mode, self.action_format)

    @property
    def tools(self) -> list[Schema]:
        """The tools that the chat template declares."""
        return tool_schemas(self.answer_mode) if self.action_format is ActionFormat.TOOLS else []


class ChatFormat:
    """Writes episodes as token ids, and reads actions out of turns. `examples` are shown before every question.

    `settings` are those in force: with the template's switch for thinking off, where it has one that is not set and
    reasoning was given no length; `lines` says so, one line, or nothing. `thinking_tokens` is the budget of a
    reasoning block, what closes it apart; None where turns have none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: ChatSettings | None = None,
        examples: Sequence[Conversation] = (),
    ) -> None:
        """Raises TemplateUseError when the tokenizer's chat template cannot be used with these settings."""
        settings = settings or ChatSettings()
        self.renderer = ChatRenderer(tokenizer, settings.chat_template_kwargs, settings.tools)
        self.lines: tuple[str, ...] = ()
        chosen = THINKING_SWITCH in settings.chat_template_kwargs or settings.max_thinking_length
        if self.renderer.thinks and not chosen:
            off = {**settings.chat_template_kwargs, THINKING_SWITCH: False}
            renderer = ChatRenderer(tokenizer, off, settings.tools)
            if not renderer.thinks:  # else the template has no such switch
                self.renderer, self.lines = renderer, (THINKING_OFF,)
                settings = replace(settings, chat_template_kwargs=off)
        self.settings = settings
        self._native = self._native_formats() if settings.tools else frozenset()
        budget = settings.max_thinking_length
        if budget is None:
            budget = THINKING_TOKENS if self.renderer.thinks else None
        elif budget == 0 and not self.renderer.opened_reasoning:
            budget = None  # there is no reasoning block to close
        self.thinking_tokens = budget
        self.closing_ids = tuple(self.renderer.closing_ids)
        self._shown = self._examples_ids(examples)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens at which generation of a turn stops."""
        return self.renderer.stop_ids

    @property
    def reasoning_length(self) -> int:
        """The most tokens that a turn has beside its action: a reasoning block and what closes it; else 0."""
        return 0 if self.thinking_tokens is None else self.thinking_tokens + len(self.closing_ids)

    def prompt_ids(self, opening: str) -> list[int]:
        """Return the ids of the prompt; `opening` is the user's message, from `first_message`."""
        if self._shown:
            return [*self._shown, *self.renderer.user_ids(opening, closed=False)]
        return self.renderer.prompt_ids(self._opening(opening))

    def reply_ids(self, observation: SQLObservation, *, closed: bool) -> list[int]:
        """Return the ids that follow a turn; see `ChatRenderer.observation_ids`."""
        return self.renderer.observation_ids(observation_message(observation), closed=closed)

    def turn_ids(self, action: SQLAction) -> list[int]:
        """Return the ids of a turn that a demonstration says in the model's place, closed."""
        if self.settings.action_format is ActionFormat.TOOLS:
            return self.renderer.call_ids(call_of(action, self.settings.answer_mode))
        return self.renderer.turn_ids(format_action(action.action_type, action.argument))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return a turn as it is read: with the tag of the reasoning block that the template opened, if it did."""
        return self.renderer.opened_reasoning + self.renderer.decode_turn(token_ids)

    def parse(self, text: str) -> ParsedAction:
        """Find the action in a turn's text. Never raises."""
        if self.settings.action_format is ActionFormat.TOOLS:
            return parse_call(text, self._native)
        return parse_action(text)

    def is_thinking(self, token_ids: Sequence[int]) -> bool:
        """Whether a turn that begins with these ids is still in a reasoning block."""
        return is_thinking(self.text_of(token_ids))

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Return a whole episode's ids and its loss mask: the policy's own tokens, masked turns apart."""
        ids = self.prompt_ids(conversation.opening)
        loss_mask = [False] * len(ids)
        for number, (action, reply) in enumerate(conversation.turns):
            turn = self.turn_ids(action)
            heard = self.renderer.observation_ids(reply, closed=True) if reply else []
            ids += [*turn, *heard]
            loss_mask += [number not in conversation.masked_turns] * len(turn) + [False] * len(heard)
        return ids, loss_mask

    def _opening(self, opening: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.settings.system_prompt}, {"role": "user", "content": opening}]

    def _examples_ids(self, examples: Sequence[Conversation]) -> list[int]:
        """Return worked episodes as they are shown before a question, up to the end of the last one's last turn."""
        ids: list[int] = []
        for example in examples:
            if ids:
                ids += self.renderer.user_ids(example.opening, closed=False)
            else:
                ids += self.renderer.prompt_ids(self._opening(example.opening))
            for action, reply in example.turns:
                ids += self.turn_ids(action)
                if reply:
                    ids += self.renderer.observation_ids(reply, closed=True)
            ids.pop()  # the end of the turn, which a user's message brings along
        return ids

    def _native_formats(self) -> frozenset[str]:
        """Name the formats that read the template's own way to write a call. Raises TemplateUseError."""
        call = call_of(_PROBE, self.settings.answer_mode)
        text = self.renderer.call_text(call)
        found = frozenset(name for name, read in READERS.items() if read(text) == call)
        if not found:
            raise TemplateUseError(
                f"the chat template calls tools in a format that is not known here, {text[:60]!r}; "
                "use --action_format text"
            )
        return found
