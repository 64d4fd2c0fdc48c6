"""Does a pretrained language model get better at exploring real databases that it has never seen? The recipe, measured.

    python -m benchmarks.real_model --out DIR --data spider:PATH [--device cpu|cuda] [--seed 1] [--recipe FILE]
    python -m benchmarks.real_model --out DIR --quick

Measured is greedy success on the same questions about unseen databases: of the model as it comes, exploring and with
the whole schema in its prompt; after warm-up; after GRPO; and, as the control, after more warm-up for as long as GRPO
took. Beside it: what it costs in time and tokens. --quick does all of it on the tiny policy and synthetic data.

Each phase is a command of the project in a folder of its own under --out. A run that was killed goes on when the same
command is given again: what is finished is not done again, and what was running goes on from its newest checkpoint.
What is in the recipe is in its file; the table goes to stderr and to DIR/table.txt, one JSON line to stdout and to
DIR/result.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.real_model_phases import (
    Finished,
    Phase,
    evaluate,
    took_all_steps,
    train,
    warm_up,
    with_parent,
)
from benchmarks.real_model_recipe import Keys, Recipe, RecipeError, on_data, read_recipe, words
from benchmarks.real_model_table import gather, print_tables
from benchmarks.server_process import ROOT, SQLENV, ServerError, ServerProcess
from env_server.errors import SQLEnvError
from tests.small_model import SMALL_MODEL
from trainer.eval.run_files import replace_json
from trainer.tiny import BASE_CHECKPOINT

RECIPE = Path("configs/real-model/recipe.yaml")
QUICK = Path("configs/real-model/quick.yaml")
WIDTH = 120
"""Of the tables, where they go into a file."""
SERVER_START_S = 900.0
"""A large checkpoint on a busy machine."""
ESTIMATES = """\
What a phase takes with SmolLM2-135M on two CPU cores without AMX: evaluations of a trained policy, 330 questions on
vLLM, 3 to 5 minutes; of the model as it comes half an hour or more, for it talks until its tokens are used up (an
estimate, as is that text-to-SQL takes longer than the first); warm-up 30; GRPO --grpo_minutes, at 75 to 95 s a step;
the control as long again; each of six servers about 1 to start.
"""


@dataclass
class Experiment:
    """What all phases share."""

    folder: Path
    recipe: Recipe
    model: str
    data: str
    device: str
    seed: int
    questions: int
    grpo_minutes: float
    console: Console
    finished: dict[str, Finished] = field(default_factory=dict)

    def run(self) -> None:
        """Run what is left of all phases, in order. Raises PhaseError."""
        for policy in ("random", "oracle"):
            self._evaluate(policy, policy, self.recipe.evaluation)
        with self._server(self.model) as server:
            few_shot = {"few_shot": self.recipe.few_shot}
            one_query = {**self.recipe.text_to_sql, "protocol": "text_to_sql"}
            self._evaluate("zero_shot", self.model, self.recipe.evaluation, server)
            self._evaluate("few_shot", self.model, {**self.recipe.evaluation, **few_shot}, server)
            self._evaluate("text_to_sql", self.model, one_query, server)
            self._evaluate("text_to_sql_few_shot", self.model, {**one_query, **few_shot}, server)
        warmed = self._warm_up("warmup", self.model, self.recipe.warmup)
        with self._server(warmed) as server:
            self._evaluate("after_warmup", warmed, self.recipe.evaluation, server)
            if self.recipe.sampling is not None:
                self._play("sampling", warmed, self.recipe.sampling, "train", server)
        if self.recipe.replay is not None:
            own_play = str(self.folder / "sampling" / "out" / "episodes.jsonl")
            warmed = self._warm_up("replay", warmed, {**self.recipe.replay, "rejection_sampling": [own_play]})
            with self._server(warmed) as server:
                self._evaluate("after_replay", warmed, self.recipe.evaluation, server)
        policy, minutes = self._grpo(warmed, self.data)
        with self._server(policy) as server:
            self._evaluate("after_grpo", policy, self.recipe.evaluation, server)
        control = self._control(warmed, self.recipe.control, minutes)
        with self._server(control) as server:
            self._evaluate("after_control", control, self.recipe.evaluation, server)

    def _grpo(self, policy: str, data: str) -> tuple[str, float]:
        """Train by GRPO, stage by stage; return the policy and the minutes that its steps took."""
        minutes = 0.0
        for stage in self.recipe.grpo:
            name = f"grpo_{stage.name}"
            with self._server(policy, training=True) as server:
                phase, keys = self._begin(name), on_data(stage.keys, data)
                made = train(phase, keys, self._training_flags(policy), server.url, self.grpo_minutes * stage.share)
            policy = self._end(name, made)
            minutes += made.minutes
        return policy, minutes

    def _control(self, policy: str, keys: Keys, minutes: float) -> str:
        """Warm a policy up for as long as GRPO took; warn where that ended sooner of itself. Return the policy."""
        control = self._warm_up("control", policy, keys, minutes)
        if took_all_steps(Phase(self.folder / "control").checkpoint):
            had = self.finished["control"].minutes
            said = (
                f"WARNING: the control's steps were over after {had:.1f} of {minutes:.1f} minutes: less than GRPO had"
            )
            self.console.print(said, style="bold yellow", highlight=False)
        return control

    def _begin(self, name: str) -> Phase:
        phase = Phase(self.folder / name)
        if phase.finished is None:
            self.console.print(f"{name} ...", highlight=False)
        return phase

    def _end(self, name: str, made: Finished) -> str:
        self.finished[name] = made
        self.console.print(f"{name}: {made.seconds / 60:.1f} minutes", highlight=False)
        return str(self.folder / name / made.policy)

    def _evaluate(self, name: str, policy: str, keys: Mapping[str, Any], server: LazyServer | None = None) -> None:
        self._play(name, policy, {"episodes": self.questions, **keys}, "eval", server)

    def _play(self, name: str, policy: str, keys: Mapping[str, Any], split: str, server: LazyServer | None) -> None:
        phase = self._begin(name)
        flags = ["--policy", policy, "--split", split, "--seed", str(self.seed), *words(on_data(keys, self.data))]
        if server is not None and phase.finished is None:
            flags += ["--use_vllm", "--vllm_server_base_url", server.url()]
        self._end(name, evaluate(phase, flags))

    def _warm_up(self, name: str, model: str, keys: Mapping[str, Any], minutes: float = 0.0) -> str:
        return self._end(
            name, warm_up(self._begin(name), on_data(keys, self.data), self._training_flags(model), minutes)
        )

    def _training_flags(self, model: str) -> list[str]:
        flags = ["--model_name_or_path", model, "--seed", str(self.seed)]
        return [*flags, "--use_cpu", str(self.device == "cpu").lower()]

    @contextmanager
    def _server(self, model: str, training: bool = False) -> Iterator[LazyServer]:
        share = ["--share_gpu"] if training and self.device == "cuda" else []
        flags = ["--model", model, "--device", self.device, *share, *words(self.recipe.server)]
        server = LazyServer(flags, self.folder / "servers.log")
        try:
            yield server
        finally:
            server.stop()


class LazyServer:
    """A vLLM server of one policy, started when it is first asked for: not where all that needs it is finished."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        self._flags = flags
        self._log = log
        self._process: ServerProcess | None = None

    def url(self) -> str:
        """Where it answers. Raises ServerError."""
        if self._process is None:
            command = [*SQLENV, "inference", "--port", "{port}", *self._flags]
            # The launcher ends its server with itself.
            process = ServerProcess(command, self._log, start_s=SERVER_START_S, before_exec=with_parent(signal.SIGTERM))
            self._process = process.__enter__()
        return self._process.url

    def stop(self) -> None:
        """End it, if it was started."""
        if self._process is not None:
            self._process.__exit__(None, None, None)


