"""The evaluations of a run: what is played and kept, and how one ends that the run has no time for."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

from env_server.dataset import Dataset, Split
from env_server.types import AnswerMode
from inference.engine import Completion, Sampling, Session
from inference.hf.engine import HFEngine
from trainer.chat.format import ChatFormat
from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import EvaluationSummary, Interval
from trainer.next_command import NextCommand
from trainer.ranks import Ranks
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import RolloutClient, RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.transcript import TokenBudget
from trainer.signals import StopSignals
from trainer.training.arguments import parse_train
from trainer.training.evaluations import RunEvaluations, evaluation_metrics


class Meanwhile:
    """The engine, but no request ends, and in the first one something happens."""

    def __init__(self, engine: HFEngine, happen: Callable[[], None]) -> None:
        self._engine = engine
        self._happenings = iter([happen])

    def session(self, key: int) -> Session:
        return MeanwhileSession(self._engine.session(key), self._happenings)

    async def aclose(self) -> None:
        pass


class MeanwhileSession:
    def __init__(self, session: Any, happenings: Iterator[Callable[[], None]]) -> None:
        self._session: AbstractAsyncContextManager[Any] = session
        self._happenings = happenings

    async def __aenter__(self) -> MeanwhileSession:
        await self._session.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._session.__aexit__(*error)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        for happen in self._happenings:
            happen()
        await asyncio.Event().wait()
        raise AssertionError


class Evaluating:
    """Evaluations of the pets' questions in a run's folder."""

    def __init__(
        self, path: Path, pets: Dataset, engine: HFEngine, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> None:
        self.folder = RunFolder.create(path, {})
        self.said = io.StringIO()
        self.questions = pets.select(Split.TRAIN)
        self.evaluations = RunEvaluations(
            self.folder, pets, "pets", self.questions, AnswerMode.VALUE, 0, ranks, Console(file=self.said)
        )
        self.loop = RolloutLoop()
        self.environments = LocalEnvironments(pets, threads=1)
        self._engine = engine
        self._tokenizer = tokenizer

    def client(self, happen: Callable[[], None] | None = None) -> RolloutClient:
        engine = self._engine if happen is None else Meanwhile(self._engine, happen)
        settings = RolloutSettings(TokenBudget(60, 512, 8), temperature=0.0)
        return RolloutClient(engine, self.environments, ChatFormat(self._tokenizer), settings)

    def during(self, step: int, stopping: StopSignals, happen: Callable[[], None] | None = None) -> bool:
        return self.evaluations.during_training(step, self.client(happen), self.loop, stopping) is not None

    def files(self) -> set[str]:
        return {path.name for path in self.folder.evaluations_path.iterdir()}

    def close(self) -> None:
        self.loop.close()
        self.environments.close()


@pytest.fixture
def evaluating(
    tmp_path: Path, pets: Dataset, engine: HFEngine, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Evaluating]:
    evaluating = Evaluating(tmp_path / "run", pets, engine, tokenizer, Ranks())
    yield evaluating
    evaluating.close()


@pytest.fixture
def training() -> Iterator[StopSignals]:
    with StopSignals("sqlenv train", NextCommand("", "")) as stopping:
        stopping.begin_training(Ranks())
        yield stopping


def test_evaluations_during_training_stand_beside_the_others(evaluating: Evaluating, training: StopSignals) -> None:
    evaluating.evaluations.policy("before", "base", 0, evaluating.client(), evaluating.loop)
    assert evaluating.during(2, training)
    assert evaluating.during(10, training)
    assert [e.label for e in evaluating.folder.evaluations()] == ["before"]
    assert [(step, e.label) for step, e in evaluating.folder.evaluations_during()] == [
        (2, "step-000002"),
        (10, "step-000010"),
    ]
    played = [evaluating.folder.evaluation_episodes(label) for label in ("before", "step-000002", "step-000010")]
    assert played[0] == played[1] == played[2], "the same questions, greedily, by the same policy"
    assert "after step 10: 0.0% of 3 questions" in evaluating.said.getvalue()
    assert "+0.0 points against before (" in evaluating.said.getvalue()


def test_what_is_known_is_told_and_taken_over(evaluating: Evaluating, training: StopSignals) -> None:
    evaluations = evaluating.evaluations
    assert evaluations.known(0) is None
    evaluations.policy("before", "base", 0, evaluating.client(), evaluating.loop)
    evaluating.during(2, training)
    ((_, kept),) = evaluating.folder.evaluations_during()
    assert evaluations.known(0) == evaluations.known(2) == kept.summary
    assert evaluations.known(3) is None
    assert not evaluations.take_over(3, "model", is_best=False)
    assert evaluations.take_over(2, "model", is_best=True)
    (after,) = (e for e in evaluating.folder.evaluations() if e.label == "after")
    assert after == replace(kept, label="after", policy="model", order=2, during=False, best_of=1)
    assert evaluating.folder.evaluation_episodes("after") == evaluating.folder.evaluation_episodes(kept.label)


def test_a_run_that_goes_on_from_a_step_forgets_what_came_after(evaluating: Evaluating, training: StopSignals) -> None:
    for step in (2, 4, 6):
        evaluating.during(step, training)
    arguments = TrainingArguments("unused", use_cpu=True, bf16=False)
    evaluating.evaluations.on_train_begin(arguments, TrainerState(global_step=4), TrainerControl())
    assert [step for step, _ in evaluating.folder.evaluations_during()] == [2, 4]
    assert len(evaluating.files()) == 4


def test_an_evaluation_is_left_when_the_run_is_to_stop(evaluating: Evaluating, training: StopSignals) -> None:
    assert not evaluating.during(2, training, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert evaluating.files() == set()
    assert training.agreed()
    assert not evaluating.during(2, training), "nor is it begun then"
    assert evaluating.evaluations.policy("after", "model", 2, evaluating.client(), evaluating.loop) is not None


class LeftByThePeer(Ranks):
    """A rank whose peer has left the evaluation."""

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        return items[:1]


def test_what_one_rank_has_left_is_kept_by_none(
    tmp_path: Path, pets: Dataset, engine: HFEngine, tokenizer: PreTrainedTokenizerBase, training: StopSignals
) -> None:
    evaluating = Evaluating(tmp_path / "run", pets, engine, tokenizer, LeftByThePeer())
    assert not evaluating.during(2, training)
    assert evaluating.files() == set()
    evaluating.close()


CPU = ("--model_name_or_path", "x", "--use_cpu", "true", "--bf16", "false")
EVERY_TWO = ("--eval_strategy", "steps", "--eval_steps", "2")
SUMMARY = EvaluationSummary(8, 2, 1, 3, 0.25, Interval(0.1, 0.5), {}, {}, 0.3, 4.5, 0.9, {}, {})


def test_the_best_checkpoint_is_the_most_successful_one() -> None:
    best = (*CPU, *EVERY_TWO, "--save_strategy", "best", "--load_best_model_at_end", "true")
    grpo, _ = parse_train(best)
    assert (grpo.metric_for_best_model, grpo.greater_is_better) == ("eval_success_rate", True)
    grpo, _ = parse_train([*best, "--metric_for_best_model", "success_low"])
    assert (grpo.metric_for_best_model, grpo.greater_is_better) == ("success_low", True)


def test_the_metrics_of_an_evaluation() -> None:
    numbers = (0.25, 0.1, 0.5, 0.3, 4.5, 0.9, 8, 1)
    names = ("success_rate", "success_low", "success_high", "reward", "steps", "parse_rate", "episodes", "failed")
    assert evaluation_metrics(SUMMARY) == {f"eval_{name}": n for name, n in zip(names, numbers, strict=True)}


@pytest.mark.parametrize(
    ("step", "known", "strategy", "on_start", "begins"),
    [
        (0, True, "no", False, True),  # what was played before training is told to the trackers
        (0, False, "no", True, False),  # no questions
        (4, False, "steps", False, True),  # it was cut short
        (4, True, "steps", True, False),
        (5, False, "steps", False, False),  # none was due
        (5, False, "steps", True, True),
        (2, False, "steps", False, False),  # before eval_delay
        (4, False, "no", False, False),
    ],
)
def test_where_training_begins_with_an_evaluation(
    step: int,
    known: bool,
    strategy: str,
    on_start: bool,
    begins: bool,
    evaluating: Evaluating,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = TrainingArguments(
        "runs/x", use_cpu=True, bf16=False, eval_strategy=strategy, eval_steps=2, eval_delay=3, eval_on_start=on_start
    )
    monkeypatch.setattr(RunEvaluations, "known", lambda *_: SUMMARY if known else None)
    state = TrainerState(global_step=step, eval_steps=2)
    evaluating.evaluations.on_train_begin(arguments, state, TrainerControl())
    assert arguments.eval_on_start is begins
