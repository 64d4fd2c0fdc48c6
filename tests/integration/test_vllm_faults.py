"""Servers that are killed, frozen and restarted while episodes are played: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from inference.engine import Sampling
from inference.vllm.engine import VLLMEngine, VLLMSettings
from inference.vllm.pressure import PressureGauge
from inference.weights.check import token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import full_weights
from inference.weights.push import WeightPusher
from tests.fork_server import ForkServer
from tests.integration.service import metric
from tests.integration.vllm_server import START_S, VLLMHandle, meanwhile, vllm_server
from tests.logprobs import logprobs_of
from trainer.chat.format import ChatFormat
from trainer.rollout.client import RolloutClient, RolloutSettings, request_for
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.failures import RolloutError
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT

# A connection attempt that is cancelled may leave its socket to the garbage collector: anyio closes it no sooner. Both
# modules that kill servers collect at once, so that no other test is blamed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EPISODES = 24
PATIENT = VLLMSettings(server_timeout_s=START_S, health_interval_s=0.3, health_timeout_s=3.0)
HASTY = VLLMSettings(server_timeout_s=4.0, health_interval_s=0.3, health_timeout_s=2.0)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("synthetic")


@pytest.fixture(scope="module")
def pair(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMHandle]]:
    folder = tmp_path_factory.mktemp("vllm")
    with (
        vllm_server(vllm_forks, BASE_CHECKPOINT, folder, wait=False) as one,
        vllm_server(vllm_forks, BASE_CHECKPOINT, folder) as two,
    ):
        one.wait_until_healthy()
        yield [one, two]


@pytest.fixture
def servers(pair: list[VLLMHandle]) -> list[VLLMHandle]:
    """Two servers that run, whatever an earlier test did to them."""
    for server in pair:
        if not server.is_running:
            server.start()
    return pair


class Playing:
    """Plays episodes on servers, with weights that they were not started with."""

    def __init__(self, dataset: Dataset, urls: list[str], folder: Path, settings: VLLMSettings) -> None:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(BASE_CHECKPOINT)
        self.model = Qwen3ForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        self._dataset = dataset
        self._environments = LocalEnvironments(dataset, threads=1)
        chat = ChatFormat(tokenizer)
        self.gauge = PressureGauge()
        self.engine = VLLMEngine(
            urls,
            stop_ids=chat.stop_ids,
            vocab_size=self.model.config.vocab_size,
            settings=settings,
            pressure=self.gauge,
        )
        accelerator = Accelerator(cpu=True)
        self.pusher = WeightPusher(
            lambda: self.model,
            self.engine,
            DiskTransport(lambda: full_weights(self.model, accelerator), folder / "weights"),
            self._logprobs,
            chat.renderer.prompt_ids([{"role": "user", "content": "Which tables are there?"}]),
        )
        self.compared = 0
        self.engine.restore_with(self.pusher.restore)
        budget = TokenBudget(1_024, 2_048, 64)
        self._client = RolloutClient(
            self.engine, self._environments, chat, RolloutSettings(budget, max_concurrency=EPISODES)
        )
        self.finished = 0

    def _logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> torch.Tensor:
        self.compared += 1
        return token_logprobs(self.model, prompt_ids, token_ids, temperature)

    def play(self, episodes: int = EPISODES) -> list[Episode]:
        self.finished = 0

        def count(_: Episode) -> None:
            self.finished += 1

        questions = self._dataset.select(Split.TRAIN)[:episodes]
        requests = [request_for(question, seed=number) for number, question in enumerate(questions)]
        return asyncio.run(self._client.play(requests, count))

    def close(self) -> None:
        asyncio.run(self.engine.aclose())
        self._environments.close()

    def is_whole(self, episode: Episode) -> bool:
        """Whether the model gives each generated token the logprob of the row, after exactly the row's prefix.

        A turn that was lost, generated twice, or generated with other weights would not have it.
        """
        row = episode.row
        ours = logprobs_of(self.model, row.prompt_ids, row.completion_ids)
        pairs = zip(row.env_mask, row.logprobs, ours, strict=True)
        return episode.truncated_turns > 0 or all(abs(a - b) < 5e-4 for mask, a, b in pairs if mask)


@pytest.fixture
def playing(dataset: Dataset, tmp_path: Path) -> Iterator[Callable[..., Playing]]:
    made: list[Playing] = []

    def make(servers: list[VLLMHandle], settings: VLLMSettings = PATIENT) -> Playing:
        made.append(Playing(dataset, [server.url for server in servers], tmp_path, settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
    made.clear()
    gc.collect()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline, "waited for it in vain"
        time.sleep(0.005)


def in_flight(playing: Playing, server: VLLMHandle) -> bool:
    """Whether some episodes are over, and the server has requests of others."""
    replica = next(each for each in playing.engine.fleet.replicas if each.url == server.url)
    return playing.finished > 0 and replica.in_flight > 0


def all_whole(playing: Playing, episodes: list[Episode]) -> bool:
    return len(episodes) == EPISODES and all(
        each.outcome is not Outcome.FAILED and playing.is_whole(each) for each in episodes
    )


def test_servers_that_are_alike_cost_one_comparison(playing: Callable[..., Playing], servers: list[VLLMHandle]) -> None:
    player = playing(servers, PATIENT)
    player.pusher.push(1)
    player.compared = 0
    player.pusher.push(2)
    assert len(servers) > 1
    assert player.compared == 1, "they draw the same tokens from the same weights"
    for parameter in player.model.parameters():
        parameter.data.mul_(0.99)
    player.pusher.push(3)
    assert player.compared == 2, "other weights are compared anew"


def test_servers_tell_how_hard_they_are_pressed(playing: Callable[..., Playing], servers: list[VLLMHandle]) -> None:
    player = playing(servers, replace(PATIENT, health_interval_s=0.05))
    player.pusher.push(1)
    player.play()
    pressure = player.gauge.take()
    assert pressure is not None
    assert 0 < pressure.kv_cache <= 1
    assert pressure.preemptions == 0
    assert pressure.prefix_hits is not None
    assert 0 < pressure.prefix_hits < 1


@pytest.mark.parametrize("fate", ["frozen", "killed"])
def test_one_of_two_replicas_is_gone_in_the_middle_of_a_batch(
    playing: Callable[..., Playing], servers: list[VLLMHandle], fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen server accepts connections and never answers."""
    player, victim = playing(servers), servers[0]
    player.pusher.push(3)
    undisturbed = player.play()
    assert all_whole(player, undisturbed)

    def strike() -> None:
        until(lambda: in_flight(player, victim))
        victim.kill() if fate == "killed" else victim.freeze()

    try:
        episodes = meanwhile(strike, player.play)
    finally:
        victim.thaw()
    assert all_whole(player, episodes)
    assert {each.policy_versions for each in episodes} == {(3, 3)}
    assert [each.row.completion_ids for each in episodes] == [each.row.completion_ids for each in undisturbed]
    assert any(f"{victim.url}" in message and "1 others are ready" in message for message in caplog.messages)


