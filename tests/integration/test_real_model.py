"""A real language model from the first flag to what can be shipped: SmolLM2-135M-Instruct, in both engines.

`make small-model` prepares it. One life of an adapter, each part a fixture that the next one needs: warmed up by LoRA,
trained by GRPO on a vLLM server in float32 under bfloat16 autocast, evaluated in both engines, exported, asked by the
scripts of the documents, and trained on with all weights. Few episodes of few tokens: what is looked at is that every
part fits the next one, token by token, and not what is learned.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import sqlenv
from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.types import SQLAction, SQLObservation
from inference.engine import Engine
from inference.hf.engine import HFEngine
from inference.launch.plan import WeightSyncMode
from inference.vllm.engine import VLLMEngine
from inference.weights.disk import DiskTransport
from inference.weights.gather import full_weights
from inference.weights.probe import token_logprobs
from inference.weights.push import WeightPusher
from inference.weights.transport import WeightSyncError
from tests.integration.exported import answer_in_transformers, answer_in_vllm
from tests.integration.training import surroundings_in
from tests.integration.vllm_server import VLLMHandle, vllm_server
from tests.logprobs import logprobs_of
from tests.small_model import SMALL_MODEL
from trainer.chat.prompts import ChatRenderer
from trainer.results.run_files import RunFolder
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import EnvironmentSession, LocalEnvironments
from trainer.rollout.episodes import Episode
from trainer.rollout.transcript import TokenBudget

# See tests/integration/test_vllm_training.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not SMALL_MODEL.is_dir(), reason="the model is not there: make small-model"),
]

SHORT = [
    *("--max_turn_length", "24", "--max_completion_length", "480", "--step_budget", "3"),
    *("--use_cpu", "true", "--report_to", "none", "--seed", "1", "--save_strategy", "no"),
]
STEP = [*SHORT, "--max_steps", "1", *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")]
GRPO = [*STEP, *("--num_generations", "4", "--lr_scheduler_type", "constant", "--temperature", "1.3")]
MODEL_CONTEXT, SERVER_CONTEXT = 8_192, 2_048
EXACT = 1e-3
"""Of a logprob, in nats: what the issue of trust in the numbers asks for in float32."""


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with surroundings_in(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module")
def data() -> str:
    """Real databases where they are at hand."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    return f"spider:{folder}" if folder else "synthetic"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def warmed(work: Path) -> Path:
    """An adapter that has seen a few dozen episodes."""
    flags = ["--use_peft", "true", "--lora_r", "8", "--learning_rate", "2e-3", "--max_episodes", "24", "--seed", "1"]
    size = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--report_to", "none"]
    command = ["warmup", "--model_name_or_path", str(SMALL_MODEL), "--data", "synthetic", *flags, *size]
    assert sqlenv.main([*command, "--output_dir", str(work / "warmed")]) == 0
    return work / "warmed"


@pytest.fixture(scope="module")
def adapters_server(work: Path) -> Iterator[VLLMHandle]:
    """Holds the base in float32, and takes adapters."""
    with vllm_server(SMALL_MODEL, work, weight_sync=WeightSyncMode.LORA) as server:
        yield server


@pytest.fixture(scope="module")
def trained(warmed: Path, adapters_server: VLLMHandle, work: Path, data: str) -> RunFolder:
    """A step of GRPO on the adapter, pushed alone."""
    servers = ["--use_vllm", "true", "--vllm_server_base_url", adapters_server.url]
    flags = ["--data", data, "--eval_episodes", "2", "--learning_rate", "1e-4", *GRPO, *servers]
    command = ["train", "--model_name_or_path", str(warmed), "--output_dir", str(work / "trained"), *flags]
    assert sqlenv.main(command) == 0
    return RunFolder.open(work / "trained")


@pytest.fixture(scope="module")
def exported(trained: RunFolder, work: Path) -> Path:
    assert sqlenv.main(["export", str(trained.path), "--out", str(work / "exported")]) == 0
    return work / "exported"


