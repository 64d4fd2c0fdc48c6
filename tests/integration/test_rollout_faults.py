"""Rollouts while environment servers are killed and restarted, stopped and drained: no episode differs for it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from benchmarks.server_process import ROOT, SQLENV, ServerProcess
from benchmarks.simulated import ScriptedPolicy, SimulatedEngine, oracle_scripts
from env_server.dataset import Dataset, Split
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from tests.integration.service import write_data
from trainer.chat.format import ChatFormat
from trainer.models import tokenizer_of
from trainer.policy import resolve_policy
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import Environments, LocalEnvironments
from trainer.rollout.episodes import Episode
from trainer.rollout.remote_environments import RemoteEnvironments, RemoteSettings
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT

EPISODES = 96
STEP_S = 0.002
"""A turn takes 20 ms, so that a batch lasts while servers come and go."""


class Restarted:
    """`sqlenv serve` on one port, process after process."""

    def __init__(self, data: Path, log: Path, stack: ExitStack) -> None:
        flags = ("--data", str(data), "--query_workers", "1,1", "--grace_s", "1")
        self._server = stack.enter_context(ServerProcess([*SQLENV, "serve", "--port", "{port}", *flags], log))
        self._log = log
        self.url = self._server.ws_url

    def send(self, number: int) -> None:
        """Send its process a signal."""
        self._server.process.send_signal(number)

    def restart(self) -> None:
        """Start it again, once its process has ended."""
        self._server.process.wait()
        with self._log.open("ab") as output:
            arguments = self._server.process.args
            assert isinstance(arguments, list)
            self._server.process = subprocess.Popen(
                arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self._server.wait_until_healthy()


@pytest.fixture
def data(pets: Dataset, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return write_data(pets, folder)


@pytest.fixture
def servers(data: Path, tmp_path: Path) -> Iterator[list[Restarted]]:
    with ExitStack() as stack:
        yield [Restarted(data, tmp_path / f"serve-{index}.log", stack) for index in range(3)]


def play(dataset: Dataset, environments: Environments) -> list[Episode]:
    """Play the oracle's episodes, each question again and again."""
    chat = ChatFormat(tokenizer_of(resolve_policy(str(BASE_CHECKPOINT))))
    questions = list(itertools.islice(itertools.cycle(dataset.select(Split.ALL)), EPISODES))
    scripts = oracle_scripts(dataset, questions)
    engine = SimulatedEngine(ScriptedPolicy(chat, scripts), stop_ids=chat.stop_ids, step_s=STEP_S)
    client = RolloutClient(engine, environments, chat, RolloutSettings(TokenBudget(512, 2_048, 128), max_concurrency=8))
    requests = [EpisodeRequest(question.question_id, seed) for seed, question in enumerate(questions)]
    return asyncio.run(client.play(requests))


def test_episodes_are_byte_for_byte_those_of_a_run_without_faults(
    pets: Dataset, data: Path, servers: Sequence[Restarted]
) -> None:
    settings = EnvSettings()
    with closing(LocalEnvironments(pets, settings, AnswerMode.VALUE)) as environments:
        undisturbed = play(pets, environments)
    killed, stopped, drained = servers
    done = threading.Event()
    restarts = 0

    def disturb() -> None:
        nonlocal restarts
        stopped.send(signal.SIGSTOP)
        drained.send(signal.SIGTERM)
        while not done.is_set():
            killed.send(signal.SIGKILL)
            killed.restart()
            restarts += 1
            if restarts == 1:
                drained.restart()
        stopped.send(signal.SIGCONT)

    deadlines = RemoteSettings(connect_s=2.0, request_s=2.0)
    urls = [server.url for server in servers]
    with closing(RemoteEnvironments(urls, pets, settings, deadlines=deadlines)) as remote:
        striking = threading.Thread(target=disturb)
        striking.start()
        try:
            disturbed = play(pets, remote)
        finally:
            done.set()
            striking.join()
    assert restarts >= 1
    assert disturbed == undisturbed
