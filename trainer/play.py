"""`sqlenv play`: a person plays an episode in the terminal, with the rewards that a policy would get."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from env_server.client import SyncSQLEnvClient
from env_server.data.loading import SYNTAX, load_dataset
from env_server.dataset import Split
from env_server.environment import SQLEnvironment
from env_server.factory import EnvironmentFactory
from env_server.types import AnswerMode, SQLObservation
from trainer.chat.parsing import parse_action
from trainer.config import ENV_HELP, TOKEN_HELP, token_of
from trainer.rollout.environments import LOCAL

HELP = """\
DESCRIBE table     columns, types, keys and row count
SAMPLE table       a few rows
QUERY select ...   one read-only statement
ANSWER value       ends the episode: a value; a, b, c; or rows as a | b, one per line
end a line with \\ to go on in the next one; quit leaves"""


def build_parser() -> argparse.ArgumentParser:
    """The flags of `sqlenv play`."""
    parser = argparse.ArgumentParser(prog="sqlenv play", description=__doc__)
    parser.add_argument("--data", default="synthetic", help=f"{SYNTAX} (default: synthetic)")
    parser.add_argument("--split", type=Split, choices=list(Split), default=Split.ALL, help="default: all")
    parser.add_argument("--question_id", help="play this question (default: a random one)")
    parser.add_argument("--seed", type=int, help="draw the question by this seed")
    parser.add_argument("--answer_mode", type=AnswerMode, choices=list(AnswerMode), default=AnswerMode.VALUE)
    parser.add_argument("--env", default=LOCAL, help=f"{ENV_HELP} A server has its own --data and --answer_mode.")
    parser.add_argument("--env_token", help=TOKEN_HELP)
    return parser


def run(argv: Sequence[str]) -> int:
    """Play one episode; returns 0 when it was played to its end, 1 when the player left."""
    args = build_parser().parse_args(argv)
    console = Console(highlight=False)
    with _open(args) as environment:
        observation = environment.reset(seed=args.seed, question_id=args.question_id, split=args.split)
        console.print(Panel(Text(f"{observation.question}\n\n{observation.schema_info}"), title="a hidden database"))
        console.print(Text(HELP, style="dim"))
        try:
            return _play(console, environment, observation)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 1


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[SQLEnvironment | SyncSQLEnvClient]:
    """Lend an environment in this process, or one on a server: that needs no data set here."""
    if args.env == LOCAL:
        dataset = load_dataset(args.data, answer_mode=args.answer_mode)
        with EnvironmentFactory(dataset, answer_mode=args.answer_mode) as factory:
            yield factory.make()
    else:
        with SyncSQLEnvClient(args.env, token_of(args.env_token)) as client:
            yield client


def _play(console: Console, environment: SQLEnvironment | SyncSQLEnvClient, observation: SQLObservation) -> int:
    total = 0.0
    while not observation.done:
        text = _read(console, observation)
        if not text:
            continue
        if text.lower() in ("quit", "exit"):
            return 1
        observation = environment.step(parse_action(text).action)
        total += observation.reward
        _show(console, observation, total)
    return 0


def _read(console: Console, observation: SQLObservation) -> str:
    lines = [console.input(Text(f"[{observation.budget_remaining} left] > ", style="bold"))]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(console.input("... "))
    return "\n".join(lines).strip()


def _show(console: Console, observation: SQLObservation, total: float) -> None:
    if observation.error:
        console.print(Text(observation.error, style="red"))
    if observation.result:
        console.print(Text(observation.result))
    parts = observation.metadata["reward_components"]
    sums = ("operational", "total")
    shown = ", ".join(f"{name} {value:+.2f}" for name, value in parts.items() if value and name not in sums)
    console.print(Text(f"reward {observation.reward:+.2f} ({shown or 'nothing'}), so far {total:+.2f}", style="dim"))
    if observation.done:
        console.print(Text(str(observation.metadata["verdict"]).replace("_", " "), style="bold"))
