"""`sqlenv train --use_vllm` on real vLLM servers: weights pushed every step, proved, token-exact; faults; two ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from trl import GRPOTrainer

from env_server.data.loading import load_dataset
from env_server.dataset import Split
from sqlenv import cli
from tests.fork_server import ForkServer
from tests.integration.service import until
from tests.integration.test_ranks import COMMAND, FORKED
from tests.integration.training import surroundings_in, three_steps
from tests.integration.vllm_runs import FLAGS, LORA, NO_CHECKPOINTS, command, token_exact
from tests.integration.vllm_server import VLLMHandle, meanwhile, vllm_server
from trainer.config import SQLEnvArguments
from trainer.eval.run_files import RunFolder
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.rewards import REWARD_FUNCTIONS
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.rollout_function import RolloutFunction

# A connection attempt that is cancelled may leave its socket to the garbage collector: anyio closes it no sooner. Both
# modules that kill servers collect at once, so that no other test is blamed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Train = Callable[..., RunFolder]


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture(scope="module")
def server(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path_factory.mktemp("vllm")) as handle:
        yield handle


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def well(server: VLLMHandle) -> VLLMHandle:
    """The server, whatever an earlier test did to it."""
    if not server.is_running:
        server.start()
    return server


@pytest.fixture
def train(well: VLLMHandle, tmp_path: Path) -> Train:
    def run(*flags: str, folder: str = "run", urls: str = "") -> RunFolder:
        assert cli.main(command(tmp_path / folder, urls or well.url, *flags)) == 0
        return RunFolder.open(tmp_path / folder)

    return run


def test_a_run_is_token_exact_and_learns(train: Train) -> None:
    folder = train(*NO_CHECKPOINTS)
    steps = folder.metrics()
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(token_exact(row) and row["grad_norm"] > 0 and row["rollout/failed"] == 0 for row in steps)
    assert len(folder.episodes()) == 24
    assert [each.label for each in folder.evaluations()] == ["random", "before", "after", "oracle"]
    assert folder.config()["grpo"]["use_vllm"] is True
    assert not (folder.path / "weights").exists(), "what was written for the servers is gone"


def test_before_any_update_vllm_plays_as_hugging_face_does(train: Train, tmp_path: Path) -> None:
    """Greedy and in float32, so the tokens are the same but for ties within rounding."""
    folder = train(*NO_CHECKPOINTS, "--max_steps", "1")
    local = tmp_path / "local"
    flags = [*FLAGS, *NO_CHECKPOINTS, "--max_steps", "1", "--output_dir", str(local)]
    assert cli.main(["train", *flags]) == 0
    ours, theirs = folder.evaluation_episodes("before"), RunFolder.open(local).evaluation_episodes("before")
    assert [each.turns for each in ours] == [each.turns for each in theirs]


def test_an_adapter_is_merged_for_a_server_that_takes_whole_checkpoints(train: Train) -> None:
    folder = train(*NO_CHECKPOINTS, *LORA, "--weight_sync", "disk", "--max_steps", "2", "--eval_episodes", "0")
    steps = folder.metrics()
    assert len(steps) == 2
    assert all(token_exact(row) and row["grad_norm"] > 0 for row in steps)


def test_the_only_server_is_killed_and_restarted_and_training_goes_on(well: VLLMHandle, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    def strike() -> None:
        until(folder.episodes_path.exists)
        until(lambda: folder.episodes_path.stat().st_size > 0)
        well.kill()
        well.start()

    arguments = command(folder.path, well.url, *NO_CHECKPOINTS, "--eval_episodes", "0", "--max_steps", "6")
    assert meanwhile(strike, lambda: cli.main([*arguments, "--vllm_server_timeout", "300"])) == 0
    steps = folder.metrics()
    assert len(steps) == 6
    assert all(token_exact(row) and row["rollout/failed"] == 0 for row in steps), "on the right weights"


def test_a_server_that_never_comes_back_stops_the_run_and_its_checkpoint_resumes(
    well: VLLMHandle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    flags = ("--eval_episodes", "0", "--save_strategy", "steps", "--save_steps", "1")

    def strike() -> None:
        until((folder.path / "checkpoint-1" / "trainer_state.json").exists)
        well.kill()

    arguments = command(folder.path, well.url, *flags, "--max_steps", "50", "--vllm_server_timeout", "3")
    assert meanwhile(strike, lambda: cli.main(arguments)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("sqlenv train: ")
    assert "within 3 s (--vllm_server_timeout)" in said
    assert well.url in said
    done = len(folder.metrics())
    well.start()
    steps = str(done + 1)
    resumed = command(folder.path, well.url, *flags, "--max_steps", steps, "--resume_from_checkpoint", "true")
    assert cli.main(resumed) == 0
    assert [row["step"] for row in folder.metrics()] == list(range(1, done + 2))
    assert all(token_exact(row) for row in folder.metrics())


def test_a_stock_trainer_trains_on_rows_of_servers(well: VLLMHandle, tmp_path: Path) -> None:
    dataset = load_dataset("synthetic")
    batches: list[list[Episode]] = []
    grpo = three_steps(tmp_path / "run", vllm_server_base_url=well.url, max_completion_length=512)
    arguments = SQLEnvArguments(max_turn_length=64, weight_sync_dir=str(tmp_path / "weights"))

    def keep(episodes: Sequence[Episode]) -> None:
        batches.append(list(episodes))

    with RolloutFunction(dataset, arguments, use_vllm=True, on_batch=keep) as rollout:
        trainer = GRPOTrainer(
            str(BASE_CHECKPOINT),
            reward_funcs=list(REWARD_FUNCTIONS),
            args=grpo,
            train_dataset=rollout.rows(dataset.select(Split.TRAIN)),
            rollout_func=rollout,
        )
        trainer.train()
    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert [{episode.policy_versions for episode in batch} for batch in batches] == [{(0, 0)}, {(1, 1)}, {(2, 2)}]
    assert Outcome.FAILED not in {episode.outcome for batch in batches for episode in batch}
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 3
    assert all(token_exact(entry) and entry["grad_norm"] > 0 for entry in logged)
    assert not (tmp_path / "weights").exists(), "what was written for the servers is gone"


def test_two_ranks_share_one_server(well: VLLMHandle, forks: ForkServer, tmp_path: Path) -> None:
    flags = ("--max_steps", "20", "--per_device_train_batch_size", "4", "--eval_episodes", "8")
    arguments = command(tmp_path / "run", well.url, *NO_CHECKPOINTS, *flags, "--ddp_find_unused_parameters", "false")
    launched = forks.run([*FORKED, COMMAND, *arguments], timeout=600)
    assert launched.returncode == 0, launched.stderr[-4000:]
    folder = RunFolder.open(tmp_path / "run")
    episodes = folder.episodes()
    assert len(folder.metrics()) == 20
    assert len({row.record.episode_id for row in episodes}) == len(episodes) == 160
    assert all(token_exact(row) and row["rollout/failed"] == 0 for row in folder.metrics())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--vllm_mode", "colocate"), "start `sqlenv inference"),
        (("--vllm_server_base_url", "localhost:8000"), "http://host:8001"),
        (("--weight_sync", "lora"), "--use_peft"),
        (("--weight_sync", "nccl"), "the trainer has none"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_written(
    flags: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(tmp_path / "run", "http://127.0.0.1:9", *flags)) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path / "run", "http://127.0.0.1:9", "--eval_episodes", "0", "--vllm_server_timeout", "1")
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "no inference server was ready within 1 s" in said
    assert not (tmp_path / "run").exists(), "the same command starts, once the server is there"
