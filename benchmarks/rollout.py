"""How much faster does the rollout client play than TRL's own loop?

    python benchmarks/rollout.py [--engine vllm simulated] [--episodes 64 256] [--latency_ms 0 50 200] [--quick]

Both sides in one run: the same policy, engine, questions and numbers of turns, and the same delays of the environment,
resets included, drawn around their mean (`rollout_sides.py`). `vllm` is a server on this machine, started by `sqlenv
inference`; `simulated` is one at the speed of a GPU (`--step_ms` for a token), whose policy is a script.
Rounds alternate; medians count. `times_faster` is our turns a second over those of TRL's loop.

`ideal_s` is the longer of two: generation alone, which is the turns of all episodes without an environment; and the
longest episode, which is its delays and its turns in an idle engine. `share_of_ideal` is that over our seconds.

Rows are checked on both sides: each of the policy's turns is in the row as the environment got it; each of its tokens
has the logprob that the model gives it after exactly the row's tokens before it, or was said by the script after them.
Prints one JSON line; the status is 1 when a row is not exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from benchmarks.engines import INFERENCE, VLLM_START_S
from benchmarks.rollout_sides import (
    GROUP,
    Game,
    OurSide,
    Pace,
    Played,
    ServerGeneration,
    SimulatedGeneration,
    TRLSide,
    turns_of,
)
from benchmarks.server_process import ServerProcess
from benchmarks.simulated import SimulatedEngine, TurnRequest
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from inference.engine import Engine
from inference.vllm.engine import VLLMEngine
from inference.weights.check import token_logprobs
from trainer.chat.format import ChatFormat
from trainer.models import load_policy
from trainer.rollout.episodes import TokenRow
from trainer.tiny import BASE_CHECKPOINT

CHECKED = 32
"""Rows of a side whose logprobs are computed again."""
TOLERANCE = 1e-3
"""Of a logprob in float32."""
REPLAYS = 2
"""Of which the faster counts: an ideal has no bad luck."""
SAID_TOKENS = (8, 40)
"""The fewest and the most tokens of a scripted turn, its action apart."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was found in a side's rows."""

    rows: int
    tokens: int
    """Whose logprob, or whose being said, was checked."""
    worst: float
    """Difference of a logprob."""
    wrong: int
    """Rows that are not what was played."""


Check = Callable[[Sequence[TokenRow]], tuple[int, float, int]]
"""Checks the tokens of rows: how many, the largest difference, how many rows are wrong."""


