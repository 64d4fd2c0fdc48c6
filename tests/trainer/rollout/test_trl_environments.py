"""SQLEnv for a stock GRPOTrainer: its tools, its words and rewards, and whole steps of TRL's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerBase, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from env_server.client.errors import ClientError
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from env_server.errors import EpisodeOverError
from env_server.settings import EnvSettings
from env_server.types import ActionType, AnswerMode, SQLAction
from policies.tiny.tokenizer import build_tokenizer
from tests.env_server.serving import Die, running_server
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.prompts import first_message, observation_message
from trainer.chat.tools import text_as_calls, tool_schemas
from trainer.config import ActionFormat
from trainer.rollout.episodes import Outcome
from trainer.rollout.remote_environments import RemoteSettings
from trainer.rollout.trl_environments import (
    TRL_REWARDS,
    SQLText,
    SQLTools,
    SQLToolsByQuery,
    TRLEnvironment,
    TRLEnvironments,
)

NAMES = ("describe", "sample", "query", "answer")
MAX_COMPLETION = 96


@pytest.fixture
def tools(pets: Dataset) -> Iterator[Any]:
    with TRLEnvironments(pets) as environments:
        yield environments()


def rewards_of(*environments: object) -> dict[str, list[float | None]]:
    """What GRPOTrainer asks the reward functions, by their names."""
    columns: dict[str, list[Any]] = {"prompts": [], "completions": [], "completion_ids": [], "question_id": []}
    return {function.__name__: function(environments=environments, **columns) for function in TRL_REWARDS}


@pytest.mark.parametrize(("kind", "mode"), [(SQLTools, AnswerMode.VALUE), (SQLToolsByQuery, AnswerMode.SQL)])
def test_a_model_is_told_of_the_tools_that_it_has_here(kind: type[TRLEnvironment], mode: AnswerMode) -> None:
    found = [get_json_schema(getattr(kind, name)) for name in NAMES]
    for schema in found:
        del schema["function"]["return"]
    assert found == tool_schemas(mode)


@pytest.mark.parametrize(
    ("kind", "tools"), [(SQLTools, NAMES), (SQLToolsByQuery, NAMES), (SQLText, ("act",))], ids=lambda x: str(x)
)
def test_nothing_else_is_public_that_trl_would_take_for_a_tool(
    kind: type[TRLEnvironment], tools: tuple[str, ...]
) -> None:
    functions = {name for name in dir(kind) if callable(getattr(kind, name)) and not name.startswith("_")}
    assert functions == {*tools, "reset"}


def test_the_policy_reads_what_it_reads_here(tools: Any, environment: SQLEnvironment) -> None:
    assert tools.reset(question_id="cats", prompt=[], more=1) == first_message(environment.reset(question_id="cats"))
    for name, kind, argument in (
        ("describe", ActionType.DESCRIBE, "pets"),
        ("sample", ActionType.SAMPLE, "nothing"),
        ("query", ActionType.QUERY, "SELECT COUNT(*) FROM pets WHERE species = 'cat'"),
        ("answer", ActionType.ANSWER, "2"),
    ):
        seen = environment.step(SQLAction(action_type=kind, argument=argument))
        assert getattr(tools, name)(argument) == observation_message(seen)
    episode = tools.episode
    assert (episode.outcome, episode.correct, episode.question_id) == (Outcome.CORRECT, True, "cats")
    assert [turn.text for turn in episode.turns][-1] == "ANSWER 2"
    with pytest.raises(EpisodeOverError, match="over"):
        tools.query("SELECT 1")
    assert tools.episode == episode
    found = rewards_of(tools, object())
    assert [values[1] for values in found.values()] == [None] * 4, "other environments have rewards of their own"
    assert {name: values[0] for name, values in found.items()} == pytest.approx(
        {"reward_correctness": 1.0, "reward_progress": 1.0, "reward_operational": -0.03, "reward_format": 1.0}
    )


def test_a_number_is_an_answer_too(tools: Any) -> None:
    tools.reset(question_id="cats")
    tools.answer(2)
    assert tools.episode.correct


def test_an_episode_without_an_action_has_rewards(tools: Any) -> None:
    tools.reset(question_id="cats")
    assert tools.episode.outcome is Outcome.OUT_OF_TOKENS
    assert rewards_of(tools) == {function.__name__: [0.0] for function in TRL_REWARDS}


def test_text_is_read_as_it_is_here(pets: Dataset) -> None:
    with TRLEnvironments(pets, action_format=ActionFormat.TEXT) as environments:
        text: Any = environments()
        assert isinstance(text, SQLText)
        text.reset(question_id="cats")
        assert "Error: " in text.act("How many?")
        text.act("I know.\nANSWER 3")
        assert [(turn.argument, turn.parseable) for turn in text.episode.turns] == [("How many?", False), ("3", True)]
        assert rewards_of(text)["reward_format"] == [0.5]


def test_a_row_carries_the_system_message_and_the_question_s_id(pets: Dataset) -> None:
    with TRLEnvironments(pets, answer_mode=AnswerMode.SQL) as environments:
        assert isinstance(environments(), SQLToolsByQuery)
        rows = environments.rows(pets.select(Split.TRAIN))
    assert rows["question_id"] == [question.question_id for question in pets.select(Split.TRAIN)]
    system, user = rows[0]["prompt"]
    assert "answer with the query" in system["content"]
    assert user == {"role": "user", "content": ""}


def test_on_a_server_it_is_the_same_episode_and_its_token_is_shown(pets: Dataset) -> None:
    with (
        running_server(pets, token="secret") as server,
        TRLEnvironments(pets, server.url, "secret") as environments,
        TRLEnvironments(pets) as local,
    ):
        played: list[Any] = [environments(), local()]
        replies = [
            [one.reset(question_id="oslo"), one.describe("pets"), one.query("SELECT name FROM pets"), one.answer("Rex")]
            for one in played
        ]
        assert replies[0] == replies[1]
        assert played[0].episode == played[1].episode
        with pytest.raises(ClientError), TRLEnvironments(pets, server.url, "guessed"):
            pass


def test_what_the_infrastructure_does_wrong_is_no_reward(pets: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = RemoteSettings(connect_s=1.0, request_s=1.0, call_s=1.0)
    monkeypatch.setattr("trainer.rollout.remote_environments.RemoteSettings", lambda: impatient)
    with running_server(pets) as server, TRLEnvironments(pets, server.url) as environments:
        tools: Any = environments()
        tools.reset(question_id="cats")
        tools.describe("pets")
        server.script = lambda _: Die()
        with pytest.raises(ClientError):
            tools.describe("owners")
        with pytest.raises(EpisodeOverError):
            tools.answer("2")
        assert tools.episode.outcome is Outcome.FAILED
        assert len(tools.episode.turns) == 1
        assert rewards_of(tools) == {function.__name__: [None] for function in TRL_REWARDS}


def config(folder: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=2,
        learning_rate=1e-3,
        max_completion_length=MAX_COMPLETION,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **settings,
    )


class Recorded(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which keeps what its loop played."""

    def _generate(self, prompts: list[Any]) -> Any:
        self.played = super()._generate(prompts)
        return self.played