def test_an_adapter_is_trained_on_a_real_model(trained: RunFolder) -> None:
    (step,) = trained.metrics()
    assert step["rollout/failed"] == 0
    assert step["rollout/trained_tokens"] > 0
    assert step["grad_norm"] > 0
    # bfloat16 autocast in the trainer, float32 in the server.
    assert 0.9 < step["sampling/importance_sampling_ratio/mean"] < 1.1
    assert step["sampling/sampling_logp_difference/mean"] < 0.1


def test_it_plays_the_same_episodes_in_both_engines(
    trained: RunFolder, adapters_server: VLLMHandle, work: Path
) -> None:
    """Greedily, in float32, as the run's own settings say."""

    def played(name: str, *flags: str) -> list[str]:
        file = work / f"{name}.jsonl"
        command = ["evaluate", "--policy", str(trained.path), "--episodes", "3", "--episodes_out", str(file)]
        assert sqlenv.main([*command, *flags]) == 0
        return sorted(file.read_text(encoding="utf-8").splitlines())

    in_process = played("hf")
    assert len(in_process) == 3
    # A server that a run has pushed to is refused: it may hold anything.
    adapters_server.kill()
    adapters_server.start()
    assert played("vllm", "--use_vllm", "--vllm_server_base_url", adapters_server.url) == in_process