def same_as_before(folder: Path, asked: Mapping[str, Any]) -> None:
    """Keep what was asked for, or check that it is what the folder was begun with. Raises RecipeError."""
    path = folder / "asked.json"
    if not path.is_file():
        replace_json(path, asked)
        return
    before = json.loads(path.read_bytes())
    if changed := [name for name in asked if before.get(name) != json.loads(json.dumps(asked[name]))]:
        raise RecipeError(f"{folder} was begun with another {', '.join(changed)}; choose another --out")


def publish(
    result: Mapping[str, Any], file: Path, table: Path, show: Callable[[Console], None], console: Console
) -> None:
    """Write a result as JSON and as a table; the console gets the table, too, and stdout the JSON in one line."""
    replace_json(file, result)
    with table.open("w", encoding="utf-8") as text:
        for shown in (console, Console(file=text, width=WIDTH)):
            show(shown)
    print(json.dumps(result))


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an experiment does unless its flags say otherwise; with --quick on the tiny policy and synthetic data."""

    recipe: Path
    questions: int
    grpo_minutes: float


def experiment_parser(
    description: str | None, epilog: str, data_help: str, defaults: Defaults
) -> argparse.ArgumentParser:
    """Return a parser with the flags of every experiment."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = "all" if defaults.questions < 0 else defaults.questions
    minutes = f"{defaults.grpo_minutes:g}"
    parser.add_argument("--out", type=Path, required=True, help="the folder of all phases; give it again to go on")
    parser.add_argument("--data", help=data_help)
    parser.add_argument("--model", help="a checkpoint's folder (default: what make small-model prepares)")
    parser.add_argument("--recipe", type=Path, help=f"default: {defaults.recipe}, with --quick {QUICK}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--questions", type=int, help=f"of each evaluation (default: {asked}, with --quick 24)")
    parser.add_argument(
        "--grpo_minutes", type=float, help=f"of GRPO, all stages (default: {minutes}, with --quick 0.5)"
    )
    parser.add_argument("--quick", action="store_true", help="the tiny policy on synthetic data, a few minutes")
    return parser


