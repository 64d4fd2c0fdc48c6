"""The evaluations of a run: played with its environments, written into its folder, printed in the terminal.

transformers decides when to evaluate on the way (`eval_strategy`, `eval_steps`, `eval_delay`), keeps the best
checkpoint (`load_best_model_at_end`, `save_strategy best`) and logs to the trackers; of its own evaluation, and TRL's,
nothing runs. All evaluations play the same questions, greedily, so that any two can be compared in pairs. Guarantees:

1. Evaluations leave training alone: with and without them, a run's weights are the same to the bit.
2. On several ranks each plays its share, all see the same numbers, and the main one writes.
3. A run that is asked to stop leaves the evaluation that it is in, keeps nothing of it, saves a checkpoint and stops.
   When it resumes, that evaluation is the first thing that it does.
4. What a resumed run had evaluated is not played again; evaluations of steps that it takes again are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from env_server.dataset import Dataset, Question, Split
from env_server.types import AnswerMode
from sqlenv.progress import reported
from trainer.eval.run_files import Evaluation, RunFolder
from trainer.eval.statistics import EvaluationSummary, compare, interval_text, percent, summarize
from trainer.evaluate import excluded_by_reason, play_scripted
from trainer.flags.configs import EVALUATION_METRICS
from trainer.ranks import Ranks
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import RolloutClient, derive_seed, request_for
from trainer.rollout.environments import AnyEnvironments
from trainer.rollout.episodes import Episode, EpisodeRecord, Outcome, record
from trainer.rollout.failures import Failures, check_failures
from trainer.signals import StopSignals

LABELS = ("random", "before", "after", "oracle")
"""The evaluations of a run in the order of the comparison table."""

OnEpisode = Callable[[Episode], None]
PREFIX = "eval_"
"""What transformers tells evaluations by; trackers and metrics.jsonl show `eval/` instead."""


def evaluation_metrics(summary: EvaluationSummary) -> dict[str, float]:
    """The numbers of an evaluation, under the names that transformers knows them by."""
    interval = summary.interval
    numbers = (summary.success_rate, interval.low, interval.high, summary.mean_reward, summary.mean_steps)
    rest = (summary.parse_rate, summary.episodes, summary.failed)
    return dict(zip(EVALUATION_METRICS, (*numbers, *rest), strict=True))


def worst_metrics(args: TrainingArguments) -> dict[str, float]:
    """The metrics of an evaluation that was cut short or failed: no checkpoint is the best by them."""
    name = args.metric_for_best_model
    return {} if name is None else {PREFIX + name.removeprefix(PREFIX): -inf if args.greater_is_better else inf}


class RunEvaluations(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Plays `questions`, greedily where a model plays, and keeps the outcome in `folder`."""

    def __init__(
        self,
        folder: RunFolder,
        dataset: Dataset,
        data: str,
        questions: Sequence[Question],
        answer_mode: AnswerMode,
        seed: int,
        ranks: Ranks,
        console: Console,
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._data = data
        self.questions = questions
        self._answer_mode = answer_mode
        self._seed = seed
        self._ranks = ranks
        self._console = console
        self.unseen_databases = all(len(splits) == 1 for splits in dataset.splits().values())

    def scripted(self, policy: str, environments: AnyEnvironments) -> None:
        """Play them with the random player or the oracle."""
        questions = self.questions
        if not questions:
            return
        if policy == "oracle" and not all(question.gold_sql for question in questions):
            self._console.print("the oracle is left out: it plays gold SQL, and questions have answers alone")
            return
        with self._progress(policy, len(questions)) as advance:
            episodes = play_scripted(policy, environments, questions, self._answer_mode, self._seed, advance)
        self._judge(policy, policy, [record(e) for e in episodes])

    def policy(
        self, label: str, policy: str, step: int, client: RolloutClient, loop: RolloutLoop
    ) -> EvaluationSummary | None:
        """Play with the policy as it is after `step`, and keep what all ranks played. Collective: every rank calls it.

        Returns None when there are no questions, or every episode failed.
        """
        if not self.questions:
            return None
        return self._judge(label, policy, self._play(label, client, loop), step)

    def during_training(
        self, step: int, client: RolloutClient, loop: RolloutLoop, stopping: StopSignals
    ) -> EvaluationSummary | None:
        """Play after a step, unless the run is to stop: then leave it, on all ranks, and return None.

        Collective: every rank calls it.
        """
        if stopping.agreed():
            return None
        label = step_label(step)
        records = self._play(label, client, loop, stopping)
        if len(records) < len(self.questions):
            return None
        return self._judge(label, f"step {step}", records, step, during=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with an evaluation: the one before training, for the trackers, or one that was cut short.

        transformers reads `eval_on_start` next. What was evaluated after this step is dropped: those steps are taken
        again.
        """
        step = state.global_step
        if self._ranks.is_main:
            for later, evaluation in self._folder.evaluations_during():
                if later > step:
                    self._folder.drop_evaluation(evaluation.label)
        known = self.known(step) is not None
        due = args.eval_on_start or (
            args.eval_strategy == IntervalStrategy.STEPS and step % state.eval_steps == 0 and args.eval_delay <= step
        )
        args.eval_on_start = known if step == 0 else not known and due

    def known(self, step: int) -> EvaluationSummary | None:
        """What was evaluated at a step; 0 is before training. Collective: every rank calls it."""
        evaluation = self._kept(step_label(step) if step else "before") if self._ranks.is_main else None
        return self._ranks.broadcast(evaluation.summary if evaluation else None)

    def take_over(self, step: int, policy: str, is_best: bool) -> bool:
        """Let the evaluation at a step be the one after training, if there is one. Collective: every rank calls it.

        `is_best`: the policy was chosen by these evaluations.
        """
        evaluation = self._kept(step_label(step)) if self._ranks.is_main else None
        if evaluation is not None:
            records = self._folder.evaluation_episodes(evaluation.label)
            best_of = len(self._folder.evaluations_during()) if is_best else 0
            order = LABELS.index("after")
            after = replace(evaluation, label="after", policy=policy, order=order, during=False, best_of=best_of)
            self._folder.write_evaluation(after, records)
            if is_best:
                self._console.print(f"kept the policy of step {step}, the best of {best_of}", highlight=False)
        return self._ranks.broadcast(evaluation is not None)

    def _kept(self, label: str) -> Evaluation | None:
        kept = (*self._folder.evaluations(), *(evaluation for _, evaluation in self._folder.evaluations_during()))
        return next((evaluation for evaluation in kept if evaluation.label == label), None)

    @contextmanager
    def _progress(self, label: str, total: int) -> Iterator[OnEpisode]:
        with reported(f"evaluating: {label}", total, self._console) as progress:
            yield lambda episode: progress.advance(episode.correct)

    def _play(
        self, label: str, client: RolloutClient, loop: RolloutLoop, stopping: StopSignals | None = None
    ) -> list[EpisodeRecord]:
        """Play, and return the episodes of all ranks; those of a rank that was told to stop are missing.

        Collective: every rank calls it.
        """
        requests = [request_for(q, derive_seed(self._seed, i)) for i, q in enumerate(self.questions)]
        mine = self._ranks.share(requests)
        with self._progress(label, len(mine)) as advance:
            playing = client.play(mine, advance, failures=Failures(len(requests), client.max_failure_share))
            episodes = loop.run(playing if stopping is None else _unless_stopped(playing, stopping))
        records = self._ranks.gather([record(e) for e in episodes])
        check_failures(_causes(records), len(requests), client.max_failure_share)
        return records

    def _judge(
        self,
        label: str,
        policy: str,
        records: Sequence[EpisodeRecord],
        step: int | None = None,
        *,
        during: bool = False,
    ) -> EvaluationSummary | None:
        """Summarize an evaluation, which the main rank writes and prints; None when every episode failed."""
        what = f"evaluated after step {step}" if during else f"evaluated {label}"
        causes = _causes(records)
        if len(causes) == len(records):
            self._say(f"{what}: nothing, since every episode failed; the first cause: {causes[0]}")
            return None
        summary = summarize(records, excluded_by_reason(self._dataset))
        if self._ranks.is_main:
            evaluation = Evaluation(
                label=label,
                policy=policy,
                data=self._data,
                split=Split.EVAL.value,
                answer_mode=self._answer_mode.value,
                order=LABELS.index("before" if during else label),
                summary=summary,
                unseen_databases=self.unseen_databases,
                step=step,
                during=during,
            )
            self._folder.write_evaluation(evaluation, records)
            against = self._against_before(records) if during else ""
            rate = f"{percent(summary.success_rate)} of {summary.episodes} questions"
            self._say(f"{what}: {rate} ({interval_text(summary.interval)}){against}")
        return summary

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _against_before(self, records: Sequence[EpisodeRecord]) -> str:
        if self._kept("before") is None:
            return ""
        paired = compare(self._folder.evaluation_episodes("before"), records)
        low, high = 100 * paired.interval.low, 100 * paired.interval.high
        return f", {100 * paired.mean:+.1f} points against before ({low:+.1f} to {high:+.1f})"


def step_label(step: int) -> str:
    """The label of the evaluation after a training step."""
    return f"step-{step:06d}"


def _causes(records: Sequence[EpisodeRecord]) -> list[str]:
    return [r.failure for r in records if r.outcome == Outcome.FAILED]


async def _unless_stopped(playing: Coroutine[Any, Any, list[Episode]], stopping: StopSignals) -> list[Episode]:
    """Play, or return nothing when the run is asked to stop meanwhile; an end at once goes through."""
    play = asyncio.create_task(playing)
    loop = asyncio.get_running_loop()
    with stopping.skippable(lambda: loop.call_soon_threadsafe(play.cancel)):
        try:
            return await play
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is None or this.cancelling():
                raise
            return []