def test_a_push_leaves_out_a_server_that_is_gone_and_takes_it_back_later(
    playing: Callable[..., Playing], pair: list[VLLMHandle]
) -> None:
    """Of both, one may be gone already, as the test before leaves them: a start takes longer than all else here."""
    well, victim = sorted(pair, key=lambda server: not server.is_running)
    player = playing([well, victim])
    if victim.is_running:
        victim.kill()
    player.pusher.push(4)
    assert [replica.is_ready for replica in player.engine.fleet.replicas] == [True, False]
    assert all_whole(player, player.play())
    victim.start()
    player.pusher.push(5)
    assert [replica.version for replica in player.engine.fleet.replicas] == [5, 5]


def test_the_only_replica_is_killed_and_comes_back_without_the_weights(
    playing: Callable[..., Playing], servers: list[VLLMHandle], caplog: pytest.LogCaptureFixture
) -> None:
    server = servers[0]
    player = playing([server])
    player.pusher.push(1)

    def strike() -> None:
        until(lambda: in_flight(player, server))
        server.kill()
        server.start()

    episodes = meanwhile(strike, player.play)
    assert all_whole(player, episodes), "on the weights that were pushed, not those that it was started with"
    assert any("is back, on version 1 of the weights" in message for message in caplog.messages)


