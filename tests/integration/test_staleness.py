"""`sqlenv train --staleness` on a real vLLM server: the next batch is played while this one is trained on."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from inference.launch.plan import WeightSyncMode
from inference.vllm.api import VLLMServer
from inference.weights.disk import DiskTransport
from inference.weights.gather import write_checkpoint
from sqlenv import cli
from tests.fork_server import ForkServer
from tests.integration.service import until
from tests.integration.training import surroundings_in
from tests.integration.vllm_runs import LORA, NO_CHECKPOINTS, command, token_exact
from tests.integration.vllm_server import START_S, VLLMHandle, meanwhile, vllm_server
from trainer.eval.output_folder import FINAL_STATE
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT

# As in test_vllm_training: a connection attempt that is cancelled may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

AHEAD = ("--staleness", "1", "--vllm_importance_sampling_mode", "token_truncate", "--eval_episodes", "0")


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield
    gc.collect()


@pytest.fixture(scope="module")
def server(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_server(vllm_forks, BASE_CHECKPOINT, folder, weight_sync=WeightSyncMode.LORA) as handle:
        yield handle


def episodes_of(folder: RunFolder) -> dict[int, list[str]]:
    """The ids of the episodes that each step trained on; an id has the question and the seed."""
    found: dict[int, list[str]] = {}
    for each in folder.episodes():
        found.setdefault(each.step, []).append(each.record.episode_id)
    return found


def versions_of(folder: RunFolder) -> dict[int, set[int]]:
    """The weights that the turns of each step's episodes were sampled under."""
    found: dict[int, set[int]] = {}
    for each in folder.episodes():
        found.setdefault(each.step, set()).update(turn["policy_version"] for turn in each.record.turns)
    return found


def test_batches_are_played_ahead_through_evaluations_checkpoints_and_a_restart(
    server: VLLMHandle, tmp_path: Path
) -> None:
    evaluated = ("--eval_episodes", "8", "--eval_strategy", "steps", "--eval_steps", "2")
    kept = ("--save_strategy", "steps", "--save_steps", "2")
    arguments = command(tmp_path / "run", server.url, *AHEAD, *evaluated, *kept, "--max_steps", "4")
    assert cli.main(arguments) == 0
    folder = RunFolder.open(tmp_path / "run")
    steps = [row for row in folder.metrics() if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["rollout/failed"] == 0 and row["grad_norm"] > 0 for row in steps)
    assert [row["rollout/staleness/max"] for row in steps] == [0, 1, 1, 1]
    versions = versions_of(folder)
    assert versions[1] == {0}
    assert all(step - 2 in versions[step] and versions[step] <= {step - 2, step - 1} for step in (2, 3, 4))
    assert [step for step, _ in folder.evaluations_during()] == [2, 4]
    whole = episodes_of(folder)
    assert {len(ids) for ids in whole.values()} == {8}

    resumed = command(tmp_path / "run", server.url, *AHEAD, *evaluated, *kept, "--max_steps", "4")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    (tmp_path / "run" / FINAL_STATE).unlink()  # as if it had been killed
    assert cli.main([*resumed, "--resume_from_checkpoint", str(checkpoint)]) == 0
    assert episodes_of(RunFolder.open(tmp_path / "run")) == whole, "the batch that was in flight is played again"


def test_adapters_arrive_while_episodes_are_in_flight(server: VLLMHandle, tmp_path: Path) -> None:
    flags = (*AHEAD, *NO_CHECKPOINTS, *LORA, "--max_steps", "4")
    assert cli.main(command(tmp_path / "run", server.url, *flags)) == 0
    steps = RunFolder.open(tmp_path / "run").metrics()
    assert [row["rollout/staleness/max"] for row in steps] == [0, 1, 1, 1]
    assert all(row["rollout/failed"] == 0 for row in steps)


def test_a_server_that_is_killed_while_the_trainer_computes_gets_the_weights_again(
    server: VLLMHandle, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")

    def strike() -> None:
        until(folder.episodes_path.exists)
        until(lambda: folder.episodes_path.stat().st_size > 0)
        server.kill()
        server.start()

    arguments = command(folder.path, server.url, *AHEAD, *NO_CHECKPOINTS, "--max_steps", "6")
    assert meanwhile(strike, lambda: cli.main([*arguments, "--vllm_server_timeout", "300"])) == 0
    steps = folder.metrics()
    assert len(steps) == 6
    assert all(row["rollout/failed"] == 0 and row["rollout/staleness/max"] <= 1 for row in steps)
    assert {len(ids) for ids in episodes_of(folder).values()} == {8}


def replace_by_a_pipe(checkpoint: Path) -> Path:
    """Cut a checkpoint's file up, and put a pipe that nobody writes to in the place of the third part."""
    tensors = load_file(checkpoint / "model.safetensors")
    shutil.rmtree(checkpoint)
    write_checkpoint(checkpoint, tensors, shard_bytes=sum(t.nbytes for t in tensors.values()) // 3)
    pipe = sorted(checkpoint.glob("*.safetensors"))[2]
    pipe.unlink()
    os.mkfifo(pipe)
    return pipe


def test_a_server_that_is_killed_in_the_middle_of_a_push_leaves_nothing_of_it_behind(
    server: VLLMHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read a part of the new weights when it dies; batches are played ahead.

    The policy is another than the server's own, and hardly changes as it trains: tokens that were drawn with the
    server's weights, or with a part of the policy's, would not be token-exact.
    """
    policy = shutil.copytree(BASE_CHECKPOINT, tmp_path / "policy")
    own = load_file(policy / "model.safetensors")
    save_file({name: 1.05 * t for name, t in own.items()}, policy / "model.safetensors", metadata={"format": "pt"})
    folder = RunFolder(tmp_path / "run")
    pushes, killed = count(), threading.Event()
    send = DiskTransport.send

    async def die_in_the_third(self: DiskTransport, api: VLLMServer) -> None:
        if next(pushes) != 2:
            await send(self, api)
            return
        checkpoint = max((folder.path / "weights").iterdir())
        whole = shutil.copytree(checkpoint, tmp_path / "whole")
        pipe = replace_by_a_pipe(checkpoint)
        sending = asyncio.create_task(send(self, api))
        # It opens when the server opens it to read, who by then has taken what is in the parts before.
        opened = await asyncio.to_thread(pipe.open, "wb")
        assert not sending.done()
        server.kill()
        opened.close()
        shutil.rmtree(checkpoint)
        whole.rename(checkpoint)
        killed.set()
        await sending

    monkeypatch.setattr(DiskTransport, "send", die_in_the_third)
    flags = (*AHEAD, *NO_CHECKPOINTS, "--model_name_or_path", str(policy), "--learning_rate", "1e-8")
    patient = ("--vllm_server_timeout", "300")
    arguments = command(folder.path, server.url, *flags, *patient, "--max_steps", "5")

    def restart() -> None:
        assert killed.wait(START_S)
        server.start()

    assert meanwhile(restart, lambda: cli.main(arguments)) == 0
    steps = folder.metrics()
    assert len(steps) == 5
    assert all(token_exact(row) for row in steps)
    assert all(row["rollout/failed"] == 0 and row["rollout/staleness/max"] <= 1 for row in steps)
    assert {len(ids) for ids in episodes_of(folder).values()} == {8}
