"""The batches that TRL gets: one row for each row it asks for, numbered, seeded, as old as allowed, and told about."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from env_server.dataset import Dataset, Question
from env_server.types import ActionType, RewardComponents, SQLAction
from inference.engine import EngineError
from inference.hf.engine import HFEngine
from tests.rank_state import rank_state
from trainer.chat.format import ChatFormat
from trainer.flags.configs import SQLEnvConfig
from trainer.ranks import Ranks
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.credit import DISCOUNT
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, EpisodeRecord, Outcome, TokenRow, Turn, record
from trainer.rollout.failures import RolloutError
from trainer.rollout.rewards import REWARD_FUNCTIONS
from trainer.rollout.transcript import TokenBudget
from trainer.training.adaptive import AdaptiveWeights
from trainer.training.batch_stats import BatchRecords
from trainer.training.batches import Batches, StaleError, total_rewards
from trainer.training.questions import BatchShape, EpochOrder

Told = tuple[int, list[EpisodeRecord]]


def config(
    rows: int = 4,
    generations: int = 2,
    *,
    accumulation: int = 1,
    steps_per_generation: int | None = None,
    seed: int = 0,
    use_vllm: bool = False,
    **more: Any,
) -> SQLEnvConfig:
    per_batch = accumulation if steps_per_generation is None else steps_per_generation
    return SQLEnvConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_batch,
        num_generations=generations,
        seed=seed,
        use_vllm=use_vllm,
        report_to=[],
        **more,
    )


def trainer_at(step: int, steps: int = 100) -> Any:
    """What batches read of a GRPOTrainer, and where they leave their metrics."""
    state = SimpleNamespace(global_step=step, max_steps=steps)
    return SimpleNamespace(state=state, _metrics={"train": defaultdict(list)})


def episode_of(
    question_id: str,
    seed: int,
    *,
    correct: bool = True,
    version: int = 0,
    outcome: Outcome | None = None,
    operational: float = 0.0,
) -> Episode:
    result = outcome or (Outcome.CORRECT if correct else Outcome.WRONG)
    reward = RewardComponents(terminal=float(correct), operational=operational, total=float(correct) + operational)
    turns = (Turn("ANSWER 1", ActionType.ANSWER, "1", True, "", "", reward, version),)
    return Episode(
        episode_id=f"{question_id}#{seed}",
        question_id=question_id,
        db_id="d",
        question="",
        hardness="easy",
        family="f",
        outcome=result,
        turns=() if result is Outcome.FAILED else turns,
        row=TokenRow([1], [2], [0.0], [1], [0]),
        failure="gone" if result is Outcome.FAILED else "",
    )


class Script:
    """Plays what it is told to, and remembers what it was asked for, in order. Stands for the rollout client."""

    max_failure_share = 1.0

    def __init__(self, play: Callable[[EpisodeRequest], Episode]) -> None:
        self._play = play
        self.asked: list[list[EpisodeRequest]] = []

    async def play(self, requests: Sequence[EpisodeRequest], **_: Any) -> list[Episode]:
        self.asked.append(list(requests))
        return [self._play(request) for request in requests]


class Dealt(EpochOrder):
    """Questions q0, q1, ... in the order of batches."""

    def __init__(self, count: int = 1000) -> None:
        self._count = count

    def draw(self, batch: int, count: int) -> Sequence[str]:
        ids = [f"q{index}" for index in range(self._count)]
        start = batch * count
        return [*ids[start : start + count], *ids[:start], *ids[start + count :]]


class AnyQuestion:
    """A data set that has every question."""

    def question(self, question_id: str) -> Question:
        return SimpleNamespace(  # type: ignore[return-value]
            question_id=question_id,
            db_id="d",
            hardness=SimpleNamespace(value="easy"),
            family="f",
            text="?",
            gold_sql="",
        )


@pytest.fixture
def loop() -> Iterator[RolloutLoop]:
    with RolloutLoop() as loop:
        yield loop


def replace_flags(grpo: SQLEnvConfig, flags: dict[str, Any]) -> SQLEnvConfig:
    changed = copy.copy(grpo)
    for name, value in flags.items():
        setattr(changed, name, value)
    return changed


def batches_of(
    script: Any,
    loop: RolloutLoop,
    grpo: SQLEnvConfig | None = None,
    filled: dict[str, Any] | None = None,
    order: EpochOrder | None = None,
    ranks: Ranks | None = None,
    told: list[Told] | None = None,
    adaptive: AdaptiveWeights | None = None,
    guided: Any = None,
) -> Batches:
    grpo = replace_flags(grpo or config(), filled or {})
    return Batches(
        AnyQuestion(),  # type: ignore[arg-type]
        order or Dealt(),
        grpo,
        ranks or Ranks(),
        loop,
        script,
        adaptive=adaptive,
        guided=guided,
        on_batch=lambda step, episodes: None if told is None else told.append((step, list(episodes))),
    )


def questions_of(prompts: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    return [prompt[-1]["question_id"] for prompt in prompts]


def test_a_batch_is_played_when_it_is_asked_for_and_handed_over_once(loop: RolloutLoop) -> None:
    told: list[Told] = []
    script = Script(lambda request: episode_of(request.question_id, request.seed, version=3))
    batches = batches_of(script, loop, told=told)
    trainer = trainer_at(3)
    prompts = batches.prepare(trainer)
    assert questions_of(prompts) == ["q6", "q6", "q7", "q7"]
    assert len(script.asked) == 1, "nothing is played ahead"
    rows = batches(prompts, trainer)
    assert set(rows) == {
        *("prompt_ids", "completion_ids", "logprobs", "env_mask", "episode"),
    }
    assert {len(values) for values in rows.values()} == {4}
    ((step, episodes),) = told
    assert step == 4, "the step that these episodes are for"
    assert [e.question_id for e in episodes] == questions_of(prompts)
    with pytest.raises(RuntimeError, match="0 rows"):
        batches(prompts, trainer)


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "steps"),
    [(1, 1, [0, 1, 2, 3]), (4, 4, [0, 1, 2, 3]), (4, 2, [0, 0, 1, 1, 2]), (1, 2, [0, 2, 4]), (2, 4, [0, 2, 4])],
)
def test_the_batches_of_a_run_and_of_one_that_resumes_are_the_same(
    accumulation: int, steps_per_generation: int, steps: list[int], loop: RolloutLoop
) -> None:
    grpo = config(accumulation=accumulation, steps_per_generation=steps_per_generation)
    shape = BatchShape.of(grpo)
    assert [shape.step_of(batch) for batch in range(len(steps))] == steps

    def played(from_batch: int) -> list[list[EpisodeRequest]]:
        script = Script(lambda request: episode_of(request.question_id, request.seed, version=steps[-1]))
        batches = batches_of(script, loop, grpo)
        for step in steps[from_batch:]:
            batches.prepare(trainer_at(step))
        return script.asked

    whole = played(0)
    seeds = [request.seed for requests in whole for request in requests]
    assert len(set(seeds)) == len(seeds) == len(steps) * shape.rows
    for first in range(1, len(steps)):
        if steps[first] != steps[first - 1]:
            assert played(first) == whole[first:]


def test_ranks_share_a_batch_and_its_groups_without_a_seed_twice(loop: RolloutLoop) -> None:
    class Rank(Ranks):
        def gather(self, items: Sequence[Any]) -> list[Any]:
            return list(items) * self.count

    grpo = config(rows=3, generations=3)
    grpo.num_generations = 2  # so TRL's check is that of four ranks
    asked = []
    for index in range(4):
        script = Script(lambda request: episode_of(request.question_id, request.seed))
        batches_of(script, loop, grpo, ranks=Rank(rank_state(index, 4))).prepare(trainer_at(0))
        asked += script.asked[0]
    assert [request.question_id for request in asked] == [f"q{row // 2}" for row in range(12)]
    assert len({request.seed for request in asked}) == 12


def test_each_token_has_the_advantage_of_its_turn_beside_its_episodes(loop: RolloutLoop) -> None:
    """Two episodes of a group begin alike; then one of them answers rightly, and one wrongly."""
    answers = iter([Outcome.CORRECT, Outcome.WRONG] * 2)

    def played(request: EpisodeRequest) -> Episode:
        last = episode_of(request.question_id, request.seed, outcome=next(answers))
        look = replace(last.turns[0], text="DESCRIBE pets", reward=RewardComponents())
        # Its first turn was dropped from the row.
        return replace(
            last, turns=(look, look, *last.turns), row=TokenRow([1], [2] * 4, [0.0] * 4, [1] * 4, [1, 1, 2, 2])
        )

    weights = [1.0, 0.0, 0.0, 0.0]
    script = Script(played)
    batches = batches_of(script, loop, config(scale_rewards="batch", reward_weights=weights), {"advantages": "turn"})
    batches.prepare(trainer_at(0))
    scale = stdev([1, 0, 1, 0]) + 1e-4
    expected = [DISCOUNT / 2 / scale] * 2 + [1 / 2 / scale] * 2
    assert batches.token_advantages is not None
    for row, sign in zip(batches.token_advantages, (1, -1, 1, -1), strict=True):
        assert row == pytest.approx([sign * advantage for advantage in expected])


def test_a_token_that_is_too_old_ends_the_run(loop: RolloutLoop) -> None:
    script = Script(lambda request: episode_of(request.question_id, request.seed, version=1))
    batches = batches_of(script, loop, filled={"staleness": 1})
    batches.prepare(trainer_at(2))
    with pytest.raises(StaleError, match="sampled 2 updates before it"):
        batches.prepare(trainer_at(3))


def test_what_fails_ahead_is_raised_when_its_batch_is_due(loop: RolloutLoop) -> None:
    class Failing(Script):
        async def play(self, requests: Sequence[EpisodeRequest], **more: Any) -> list[Episode]:
            if self.asked:
                raise RolloutError("3 of 4 episodes failed")
            return await super().play(requests, **more)

    batches = batches_of(Failing(lambda r: episode_of(r.question_id, r.seed)), loop, filled={"staleness": 1})
    batches.prepare(trainer_at(0))
    with pytest.raises(RolloutError, match="3 of 4"):
        batches.prepare(trainer_at(1))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_nothing_is_older_than_allowed_and_no_group_is_lost_or_doubled(data: st.DataObject) -> None:
    """Random schedules: how long batches take, where a run stops and resumes, which episodes fail."""
    staleness = data.draw(st.integers(0, 3))
    steps = data.draw(st.integers(1, 8))
    refill = data.draw(st.sampled_from([0.0, 1.0]))
    failing = data.draw(st.sets(st.integers(0, 40), max_size=6))
    stops = data.draw(st.sets(st.integers(1, 8), max_size=3))
    delays = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    pushed = 0

    def outcome_of(request: EpisodeRequest) -> Episode:
        place = int(request.question_id[1:])
        failed = Outcome.FAILED if place in failing else None
        return episode_of(
            request.question_id, request.seed, correct=bool(request.seed % 2), version=pushed, outcome=failed
        )

    class Slow(Script):
        async def play(self, requests: Sequence[EpisodeRequest], **more: Any) -> list[Episode]:
            episodes = await super().play(requests, **more)
            for _ in range(delays[len(self.asked) % len(delays)]):
                await asyncio.sleep(0)
            return episodes

    def run(stopping: set[int]) -> list[list[str]]:
        nonlocal pushed
        trained: list[list[str]] = []
        script = Slow(outcome_of)
        loop = RolloutLoop()
        told: list[Told] = []
        batches = batches_of(script, loop, filled={"staleness": staleness, "dynamic_sampling": refill}, told=told)
        for step in range(steps):
            if step in stopping:
                loop.close()  # whatever is in flight is gone
                loop = RolloutLoop()
                batches = batches_of(
                    script, loop, filled={"staleness": staleness, "dynamic_sampling": refill}, told=told
                )
            pushed = step
            told.clear()
            prompts = batches.prepare(trainer_at(step, steps))
            rows = batches(prompts, trainer_at(step))
            assert len(rows["prompt_ids"]) == 4
            ((_, episodes),) = told
            ages = [step - turn["policy_version"] for episode in episodes for turn in episode.turns]
            assert all(0 <= age <= staleness for age in ages)
            groups = questions_of(prompts)
            assert groups[0::2] == groups[1::2]
            assert len(set(groups)) == 2
            ids = [episode.episode_id for episode in episodes]
            assert len(set(ids)) == len(ids)
            trained.append([episode.episode_id for episode in episodes[:4]])
        loop.close()
        return trained

    assert run(stops) == run(set()), "a run that stops and resumes trains on the same episodes"


@pytest.mark.parametrize("shaped", [0.0, 1e-6, 0.3])
def test_groups_without_signal_are_replaced_and_the_estimate_is_of_those_drawn_first(
    shaped: float, loop: RolloutLoop
) -> None:
    """Correctness alone decides which they are: of smaller rewards, no difference counts, be it rounding or large."""

    def play(request: EpisodeRequest) -> Episode:
        place = int(request.question_id[1:])
        correct = place != 0 and (place == 1 or request.seed % 2 == 0)
        return episode_of(request.question_id, request.seed, correct=correct, operational=shaped * (request.seed % 3))

    told: list[Told] = []
    script = Script(play)
    grpo = config(rows=8, generations=4)
    batches = batches_of(script, loop, grpo, {"dynamic_sampling": 20.0}, Dealt(40), told=told)
    trainer = trainer_at(0)
    kept = questions_of(batches.prepare(trainer))
    assert not {"q0", "q1"} & set(kept), "never and always solved"
    metrics = trainer._metrics["train"]
    assert metrics["rollout/success_rate"] == [0.5], "q0 and q1"
    assert metrics["rollout/no_signal"] == [0.0]
    assert metrics["rollout/replaced"][0] >= 2
    unfiltered = trainer_at(0)
    batches_of(script, loop, grpo).prepare(unfiltered)
    assert unfiltered._metrics["train"]["rollout/no_signal"] == [1.0]
    ((_, episodes),) = told
    assert len(episodes) == 8 + 4 * metrics["rollout/replaced"][0]


class Guided:
    """Gives one step to each question but q1; keeps what it is told. Stands for `GuidedStarts`."""

    given = (SQLAction(action_type="DESCRIBE", argument="pets"),)

    def __init__(self) -> None:
        self.observed: list[tuple[int, list[EpisodeRecord]]] = []

    def of(self, batch: int) -> Callable[[str], tuple[SQLAction, ...]]:
        return lambda question_id: () if question_id == "q1" else self.given

    def ways(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        return {}

    def observe(self, batch: int, episodes: Sequence[EpisodeRecord], ways: Any) -> None:
        self.observed.append((batch, list(episodes)))


def test_guided_groups_are_trained_on_and_count_in_no_number_about_unguided_play(loop: RolloutLoop) -> None:
    def play(request: EpisodeRequest) -> Episode:
        episode = episode_of(request.question_id, request.seed, correct=bool(request.given) and request.seed % 2 == 0)
        return replace(episode, turns=episode.turns * 2, given_steps=1) if request.given else episode

    told: list[Told] = []
    guided, script = Guided(), Script(play)
    filled = {"guided_starts": True}
    batches = batches_of(script, loop, config(rows=16, generations=8), filled, told=told, guided=guided)
    trainer = trainer_at(0)
    prompts = batches.prepare(trainer)
    assert questions_of(prompts) == ["q0"] * 8 + ["q1"] * 8
    seeds = [request.seed for requests in script.asked for request in requests]
    assert len(set(seeds)) == len(seeds) == 24, "q1 has no steps to give"
    ((_, episodes),) = told
    assert [episode.given_steps for episode in episodes] == [1] * 8 + [0] * 16, "trained on first; all are kept"
    solved = sum(episode.correct for episode in episodes[:8])
    metrics = trainer._metrics["train"]
    assert metrics["rollout/success_rate"] == [0.0]
    assert metrics["rollout/guided_success"] == [solved / 8]
    assert metrics["rollout/guided_share"] == [0.5]
    assert metrics["rollout/given_steps"] == [1]
    assert metrics["rollout/steps"] == [1], "those of the policy"
    ((batch, learnt_from),) = guided.observed
    assert (batch, sum(each.correct for each in learnt_from)) == (0, solved)
    assert [each.given_steps for each in learnt_from] == [1] * 8


def test_of_more_episodes_than_are_trained_on_the_most_different_are(loop: RolloutLoop) -> None:
    class OneRight(Script):
        """Of each question's episodes, the one with the greatest seed is right."""

        async def play(self, requests: Sequence[EpisodeRequest], **_: Any) -> list[Episode]:
            self.asked.append(list(requests))
            best = max(request.seed for request in requests)
            return [episode_of(r.question_id, r.seed, correct=r.seed == best) for r in requests]

    told: list[Told] = []
    script = OneRight(lambda _: None)  # type: ignore[arg-type, return-value]
    grpo = config(rows=8, generations=4)
    batches = batches_of(script, loop, grpo, {"rollout_downsampling": 4}, told=told)
    trainer = trainer_at(0)
    prompts = batches.prepare(trainer)
    assert questions_of(prompts) == ["q0"] * 4 + ["q1"] * 4
    rows = batches(prompts, trainer)
    assert [sum(each.correct for each in rows["episode"][group : group + 4]) for group in (0, 4)] == [1, 1]
    ((_, episodes),) = told
    seeds = {request.seed for requests in script.asked for request in requests}
    assert [len(requests) for requests in script.asked] == [16, 16]
    assert sorted(int(e.episode_id.partition("#")[2]) for e in episodes) == sorted(seeds), "all are kept, once"
    assert len(seeds) == 32
    assert trainer._metrics["train"]["rollout/success_rate"] == [2 / 32], "not of those that were chosen"


