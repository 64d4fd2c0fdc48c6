"""A conversation in a terminal: what is shown of a policy's turns and of its reply, and how a question is left."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
from rich.console import Console

from env_server.types import AnswerMode
from tests.trainer.cli.conftest import Reciting
from trainer.cli.conversation import Conversation
from trainer.cli.session import PolicySession
from trainer.policy import PlaySettings

QUERY = "SELECT name FROM pets WHERE species = 'cat'"
SHOWN = f"""\
 1 DESCRIBE owners
   owners: 3 rows
   owner_id INTEGER primary key
   name TEXT
   city TEXT
   Cats, then.
   QUERY {QUERY}
 2 QUERY {QUERY}
   name
   Tom
   Kit
   no action; taken as a query:
 3 QUERY or so
   syntax error: near "or": syntax error
 4 ANSWER Tom, Kit

the answer: Tom, Kit
which this query returned:
{QUERY}
4 steps, """


@contextmanager
def conversing(policies: Sequence[PolicySession]) -> Iterator[tuple[Conversation, io.StringIO]]:
    out = io.StringIO()
    with closing(Conversation(policies, "pets", Console(file=out, width=120))) as conversation:
        yield conversation, out


def test_turns_and_the_reply(reciting: Reciting) -> None:
    said = ("DESCRIBE owners", f"Cats, then.\nQUERY {QUERY}", "or so", "ANSWER Tom, Kit")
    with conversing([reciting(*said)]) as (conversation, out):
        assert conversation.tables() == "pets: owners, pets"
        assert conversation.ask("Which cats are there?")
    assert out.getvalue().startswith(SHOWN)


def test_an_answer_that_is_a_query(reciting: Reciting) -> None:
    player = reciting(f"ANSWER {QUERY}", play=PlaySettings(answer_mode=AnswerMode.SQL))
    with conversing([player]) as (conversation, out):
        assert conversation.ask("Which cats are there?")
    assert f"the answer is what this query returns:\n{QUERY}\nname\nTom\nKit\n" in out.getvalue()


def test_one_of_two_without_an_answer(reciting: Reciting) -> None:
    silent = reciting("SAMPLE pets", name="silent", play=PlaySettings(step_budget=1))
    with conversing([reciting("ANSWER 2"), silent]) as (conversation, out):
        assert not conversation.ask("How many cats are there?")
    first, second = out.getvalue().split("silent ─", 1)
    assert first.startswith("parrot ─")
    assert "the answer: 2\nwhich rests on no query that succeeded\n1 step, " in first
    assert "no answer: the policy ran out of steps\n1 step, " in second


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_the_question_and_not_the_conversation(reciting: Reciting, keyboard: None) -> None:
    pressed = threading.Event()

    def press(turn: int) -> None:
        if turn == 1 and not pressed.is_set():
            pressed.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    player = reciting(*["SAMPLE pets"] * 50, "ANSWER 2", play=PlaySettings(step_budget=60), before=press)
    with conversing([player]) as (conversation, out):
        with pytest.raises(KeyboardInterrupt):
            conversation.ask("How many cats are there?")
        shown = len(out.getvalue())
        assert conversation.ask("How many cats are there?")
        assert "\n51 ANSWER 2\n" in out.getvalue()[shown:]
    assert pressed.is_set()
