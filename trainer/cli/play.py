"""`sqlenv play`: a person plays an episode in the terminal, with the rewards that a policy would get.

What a person asks about the game (`help`, `tables`) is answered here and costs nothing. When the episode is
over or left, the gold query and the gold answer are shown, where they are known: they never leave a server.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from env_server.actions import ACTIONS
from env_server.client import SyncSQLEnvClient
from env_server.data.loading import DEFAULT_SPEC, SYNTAX, load_dataset
from env_server.dataset import Question, Split
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.judging.answers import format_answer
from env_server.types import AnswerMode, SQLObservation
from sqlenv.parser import Parser, choice
from trainer.chat.actions import parse_action
from trainer.cli.terminal import line_reader
from trainer.config import ENV_HELP, TOKEN_HELP, token_of
from trainer.rollout.environments import LOCAL

HELP = (
    "\n".join(f"{f'{kind} {each.argument.name}':<18} {each.shows}" for kind, each in ACTIONS.items())
    + """
help and tables cost nothing; quit, or Ctrl-D, leaves; Tab completes"""
)
_COMMANDS = ("help", "tables", "quit")
_GOLD_ROWS = 20
"""Rows of the gold answer that are shown."""


def build_parser() -> Parser:
    """The flags of `sqlenv play`."""
    parser = Parser(
        prog="sqlenv play",
        description="Play an episode in this terminal, with the rewards that a policy would get.\n"
        "To watch a policy play one: sqlenv chat MODEL --data DATA",
    )
    parser.add_argument("--data", help=f"{SYNTAX} (default: {DEFAULT_SPEC})")
    parser.add_argument("--split", type=choice(Split), choices=list(Split), default=Split.ALL, help="default: all")
    parser.add_argument("--question_id", help="play this question (default: a random one)")
    parser.add_argument("--seed", type=int, help="draw the question by this seed")
    parser.add_argument(
        "--answer_mode",
        type=choice(AnswerMode),
        choices=list(AnswerMode),
        help="what ANSWER carries: the value itself, or a query that yields it (default: value)",
    )
    parser.add_argument("--env", default=LOCAL, help=f"{ENV_HELP} A server has its own --data and --answer_mode.")
    parser.add_argument("--env_token", help=TOKEN_HELP)
    return parser


def run(argv: Sequence[str]) -> int:
    """Play one episode; returns 0 when it was played to its end, 1 when the player left."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for flag, given in (("--data", args.data), ("--answer_mode", args.answer_mode)):
        if given is not None and args.env != LOCAL:
            parser.error(f"{flag} and --env exclude each other: the server at {args.env} has its own. Leave one out")
    console = Console(highlight=False)
    with _open(args) as environment:
        observation = environment.reset(seed=args.seed, question_id=args.question_id, split=args.split)
        question = environment.question if isinstance(environment, SQLEnvironment) else None
        console.print(Panel(Text(f"{observation.question}\n\n{observation.schema_info}"), title="a hidden database"))
        console.print(Text(HELP, style="dim"))
        try:
            finished = _play(console, environment, observation)
        except (EOFError, KeyboardInterrupt):
            console.print()
            finished = False
        _show_gold(console, question)
        if not finished:
            console.print("Goodbye.")
        return 0 if finished else 1


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[SQLEnvironment | SyncSQLEnvClient]:
    """Open an environment in this process, or one on a server, which needs no data set here."""
    if args.env == LOCAL:
        answer_mode = args.answer_mode or AnswerMode.VALUE
        dataset = load_dataset(args.data or DEFAULT_SPEC, answer_mode=answer_mode)
        with EnvironmentFactory(dataset, answer_mode=answer_mode) as factory:
            yield factory.make()
    else:
        with SyncSQLEnvClient(args.env, token_of(args.env_token)) as client:
            yield client


def _play(console: Console, environment: SQLEnvironment | SyncSQLEnvClient, observation: SQLObservation) -> bool:
    """Play to the end, and return whether that was reached. Raises EOFError, KeyboardInterrupt."""
    total = 0.0

    def words() -> list[str]:
        """Actions, commands, and the names that the episode has shown."""
        return [*ACTIONS, *_COMMANDS, *dict.fromkeys(re.findall(r"\w+", observation.schema_info))]

    read = line_reader("play", words)
    while not observation.done:
        entry = read(f"[{observation.budget_remaining} left] > ")
        match entry.casefold():
            case "":
                continue
            case "help" | "?":
                console.print(Text(HELP, style="dim"))
            case "tables":
                console.print(Text(observation.schema_info, style="dim"))
            case "quit" | "exit":
                return False
            case _:
                observation = environment.step(parse_action(entry).action)
                total += observation.reward
                _show(console, observation, total)
    return True


def _show(console: Console, observation: SQLObservation, total: float) -> None:
    if observation.error:
        console.print(Text(observation.error, style="red"))
    if observation.result:
        console.print(Text(observation.result))
    parts = observation.reward_components.parts if observation.reward_components is not None else {}
    shown = ", ".join(f"{name.replace('_', ' ')} {value:+.2f}" for name, value in parts.items())
    console.print(Text(f"reward {observation.reward:+.2f} ({shown or 'nothing'}), so far {total:+.2f}", style="dim"))
    if observation.done:
        console.print(Text(str(observation.metadata["verdict"]).replace("_", " "), style="bold"))


def _show_gold(console: Console, question: Question | None) -> None:
    if question is None:
        console.print(Text("The gold query and answer stay on the server.", style="dim"))
        return
    rows = question.gold.rows
    more = len(rows) - _GOLD_ROWS
    answer = format_answer(rows[:_GOLD_ROWS]) + (f"\n... and {more:,} more rows" if more > 0 else "")
    for label, text in (("gold query", question.gold_sql), ("gold answer", answer)):
        if not text:
            continue
        console.print(Text.assemble((label, "dim"), "\n" if "\n" in text else "  ", text))
