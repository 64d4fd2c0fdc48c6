"""Our rollout client in a GRPOTrainer that somebody else builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer

from env_server.dataset import Dataset, Split
from policies.tiny.tokenizer import build_tokenizer
from tests.env_server.serving import running_server
from tests.integration.training import three_steps
from trainer.config import ConfigError, SQLEnvArguments
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.rewards import REWARD_FUNCTIONS
from trainer.training.rollout_function import RolloutFunction


@pytest.mark.parametrize("remote", [False, True])
def test_a_stock_trainer_trains_on_our_rows(
    remote: bool,
    pets: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    random_policy: Callable[..., Qwen3ForCausalLM],
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = build_tokenizer(["How many cats are there pets owners"])
    liked = {"SAMPLE ": 8.0, "ANSWER ": 9.0, "pets": 8.0, "2": 8.0, "<end>": 10.0}
    batches: list[list[Episode]] = []
    grpo = three_steps(tmp_path, max_completion_length=96)
    with running_server(pets, token="secret") as server:
        arguments = SQLEnvArguments(env_server=server.url if remote else "local", env_token="secret", max_turn_length=8)
        with RolloutFunction(pets, arguments, on_batch=lambda episodes: batches.append(list(episodes))) as rollout:
            trainer = GRPOTrainer(
                random_policy(tokenizer, liked=liked),
                reward_funcs=list(REWARD_FUNCTIONS),
                args=grpo,
                train_dataset=rollout.rows(pets.select(Split.TRAIN)),
                processing_class=tokenizer,
                rollout_func=rollout,
            )
            trainer.train()
    assert [len(batch) for batch in batches] == [8, 8, 8]
    episodes = [episode for batch in batches for episode in batch]
    assert len({episode.episode_id for episode in episodes}) == 24, "no seed comes twice"
    assert Outcome.FAILED not in {episode.outcome for episode in episodes}
    assert [{episode.policy_versions for episode in batch} for batch in batches] == [{(0, 0)}, {(1, 1)}, {(2, 2)}]
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 3
    for entry in logged:  # the rows are those that the trainer's own model would have sampled
        assert entry["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-4)
        assert entry["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("flag", ["staleness", "dynamic_sampling", "rollout_downsampling"])
def test_flags_that_it_cannot_honour_are_refused(pets: Dataset, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}: only `sqlenv train` honours it"):
        RolloutFunction(pets, SQLEnvArguments(**{flag: 2}))  # type: ignore[arg-type]