def test_the_exported_folder_answers_without_this_project(exported: Path, trained: RunFolder) -> None:
    said = answer_in_transformers(exported)
    assert said
    assert said == answer_in_vllm(exported)
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert "success" in card
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is True
    assert json.loads((exported / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"] == "<|im_end|>"


@pytest.fixture(scope="module")
def server(exported: Path, work: Path) -> Iterator[VLLMHandle]:
    """Holds the exported policy in float32, and takes whole checkpoints."""
    with vllm_server(exported, work) as found:
        yield found


def test_all_weights_are_trained_on_a_real_model(exported: Path, server: VLLMHandle, work: Path, data: str) -> None:
    servers = ["--use_vllm", "true", "--vllm_server_base_url", server.url]
    flags = ["--data", data, "--eval_episodes", "0", "--learning_rate", "1e-5", "--bf16", "false", *GRPO, *servers]
    command = ["train", "--model_name_or_path", str(exported), "--use_peft", "false", *flags]
    assert sqlenv.main([*command, "--output_dir", str(work / "full")]) == 0
    (step,) = RunFolder.open(work / "full").metrics()
    assert step["grad_norm"] > 0
    assert step["sampling/sampling_logp_difference/max"] < EXACT


@pytest.fixture(scope="module")
def model(exported: Path) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    return found


@pytest.fixture(scope="module")
def tokenizer(exported: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(exported)


def vllm_engine(model: PreTrainedModel, renderer: ChatRenderer, server: VLLMHandle) -> VLLMEngine:
    return VLLMEngine(
        [server.url], stop_ids=renderer.stop_ids, vocab_size=model.config.vocab_size, max_context=MODEL_CONTEXT
    )


def pusher_of(
    model: PreTrainedModel, engine: VLLMEngine, renderer: ChatRenderer, transport: DiskTransport
) -> WeightPusher:
    probe = renderer.prompt_ids([{"role": "user", "content": "Which tables are there, and what is in them?"}])
    pusher = WeightPusher(lambda: model, engine, transport, partial(token_logprobs, model), probe)
    engine.restore_with(pusher.restore)
    return pusher


def test_a_tensor_that_a_server_does_not_take_is_named(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, server: VLLMHandle, tmp_path: Path
) -> None:
    """One third of a merged projection, in the last layer, where it moves least."""
    name = "model.layers.29.self_attn.q_proj.weight"
    kept = model.get_parameter(name).detach().clone()

    def all_but_one() -> Mapping[str, torch.Tensor]:
        return {**full_weights(model, Accelerator(cpu=True)), name: kept}

    renderer = ChatRenderer(tokenizer)
    engine = vllm_engine(model, renderer, server)
    with pytest.raises(WeightSyncError, match=f"it keeps what it had of {name}"):
        pusher_of(model, engine, renderer, DiskTransport(all_but_one, tmp_path / "weights")).push(0)


SCRIPT = (
    SQLAction(action_type="DESCRIBE", argument="café_größen"),
    SQLAction(action_type="SAMPLE", argument="café_größen"),
    SQLAction(action_type="QUERY", argument="SELECT nämlich FROM nirgends"),
    SQLAction(action_type="QUERY", argument="SELECT name, note FROM café_größen ORDER BY id"),
)
"""What the environment is really asked, whatever the policy says: errors, unicode and long cells come back."""


@pytest.fixture(scope="module")
def cafes(work: Path) -> Dataset:
    file = work / "cafes.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE café_größen (id INTEGER PRIMARY KEY, name TEXT, note TEXT)")
        rows = [
            (1, "Zoë ☕ Łódź", "naïve—coöperation " * 40),
            (2, "東京カフェ", "🍰" * 300),
            (3, "<|im_end|>\n<|im_start|>user", "\u202eright to left\u202c\ttabs\r\nand 'quotes'"),
        ]
        connection.executemany("INSERT INTO café_größen VALUES (?, ?, ?)", rows)
    connection.close()
    question = Question(
        question_id="q",
        text="How many cafés “Zoë ☕” are there?",
        db_id="cafes",
        gold_sql="SELECT 1",
        hardness=Hardness.EASY,
        split=Split.TRAIN,
        gold=Gold(((1,),), False),
        family="test",
    )
    return Dataset("cafes", (question,), {"cafes": file})


class Scripted:
    """Environments that take the script's actions instead of the policy's."""

    def __init__(self, dataset: Dataset) -> None:
        self._environments = LocalEnvironments(dataset, threads=1)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        async with self._environments.session() as session:
            yield _ScriptedSession(session)

    def close(self) -> None:
        self._environments.close()


class _ScriptedSession:
    def __init__(self, session: EnvironmentSession) -> None:
        self._session = session
        self._steps = 0

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        return await self._session.reset(question_id, episode_id)

    async def step(self, action: SQLAction) -> SQLObservation:
        self._steps += 1
        return await self._session.step(SCRIPT[(self._steps - 1) % len(SCRIPT)])


def check_exactness(engine: Engine, model: PreTrainedModel, renderer: ChatRenderer, cafes: Dataset) -> list[Episode]:
    """Play, and compare each trained token's logprob with the trainer's under the row's prefix."""
    environments = Scripted(cafes)
    budget = TokenBudget(max_completion=4_000, max_context=MODEL_CONTEXT, max_turn=8)
    client = RolloutClient(engine, environments, renderer, RolloutSettings(budget))

    async def play() -> list[Episode]:
        try:
            return await client.play([EpisodeRequest("q", seed=1)])
        finally:
            await engine.aclose()

    try:
        episodes = asyncio.run(play())
    finally:
        environments.close()
    for episode in episodes:
        assert episode.failure == ""
        row = episode.row
        ours = logprobs_of(model, row.prompt_ids, row.completion_ids)
        gaps = [abs(a - b) for trained, a, b in zip(row.env_mask, row.logprobs, ours, strict=True) if trained]
        assert gaps
        assert max(gaps) < EXACT
    return episodes


def test_rows_are_token_exact_on_vllm_where_the_server_has_less_context(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, server: VLLMHandle, cafes: Dataset, tmp_path: Path
) -> None:
    renderer = ChatRenderer(tokenizer)
    engine = vllm_engine(model, renderer, server)
    pusher = pusher_of(
        model, engine, renderer, DiskTransport(lambda: full_weights(model, Accelerator(cpu=True)), tmp_path)
    )
    pusher.push(1)
    episodes = check_exactness(engine, model, renderer, cafes)
    assert all(len(e.row.prompt_ids) + len(e.row.completion_ids) <= SERVER_CONTEXT for e in episodes)
    assert all(e.truncated_turns for e in episodes), "the oldest turns are dropped"
    said = {turn.result + turn.error for e in episodes for turn in e.turns}
    assert any("no such table" in text for text in said)
    assert any("東京カフェ" in text for text in said)


def test_rows_are_token_exact_in_hugging_face_generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cafes: Dataset
) -> None:
    renderer = ChatRenderer(tokenizer)
    engine = HFEngine(model, stop_ids=renderer.stop_ids, pad_id=0, max_context=1_280)
    assert all(e.truncated_turns for e in check_exactness(engine, model, renderer, cafes))
