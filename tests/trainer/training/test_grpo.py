"""What TRL gets from a rollout: one row per prompt with everything it needs, seeds that never come twice, metrics."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from env_server.dataset import Dataset, Split
from env_server.errors import UnknownQuestionError
from env_server.settings import RewardSettings
from env_server.types import ActionType, RewardComponents
from inference.engine import EngineError
from inference.hf.engine import HFEngine
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.format import ChatFormat
from trainer.ranks import Ranks
from trainer.rollout.client import RolloutClient, RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.failures import WINDOW, RolloutError
from trainer.rollout.rewards import REWARD_FUNCTIONS
from trainer.rollout.timings import Part
from trainer.rollout.transcript import TokenBudget
from trainer.tiny.tokenizer import build_tokenizer
from trainer.training.grpo import SQLEnvRollout, prompt_rows, rollout_metrics, stop_at_turns_ends
from trainer.training.step_times import StepTimes

Batch = tuple[int, list[Episode]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(["How many cats are there pets owners"])


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerBase, random_policy: Callable[..., Qwen3ForCausalLM]) -> Iterator[HFEngine]:
    engine = HFEngine(random_policy(tokenizer), stop_ids=[3], pad_id=0, linger_s=1e6)
    yield engine
    asyncio.run(engine.aclose())


@pytest.fixture
def environments(pets: Dataset) -> Iterator[LocalEnvironments]:
    local = LocalEnvironments(pets, threads=1)
    yield local
    local.close()


class Rollouts:
    """Makes rollout functions over the pets and keeps what they hand to the log."""

    def __init__(self, pets: Dataset, client: RolloutClient) -> None:
        self._pets = pets
        self._client = client
        self.batches: list[Batch] = []
        self._runner = asyncio.Runner()

    def make(self, seed: int = 0, ranks: Ranks | None = None) -> SQLEnvRollout:
        def on_batch(step: int, episodes: Sequence[Episode]) -> None:
            self.batches.append((step, list(episodes)))

        rollout = SQLEnvRollout(self._pets, seed, RewardSettings(), ranks or Ranks(), self._runner)
        rollout.play_with(self._client, on_batch)
        return rollout

    def seeds(self) -> list[set[str]]:
        """The seeds of each batch's episodes."""
        return [{e.episode_id.rpartition("#")[2] for e in episodes} for _, episodes in self.batches]

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def rollouts(
    pets: Dataset, tokenizer: PreTrainedTokenizerBase, engine: HFEngine, environments: LocalEnvironments
) -> Iterator[Rollouts]:
    settings = RolloutSettings(TokenBudget(60, 512, 8))
    rollouts = Rollouts(pets, RolloutClient(engine, environments, ChatFormat(tokenizer), settings))
    yield rollouts
    rollouts.close()


def trainer_at(step: int) -> Any:
    """What a rollout reads of a GRPOTrainer, and where it leaves its metrics."""
    metrics: dict[str, list[float]] = defaultdict(list)
    times = StepTimes(lambda name, seconds: metrics[name].append(seconds))
    return SimpleNamespace(state=SimpleNamespace(global_step=step), _metrics={"train": metrics}, times=times)


class SecondOfTwo(Ranks):
    """A rank whose peer has had an episode already, in 1000 seconds."""

    def __init__(self, peers_episode: Episode) -> None:
        super().__init__(index=1, count=2)
        self._peers: list[list[Any]] = [[peers_episode], [(1000.0, {Part.ENVIRONMENT: 1000.0})]]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return [*self._peers.pop(0), *items]


def prompts_of(pets: Dataset, *question_ids: str) -> list[list[dict[str, Any]]]:
    return [row["prompt"] for q in question_ids for row in prompt_rows([pets.question(q)])]


def test_a_prompt_is_the_question_and_carries_its_id(pets: Dataset) -> None:
    rows = prompt_rows(pets.select(Split.TRAIN))
    assert rows.column_names == ["prompt"]
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": q.text, "question_id": q.question_id}] for q in pets.select(Split.TRAIN)
    ]