def test_a_failed_candidate_is_neither_the_best_nor_the_worst(loop: RolloutLoop) -> None:
    failed = episode_of("q", 0, outcome=Outcome.FAILED)
    right, wrong = (episode_of("q", seed, correct=bool(seed)) for seed in (1, 0))
    weights = [1.0, 0.0, 0.0, 0.0]
    assert total_rewards([failed, right, wrong], REWARD_FUNCTIONS, weights) == [0.5, 1.0, 0.0]
    assert total_rewards([failed, failed], REWARD_FUNCTIONS, weights) == [0.0, 0.0]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(("accumulation", "steps_per_generation"), [(1, 1), (4, 2), (6, 2)])
def test_the_lag_is_what_may_be_in_flight_when_a_batch_is_begun(
    accumulation: int, steps_per_generation: int, staleness: int, loop: RolloutLoop
) -> None:
    grpo = config(accumulation=accumulation, steps_per_generation=steps_per_generation)
    shape, begun, ended = BatchShape.of(grpo), dict[int, int](), 0

    class Watched(Dealt):
        def draw(self, batch: int, count: int) -> Sequence[str]:
            begun[batch] = ended
            return super().draw(batch, count)

    script = Script(lambda request: episode_of(request.question_id, request.seed, version=100))
    batches = batches_of(script, loop, grpo, {"staleness": staleness}, Watched())
    for ended in range(4 * shape.batches_per_step):
        batches.prepare(trainer_at(shape.step_of(ended)))
    behind = {batch: batch - known for batch, known in begun.items() if batch >= shape.first_batch(staleness)}
    assert max(behind.values()) == shape.lag(staleness)


