"""`sqlenv simulate`: from flags to a rehearsal, its figures, and a deployment that meets a target."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split, in_turn
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from inference.simulated.profile import Faults
from sqlenv.progress import reported
from trainer.chat.format import ChatFormat
from trainer.config import token_of
from trainer.rollout.client import EpisodeRequest, derive_seed, request_for
from trainer.rollout.environments import Environments, open_environments
from trainer.rollout.episodes import Episode
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.burst import Measured, measured
from trainer.simulation.figures import Figures, figures
from trainer.simulation.flags import SIMULATED, build_parser, deployment_of, environments_of, lengths_of, server_of
from trainer.simulation.like import PastRun, calibrated
from trainer.simulation.presets import PRESETS
from trainer.simulation.rehearsal import Deployment, Load, rehearse
from trainer.simulation.scripts import Script, made_up, played_by_the_oracle
from trainer.simulation.sizing import Plan, planned
from trainer.simulation.words import plan_text, summary, tables
from trainer.tiny import BASE_CHECKPOINT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCRIPTS = 512
"""Episodes that are made up, or played by the oracle; what is beyond that is played from these again."""
SIZING_S = 60.0
"""Of a target's episodes that a sizing rehearsal plays, so that its middle is steady."""
SIZING_EPISODES = (400, 20_000)
"""The fewest and the most."""
COMPLETION, CONTEXT, TURN = 16_384, 32_768, 2_048
"""Tokens of an episode, of a prompt with it, and of a turn, where no flag and no run says otherwise."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What is rehearsed, and where its numbers come from."""

    load: Load
    deployment: Deployment
    source: str


