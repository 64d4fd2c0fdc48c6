"""The batches that GRPOTrainer trains on: whose questions they ask, when they are played, and what of them is kept.

TRL asks for a batch when it needs one. `Batches` numbers them, draws their questions, has them played, and hands over
exactly one row for each row that TRL asks for. Invariants:

1. Nothing older than `staleness` updates is trained on. A batch is not begun before the weights of the step that is
   `staleness` before its own are on the servers; each turn keeps the version that it was sampled under, and a batch
   with an older one raises.
2. With a staleness of 0, a batch is played when TRL asks for it, with the weights that it is trained on. Above, the
   coming batches are played while the trainer trains on this one; new weights arrive while they are in flight.
3. A batch's questions and the seeds of its episodes depend on the run's seed, its number, and results of batches that
   had ended when it may have been begun. So a run that resumes asks for the same batches under the same seeds, those
   that were in flight when it stopped among them.
4. Every rank plays its own rows. What the trainer logs about a batch is about the episodes of all ranks.
5. A batch's groups are judged under the reward weights that TRL then adds its rewards up with, adaptive ones too.
6. Guided groups are in no number about unguided play, and do not decide the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import ceil
from operator import itemgetter
from statistics import median, stdev
from typing import Any

import torch
from trl import GRPOTrainer

from env_server.dataset import Dataset, Question
from trainer.flags.configs import SQLEnvConfig
from trainer.ranks import Ranks
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import EpisodeRequest, RolloutClient, derive_seed, request_for
from trainer.rollout.credit import turn_advantages, turn_rewards
from trainer.rollout.episodes import Episode, EpisodeRecord, has_signal, record
from trainer.rollout.failures import Failures, FailureWindow
from trainer.rollout.groups import PlayedGroups, most_spread, play_groups
from trainer.rollout.rewards import REWARD_FUNCTIONS, Reward, total_reward, weights_of
from trainer.rollout.timing import Phase, attribute
from trainer.training.adaptive import AdaptiveWeights, Give, GuidedStarts
from trainer.training.batch_stats import (
    BatchRecords,
    BatchTimes,
    batch_metrics,
    groups_of,
    guided_metrics,
    of_all_ranks,
    without_texts,
)
from trainer.training.questions import BatchShape, EpochOrder

SCALE_FLOOR = 1e-4
"""What TRL adds to the standard deviation that it divides advantages by."""

OnBatch = Callable[[int, Sequence[EpisodeRecord]], None]
"""Called on each rank with the training step and the episodes that the rank played."""


class StaleError(Exception):
    """A token is older than allowed; a bug of ours, since a batch is not begun before its time."""


@dataclass(frozen=True, slots=True)
class _Played:
    """What one rank played of a batch, on the clock of `time.perf_counter`."""

    rows: list[Episode]
    """Those that are trained on."""
    groups: PlayedGroups | None
    """Where groups were judged; else the rows are all there is, and a group may have some on another rank."""
    others: list[Episode]
    """Those that are not: of groups that were kept, then of groups that were replaced."""
    began: float
    ended: float


class Batches:
    """TRL's `rollout_func`, and the source of the prompts of its batches: see `SQLEnvTrainer`.

    `client` plays them; `on_batch` is told of each.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: EpochOrder,
        config: SQLEnvConfig,
        ranks: Ranks,
        loop: RolloutLoop,
        client: RolloutClient,
        rewards: Sequence[Reward] = REWARD_FUNCTIONS,
        adaptive: AdaptiveWeights | None = None,
        guided: GuidedStarts | None = None,
        on_batch: OnBatch = lambda _step, _records: None,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._config = config
        self._shape = BatchShape.of(config)
        self._weights = weights_of(rewards, config.reward_weights)
        self._adaptive = adaptive
        self._guided = guided
        self._rewards = rewards
        self._ranks = ranks
        self._loop = loop
        self._client = client
        self._failures = FailureWindow(client.max_failure_share)
        self.waits: Mapping[Phase, float] = {}
        """What the episodes of the last batch waited for, in seconds; of several ranks, the slowest one's."""
        self.decided: Sequence[bool] = []
        """Of each row of this rank in the last batch, whether correctness differs within its group."""
        self._on_batch = on_batch
        self._next: int | None = None
        self._begun: dict[int, Future[_Played]] = {}
        self._rows: list[Episode] = []
        self.token_advantages: list[list[float]] | None = None
        """Of the last batch's rows: what each completion token's advantage has beside its episode's; None: nothing."""

    def prepare(self, trainer: GRPOTrainer) -> list[list[dict[str, str]]]:
        """Play the batch that `trainer` is about to train on, if it is not played yet; return its rows' prompts.

        The engine has the weights of `trainer.state.global_step`. Collective: every rank calls it. Raises RolloutError,
        StaleError.
        """
        step, batch = trainer.state.global_step, self._number(trainer.state.global_step)
        asked = time.perf_counter()
        for number in range(batch, self._last_to_begin(step, batch, trainer.state.max_steps) + 1):
            if number not in self._begun:
                self._begun[number] = self._begin(number)
        played = self._loop.result(self._begun.pop(batch))
        self._next = batch + 1
        waits = attribute(episode.timing for episode in played.rows if episode.timing is not None)
        ranks = self._ranks.gather([(played.ended - played.began, waits, max(0.0, asked - played.ended))])
        seconds, self.waits, _ = max(ranks, key=itemgetter(0))
        times = BatchTimes(seconds=seconds, idle=min(idle for *_, idle in ranks))
        self._rows = played.rows
        if self._config.advantages == "turn":
            self.token_advantages = self._turn_advantages(self._weights_of(batch))
        self._conclude(trainer, batch, played, times)
        return [prompt_of(self._dataset.question(episode.question_id)) for episode in self._rows]

    def __call__(self, prompts: Sequence[object], trainer: GRPOTrainer) -> dict[str, Any]:
        """Hand over the rows of the batch that `prepare` played."""
        rows, self._rows = self._rows, []
        if len(rows) != len(prompts):
            raise RuntimeError(f"the batch has {len(rows)} rows, and TRL asks for {len(prompts)}")
        return trl_rows(rows)

    def _turn_advantages(self, weights: Sequence[float]) -> list[list[float]]:
        """Return the advantage of its turn for each completion token of this rank's rows, scaled as TRL scales those
        of episodes. Collective: every rank calls it.
        """
        size = self._shape.generations
        groups = [self._rows[first : first + size] for first in range(0, len(self._rows), size)]
        totals = [
            [sum(turn_rewards(each, self._rewards, weights)) for each in group if not each.failed] for group in groups
        ]
        of_batch = [total for rank in self._ranks.gather([totals]) for group in rank for total in group]
        rows = []
        for group, of_group in zip(groups, totals, strict=True):
            scale = 1.0
            if self._config.scale_rewards != "none":
                compared = of_group if self._config.scale_rewards == "group" else of_batch
                scale = (stdev(compared) if len(compared) > 1 else 0.0) + SCALE_FLOOR
            for episode, turns in zip(group, turn_advantages(group, self._rewards, weights), strict=True):
                rows.append([turns[turn] / scale if turns else 0.0 for turn in episode.row.turn_ids])
        return rows

    def _number(self, step: int) -> int:
        """The batch that comes next; the first of its step where a run begins, or goes on."""
        return self._shape.first_batch(step) if self._next is None else self._next

    def _last_to_begin(self, step: int, batch: int, steps: int) -> int:
        """The last batch that may be played with the weights of `step`, of those that the run will train on."""
        staleness = self._config.staleness
        if not staleness:
            return batch
        return max(batch, self._shape.first_batch(min(step + staleness + 1, steps)) - 1)

    def _begin(self, batch: int) -> Future[_Played]:
        whole = ceil(self._shape.rows * self._ranks.count / self._shape.generations)
        # Drawn here, at a point that every run comes to in the same state, and not when the loop gets to it.
        ids = self._order.draw(batch, whole)
        config = self._config
        if not (config.dynamic_sampling or config.rollout_downsampling > 1 or config.guided_starts):
            return self._loop.start(self._play_all(batch, ids, whole))
        give = None if self._guided is None else self._guided.of(batch)
        return self._loop.start(self._play_judged(batch, ids, whole, self._weights_of(batch), give))

    def _weights_of(self, batch: int) -> Sequence[float]:
        return self._weights if self._adaptive is None else self._adaptive.of(batch)

    async def _play_all(self, batch: int, ids: Sequence[str], whole: int) -> _Played:
        """Play this rank's rows of the first `whole` questions."""
        began = time.perf_counter()
        first = self._ranks.index * self._shape.rows
        rows = [ids[row // self._shape.generations] for row in range(first, first + self._shape.rows)]
        requests = [self._request(batch, row, question_id) for row, question_id in enumerate(rows)]
        episodes = await self._client.play(requests, failures=self._failures_of_batch())
        return _Played(episodes, None, [], began, time.perf_counter())

    async def _play_judged(
        self,
        batch: int,
        ids: Sequence[str],
        whole: int,
        weights: Sequence[float],
        give: Give | None,
    ) -> _Played:
        """Play this rank's groups, and others where they have no signal; of each, take what is trained on."""
        began = time.perf_counter()
        ranks, size = self._ranks, self._shape.generations
        count = self._shape.rows // size
        spare = ids[whole + ranks.index :: ranks.count]
        drawn = [
            *ids[count * ranks.index : count * (ranks.index + 1)],
            *spare[: int(self._config.dynamic_sampling * count)],
        ]

        def draw(number: int) -> list[EpisodeRequest]:
            own = [self._request(batch, number * size + member, drawn[number]) for member in range(size)]
            return [*own, *(self._candidate(batch, number, member, drawn[number]) for member in range(size, played))]

        def guide(number: int) -> list[EpisodeRequest]:
            if give is None or not (given := give(drawn[number])):
                return []
            members = [self._candidate(batch, number, member, drawn[number], "guided") for member in range(played)]
            return [replace(request, given=given) for request in members]

        played = size * self._config.rollout_downsampling
        failures = self._failures_of_batch()
        groups = await play_groups(self._client, draw, count, len(drawn) - count, failures, guide)
        rows: list[Episode] = []
        left_out: list[Episode] = []
        for group in groups.kept:
            chosen = set(most_spread(total_rewards(group.episodes, self._rewards, weights), size))
            for place, episode in enumerate(group.episodes):
                (rows if place in chosen else left_out).append(episode)
        others = [*left_out, *(episode for group in groups.replaced for episode in group.episodes)]
        return _Played(rows, groups, others, began, time.perf_counter())

    def _failures_of_batch(self) -> Failures:
        """Those of a batch of all ranks."""
        rows = self._shape.rows * self._config.rollout_downsampling
        return Failures(rows * self._ranks.count, self._client.max_failure_share)

    def _request(self, batch: int, row: int, question_id: str) -> EpisodeRequest:
        """The request of a rank's row. Those beyond the batch's own are in groups that replace others."""
        shape, step = self._shape, self._shape.step_of(batch)
        in_step = (batch - shape.first_batch(step)) * shape.rows + row
        return self._seeded(step, question_id, *((in_step,) if row < shape.rows else ("replacement", batch, row)))

    def _candidate(
        self, batch: int, group: int, member: int, question_id: str, kind: str = "candidate"
    ) -> EpisodeRequest:
        """The request of an episode that a group has beyond as many as are trained on, or that is guided."""
        return self._seeded(self._shape.step_of(batch), question_id, kind, batch, group, member)

    def _seeded(self, step: int, question_id: str, *place: str | int) -> EpisodeRequest:
        return request_for(
            self._dataset.question(question_id), derive_seed(self._config.seed, step, self._ranks.index, *place)
        )

    def _conclude(self, trainer: GRPOTrainer, batch: int, played: _Played, times: BatchTimes) -> None:
        """Check the batch of all ranks, learn from it, and have this rank's episodes logged."""
        step, size = trainer.state.global_step, self._shape.generations
        everything = [*played.rows, *played.others]
        for reward in self._rewards:
            reward(episode=everything)
        records = [record(episode, with_versions=True) for episode in everything]
        whole = of_all_ranks(self._ranks.gather([self._part(played, records)]), size)
        self._failures.add(whole.failures, len(whole.rows) + len(whole.others))
        metrics = batch_metrics(whole, size, times, step)
        if self._guided is not None:
            metrics |= guided_metrics(whole)
            ways = self._ranks.gather([self._guided.ways(everything)])
            self._guided.observe(batch, [episode for group in whole.guided for episode in group], ways)
        decided = [signal for group in groups_of(whole.rows, size) for signal in [has_signal(group)] * len(group)]
        self.decided = decided[self._ranks.index * self._shape.rows :][: self._shape.rows]
        if self._adaptive is not None:
            weights = self._adaptive.of(batch)
            trainer.reward_weights = torch.tensor(weights, dtype=torch.float32)
            names = [reward.name for reward in self._rewards]
            metrics |= {f"reward_weights/{name}": weight for name, weight in zip(names, weights, strict=True)}
            self._adaptive.observe(
                batch,
                [
                    [[e.rewards[name] or 0.0 for name in names] for e in group if not e.failed]
                    for group in whole.drawn_first
                ],
            )
        if metrics["rollout/staleness/max"] > self._config.staleness:
            raise StaleError(
                f"a token of step {step + 1} was sampled {metrics['rollout/staleness/max']:g} updates before it, and "
                f"--staleness {self._config.staleness} allows fewer"
            )
        # TRL averages them until its next log, with its own: the run's log and every tracker get both.
        for name, value in metrics.items():
            trainer._metrics["train"][name].append(value)
        # The trainer logs a step under the number it has after its update.
        self._on_batch(step + 1, records)

    def _part(self, played: _Played, records: Sequence[EpisodeRecord]) -> BatchRecords:
        """Return what this rank exchanges of a batch."""
        brief = [without_texts(each) for each in records]
        rows, others = brief[: len(played.rows)], brief[len(played.rows) :]
        if played.groups is None:
            return BatchRecords(rows, others)
        # The same objects, so that they are sent once.
        known = dict(zip(map(id, (*played.rows, *played.others)), brief, strict=True))
        part = BatchRecords(rows, others, replaced=len(played.groups.replaced))
        for group in (*played.groups.kept, *played.groups.replaced):
            if group.guided or group.number < self._shape.rows // self._shape.generations:
                (part.guided if group.guided else part.drawn_first).append([known[id(e)] for e in group.episodes])
        return part


def prompt_of(question: Question) -> list[dict[str, str]]:
    """TRL's prompt format: the question as a user message that also carries its id."""
    return [{"role": "user", "content": question.text, "question_id": question.question_id}]


def total_rewards(episodes: Sequence[Episode], rewards: Sequence[Reward], weights: Sequence[float]) -> list[float]:
    """Return each episode's weighted sum of rewards; of a failed one, the median, at neither end."""
    totals = [None if e.failed else total_reward(e, rewards, weights) for e in episodes]
    middle = median([total for total in totals if total is not None] or [0.0])
    return [middle if total is None else total for total in totals]


def trl_rows(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What TRL's `rollout_func` returns: one row for each episode, and the episodes for the reward functions."""
    rows = [episode.row for episode in episodes]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.env_mask for row in rows],
        "episode": list(episodes),
    }
