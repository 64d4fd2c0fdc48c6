"""The flags of `sqlenv simulate`, and the deployment that they describe."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from env_server.data.loading import SYNTAX
from inference.simulated.profile import Faults, ServerProfile
from sqlenv.parser import Parser, whole_number
from trainer.config import ENV_HELP, TOKEN_HELP
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.presets import PRESETS
from trainer.simulation.rehearsal import Deployment
from trainer.simulation.scripts import Lengths

SIMULATED = "simulated"
"""The value of `--env` for environments that are simulated too."""
LENGTHS = ("turns", "turn_tokens", "reply_tokens", "question_tokens", "spread")

DESCRIPTION = """\
Rehearse rollouts without a model, to size a deployment before renting it.

The real rollout client plays thousands of scripted episodes against a simulated inference server: a queue with
continuous batching, whose speed is a preset's, a run's (--like), or measured here (--measure). Environments are
simulated too, or real (--env). Waits are skipped where nothing real is waited for, so that an hour of rollouts
takes a minute; the client's own work counts as it takes on this machine.

It prints the throughput, the tails, how much of each part is used, and what is used up first. With
--target_episodes_per_second it looks for the inference replicas, environment servers, episodes in flight and
trainer ranks that reach it.
"""

EPILOG = """\
examples:
  sqlenv simulate                                             the tiny policy on a CPU
  sqlenv simulate --preset gpu-1.5b --replicas 4 --max_concurrency 1024 --episodes 4000
  sqlenv simulate --preset gpu-1.5b --target_episodes_per_second 40
  sqlenv simulate --preset gpu-1.5b --batch 256 --max_concurrency 256        what waiting for the last one costs
  sqlenv simulate --preset gpu-1.5b --replicas 4 --replica_uptime_s 600      a replica dies every few minutes
  sqlenv simulate --env ws://host:8000,ws://other:8000 --episodes 500        can these servers keep up?
  sqlenv simulate --like runs/first --max_concurrency 256                    the run's episodes, with more in flight
  sqlenv simulate --measure http://127.0.0.1:8001 --policy MODEL             after: sqlenv inference --model MODEL

how to read it: a part that is used to more than 85% is what limits the rest, and waits for it grow without bound.
If none is, the episodes in flight are the limit (--max_concurrency), or the batches are (--batch): each waits for
its last episode.