def run(argv: Sequence[str]) -> int:
    """Rehearse as the flags say; print the tables, and with --json one object on stdout and the tables on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.like and args.measure:
        parser.error("--like and --measure both say how fast the servers are: choose one")
    if args.target_episodes_per_second and args.env != SIMULATED:
        parser.error("--target_episodes_per_second looks for a number of environment servers: leave --env out")
    console, out = Console(stderr=True), Console(stderr=args.json)
    past = PastRun.read(args.like) if args.like else None
    policy = args.policy or (past.setting("model_name_or_path", None) if past else None) or str(BASE_CHECKPOINT)
    chat = ChatFormat(_tokenizer(policy))
    rehearsed = _settle(args, policy, chat, past, console)
    found = _play(args, chat, rehearsed, console)
    out.print(rehearsed.source, highlight=False, soft_wrap=True)
    out.print(*tables(found, rehearsed.deployment))
    plan = None
    if args.target_episodes_per_second:
        plan = _size(args.target_episodes_per_second, chat, rehearsed, found, console)
        out.print(plan_text(plan), highlight=False, soft_wrap=True)
    if args.json:
        print(json.dumps(summary(rehearsed.source, rehearsed.deployment, found, plan), sort_keys=True))  # noqa: T201
    return 0


def _settle(
    args: argparse.Namespace, policy: str, chat: ChatFormat, past: PastRun | None, console: Console
) -> Rehearsed:
    """Say what is rehearsed, calibrated where that was asked for."""
    preset = PRESETS[args.preset]
    budget = TokenBudget(
        args.max_completion_length or (past.setting("max_completion_length", COMPLETION) if past else COMPLETION),
        args.max_context_length or CONTEXT,
        args.max_turn_length or TURN,
    )
    deployment = deployment_of(args, preset.server, past.setting("max_concurrency", 64) if past else 64)
    scripts: Sequence[Script]
    if past is not None:
        console.print(f"the last steps of {args.like}, rehearsed until they take as long as they did", highlight=False)
        before = replace(deployment, max_concurrency=past.setting("max_concurrency", 64), faults=Faults())
        fitted = calibrated(past, chat, budget, before)
        deployment = replace(
            deployment,
            server=server_of(args, fitted.server),
            environments=environments_of(args, fitted.environments),
            batch=args.batch or past.batch,
        )
        scripts, source = past.scripts, f"{args.like}: its episodes, servers as fast as its were"
    elif args.measure:
        shown = _burst(args, policy, chat, budget, console)
        environments = replace(
            deployment.environments, call_s=shown.environments.call_s, spread=shown.environments.spread, network_s=0.0
        )
        deployment = replace(
            deployment, server=server_of(args, shown.server), environments=environments_of(args, environments)
        )
        scripts, source = shown.scripts, f"{args.measure}: measured just now, with environments in this process"
    elif args.env == SIMULATED:
        lengths = lengths_of(args, preset.lengths)
        scripts = made_up(chat, lengths, min(SCRIPTS, args.episodes), args.seed, args.step_budget)
        source = f"{args.preset}: {preset.source}"
    else:
        dataset = load_dataset(args.data)
        questions = in_turn(dataset.select(Split.ALL))[: min(SCRIPTS, args.episodes)]
        scripts = played_by_the_oracle(dataset, questions, AnswerMode.VALUE)
        source = f"{args.preset}: {preset.source}; real environments, played by the oracle"
    return Rehearsed(Load(scripts, args.episodes, budget, args.step_budget, args.seed), deployment, source)


def _play(args: argparse.Namespace, chat: ChatFormat, rehearsed: Rehearsed, console: Console) -> Figures:
    with reported("rehearsing", args.episodes, console) as progress:

        def advance(_: Episode) -> None:
            progress.advance()

        if args.env == SIMULATED:
            return figures(rehearse(chat, rehearsed.load, rehearsed.deployment, on_episode=advance))
        with closing(_environments(args, load_dataset(args.data))) as environments:
            return figures(rehearse(chat, rehearsed.load, rehearsed.deployment, environments, on_episode=advance))


def _size(target: float, chat: ChatFormat, rehearsed: Rehearsed, found: Figures, console: Console) -> Plan:
    def again(deployment: Deployment) -> Figures:
        least, most = SIZING_EPISODES
        episodes = int(min(most, max(least, target * SIZING_S, 4 * deployment.max_concurrency)))
        console.print(
            f"{deployment.replicas} replicas, {deployment.environments.servers} environment servers, "
            f"{deployment.max_concurrency} episodes in flight: {episodes} episodes ...",
            highlight=False,
        )
        # One client's work is not in the way of several: how many it takes follows from what a turn costs.
        return figures(rehearse(chat, replace(rehearsed.load, episodes=episodes), deployment, counts_work=False))

    return planned(target, rehearsed.deployment, found, again)


def _burst(args: argparse.Namespace, policy: str, chat: ChatFormat, budget: TokenBudget, console: Console) -> Measured:
    """Measure the servers with the policy on the data set's training questions."""
    from trainer.policy.served import ServedPolicy

    served = ServedPolicy.load(policy)
    engine = served.engine(args.measure, chat)
    dataset = load_dataset(args.data)
    questions = in_turn(dataset.select(Split.TRAIN))
    console.print(f"measuring {args.measure} with some hundred episodes", highlight=False)

    def requests(first: int, count: int) -> list[EpisodeRequest]:
        chosen = (questions[number % len(questions)] for number in range(first, first + count))
        return [request_for(question, derive_seed(args.seed, first + place)) for place, question in enumerate(chosen)]

    within = replace(budget, max_context=min(budget.max_context, served.context))
    with closing(_environments(args, dataset)) as environments:
        try:
            return measured(engine, environments, chat, within, requests)
        finally:
            asyncio.run(engine.aclose())


def _environments(args: argparse.Namespace, dataset: Dataset) -> Environments:
    settings = EnvSettings(step_budget=args.step_budget)
    where = "local" if args.env == SIMULATED else args.env
    return open_environments(where, token_of(args.env_token), dataset, settings, AnswerMode.VALUE)


def _tokenizer(policy: str) -> PreTrainedTokenizerBase:
    from trainer.policy.loading import resolve_policy, tokenizer_of

    return tokenizer_of(resolve_policy(policy))