def test_a_server_that_was_restarted_unnoticed_generates_nothing_that_is_kept(
    playing: Callable[..., Playing], servers: list[VLLMHandle], caplog: pytest.LogCaptureFixture
) -> None:
    server = servers[1]
    player = playing([server])
    player.pusher.push(1)
    server.kill()
    server.start()
    assert all_whole(player, player.play())
    assert any("it was restarted, and has lost the weights" in message for message in caplog.messages)


def test_a_cancelled_episode_cancels_its_request_at_the_server(
    playing: Callable[..., Playing], servers: list[VLLMHandle]
) -> None:
    server = servers[0]
    player = playing([server])
    player.pusher.push(0)
    wanted = 1_900

    async def scenario() -> None:
        async with player.engine.session(0) as session, player.engine.session(1) as other:
            task = asyncio.create_task(session.generate((50, 51, 52), Sampling(wanted, 2.0), 1))
            while not await asyncio.to_thread(metric, server, "vllm:num_requests_running"):
                assert not task.done(), "it must still be generating"
            before = await asyncio.to_thread(metric, server, "vllm:generation_tokens_total")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The server counts while it generates only.
            await other.generate((50, 51), Sampling(1), 1)
            while await asyncio.to_thread(metric, server, "vllm:num_requests_running"):
                await other.generate((50, 51), Sampling(1), 1)
            generated = await asyncio.to_thread(metric, server, "vllm:generation_tokens_total") - before
            assert generated < wanted / 2

    asyncio.run(asyncio.wait_for(scenario(), START_S))


def test_a_turn_may_take_longer_than_its_deadline_where_the_server_computes(
    playing: Callable[..., Playing], servers: list[VLLMHandle], caplog: pytest.LogCaptureFixture
) -> None:
    limit_s, wanted = 3.0, 1_900
    player = playing([servers[0]], replace(PATIENT, request_timeout_s=limit_s))
    player.pusher.push(1)

    async def turn(key: int) -> int:
        async with player.engine.session(key) as session:
            return len((await session.generate((50, 51, 52), Sampling(wanted, 2.0), seed=key)).token_ids)

    async def scenario() -> float:
        began = time.monotonic()
        # Any of them may draw a token that ends it.
        assert max(await asyncio.gather(*map(turn, range(16)))) == wanted
        return time.monotonic() - began

    took_s = asyncio.run(asyncio.wait_for(scenario(), START_S))
    assert took_s > limit_s, "ask for more tokens"
    assert not [message for message in caplog.messages if "lost" in message]


def test_a_server_that_is_well_and_computes_nothing_loses_its_turns(
    playing: Callable[..., Playing], servers: list[VLLMHandle], caplog: pytest.LogCaptureFixture
) -> None:
    victim = servers[0]
    player = playing(servers, replace(PATIENT, request_timeout_s=2.0))
    player.pusher.push(3)

    def strike() -> None:
        until(lambda: in_flight(player, victim))
        victim.freeze_engine()

    try:
        episodes = meanwhile(strike, player.play)
    finally:
        victim.kill()
    assert all_whole(player, episodes)
    assert any(f"{victim.url}: it computed no token within 2 s" in message for message in caplog.messages)


@pytest.mark.parametrize("fate", ["frozen", "killed"])
def test_no_server_comes_back_within_the_deadline(
    playing: Callable[..., Playing], servers: list[VLLMHandle], fate: str
) -> None:
    server = servers[0]
    player = playing([server], HASTY)
    player.pusher.push(1)
    server.kill() if fate == "killed" else server.freeze()
    try:
        with pytest.raises(RolloutError, match=r"no inference server was ready within 4 s \(--vllm_server_timeout\)"):
            player.play()
    finally:
        server.thaw()