class Script:
    """A policy that says filler and an ANSWER, and knows what it said after which ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._filler = tokenizer("which ", add_special_tokens=False)["input_ids"][:1]
        ending = f"\nANSWER 0{tokenizer.eos_token}"
        self._answer = tuple(tokenizer(ending, add_special_tokens=False)["input_ids"])
        self.said: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __call__(self, request: TurnRequest) -> Sequence[int]:
        """Say a turn; how long it is follows from the ids before it."""
        fewest, most = SAID_TOKENS
        length = fewest + (sum(request.prompt_ids) + len(request.prompt_ids)) % (most - fewest + 1)
        turn = self.said[request.prompt_ids] = (*self._filler * length, *self._answer)
        return turn

    def check(self, rows: Sequence[TokenRow]) -> tuple[int, float, int]:
        """Check that each turn was said after exactly what stands before it."""
        tokens = wrong = 0
        for row in rows:
            spans = turns_of(row)
            prefixes = [(*row.prompt_ids, *row.completion_ids[:start]) for start, _ in spans]
            turns = [tuple(row.completion_ids[start:end]) for start, end in spans]
            wrong += any(self.said.get(prefix) != turn for prefix, turn in zip(prefixes, turns, strict=True))
            tokens += sum(map(len, turns))
        return tokens, 0.0, wrong


def model_check(model: PreTrainedModel, temperature: float) -> Check:
    """Check against the model's own logprobs."""

    def check(rows: Sequence[TokenRow]) -> tuple[int, float, int]:
        tokens, worst, wrong = 0, 0.0, 0
        for row in rows[:: max(1, len(rows) // CHECKED)]:
            own = token_logprobs(model, row.prompt_ids, row.completion_ids, temperature).tolist()
            columns = zip(own, row.logprobs, row.env_mask, strict=True)
            differences = [abs(mine - theirs) for mine, theirs, learned in columns if learned]
            tokens += len(differences)
            worst = max(worst, *differences)
            wrong += max(differences) > TOLERANCE
        return tokens, worst, wrong

    return check


def exactness(played: Played, chat: ChatFormat, check: Check) -> Exactness:
    """Check a side's rows."""
    tokens, worst, wrong = check(played.rows)
    for row, texts in zip(played.rows, played.texts, strict=True):
        lengths = {len(row.completion_ids), len(row.logprobs), len(row.env_mask)}
        in_row = [chat.text_of(row.completion_ids[start:end]).strip() for start, end in turns_of(row)]
        wrong += len(lengths) > 1 or in_row != [text.strip() for text in texts]
    return Exactness(len(played.rows), tokens, worst, wrong)


def longest_s(ours: OurSide, game: Game, played: Played, turn: int) -> float:
    """Return the seconds of the longest episode in an idle engine."""
    requests = game.requests(len(played.rows), turn)
    tokens = [sum(row.env_mask) for row in played.rows]
    most = max(range(len(tokens)), key=tokens.__getitem__)
    token_s = ours.replay([played.rows[most]], [requests[most]]) / tokens[most]
    return max(
        sum(game.pace.delay_s(number, call) for call in range(len(texts) + 1)) + tokens[number] * token_s
        for number, texts in enumerate(played.texts)
    )


@dataclass(slots=True)
class Bench:
    """One engine, with both sides on it."""

    name: str
    game: Game
    ours: OurSide
    trl: TRLSide
    check: Check
    forget: Callable[[], object]
    """Has the engine forget what it has cached."""

    def measure(self, episodes: int, latency_s: float, rounds: int) -> dict[str, object]:
        """Play `rounds` of both sides."""
        pairs: list[tuple[Played, Played]] = []
        for turn in range(rounds):
            both: dict[str, Played] = {}
            for side in ("ours", "trl") if turn % 2 else ("trl", "ours"):
                print(
                    f"\r{self.name}, {episodes} episodes, {1000 * latency_s:g} ms, {side}   ", end="", file=sys.stderr
                )
                self.game.pace.mean_s = latency_s
                self.forget()
                both[side] = self.ours.play(episodes, turn) if side == "ours" else self.trl.play(episodes)
            pairs.append((both["ours"], both["trl"]))
        ours, trl = pairs[-1]
        generation = self._generation_alone_s(ours, rounds - 1)
        ideal = max(generation, longest_s(self.ours, self.game, ours, rounds - 1))
        found = {
            name: asdict(exactness(each, self.game.chat, self.check)) for name, each in (("ours", ours), ("trl", trl))
        }
        seconds = median(mine.seconds for mine, _ in pairs)
        return {
            "times_faster": round(median((m.turns / m.seconds) / (t.turns / t.seconds) for m, t in pairs), 2),
            "ours": _summary([mine for mine, _ in pairs]),
            "trl": _summary([theirs for _, theirs in pairs]),
            "generation_alone_s": round(generation, 3),
            "ideal_s": round(ideal, 3),
            "share_of_ideal": round(ideal / seconds, 3),
            "exact": all(each["wrong"] == 0 for each in found.values()),
            "checked": found,
        }

    def warm_up(self) -> None:
        """Play a little of each side, since what runs first is slower."""
        self.game.pace.mean_s = 0.0
        self.ours.play(GROUP, 0)
        self.trl.play(GROUP)

    def _generation_alone_s(self, played: Played, turn: int) -> float:
        requests = self.game.requests(len(played.rows), turn)
        seconds = []
        for _ in range(REPLAYS):
            self.forget()
            seconds.append(self.ours.replay(played.rows, requests))
        return min(seconds)


def _summary(played: Sequence[Played]) -> dict[str, float]:
    return {
        "s": round(median(each.seconds for each in played), 3),
        "turns": median(each.turns for each in played),
        "tokens": median(each.tokens for each in played),
        "turns_per_s": round(median(each.turns / each.seconds for each in played), 2),
        "tokens_per_s": round(median(each.tokens / each.seconds for each in played), 1),
    }


@contextmanager
def benches(args: argparse.Namespace) -> Iterator[list[Bench]]:
    """Both sides on each engine that is asked for."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, tokenizer = load_policy(args.policy)
        chat = ChatFormat(tokenizer)
        dataset = load_dataset(args.data)
        shortest, longest = args.turns
        pace = Pace(0.0, shortest, longest)
        context = int(model.config.max_position_embeddings)
        game = Game(dataset, dataset.select(Split.TRAIN), chat, context, pace, args.temperature)
        found: list[Bench] = []
        for name in args.engine:
            make: Callable[[], Engine]
            generation: ServerGeneration | SimulatedGeneration
            if name == "vllm":
                command = [*INFERENCE, "--model", args.policy]
                server = stack.enter_context(ServerProcess(command, scratch / "vllm.log", start_s=VLLM_START_S))
                make = _vllm_engine(server.url, chat, model)
                generation = ServerGeneration(server.url, args.temperature)
                check, forget = model_check(model, args.temperature), _forgetting(server.url)
            else:
                script = Script(tokenizer)
                make = _simulated_engine(script, args.step_ms / 1000, chat)
                generation = SimulatedGeneration(make, args.temperature)
                check, forget = script.check, _nothing
            ours = OurSide(game, make)
            stack.callback(ours.close)
            trl = TRLSide(game, args.policy, AutoTokenizer.from_pretrained(args.policy), generation, scratch)
            stack.callback(trl.close)
            found.append(Bench(name, game, ours, trl, check, forget))
        yield found


def _vllm_engine(url: str, chat: ChatFormat, model: PreTrainedModel) -> Callable[[], Engine]:
    return lambda: VLLMEngine([url], stop_ids=chat.stop_ids, vocab_size=model.config.vocab_size)


def _simulated_engine(script: Script, step_s: float, chat: ChatFormat) -> Callable[[], Engine]:
    return lambda: SimulatedEngine(script, stop_ids=chat.stop_ids, step_s=step_s)


def _forgetting(url: str) -> Callable[[], object]:
    request = urllib.request.Request(f"{url}/reset_prefix_cache?reset_running_requests=true", method="POST")
    return lambda: urllib.request.urlopen(request, timeout=60).read()


def _nothing() -> None:
    """Each batch has an engine of its own."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=("vllm", "simulated"), default=["vllm", "simulated"])
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 256], help=f"multiples of {GROUP}")
    parser.add_argument("--latency_ms", type=float, nargs="+", default=[0, 50, 200], help="of the environment, mean")
    parser.add_argument("--turns", type=int, nargs=2, default=[3, 7], help="the fewest and the most of an episode")
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="a checkpoint's folder")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--step_ms", type=float, default=5.0, help="of the simulated engine, for a token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures little")
    args = parser.parse_args()
    if args.quick:
        args.episodes, args.latency_ms, args.turns, args.rounds = [GROUP], [0, 20], [2, 4], 1
    results: dict[str, dict[str, dict[str, object]]] = {}
    exact = True
    with benches(args) as found:
        for bench in found:
            bench.warm_up()
            for episodes in args.episodes:
                for latency in args.latency_ms:
                    cell = bench.measure(episodes, latency / 1000, args.rounds)
                    exact &= bool(cell["exact"])
                    results.setdefault(bench.name, {}).setdefault(str(episodes), {})[f"{latency:g} ms"] = cell
    print(file=sys.stderr)
    print(json.dumps({"benchmark": "rollout", "rounds": args.rounds, "turns": args.turns, "results": results}))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
