"""Does a policy get better at databases of one's own, from questions and answers alone? GRPO beside its rivals.

    python -m benchmarks.own_databases --out DIR --data spider:PATH [--device cpu|cuda] [--seed 1]
    python -m benchmarks.own_databases --out DIR --quick

The databases of --data with the most questions stand for one's own; a quarter of their questions is held out, none of
them with the SQL of another. A policy warms up on the other databases, so that it has never seen these. From it start,
for --grpo_minutes each: GRPO on the questions and their answers, the SQL hidden; rejection sampling from the same
answers, that is rounds of its own play and of learning what was right in it; and more warm-up on the other databases.
The upper line learns from the gold SQL. Measured is greedy success on the held-out questions, and pass@k before and
after GRPO: whether it made what the policy knew more likely, or taught it something.

Phases, resuming, output and the sections of a recipe are those of `benchmarks/real_model.py`; {data} in a section of
warm-ups stands for the other databases here. --quick does all of it on the tiny policy and synthetic data.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.real_model import (
    WIDTH,
    Defaults,
    Experiment,
    experiment_parser,
    publish,
    read_asked,
    same_as_before,
)
from benchmarks.real_model_recipe import Keys, RecipeError, on_data, read_recipe
from benchmarks.real_model_table import ROWS, gather, print_tables
from benchmarks.server_process import ServerError
from env_server.data.loading import load_dataset
from env_server.data.splits import split_queries
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError
from trainer.eval.statistics import percent

RECIPE = Path("configs/real-model/own-databases.yaml")
OWN, OTHER = "own", "other"


def write_folders(dataset: Dataset, number: int, folder: Path) -> tuple[str, str]:
    """Write the databases with the most questions, and the others, as data folders; return their paths, own first."""
    counts = Counter(question.db_id for question in dataset.questions)
    own = {db_id for db_id, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:number]}
    paths = []
    for name in (OWN, OTHER):
        path = folder / name
        paths.append(str(path))
        if path.is_dir():
            continue
        partial = folder / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        questions = [question for question in dataset.questions if (question.db_id in own) == (name == OWN)]
        for db_id in {question.db_id for question in questions}:
            shutil.copyfile(dataset.databases[db_id], partial / f"{db_id}.sqlite")
        sides = split_queries([question.gold_sql for question in questions])
        with (partial / "questions.jsonl").open("w", encoding="utf-8") as file:
            for question, side in zip(questions, sides, strict=True):
                entry = {"id": question.question_id, "question": question.text, "sql": question.gold_sql}
                entry |= {"database": question.db_id, "split": side if name == OWN else "train"}
                entry |= {"evidence": question.evidence} if question.evidence else {}
                file.write(json.dumps(entry) + "\n")
        partial.rename(path)
    return paths[0], paths[1]


@dataclass
class OwnDatabases(Experiment):
    """The phases; `data` are one's own databases, `other` those that the policy starts from."""

    other: str = ""

    def run(self) -> None:
        """Run what is left of all phases, in order. Raises PhaseError."""
        recipe, answers = self.recipe, f"answers:{self.data}"
        start = self._warm_up("warmup", self.model, on_data(recipe.warmup, self.other))
        self._measure("before", start, sampled=True)
        policy, minutes = self._grpo(start, answers)
        self._measure("after_grpo", policy, sampled=True)
        self._measure("after_rejection", self._reject(start, answers, minutes))
        self._measure("after_control", self._control(start, on_data(recipe.control, self.other), minutes))
        self._measure("after_supervised", self._warm_up("supervised", start, {**recipe.warmup, "data": self.data}))

    def _measure(self, name: str, policy: str, *, sampled: bool = False) -> None:
        """Evaluate a policy greedily, and on request also with several samples of each question."""
        with self._server(policy) as server:
            self._evaluate(name, policy, self.recipe.evaluation, server)
            if sampled:
                self._evaluate(f"{name}_sampled", policy, self._sampling, server)

    def _reject(self, start: str, answers: str, minutes: float) -> str:
        """Play training questions, learn what was right in all rounds so far, and so on for the minutes."""
        assert self.recipe.replay is not None
        policy = start
        plays: list[str] = []
        while minutes > 0:
            number = len(plays) + 1
            with self._server(policy) as server:
                self._play(f"play_{number}", policy, {**self._sampling, "data": answers}, "train", server)
            plays.append(str(self.folder / f"play_{number}" / "out" / "episodes.jsonl"))
            minutes -= self.finished[f"play_{number}"].seconds / 60
            if minutes > 0 or number == 1:
                keys = {**self.recipe.replay, "data": answers, "rejection_sampling": plays}
                policy = self._warm_up(f"rejection_{number}", start, keys, max(minutes, 0.1))
                minutes -= self.finished[f"rejection_{number}"].seconds / 60
        return policy

    @property
    def _sampling(self) -> Keys:
        assert self.recipe.sampling is not None
        return self.recipe.sampling


def main() -> int:
    """Run what is left, print the table."""
    defaults = Defaults(RECIPE, questions=-1, grpo_minutes=60.0)
    data_help = "spider:PATH or another data set with more databases than --databases"
    parser = experiment_parser(__doc__, "", data_help, defaults)
    parser.add_argument("--databases", type=int, help="that are one's own (default: 15, with --quick 3)")
    args = parser.parse_args()
    asked = read_asked(parser, args, defaults)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    number = args.databases or (3 if args.quick else 15)
    try:
        recipe = read_recipe(asked["recipe"])
        if recipe.sampling is None:
            raise RecipeError("rejection sampling needs the sections sampling and replay")
        same_as_before(folder, {**asked, "databases": number})
        own, other = write_folders(load_dataset(asked["data"]), number, folder / "data")
        fields = {**asked, "recipe": recipe, "data": own, "other": other}
        experiment = OwnDatabases(folder, device=args.device, console=console, **fields)
        experiment.run()
    except (SQLEnvError, ServerError) as error:
        console.print(f"benchmarks.own_databases: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    asked |= {"databases": number, "device": args.device}
    result = {"benchmark": "own_databases", **asked, **gather(folder, experiment.finished)}
    after, before = (result["policies"][name]["success_rate"] for name in ("after_grpo", "before"))
    result["ratio"] = after / before if before else None
    result["sampled"] = {
        name: json.loads((folder / f"{name}_sampled" / "out" / "summary.json").read_bytes())["sampled"]
        for name in ("before", "after_grpo")
    }

    def show(shown: Console) -> None:
        print_tables(result, shown)
        for name, sampled in result["sampled"].items():
            rates = ", ".join(f"pass@{k} {percent(at['rate'])}" for k, at in sampled["pass_at"].items())
            voted = percent(sampled["voted"]["rate"])
            shown.print(f"{ROWS[name]}, {sampled['questions']} questions sampled: {rates}, voted {voted}")

    publish(result, folder / "result.json", folder / "table.txt", show, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