def read_asked(parser: argparse.ArgumentParser, args: argparse.Namespace, defaults: Defaults) -> dict[str, Any]:
    """Return what an experiment is to do, as its folder keeps it. Ends the process where flags do not fit."""
    for name in ("questions", "grpo_minutes"):
        if (number := getattr(args, name)) is not None and number <= 0:
            parser.error(f"--{name} must be positive, not {number}")
    data, model = args.data or ("synthetic" if args.quick else ""), args.model
    if not data:
        parser.error("--data is needed: spider:PATH, or --quick")
    if model is None:
        model = str(BASE_CHECKPOINT if args.quick else SMALL_MODEL)
        if not Path(model).is_dir():
            parser.error(f"there is no {model}: make small-model prepares it, or name another --model")
    file = args.recipe or ROOT / (QUICK if args.quick else defaults.recipe)
    return {
        "recipe": yaml.safe_load(file.read_text(encoding="utf-8")),
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
        "data": data,
        "seed": args.seed,
        "questions": args.questions or (24 if args.quick else defaults.questions),
        "grpo_minutes": args.grpo_minutes or (0.5 if args.quick else defaults.grpo_minutes),
    }


def main() -> int:
    """Run what is left, print the table."""
    defaults = Defaults(RECIPE, questions=330, grpo_minutes=35.0)
    data_help = "spider:PATH or another data set with unseen databases in its eval split"
    parser = experiment_parser(__doc__, ESTIMATES, data_help, defaults)
    args = parser.parse_args()
    asked = read_asked(parser, args, defaults)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        recipe = read_recipe(asked["recipe"])
        same_as_before(folder, asked)
        experiment = Experiment(folder, device=args.device, console=console, **{**asked, "recipe": recipe})
        experiment.run()
    except (SQLEnvError, ServerError) as error:
        console.print(f"benchmarks.real_model: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    result = {"benchmark": "real_model", **asked, "device": args.device, **gather(folder, experiment.finished)}
    after, before = (result["policies"][name]["success_rate"] for name in ("after_grpo", "zero_shot"))
    result["ratio"] = after / before if before else None
    publish(result, folder / "result.json", folder / "table.txt", lambda shown: print_tables(result, shown), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