def test_adaptive_weights_are_those_that_groups_are_judged_and_trained_under(loop: RolloutLoop) -> None:
    adaptive = AdaptiveWeights([1.0, 0.2, 0.2, 0.1])
    script = Script(lambda r: episode_of(r.question_id, r.seed, correct=r.seed % 2 == 0, version=100))
    batches = batches_of(script, loop, config(rows=8, generations=4), {"dynamic_sampling": 1.0}, adaptive=adaptive)
    trainer, expected = trainer_at(0), []
    for step in range(3):
        trainer.state.global_step = step
        expected.append(adaptive.of(step))
        batches.prepare(trainer)
        assert trainer.reward_weights.tolist() == pytest.approx(expected[-1])
    assert len(set(expected)) == 3, "they follow the episodes"
    logged = [trainer._metrics["train"][f"reward_weights/{reward.name}"] for reward in REWARD_FUNCTIONS]
    assert list(zip(*logged, strict=True)) == expected


@pytest.fixture
def environments(pets: Dataset) -> Iterator[LocalEnvironments]:
    local = LocalEnvironments(pets, threads=1)
    yield local
    local.close()


def real_batches(
    pets: Dataset, client: RolloutClient, loop: RolloutLoop, told: list[Told], rows: int = 4, ranks: Ranks | None = None
) -> Batches:
    order = EpochOrder([q.question_id for q in pets.questions], 0)
    ranks = ranks or Ranks()
    return Batches(
        pets,
        order,
        config(rows=rows),
        ranks,
        loop,
        client,
        on_batch=lambda step, episodes: told.append((step, list(episodes))),
    )


