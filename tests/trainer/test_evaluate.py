"""Evaluation: which questions, by whom they are played, and that a model plays as it does in training."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from env_server.dataset import Dataset, Exclusion, ExclusionReason, Gold, Hardness, Question, Split
from env_server.environment import SQLEnvironment
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from inference.hf.engine import HFEngine
from policies.tiny.tokenizer import build_tokenizer
from tests.env_server.serving import running_server
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.chat.prompts import first_message
from trainer.engines import in_process_engine
from trainer.eval.statistics import summarize
from trainer.evaluate import (
    build_parser,
    choose_questions,
    excluded_by_reason,
    play_on,
    play_scripted,
    summary_json,
    without_effect,
)
from trainer.models import load_policy
from trainer.policy import PolicyError
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings, derive_seed
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, record
from trainer.rollout.remote_environments import RemoteEnvironments
from trainer.rollout.transcript import TokenBudget

WORDS = ["How many cats are there pets owners"]
SETTINGS = RolloutSettings(TokenBudget(120, 512, 12), temperature=0.0)


def dataset_of(**sizes: int) -> Dataset:
    """Questions of evaluation databases, as many of each as said, database after database."""
    questions = [
        Question(f"{db_id}-{i}", "?", db_id, "SELECT 1", Hardness.EASY, Split.EVAL, Gold(((1,),), False))
        for db_id, size in sizes.items()
        for i in range(size)
    ]
    return Dataset("made", tuple(questions), {db_id: Path(db_id) for db_id in sizes})


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(WORDS)


@pytest.fixture(scope="module")
def model(random_policy: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    return random_policy(build_tokenizer(WORDS))


@pytest.fixture
def environments(pets: Dataset) -> Iterator[LocalEnvironments]:
    with closing(LocalEnvironments(pets)) as local:
        yield local


Play = Callable[..., list[Episode]]


@pytest.fixture
def play_model(pets: Dataset, tokenizer: PreTrainedTokenizerBase, model: Qwen3ForCausalLM) -> Play:
    """Play the questions with the model."""

    def play(
        environments: LocalEnvironments | RemoteEnvironments,
        on_episode: Callable[[Episode], None] = lambda _: None,
        spoken: PreTrainedTokenizerBase = tokenizer,
    ) -> list[Episode]:
        chat = ChatFormat(spoken)
        engine = in_process_engine(model, spoken, chat, SETTINGS)
        return play_on(engine, chat, environments, pets.questions, SETTINGS, 5, on_episode)

    return play


def test_questions_are_taken_in_turn_from_each_database() -> None:
    chosen = choose_questions(dataset_of(a=3, b=1, c=2), Split.EVAL, -1)
    assert [q.question_id for q in chosen] == ["a-0", "b-0", "c-0", "a-1", "c-1", "a-2"]


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 7, 100])
def test_a_limit_favours_no_database(limit: int) -> None:
    chosen = choose_questions(dataset_of(a=5, b=5, c=5), Split.EVAL, limit)
    assert len(chosen) == min(limit, 15)
    counts = Counter({"a": 0, "b": 0, "c": 0}) + Counter(q.db_id for q in chosen)
    if counts:
        assert max(counts.values()) - min(counts[db_id] for db_id in "abc") <= 1


def test_only_the_split_is_chosen_from(pets: Dataset) -> None:
    assert [q.question_id for q in choose_questions(pets, Split.EVAL, -1)] == ["species"]
    assert len(choose_questions(pets, Split.ALL, -1)) == 4


@pytest.mark.parametrize("mode", list(AnswerMode))
def test_the_oracle_plays_every_question_in_order(pets: Dataset, mode: AnswerMode) -> None:
    ended: list[Episode] = []
    with closing(LocalEnvironments(pets, answer_mode=mode)) as environments:
        played = play_scripted("oracle", environments, pets.questions, mode, 0, ended.append)
    assert [e.question_id for e in played] == [q.question_id for q in pets.questions]
    assert all(e.correct for e in played)
    assert ended == played


def test_the_seed_decides_what_the_random_player_does(pets: Dataset) -> None:
    def turns(seed: int) -> list[object]:
        with closing(LocalEnvironments(pets, EnvSettings(step_budget=6))) as environments:
            played = play_scripted("random", environments, pets.questions, AnswerMode.VALUE, seed, lambda _: None)
        assert all(len(e.turns) <= 6 for e in played)
        return [e.turns for e in played]

    assert turns(1) == turns(1)
    assert turns(1) != turns(2)


def test_a_model_plays_as_the_rollout_client_of_training_would(
    pets: Dataset, tokenizer: PreTrainedTokenizerBase, model: Qwen3ForCausalLM, play_model: Play
) -> None:
    ended: list[Episode] = []
    environments = LocalEnvironments(pets, EnvSettings(step_budget=4))
    played = play_model(environments, ended.append)
    assert sorted(ended, key=lambda e: e.episode_id) == sorted(played, key=lambda e: e.episode_id)

    async def train_like() -> list[Episode]:
        chat = ChatFormat(tokenizer)
        engine = HFEngine(model, stop_ids=chat.stop_ids, pad_id=0)
        requests = [
            EpisodeRequest(q.question_id, derive_seed(5, i), q.db_id, "easy", "test", gold_sql=q.gold_sql)
            for i, q in enumerate(pets.questions)
        ]
        episodes = await RolloutClient(engine, environments, chat, SETTINGS).play(requests)
        await engine.aclose()
        return episodes

    expected = asyncio.run(train_like())
    environments.close()
    assert played == expected


def test_the_variables_of_the_chat_template_reach_the_prompt(
    pets: Dataset,
    environments: LocalEnvironments,
    environment: SQLEnvironment,
    tokenizer: PreTrainedTokenizerBase,
    model: Qwen3ForCausalLM,
) -> None:
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<act>{% endif %}", "<act>{{ opening }}{% endif %}")
    chat = ChatFormat(tokenizer, ChatSettings(chat_template_kwargs={"opening": "pets"}))
    engine = in_process_engine(model, tokenizer, chat, SETTINGS)
    (played,) = play_on(engine, chat, environments, pets.questions[:1], SETTINGS, 0, lambda _: None)
    opening = first_message(environment.reset(question_id=pets.questions[0].question_id))
    assert tokenizer.decode(played.row.prompt_ids) == f"<obs>{opening}<act>pets"


def test_a_tokenizer_without_a_padding_token_will_do(
    environments: LocalEnvironments, tokenizer: PreTrainedTokenizerBase, play_model: Play
) -> None:
    expected = play_model(environments)
    tokenizer.pad_token = None
    assert tokenizer.pad_token_id is None
    assert [e.row.completion_ids for e in play_model(environments)] == [e.row.completion_ids for e in expected]


@pytest.mark.parametrize("policy", ["oracle", "random", "model"])
def test_on_servers_it_is_the_same_play(
    pets: Dataset, environments: LocalEnvironments, play_model: Play, policy: str
) -> None:
    def play(where: LocalEnvironments | RemoteEnvironments) -> list[Episode]:
        if policy == "model":
            return play_model(where)
        return play_scripted(policy, where, pets.questions, AnswerMode.VALUE, 5, lambda _: None)

    with running_server(pets) as server, closing(RemoteEnvironments(server.url, pets)) as remote:
        assert play(remote) == play(environments)
        assert len(server.played("reset")) == len(pets.questions)


@pytest.mark.parametrize("name", ["missing", "empty", "broken"])
def test_what_cannot_be_loaded_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{", encoding="utf-8")
    problem = "is no folder here" if name == "missing" else "is not a checkpoint: ."
    with pytest.raises(PolicyError, match=f"{name}' {problem}"):
        load_policy(str(tmp_path / name))


def test_a_policy_without_a_tokenizer_cannot_play(
    environments: LocalEnvironments, tmp_path: Path, model: Qwen3ForCausalLM, play_model: Play
) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(SQLEnvError, match="no chat template"):
        play_model(environments, spoken=load_policy(str(tmp_path))[1])


def test_exclusions_are_counted_by_reason(pets: Dataset) -> None:
    reasons = [ExclusionReason.GOLD_EMPTY, ExclusionReason.GOLD_FAILS, ExclusionReason.GOLD_EMPTY]
    excluded = tuple(Exclusion(f"x{i}", "pets", "?", reason) for i, reason in enumerate(reasons))
    dataset = Dataset("pets", pets.questions, pets.databases, excluded)
    assert excluded_by_reason(dataset) == {"gold_empty": 2, "gold_fails": 1}


def test_the_summary_is_one_line_of_json(pets: Dataset, environments: LocalEnvironments) -> None:
    played = play_scripted("oracle", environments, pets.questions, AnswerMode.VALUE, 0, lambda _: None)
    records = [record(e) for e in played]
    line = summary_json(summarize(records, {"gold_empty": 2}), policy="oracle")
    summary = json.loads(line)
    assert "\n" not in line
    assert summary["policy"] == "oracle"
    assert (summary["success_rate"], summary["episodes"], summary["excluded"]) == (1.0, 4, {"gold_empty": 2})
    low, high = summary["interval"]
    assert 0.0 < low < high == 1.0
    assert summary["by_hardness"]["easy"]["interval"] == [low, high]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--policy random", []),
        ("--policy random --step_budget 4 --seed 3 --env ws://there --env_token x", []),
        ("--policy random --few_shot 2 --temperature 1", ["--few_shot", "--temperature"]),
        ("--policy oracle --max_turn_length 9 --use_vllm", ["--use_vllm", "--max_turn_length"]),
        ("--policy oracle --vllm_server_base_url http://there", ["--vllm_server_base_url"]),
        ("--policy m --few_shot 2 --use_vllm --vllm_server_base_url http://there", []),
        ("--policy m --vllm_server_base_url http://there", ["--vllm_server_base_url"]),
        ("--policy m --env_token x", ["--env_token"]),
        ("--policy m --dtype float32", []),
        ("--policy m --dtype float32 --use_vllm", ["--dtype"]),
        ("--policy oracle --dtype float32", ["--dtype"]),
    ],
)
def test_a_flag_that_does_nothing_is_said(flags: str, said: list[str]) -> None:
    lines = without_effect(build_parser().parse_args(flags.split()))
    assert [line.split()[0] for line in lines] == said
    assert all(" has no effect" in line for line in lines)