def test_exactly_one_row_for_each_prompt_with_all_that_trl_reads(pets: Dataset, rollouts: Rollouts) -> None:
    prompts = prompts_of(pets, "cats", "cats", "oldest", "oldest", "cats")
    trainer = trainer_at(3)
    rows = rollouts.make()(prompts, trainer)
    assert set(rows) == {
        *("prompt_ids", "completion_ids", "logprobs", "env_mask"),
        *("correctness", "progress", "operational", "format_share"),
    }
    assert {len(values) for values in rows.values()} == {5}
    ((step, episodes),) = rollouts.batches
    assert step == 4, "the step that these episodes are for"
    assert [e.question_id for e in episodes] == ["cats", "cats", "oldest", "oldest", "cats"]
    assert trainer._metrics["train"]["rollout/failed"] == [0], "where TRL takes them from when it logs"
    for index, episode in enumerate(episodes):
        assert rows["prompt_ids"][index] == episode.row.prompt_ids
        assert rows["completion_ids"][index] == episode.row.completion_ids
        assert rows["logprobs"][index] == episode.row.logprobs
        assert rows["env_mask"][index] == episode.row.env_mask
        assert len(episode.row.completion_ids) == len(episode.row.logprobs) == len(episode.row.env_mask) > 0
    rewards = [function(**rows) for function in REWARD_FUNCTIONS]
    assert all(len(values) == 5 and None not in values for values in rewards)


def test_seeds_differ_by_run_step_rank_batch_and_place(pets: Dataset, rollouts: Rollouts) -> None:
    prompts = prompts_of(pets, "cats", "cats", "oldest")
    rollout = rollouts.make()
    rollout(prompts, trainer_at(0))
    rollout(prompts, trainer_at(0))  # TRL may generate several batches in one step
    rollout(prompts, trainer_at(1))
    rollouts.make(ranks=Ranks(index=1))(prompts, trainer_at(0))
    rollouts.make(seed=1)(prompts, trainer_at(0))
    seeds = rollouts.seeds()
    assert [len(batch) for batch in seeds] == [3] * 5
    assert len(set.union(*seeds)) == 15
    rollouts.make()(prompts, trainer_at(1))
    assert rollouts.batches[-1] == rollouts.batches[2], "a resumed run plays what the first would have played"


def test_an_unknown_question_is_an_error_not_a_failed_episode(rollouts: Rollouts) -> None:
    with pytest.raises(UnknownQuestionError):
        rollouts.make()([[{"role": "user", "content": "?", "question_id": "dogs"}]], trainer_at(0))


def test_failed_episodes_are_rows_without_rewards_until_there_are_too_many(
    pets: Dataset, tokenizer: PreTrainedTokenizerBase, engine: HFEngine, environments: LocalEnvironments
) -> None:
    class Refusing:
        """Refuses every other session."""

        def session(self, key: int) -> Any:
            if key % 2:
                raise EngineError("no memory")
            return engine.session(key)

        async def aclose(self) -> None:
            pass

    def rollouts_with(share: float) -> Rollouts:
        settings = RolloutSettings(TokenBudget(60, 512, 8), max_failure_share=share)
        return Rollouts(pets, RolloutClient(Refusing(), environments, ChatFormat(tokenizer), settings))

    prompts = prompts_of(pets, "cats", "cats", "oldest", "oldest")
    lenient, strict = rollouts_with(0.5), rollouts_with(0.25)
    trainer = trainer_at(0)
    rows = lenient.make()(prompts, trainer)
    for function in REWARD_FUNCTIONS:
        assert [value is None for value in function(**rows)] == [False, True, False, True]
    assert [set(mask) for mask in rows["env_mask"]][1::2] == [{0}, {0}]
    assert trainer._metrics["train"]["rollout/failed"] == [2]
    lenient.close()
    with pytest.raises(RolloutError, match="EngineError: no memory"):
        strict.make()(prompts, trainer_at(0))
    assert strict.batches == []
    strict.close()


