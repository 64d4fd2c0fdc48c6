"""The evaluations of a run: played with its environments, written into its folder, said in the terminal.

Every rank plays its share; the main one keeps what all of them played.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from env_server.data.questions import Dataset, Question, Split
from env_server.types import AnswerMode
from trainer.environments import AnyEnvironments
from trainer.episodes import Episode, EpisodeRecord, Outcome, record
from trainer.evaluate import excluded_by_reason, play_scripted
from trainer.ranks import Ranks
from trainer.rollout import RolloutClient, check_failures, derive_seed, request_for
from trainer.run_files import Evaluation, RunFolder
from trainer.statistics import summarize
from trainer.summary_table import interval_text, percent

LABELS = ("random", "before", "after", "oracle")
"""The evaluations of a run in the order of the comparison table."""

OnEpisode = Callable[[Episode], None]


class RunEvaluations:
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
        self._questions = questions
        self._answer_mode = answer_mode
        self._seed = seed
        self._ranks = ranks
        self._console = console
        self.unseen_databases = all(len(splits) == 1 for splits in dataset.splits().values())

    def scripted(self, policy: str, environments: AnyEnvironments) -> None:
        """Play them with the random player or the oracle."""
        questions = self._questions
        if not questions:
            return
        with self._progress(policy, len(questions)) as advance:
            episodes = play_scripted(policy, environments, questions, self._answer_mode, self._seed, advance)
        self._keep(policy, policy, [record(e) for e in episodes])

    def policy(self, label: str, policy: str, client: RolloutClient, runner: asyncio.Runner) -> None:
        """Play this rank's share of the questions, and keep what all ranks played."""
        if not self._questions:
            return
        requests = [request_for(q, derive_seed(self._seed, i)) for i, q in enumerate(self._questions)]
        mine = self._ranks.share(requests)
        with self._progress(label, len(mine)) as advance:
            episodes = runner.run(client.play(mine, advance, batch=len(requests)))
        records = self._ranks.gather([record(e) for e in episodes])
        causes = [r.failure for r in records if r.outcome == Outcome.FAILED]
        check_failures(causes, len(records), client.max_failure_share)
        if len(causes) == len(records):
            text = f"evaluated {label}: nothing, for every episode failed; the first cause: {causes[0]}"
            self._console.print(text, highlight=False)
            return
        if self._ranks.is_main:
            self._keep(label, policy, records)

    @contextmanager
    def _progress(self, label: str, total: int) -> Iterator[OnEpisode]:
        with Progress(console=self._console, transient=True) as progress:
            bar = progress.add_task(f"evaluating: {label}", total=total)
            yield lambda _: progress.advance(bar)

    def _keep(self, label: str, policy: str, records: Sequence[EpisodeRecord]) -> None:
        summary = summarize(records, excluded_by_reason(self._dataset))
        evaluation = Evaluation(
            label=label,
            policy=policy,
            data=self._data,
            split=Split.EVAL.value,
            answer_mode=self._answer_mode.value,
            order=LABELS.index(label),
            summary=summary,
            unseen_databases=self.unseen_databases,
        )
        self._folder.write_evaluation(evaluation, records)
        self._console.print(
            f"evaluated {label}: {percent(summary.success_rate)} of {summary.episodes} questions "
            f"({interval_text(summary.interval)})",
            highlight=False,
        )
