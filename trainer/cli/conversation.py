"""A terminal's side of a conversation: a question is played by each policy, and its turns are shown as they come."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent

from rich.console import Console
from rich.text import Text

from env_server.dataset import Dataset
from env_server.types import ActionType
from trainer.chat.actions import format_action
from trainer.cli.session import NO_ANSWER, Asked, PolicyPlayer, Reply
from trainer.rollout.background import RolloutLoop
from trainer.rollout.episodes import Outcome, Turn

_INDENT = " " * 3
_LONGEST_WORDS = 600
"""Characters of what a policy writes beside its action."""


class Conversation:
    """Questions about one database, answered by policies one after the other. `close` ends them."""

    def __init__(self, players: Sequence[PolicyPlayer], dataset: Dataset, database: str, console: Console) -> None:
        self._loop = RolloutLoop()
        self._asked = [Asked(player, dataset) for player in players]
        self._database = database
        self._console = console

    def tables(self) -> str:
        """Name the database and its tables."""
        return f"{self._database}: {', '.join(self._asked[0].tables(self._database))}"

    def ask(self, question: str) -> bool:
        """Show how each policy answers; return whether all did. KeyboardInterrupt leaves the question."""
        replies = [self._ask(asked, question) for asked in self._asked]
        return all(reply.answer for reply in replies)

    def close(self) -> None:
        """Release the policies."""
        for asked in self._asked:
            self._loop.run(asked.aclose())
        self._loop.close()

    def _ask(self, asked: Asked, question: str) -> Reply:
        console = self._console
        name = asked.player.name
        if len(self._asked) > 1:
            console.rule(Text(name), align="left")
        with console.status(f"{name} is playing"):
            reply = self._loop.run(asked.ask(question, self._database, _Turns(console).show))
        _show_reply(console, reply)
        return reply


class _Turns:
    """Shows turns, numbered."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def show(self, turn: Turn) -> None:
        self._shown += 1
        action = written(turn)
        words = turn.text.strip()
        if not turn.parseable:
            self._below("no action; taken as a query:", "dim")
        elif words != action:
            self._below(words if len(words) <= _LONGEST_WORDS else words[: _LONGEST_WORDS - 1] + "…", "dim")
        first, *more = action.split("\n")
        self._console.print(Text.assemble((f"{self._shown:>2} ", "dim"), ("\n   ".join([first, *more]), "bold")))
        if turn.error:
            self._below(turn.error, "red")
        elif turn.action_type != ActionType.ANSWER:
            self._below(turn.result)

    def _below(self, text: str, style: str = "") -> None:
        self._console.print(Text(indent(text, _INDENT), style=style))


def written(turn: Turn) -> str:
    """Return a turn's action in one form, whatever the policy's format is."""
    try:
        return format_action(turn.action_type, turn.argument)
    except ValueError:
        return f"{turn.action_type} {turn.argument}".strip()


def _show_reply(console: Console, reply: Reply) -> None:
    episode = reply.episode
    console.print()
    if episode.outcome is Outcome.FAILED:
        console.print(Text(f"the question could not be played: {episode.failure}", style="red"))
    elif not reply.answer:
        console.print(Text(NO_ANSWER[episode.outcome], style="red"))
    elif reply.rows:
        console.print(Text.assemble(("the answer is what this query returns:\n", "dim"), reply.query))
        console.print(Text(reply.rows, style="bold"))
    else:
        console.print(Text.assemble(("the answer: ", "dim"), (reply.answer, "bold")))
        console.print(Text(reply.basis, style="dim"))
        if reply.query:
            console.print(Text(reply.query))
    if reply.answer and reply.samples > 1:
        console.print(f"{reply.agreed} of {reply.samples} samples gave this answer")
    tokens = sum(episode.row.env_mask)
    took = "" if episode.timing is None else f", {episode.timing.ended - episode.timing.started:.1f} s"
    console.print(Text(f"{_counted(len(episode.turns), 'step')}, {_counted(tokens, 'token')}{took}\n", style="dim"))


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