def test_failed_episodes_are_rows_without_rewards_until_there_are_too_many(
    pets: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    engine: HFEngine,
    environments: LocalEnvironments,
    loop: RolloutLoop,
) -> None:
    class Refusing:
        """Refuses every other session."""

        def session(self, key: int) -> Any:
            if key % 2:
                raise EngineError("no memory")
            return engine.session(key)

        async def aclose(self) -> None:
            pass

    def batches_with(share: float, told: list[Told]) -> Batches:
        played = RolloutSettings(TokenBudget(60, 512, 8), max_failure_share=share)
        return real_batches(pets, RolloutClient(Refusing(), environments, ChatFormat(tokenizer), played), loop, told)

    told: list[Told] = []
    lenient, strict = batches_with(0.5, told), batches_with(0.25, told)
    trainer = trainer_at(0)
    rows = lenient(lenient.prepare(trainer), trainer)
    for function in REWARD_FUNCTIONS:
        assert [value is None for value in function(**rows)] == [False, True, False, True]
    assert [set(mask) for mask in rows["env_mask"]][1::2] == [{0}, {0}]
    assert trainer._metrics["train"]["rollout/failed"] == [2]
    with pytest.raises(RolloutError, match="EngineError: no memory"):
        strict.prepare(trainer_at(0))
    assert len(told) == 1


def test_a_batch_is_that_of_all_ranks_and_as_slow_as_the_slowest(loop: RolloutLoop) -> None:
    peers = BatchRecords([record(episode_of("peer", seed), with_versions=True) for seed in range(4)])

    class SecondOfTwo(Ranks):
        """A rank whose peer has had its episodes already, in 1000 seconds."""

        def gather(self, items: Sequence[Any]) -> list[Any]:
            if isinstance(items[0], BatchRecords):
                return [peers, *items]
            return [(1000.0, {}, 1000.0), *items]

    told: list[Told] = []
    script = Script(lambda request: episode_of(request.question_id, request.seed))
    batches = batches_of(script, loop, ranks=SecondOfTwo(rank_state(1, 2)), told=told)
    trainer = trainer_at(0)
    prompts = batches.prepare(trainer)
    assert questions_of(prompts) == ["q2", "q2", "q3", "q3"], "TRL gets the rows of this rank alone"
    ((_, episodes),) = told
    assert [e.question_id for e in episodes] == questions_of(prompts), "each rank keeps its own episodes"
    metrics = trainer._metrics["train"]
    assert metrics["rollout/seconds"] == [1000.0]
    assert metrics["rollout/trained_tokens"] == [8]
