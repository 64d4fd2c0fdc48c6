"""How much faster does the rollout client play than TRL's own loop?

    python -m benchmarks.rollout [--engine vllm simulated] [--episodes 64 256] [--latency_ms 0 50 200] [--quick]

Both sides in one run: the same policy, engine, questions and numbers of turns, and the same delays of the environment,
resets included, drawn around their mean (`rollout_sides.py`). `vllm` is a server on this machine, started by `sqlenv
inference`; `simulated` is one at the speed of a GPU (`--step_ms` for a token), whose policy is a script.
Rounds alternate; medians count. `times_faster` is our turns per second over those of TRL's loop. Prints one JSON line.
"""

from __future__ import annotations

import tempfile
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.engines import INFERENCE, VLLM_START_S
from benchmarks.harness import medians, parser, ratio, report, rounds
from benchmarks.rollout_sides import GROUP, Game, OurSide, Pace, ServerGeneration, SimulatedGeneration, TRLSide
from benchmarks.server_process import ServerProcess
from benchmarks.simulated import SimulatedEngine, TurnRequest
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from inference.engine import Engine
from inference.vllm.engine import VLLMEngine
from trainer.chat.format import ChatFormat
from trainer.models import load_policy
from trainer.tiny import BASE_CHECKPOINT

SAID_TOKENS = (8, 40)
"""The fewest and the most tokens of a scripted turn, its action apart."""


class Script:
    """A policy that says filler and an ANSWER; how long a turn is follows from the ids before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._filler = tokenizer("which ", add_special_tokens=False)["input_ids"][:1]
        ending = f"\nANSWER 0{tokenizer.eos_token}"
        self._answer = tuple(tokenizer(ending, add_special_tokens=False)["input_ids"])

    def __call__(self, request: TurnRequest) -> Sequence[int]:
        """Say a turn."""
        fewest, most = SAID_TOKENS
        length = fewest + (sum(request.prompt_ids) + len(request.prompt_ids)) % (most - fewest + 1)
        return (*self._filler * length, *self._answer)


@dataclass(slots=True)
class Bench:
    """One engine, with both sides on it."""

    name: str
    game: Game
    ours: OurSide
    trl: TRLSide
    forget: Callable[[], object]
    """Has the engine forget what it has cached."""

    def measure(self, episodes: int, latency_s: float, count: int) -> dict[str, object]:
        """Play `count` rounds of both sides."""
        self.game.pace.mean_s = latency_s

        def play(side: str, number: int) -> dict[str, float]:
            self.forget()
            played = self.ours.play(episodes, number) if side == "ours" else self.trl.play(episodes)
            per_s = {"turns_per_s": played.turns / played.seconds, "tokens_per_s": played.tokens / played.seconds}
            return {"s": played.seconds, "turns": played.turns, "tokens": played.tokens, **per_s}

        found = rounds(("trl", "ours"), count, play, f"{self.name}, {episodes} episodes, {1000 * latency_s:g} ms")
        faster = ratio(found["ours"], found["trl"], "turns_per_s")
        return {"times_faster": faster, **{side: medians(each) for side, each in found.items()}}


@contextmanager
def benches(args: Namespace) -> Iterator[list[Bench]]:
    """Both sides on each engine that is asked for."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, tokenizer = load_policy(args.policy)
        context = int(model.config.max_position_embeddings)
        chat = ChatFormat(tokenizer)
        dataset = load_dataset(args.data)
        game = Game(dataset, dataset.select(Split.TRAIN), chat, context, Pace(0.0, *args.turns), args.temperature)
        found: list[Bench] = []
        for name in args.engine:
            generation: ServerGeneration | SimulatedGeneration
            if name == "vllm":
                command = [*INFERENCE, "--model", args.policy]
                server = stack.enter_context(ServerProcess(command, scratch / "vllm.log", start_s=VLLM_START_S))
                make: Callable[[], Engine] = partial(
                    VLLMEngine, [server.url], stop_ids=chat.stop_ids, vocab_size=model.config.vocab_size
                )
                generation, forget = ServerGeneration(server.url, args.temperature), forgetting(server.url)
            else:
                script = Script(tokenizer)
                make = partial(SimulatedEngine, script, stop_ids=chat.stop_ids, step_s=args.step_ms / 1000)
                generation, forget = SimulatedGeneration(make, args.temperature), lambda: None
            ours = OurSide(game, make)
            stack.callback(ours.close)
            trl = TRLSide(game, args.policy, AutoTokenizer.from_pretrained(args.policy), generation, scratch)
            stack.callback(trl.close)
            ours.play(GROUP, 0)  # what runs first is slower
            trl.play(GROUP)
            found.append(Bench(name, game, ours, trl, forget))
        yield found


def forgetting(url: str) -> Callable[[], object]:
    """Return what empties a server's prefix cache."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache?reset_running_requests=true", method="POST")
    return lambda: urllib.request.urlopen(request, timeout=60).read()


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, "one short round")
    arguments.add_argument("--engine", nargs="+", choices=("vllm", "simulated"), default=["vllm", "simulated"])
    arguments.add_argument("--episodes", type=int, nargs="+", default=[64, 256], help=f"multiples of {GROUP}")
    arguments.add_argument("--latency_ms", type=float, nargs="+", default=[0, 50, 200], help="of the environment, mean")
    arguments.add_argument("--turns", type=int, nargs=2, default=[3, 7], help="the fewest and the most of an episode")
    arguments.add_argument("--policy", default=str(BASE_CHECKPOINT), help="a checkpoint's folder")
    arguments.add_argument("--data", default="synthetic")
    arguments.add_argument("--temperature", type=float, default=1.0)
    arguments.add_argument("--step_ms", type=float, default=5.0, help="of the simulated engine, for a token")
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    if args.quick:
        args.episodes, args.latency_ms, args.turns, args.rounds = [GROUP], [0, 20], [2, 4], 1
    with benches(args) as found:
        results = {
            bench.name: {
                str(episodes): {
                    f"{latency:g} ms": bench.measure(episodes, latency / 1000, args.rounds)
                    for latency in args.latency_ms
                }
                for episodes in args.episodes
            }
            for bench in found
        }
    report("rollout", rounds=args.rounds, turns=args.turns, results=results)


if __name__ == "__main__":
    main()