@pytest.fixture(autouse=True)
def hushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def calling(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Make calls single tokens, so that a random policy can be brought to make them; returns the tokens."""
    arguments = {"describe": '"table": "pets"', "query": '"sql": "SELECT 1"', "answer": '"value": "2"'}
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{{argument}}}}}\n</tool_call>'
        for name, argument in arguments.items()
    ]
    tokenizer.add_tokens([AddedToken(call, special=False, normalized=False) for call in calls])
    return calls


def test_a_stock_trainer_learns_by_calls(
    pets: Dataset, tmp_path: Path, random_policy: Callable[..., Qwen3ForCausalLM]
) -> None:
    tokenizer = copy.deepcopy(family_tokenizer("qwen3_instruct_2507"))
    tokenizer.eos_token = "<|im_end|>"
    liked = dict.fromkeys(calling(tokenizer), 9.0) | {"<|im_end|>": 10.0}
    model = random_policy(tokenizer, context=4_096, liked=liked)
    before = model.lm_head.weight.detach().clone()
    with TRLEnvironments(pets) as environments:
        trainer = Recorded(
            model,
            reward_funcs=list(TRL_REWARDS),
            args=config(tmp_path, reward_weights=[1.0, 0.2, 0.2, 0.1]),
            train_dataset=environments.rows(pets.select(Split.TRAIN)),
            processing_class=tokenizer,
            environment_factory=environments,
        )
        trainer.train()
        episodes = [environment.episode for environment in trainer.environments]
    assert len(episodes) == 8
    assert any(turn.text == "DESCRIBE pets" for episode in episodes for turn in episode.turns)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 2
    assert {f"rewards/{function.__name__}/mean" for function in TRL_REWARDS} <= logged[0].keys()
    assert not before.equal(trainer.model.lm_head.weight)


@pytest.mark.parametrize("ends", [True, False])
def test_an_episode_that_is_over_leaves_the_loop(
    ends: bool, pets: Dataset, tmp_path: Path, random_policy: Callable[..., Qwen3ForCausalLM]
) -> None:
    tokenizer = text_as_calls(build_tokenizer(["How many cats are there pets owners"]))
    liked = {"SAMPLE ": 8.0, "ANSWER ": 9.0, "pets": 8.0, "2": 8.0, "<end>": 10.0}
    with TRLEnvironments(
        pets,
        settings=EnvSettings(step_budget=4),
        action_format=ActionFormat.TEXT,
        max_completion_length=MAX_COMPLETION if ends else None,
    ) as environments:
        trainer = Recorded(
            random_policy(tokenizer, context=1_024, liked=liked),
            reward_funcs=list(TRL_REWARDS),
            args=config(tmp_path),
            train_dataset=environments.rows(pets.select(Split.TRAIN)),
            processing_class=tokenizer,
            environment_factory=environments,
        )
        trainer.train()
        episodes = [environment.episode for environment in trainer.environments]
    _, completions, masks, messages, *_ = trainer.played
    over = [index for index, episode in enumerate(episodes) if episode.outcome is not Outcome.OUT_OF_TOKENS]
    assert over
    assert any(len(episode.turns) > 1 for episode in episodes)
    last = [messages[index][-1] for index in over]
    if ends:
        said = [message["tool_calls"][0]["function"]["arguments"]["turn"] for message in last]
        assert said == [episodes[index].turns[-1].text for index in over]
    for index, (ids, mask) in enumerate(zip(completions, masks, strict=True)):
        assert len(ids) == len(mask) <= MAX_COMPLETION
        spoken = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own])
        turns = [text.strip() for text in spoken.removesuffix("<end>").split("<end>")]
        acted = [turn.text for turn in episodes[index].turns]
        assert turns[: len(acted)] == acted
        if ends and index in over:
            assert len(turns) == len(acted), "nothing is trained on after the end"
            assert mask[-1] == 1