what it leaves out: the memory of the key-value cache, slower steps under long contexts, and what HTTP to a real
inference server costs the client. Presets that are marked as estimates were not measured: calibrate before money
depends on them."""


def build_parser() -> Parser:
    """The flags of `sqlenv simulate`."""
    parser = Parser(
        prog="sqlenv simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="tiny-cpu", help="where all that no flag says comes from: "
        + "; ".join(f"{name}: {_shown(each.source)}" for name, each in PRESETS.items()))  # fmt: skip
    add("--like", type=Path, metavar="RUN", help="a run's folder: play its episodes, on servers as fast as its were")
    add("--measure", metavar="URLS", help="vLLM servers that serve --policy: measure them in a short burst first")
    add("--policy", help="whose tokenizer and chat template are used: a folder, or a name on the Hub (default: the "
        "run's, else the tiny policy)")  # fmt: skip
    add("--episodes", type=whole_number(1), default=1000, help="default: 1000")
    add("--max_concurrency", type=whole_number(1), help="episodes in flight (default: the run's, else 64)")
    add("--batch", type=whole_number(1), help="episodes of a batch that all wait for, as a training step does "
        "(default: the run's, else no batches)")  # fmt: skip
    add("--target_episodes_per_second", type=above_zero, metavar="N", help="look for what reaches this")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object on stdout, and the text on stderr")
    engine = parser.add_argument_group("inference servers").add_argument
    engine("--replicas", type=whole_number(1), default=1, help="default: 1")
    engine("--max_sequences", type=whole_number(1), help="requests that a replica decodes at once")
    engine("--step_ms", type=above_zero, help="milliseconds of a decoding step of one request")
    engine("--step_ms_per_sequence", type=zero_or_more, help="what each further one adds")
    engine("--prefill_tokens_per_second", type=above_zero, help="prompt tokens, where they are in no cache")
    engine("--request_ms", type=zero_or_more, help="of the server's front end, for a request, one after another")
    engine("--replica_uptime_s", type=above_zero, help="after so long, on the average, a replica dies")
    engine("--replica_restart_s", type=zero_or_more, default=60.0, help="and is back (default: 60)")
    engine("--request_failure_share", type=share, default=0.0, help="of requests that are lost (default: 0)")
    place = parser.add_argument_group("environments").add_argument
    place("--env", default=SIMULATED, help=f"'{SIMULATED}' (default), or real ones, on an ordinary clock. {ENV_HELP}")
    place("--env_token", help=TOKEN_HELP)
    place("--data", default="synthetic", help=f"of real environments: {SYNTAX} (default: synthetic)")
    place("--environment_servers", type=whole_number(1), default=1, help="default: 1")
    place(
        "--environment_workers",
        type=whole_number(1),
        default=4,
        help="calls that a server works on at once (default: 4)",
    )
    place("--environment_ms", type=zero_or_more, help="of a worker, for a call, on the average (default: 5)")
    place("--environment_spread", type=zero_or_more, help="deviation of that over its mean (default: 1)")
    place("--environment_network_ms", type=zero_or_more, help="there and back (default: 1)")
    place("--environment_failure_share", type=share, default=0.0, help="of calls whose server fails (default: 0)")
    length = parser.add_argument_group(
        "lengths of made-up episodes, on the average (default: the preset's)"
    ).add_argument
    for name, what in (
        ("turns", "turns of an episode"),
        ("turn_tokens", "tokens of the policy in a turn, its thought included"),
        ("reply_tokens", "tokens of a reply"),
        ("question_tokens", "tokens of a question"),
    ):
        length(f"--{name}", type=above_zero, help=what)
    length("--length_spread", type=zero_or_more, dest="spread", help="deviation of these over their mean")
    length("--step_budget", type=whole_number(1), default=15, help="turns of an episode at most (default: 15)")
    length("--max_context_length", type=whole_number(1), help="tokens of prompt and completion (default: 32,768)")
    length("--max_completion_length", type=whole_number(1), help="tokens of an episode (default: 16,384)")
    length("--max_turn_length", type=whole_number(1), help="tokens of a turn (default: 2,048)")
    return parser


def deployment_of(args: argparse.Namespace, server: ServerProfile, max_concurrency: int) -> Deployment:
    """The deployment that the flags describe, on servers of this kind."""
    return Deployment(
        server_of(args, server),
        replicas=args.replicas,
        environments=environments_of(
            args,
            EnvironmentProfile(
                servers=args.environment_servers,
                workers=args.environment_workers,
                failure_share=args.environment_failure_share,
                seed=args.seed,
            ),
        ),
        faults=Faults(args.request_failure_share, args.replica_uptime_s or math.inf, args.replica_restart_s, args.seed),
        max_concurrency=args.max_concurrency or max_concurrency,
        batch=args.batch or 0,
    )


def server_of(args: argparse.Namespace, server: ServerProfile) -> ServerProfile:
    """A server with what the flags say of it: they win over what was measured, and over the preset."""
    said = {
        "max_sequences": args.max_sequences,
        "step_s": _seconds(args.step_ms),
        "step_s_per_sequence": _seconds(args.step_ms_per_sequence),
        "prefill_tokens_per_s": args.prefill_tokens_per_second,
        "request_s": _seconds(args.request_ms),
    }
    return replace(server, **{name: value for name, value in said.items() if value is not None})


def environments_of(args: argparse.Namespace, profile: EnvironmentProfile) -> EnvironmentProfile:
    """Environments with the times that the flags say."""
    said = {
        "call_s": _seconds(args.environment_ms),
        "spread": args.environment_spread,
        "network_s": _seconds(args.environment_network_ms),
    }
    return replace(profile, **{name: value for name, value in said.items() if value is not None})


def lengths_of(args: argparse.Namespace, lengths: Lengths) -> Lengths:
    """Lengths with what the flags say of them."""
    return replace(lengths, **{name: value for name in LENGTHS if (value := getattr(args, name)) is not None})


def above_zero(text: str) -> float:
    """Read a number above 0."""
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def zero_or_more(text: str) -> float:
    """Read a number that is not negative."""
    number = float(text)
    if not 0.0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must not be negative, and be finite; not {text}")
    return number


def share(text: str) -> float:
    """Read a share below 1."""
    number = float(text)
    if not 0.0 <= number < 1.0:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to below 1, not {text}")
    return number


def _shown(text: str) -> str:
    """A text as argparse is to show it: it formats help."""
    return text.replace("%", "%%")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
