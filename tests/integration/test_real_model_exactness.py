"""Every token of a real language model is the trainer's own: SmolLM2-135M-Instruct, in both engines, in float32.

`make small-model` prepares it. Weights are pushed to a vLLM server and proved; then episodes are played whose texts a
byte-level BPE tokenizer cuts in odd places.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.settings import EnvSettings
from env_server.types import SQLAction, SQLObservation
from inference.engine import Engine
from inference.hf.engine import HFEngine
from inference.vllm.engine import VLLMEngine
from inference.weights.check import token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import full_weights
from inference.weights.push import WeightPusher
from inference.weights.transport import WeightSyncError
from tests.fork_server import ForkServer
from tests.integration.vllm_server import VLLMHandle, vllm_server
from tests.logprobs import logprobs_of
from tests.small_model import SMALL_MODEL, first_layers
from trainer.chat.format import ChatFormat
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import EnvironmentSession, LocalEnvironments
from trainer.rollout.episodes import Episode
from trainer.rollout.transcript import TokenBudget

pytestmark = pytest.mark.skipif(not SMALL_MODEL.is_dir(), reason="the model is not there: make small-model")

MODEL_CONTEXT, SERVER_CONTEXT = 8_192, 1_024
EXACT = 1e-3
"""Of a logprob, in nats: changes no importance ratio by more than a thousandth."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    return found


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(SMALL_MODEL))


def connect(
    server: VLLMHandle,
    model: PreTrainedModel,
    chat: ChatFormat,
    folder: Path,
    left_behind: str = "",
) -> tuple[VLLMEngine, WeightPusher]:
    """Return an engine on the server, and a pusher of the model's weights, all but one where it is named."""
    vocab_size = model.config.vocab_size
    engine = VLLMEngine([server.url], stop_ids=chat.stop_ids, vocab_size=vocab_size, max_context=MODEL_CONTEXT)
    probe = chat.renderer.prompt_ids([{"role": "user", "content": "Which tables are there, and what is in them?"}])
    accelerator = Accelerator(cpu=True)

    def gather() -> Mapping[str, torch.Tensor]:
        return {name: tensor for name, tensor in full_weights(model, accelerator).items() if name != left_behind}

    transport = DiskTransport(gather, folder / "weights")
    pusher = WeightPusher(lambda: model, engine, transport, partial(token_logprobs, model), probe)
    engine.restore_with(pusher.restore)
    return engine, pusher


SCRIPT = (
    SQLAction(action_type="DESCRIBE", argument="café_größen"),
    SQLAction(action_type="SAMPLE", argument="café_größen"),
    SQLAction(action_type="QUERY", argument="SELECT nämlich FROM nirgends"),
    SQLAction(action_type="QUERY", argument="SELECT name, note FROM café_größen ORDER BY id"),
)
"""What the environment is really asked, whatever the policy says: errors, unicode and long cells come back."""


@pytest.fixture(scope="module")
def cafes(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    file = tmp_path_factory.mktemp("cafes") / "cafes.sqlite"
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
        self._environments = LocalEnvironments(dataset, EnvSettings(step_budget=len(SCRIPT) + 1), threads=1)

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


def check_exactness(engine: Engine, model: PreTrainedModel, chat: ChatFormat, cafes: Dataset) -> list[Episode]:
    """Play, and compare each trained token's logprob with the trainer's under the row's prefix."""
    environments = Scripted(cafes)
    budget = TokenBudget(max_completion=4_000, max_context=MODEL_CONTEXT, max_turn=8)
    client = RolloutClient(engine, environments, chat, RolloutSettings(budget))

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
    vllm_forks: ForkServer, chat: ChatFormat, cafes: Dataset, tmp_path: Path
) -> None:
    """On the model's first layers: which prefix a token was drawn after does not depend on how many come behind."""
    checkpoint = first_layers(4, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with vllm_server(vllm_forks, checkpoint, tmp_path, context=SERVER_CONTEXT) as server:
        engine, pusher = connect(server, model, chat, tmp_path)
        pusher.push(1)
        episodes = check_exactness(engine, model, chat, cafes)
    assert all(len(e.row.prompt_ids) + len(e.row.completion_ids) <= SERVER_CONTEXT for e in episodes)
    assert all(e.truncated_turns for e in episodes), "the oldest turns are dropped"
    said = {turn.result + turn.error for e in episodes for turn in e.turns}
    assert any("no such table" in text for text in said)
    assert any("東京カフェ" in text for text in said)


def test_a_tensor_that_a_server_does_not_take_is_named_and_no_other(
    vllm_forks: ForkServer, model: PreTrainedModel, chat: ChatFormat, tmp_path: Path
) -> None:
    """One third of a merged projection, in the last layer, where it moves least."""
    name = "model.layers.29.self_attn.q_proj.weight"
    with vllm_server(vllm_forks, SMALL_MODEL, tmp_path, context=SERVER_CONTEXT) as server:
        _, pusher = connect(server, model, chat, tmp_path, name)
        with pytest.raises(WeightSyncError, match=r"it does not take model\.layers\.29\.self_attn\.qkv_proj\.weight"):
            pusher.push(0)


def test_rows_are_token_exact_in_hugging_face_generate(
    model: PreTrainedModel, chat: ChatFormat, cafes: Dataset
) -> None:
    engine = HFEngine(model, stop_ids=chat.stop_ids, pad_id=0, max_context=SERVER_CONTEXT)
    assert all(e.truncated_turns for e in check_exactness(engine, model, chat, cafes))