def test_a_failure_in_every_small_batch_stops_the_run_in_the_end(
    pets: Dataset, tokenizer: PreTrainedTokenizerBase, engine: HFEngine, environments: LocalEnvironments
) -> None:
    class Refusing:
        """Refuses the first session of each batch."""

        def session(self, key: int) -> Any:
            if key == 0:
                raise EngineError("no memory")
            return engine.session(key)

        async def aclose(self) -> None:
            pass

    settings = RolloutSettings(TokenBudget(60, 512, 8), max_failure_share=0.25)
    rollouts = Rollouts(pets, RolloutClient(Refusing(), environments, ChatFormat(tokenizer), settings))
    rollout, prompts = rollouts.make(), prompts_of(pets, "cats", "cats")
    for step in range(WINDOW // 2 - 1):
        rollout(prompts, trainer_at(step))
    with pytest.raises(RolloutError, match=r"50 of 100 episodes failed in the last 50 batches, .* EngineError: no mem"):
        rollout(prompts, trainer_at(WINDOW // 2 - 1))
    rollouts.close()


def episode_with(
    outcome: Outcome, rewards: Sequence[float] = (), truncated: int = 0, mask: Sequence[int] = ()
) -> Episode:
    turns = tuple(Turn("", ActionType.QUERY, "", True, "", "", RewardComponents(total=r)) for r in rewards)
    row = TokenRow([1], [2] * len(mask), [0.0] * len(mask), list(mask))
    return Episode("e", "q", "d", "", "easy", "f", outcome, turns, row, truncated)


def test_a_batch_is_that_of_all_ranks_and_as_slow_as_the_slowest(pets: Dataset, rollouts: Rollouts) -> None:
    peers = episode_with(Outcome.CORRECT, [1.0], mask=[1, 1])
    trainer = trainer_at(0)
    rows = rollouts.make(ranks=SecondOfTwo(peers))(prompts_of(pets, "cats", "oldest"), trainer)
    assert len(rows["prompt_ids"]) == 2, "TRL gets the rows of this rank's prompts alone"
    ((_, episodes),) = rollouts.batches
    metrics = trainer._metrics["train"]
    assert episodes[0] is peers
    assert [e.question_id for e in episodes[1:]] == ["cats", "oldest"]
    assert metrics["rollout/seconds"] == [1000.0]
    trainer.times.on_step_end(None, None, None)
    assert metrics["time/environment"] == metrics["time/rollout"], "divided as the slowest rank's time"
    assert metrics["rollout/trained_tokens"] == [2 + sum(sum(mask) for mask in rows["env_mask"])]


def test_metrics_of_a_batch() -> None:
    episodes = [
        episode_with(Outcome.CORRECT, [0.01, 1.0], mask=[1, 0, 1]),
        episode_with(Outcome.WRONG, [-0.02], truncated=2, mask=[0, 1]),
        episode_with(Outcome.OUT_OF_BUDGET, [0.0] * 3, mask=[1]),
        episode_with(Outcome.OUT_OF_TOKENS, [0.01] * 2, truncated=1, mask=[1]),
        episode_with(Outcome.FAILED, mask=[0]),
    ]
    assert rollout_metrics(episodes, seconds=2.0) == pytest.approx(
        {
            "rollout/success_rate": 1 / 4,
            "rollout/reward": (1.01 - 0.02 + 0.0 + 0.02) / 4,
            "rollout/steps": (2 + 1 + 3 + 2) / 4,
            "rollout/out_of_budget": 1 / 5,
            "rollout/out_of_tokens": 1 / 5,
            "rollout/failed": 1,
            "rollout/truncated": 2,
            "rollout/trained_tokens": 5,
            "rollout/seconds": 2.0,
            "rollout/episodes_per_second": 2.5,
        }
    )


def test_metrics_when_every_episode_failed() -> None:
    metrics = rollout_metrics([episode_with(Outcome.FAILED, mask=[0])], seconds=1.0)
    assert metrics["rollout/failed"] == 1
    assert metrics["rollout/success_rate"] == metrics["rollout/reward"] == metrics["rollout/steps"] == 0.0


@pytest.mark.parametrize("told", [False, True])
def test_a_row_that_ends_where_turns_end_is_not_truncated_once_trl_is_told(
    told: bool,
    random_policy: Callable[..., Qwen3ForCausalLM],
    pets: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns end with another token than the tokenizer's EOS; rows that TRL takes for cut off teach nothing."""
    tokenizer = family_tokenizer("qwen2_5")
    chat = ChatFormat(tokenizer)
    assert chat.stop_ids[0] != tokenizer.eos_token_id

    def made_up(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        rows = [[5, 6 + index, chat.stop_ids[0]] for index, _ in enumerate(prompts)]
        return {"prompt_ids": [[5]] * len(rows), "completion_ids": rows, "logprobs": [[-6.0] * 3] * len(rows)}

    def places(completions: list[Any], **_: Any) -> list[float]:
        return [float(index) for index, _ in enumerate(completions)]

    config = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_checkpointing=False,
        mask_truncated_completions=True,
    )
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = GRPOTrainer(
        random_policy(tokenizer),
        places,
        config,
        train_dataset=prompt_rows(pets.questions),
        processing_class=tokenizer,
        rollout_func=made_up,
    )
    if told:
        stop_at_turns_ends(trainer, chat)
    trainer.train()
    (logged, *_) = trainer.state.log_history
    assert logged["completions/clipped_ratio"] == (0.0 if told else 1.0)
    assert (logged["grad_norm"] > 0) == told
