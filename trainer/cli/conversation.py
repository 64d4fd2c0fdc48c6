"""A terminal's side of a conversation: a question is played by each policy, and its turns are shown as they come."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from textwrap import indent

from rich.console import Console
from rich.text import Text

from env_server.types import ActionType
from trainer.cli.session import NO_ANSWER, PolicySession, Reply, written
from trainer.cli.terminal import line_reader
from trainer.report.tables import counted
from trainer.rollout.background import RolloutLoop
from trainer.rollout.episodes import Outcome, Turn

HELP = """\
Type a question about the data. It is explored with DESCRIBE, SAMPLE and QUERY, then answered.
tables shows the database; help; quit, or Ctrl-D, leaves. Ctrl-C interrupts an answer."""
_COMMANDS = ("help", "tables", "quit")

_INDENT = " " * 3
_MAX_TEXT = 600
"""Characters of what a policy writes beside its action."""


class Conversation:
    """Questions about one database, answered by policies one after the other. `close` ends them."""

    def __init__(self, policies: Sequence[PolicySession], database: str, console: Console) -> None:
        self._loop = RolloutLoop()
        self._policies = policies
        self._database = database
        self._console = console

    def tables(self) -> str:
        """Name the database and its tables."""
        return f"{self._database}: {', '.join(self._policies[0].tables(self._database))}"

    def ask(self, question: str) -> bool:
        """Show how each policy answers; return whether all did. KeyboardInterrupt leaves the question."""
        replies = [self._ask(policy, question) for policy in self._policies]
        return all(reply.answer for reply in replies)

    def converse(self) -> None:
        """Answer what is typed until the person leaves."""
        tables = self.tables()
        self._console.print(Text(HELP, style="dim"))
        self._console.print(Text(tables))
        read = line_reader("chat", lambda: [*_COMMANDS, *dict.fromkeys(re.findall(r"\w+", tables))])
        while True:
            try:
                entry = read("question> ")
            except (EOFError, KeyboardInterrupt):
                break
            match entry.casefold():
                case "":
                    continue
                case "help" | "?":
                    self._console.print(Text(HELP, style="dim"))
                case "tables":
                    self._console.print(Text(tables))
                case "quit" | "exit":
                    break
                case _:
                    try:
                        self.ask(entry)
                    except KeyboardInterrupt:
                        self._console.print(Text("interrupted", style="red"))
        self._console.print("Goodbye.")

    def _ask(self, policy: PolicySession, question: str) -> Reply:
        shown = count(1)

        def show(turn: Turn) -> None:
            _show_turn(self._console, next(shown), turn)

        if len(self._policies) > 1:
            self._console.rule(Text(policy.name), align="left")
        with self._console.status(f"{policy.name} is playing"):
            reply = self._loop.run(policy.ask(question, self._database, show))
        _show_reply(self._console, reply)
        return reply

    def close(self) -> None:
        """Release the policies."""
        for policy in self._policies:
            self._loop.run(policy.aclose())
        self._loop.close()


def _show_turn(console: Console, number: int, turn: Turn) -> None:
    def below(text: str, style: str = "") -> None:
        console.print(Text(indent(text, _INDENT), style=style))

    action, words = written(turn), turn.text.strip()
    if not turn.parseable:
        below("no action; taken as a query:", "dim")
    elif words != action:
        below(words if len(words) <= _MAX_TEXT else words[: _MAX_TEXT - 1] + "…", "dim")
    first, *more = action.split("\n")
    console.print(Text.assemble((f"{number:>2} ", "dim"), ("\n   ".join([first, *more]), "bold")))
    if turn.error:
        below(turn.error, "red")
    elif turn.action_type != ActionType.ANSWER:
        below(turn.result)


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
    console.print(Text(f"{counted(len(episode.turns), 'step')}, {counted(tokens, 'token')}{took}\n", style="dim"))
