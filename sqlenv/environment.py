"""An environment as a person holds it: one episode at a time, in this process or on a server, by the same methods.

    env.reset(split="eval", seed=1)
    env.describe("growers")
    env.query("SELECT COUNT(*) FROM growers")
    env.answer(14)

Each call returns what the agent sees, a `SQLObservation`; printed, or as the last value of a notebook's cell, it reads
as a transcript does, and so does the environment itself: the episode so far. Who plays is `env_server`'s own
`SQLEnvironment` or client; here is what a person needs beside them.

Guarantees: what an agent may do wrong is an observation; what the caller does wrong (a step before `reset`, after the
end or after `close`, a value of the wrong type, a word that is none of those known) raises one sentence that names the
fix, and changes nothing. One thread at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import StrEnum
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, SupportsIndex, TypeVar

from env_server.dataset import Dataset, Split
from env_server.errors import ClosedError, EpisodeOverError, NoEpisodeError, SQLEnvError
from env_server.formatting import episode_html, episode_text
from env_server.types import ActionType, SQLAction, SQLObservation

if TYPE_CHECKING:
    from env_server.environment import EnvironmentFactory

E = TypeVar("E", bound=StrEnum)


class Player(Protocol):
    """Who plays: `SQLEnvironment`, or `SyncSQLEnvClient`."""

    def reset(self, seed: int | None, episode_id: str | None, question_id: str | None, split: Split) -> SQLObservation:
        """Start an episode."""

    def step(self, action: SQLAction) -> SQLObservation:
        """Take an action."""


class Environment:
    """Made by `sqlenv.make` and `sqlenv.connect`. A context manager; `close` gives back what it holds.

    `name` is the data set's, or the server's; `factory` makes environments of the data where it is here.
    """

    def __init__(
        self, name: str, player: Player, close: Callable[[], None], factory: EnvironmentFactory | None = None
    ) -> None:
        self._name = name
        self._drawn = player
        self._player = player
        self._close = close
        self._factory = factory
        self._closed = False
        self._episode: list[SQLObservation] = []

    def reset(
        self,
        seed: SupportsIndex | None = None,
        *,
        question_id: str | None = None,
        split: Split | str = Split.ALL,
        episode_id: str | None = None,
        question: str | None = None,
        database: str | None = None,
    ) -> SQLObservation:
        """Start an episode: the question, and the tables' names.

        It is about `question_id`, else about one of `split` ("train", "eval" or "all") drawn by `seed`; or about a
        `question` of your own on the data that is here, whose answer nobody judges. Databases without questions are
        looked around in without one; `database` names one where there are several. Raises SQLEnvError.
        """
        self._refuse_closed()
        try:
            number = None if seed is None else operator.index(seed)
        except TypeError:
            raise _wrong("reset", "seed=NUMBER", seed) from None
        for name, word in (("question_id", question_id), ("episode_id", episode_id)):
            if word is not None:
                _text("reset", f"{name}=TEXT", word)
        part = word_of(Split, "split", split)
        player = self._drawn
        without_questions = self._factory is not None and not self._factory.dataset.questions
        if question is not None or database is not None or without_questions:
            if question_id is not None or seed is not None or part is not Split.ALL:
                raise SQLEnvError(
                    "question_id, seed and split choose among the questions of the data: leave them out where you ask "
                    "your own, or look around in data without questions"
                )
            player = self._asking(_text("reset", "question=TEXT", question or ""), database)
        observation = player.reset(number, episode_id, question_id, part)
        self._player, self._episode = player, [observation]
        return observation

    def describe(self, table: str) -> SQLObservation:
        """Show a table's columns, types, keys and number of rows."""
        return self._take(ActionType.DESCRIBE, _text("describe", "a table's name", table))

    def sample(self, table: str) -> SQLObservation:
        """Show a few rows of a table."""
        return self._take(ActionType.SAMPLE, _text("sample", "a table's name", table))

    def query(self, sql: str) -> SQLObservation:
        """Run one read-only statement and show its rows."""
        return self._take(ActionType.QUERY, _text("query", "SQL", sql))

    def answer(self, value: str | int | float) -> SQLObservation:
        """Answer, which ends the episode: a value; `a, b, c`; or rows as `a | b`, one per line; SQL in `sql` mode."""
        if _is_number(value):
            value = str(value)  # of NumPy's numbers, too, whose repr says what they are
        what = "a number or text (a list as 'a, b, c'; rows as 'a | b', one per line)"
        return self._take(ActionType.ANSWER, _text("answer", what, value))

    def step(self, action: SQLAction | str) -> SQLObservation:
        """Take an action as an agent writes it, such as "QUERY SELECT 1"."""
        if isinstance(action, SQLAction):
            return self._step(action)
        kind, *argument = _text("step", "an action such as 'QUERY SELECT 1'", action).split(maxsplit=1) or [""]
        return self._take(kind, *argument)

    @property
    def observations(self) -> tuple[SQLObservation, ...]:
        """The episode so far, from the observation of its reset on."""
        return tuple(self._episode)

    @property
    def reward(self) -> float:
        """The sum of the episode's rewards."""
        return sum(observation.reward for observation in self._episode)

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return bool(self._episode) and self._episode[-1].done

    @property
    def dataset(self) -> Dataset:
        """The databases and the questions with their gold queries. Raises SQLEnvError where they are not here."""
        if self._factory is None:
            raise SQLEnvError(f"the questions stay on {self._name}: take the data here with sqlenv.make(PATH)")
        return self._factory.dataset

    def close(self) -> None:
        """Close the databases, or end the session; closing twice is allowed, going on afterwards is not."""
        if not self._closed:
            self._closed = True
            self._close()

    def _asking(self, question: str, database: str | None) -> Player:
        """Return who plays a typed question."""
        if self._factory is None:
            raise SQLEnvError(
                f"{self._name} asks its own questions: leave out question and database, or sqlenv.make(PATH) the data"
            )
        from env_server.data.loading import typed_question
        from env_server.environment import SQLEnvironment

        dataset = typed_question(question, self._factory.dataset.databases, database)
        return SQLEnvironment(dataset, self._factory.pool, self._factory.settings, self._factory.answer_mode)

    def _take(self, kind: str, argument: str = "") -> SQLObservation:
        return self._step(SQLAction(action_type=kind, argument=argument))

    def _step(self, action: SQLAction) -> SQLObservation:
        self._refuse_closed()
        if not self._episode:
            raise NoEpisodeError("no episode yet: call env.reset() first")
        if self.done:
            raise EpisodeOverError("the episode is over: env.reset() starts another one")
        observation = self._player.step(action)
        self._episode.append(observation)
        return observation

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("this environment is closed: make another one with sqlenv.make or sqlenv.connect")

    def __str__(self) -> str:
        return episode_text(self._episode) or repr(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "no episode" if not self._episode else f"step {len(self._episode) - 1}"
        return f"<sqlenv.Environment of {self._name}: {state}>"

    def _repr_html_(self) -> str | None:
        """None, which stands for the plain form, before the first episode."""
        return episode_html(self._episode) or None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def word_of(words: type[E], name: str, given: str) -> E:
    """Return the member of an enum that a word names, in any case. Raises SQLEnvError."""
    try:
        return words(given.lower())
    except (ValueError, AttributeError):
        known = ", ".join(repr(str(word)) for word in words)
        raise SQLEnvError(f"{name} is {given!r}: use one of {known}") from None


def _is_number(given: object) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool)


def _text(method: str, what: str, given: object) -> str:
    """Raises TypeError."""
    if not isinstance(given, str):
        raise _wrong(method, what, given)
    return given


def _wrong(method: str, what: str, given: object) -> TypeError:
    return TypeError(f"{method} takes {what}, not {given!r}, of type {type(given).__name__}")
