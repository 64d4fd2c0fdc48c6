"""`sqlenv train --dry_run`, through the command: the plan, each problem that it can find, and every config.

The models are of the true shapes: a dry run reads their configs, and loads no weights. The inference server is a
stand-in that answers as vLLM does.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from sqlenv import cli
from tests.dry_run import StandIn, make_checkpoints, standing_in
from tests.integration.service import serving
from tests.integration.training import surroundings_in
from tests.trainer.fake_hub import TOKEN, pointed_at, running_hub
from trainer.tiny import BASE_CHECKPOINT
from trainer.training import dry_run
from trainer.training.arguments import parse_train
from trainer.training.dry_run import DryRunError

ROOT = Path(__file__).parents[3]
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Dry-run with some flags; returns the exit status, the plan in one line, and what is in the way."""
    monkeypatch.chdir(ROOT)

    def run(*flags: str) -> tuple[int, str, str]:
        output = () if "--output_dir" in flags else ("--output_dir", str(tmp_path / "new" / "run"))
        status = cli.main(["train", *output, *flags, "--dry_run"])
        said = capsys.readouterr()
        assert not (tmp_path / "new").exists(), "a dry run writes nothing"
        return status, re.sub(r"[│\s]+", " ", said.out), said.err.removeprefix("sqlenv train: ")

    return run


@pytest.fixture
def vllm() -> Iterator[tuple[str, type[StandIn]]]:
    with standing_in() as server:
        yield server


def folder_of(models: Path, config: Path) -> str:
    """Where the checkpoint is that a config names on the Hub."""
    name = str(yaml.safe_load(config.read_text(encoding="utf-8"))["model_name_or_path"])
    return name if (ROOT / name).is_dir() else str(models / name.partition("/")[2])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_passes_and_its_header_has_the_estimate(
    name: str, plan: Plan, models: Path, vllm: tuple[str, type[StandIn]], tmp_path: Path
) -> None:
    config = CONFIGS[name]
    url, server = vllm
    header = config.read_text(encoding="utf-8").partition("\n\n")[0]
    needs, _, memory = header.partition("# Memory: about ")
    flags = ["--config", str(config), "--model_name_or_path", folder_of(models, config)]
    written = yaml.safe_load(config.read_text(encoding="utf-8"))
    if written.get("use_vllm"):
        server.model = folder_of(models, config)
        server.settings = StandIn.settings | {"weight_transfer_config": {"backend": written["weight_sync"]}}
        flags += ["--vllm_server_base_url", url]
    status, said, wrong = plan(*flags)
    assert status == 0
    assert all("taken over from " in line for line in wrong.splitlines()), "of stages, by the next one"
    assert "preflight OK" in said
    planned = re.search(r"about ([\d.]+) GiB of", said)
    assert planned is not None
    assert float(planned[1]) == pytest.approx(float(memory.partition(" GiB")[0]), rel=0.02)
    if gpu := re.search(r"(\d+) GiB", needs):
        assert float(planned[1]) < float(gpu[1])


def test_the_plan_tells_what_the_run_would_do(plan: Plan) -> None:
    status, said, _ = plan("--config", "configs/tiny.yaml")
    assert status == 0
    assert "synthetic, value mode: 2,871 questions on 48 databases to train on" in said
    assert "trainer/tiny/base (qwen3), all weights, float32, no mixed precision" in said
    assert "60 of 8 questions x 8 episodes; 64 episodes of at most 1,024 tokens, 65,536 in all" in said
    assert "local, 15 steps per episode" in said
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "generation"):
        assert f" {part} " in said


def test_everything_in_the_way_is_said_at_once(plan: Plan, tmp_path: Path) -> None:
    model = tmp_path / "no-weights"
    shutil.copytree(BASE_CHECKPOINT, model, ignore=shutil.ignore_patterns("*.safetensors"))
    status, _, wrong = plan(
        *("--config", "configs/tiny.yaml", "--output_dir", "README.md/run", "--env", "ws://127.0.0.1:9"),
        *("--model_name_or_path", str(model)),
    )
    assert status == 2
    assert "--output_dir README.md/run: " in wrong
    assert "127.0.0.1:9" in wrong
    assert "has a config and no weights" in wrong
    assert wrong.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "complaints"),
    [
        (("--model_name_or_path", "/no/such/policy"), ["/no/such/policy"]),
        (
            (
                *("--output_dir", "README.md/run", "--env", "ws://127.0.0.1:9"),
                *("--use_vllm", "true", "--vllm_server_base_url", "http://127.0.0.1:8"),
            ),
            ["--output_dir README.md/run: ", "127.0.0.1:9", "`sqlenv serve`", "http://127.0.0.1:8"],
        ),
        (("--per_device_train_batch_size", "100000", "--num_generations", "8"), ["--per_device_train_batch_size"]),
        (
            ("--max_turn_length", "2000"),
            ["the context of 2048 tokens does not hold the prompt of 81 and a turn of 2000"],
        ),
    ],
)
def test_what_is_in_the_way_is_said(plan: Plan, flags: tuple[str, ...], complaints: list[str]) -> None:
    status, _, wrong = plan("--config", "configs/tiny.yaml", *flags)
    assert status == 2
    assert [complaint for complaint in complaints if complaint not in wrong] == []


def test_a_checkpoint_must_be_one(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    flags = ("--config", "configs/tiny.yaml", "--output_dir", str(folder))
    checkpoint = folder / "checkpoint-5"
    status, _, wrong = plan(*flags, "--resume_from_checkpoint", str(checkpoint))
    assert (status, "is not a checkpoint of a run" in wrong) == (2, True)
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    status, said, wrong = plan(*flags, "--resume_from_checkpoint", str(checkpoint))
    assert (status, wrong) == (0, "")
    assert "resumed from checkpoint-5" in said


PUSH = ("--config", "configs/tiny.yaml", "--push_to_hub", "true", "--hub_model_id", "me/mine")


@pytest.mark.parametrize("missing", ["token", "valid token", "network", "offline"])
def test_a_push_that_will_fail_is_in_the_way(
    missing: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = {"token": (), "valid token": ("--hub_token", "hf_old")}.get(missing, ("--hub_token", TOKEN))
    with running_hub() as hub, pointed_at(hub, str(tmp_path)), monkeypatch.context() as patch:
        if missing == "network":
            patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        if missing == "offline":
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        status, _, wrong = plan(*PUSH, *token)
    fix = {"token": "hf auth login", "valid token": "hf auth login", "offline": "HF_HUB_OFFLINE"}
    assert status == 2
    assert "me/mine" in wrong
    assert fix.get(missing, "ConnectError") in wrong


class FakeGPU:
    """A GPU of 10 GiB, which takes so many rows at once."""

    def __init__(self, fitting: int, peak: float, error: Exception) -> None:
        self._fitting, self._peak, self._error = fitting, peak, error

    def train(self, *arguments: Any) -> None:
        if arguments[-1] > self._fitting:
            raise self._error

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        patch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 2**30, 16 * 2**30))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda: self._peak)
        patch.setattr(dry_run, "train_longest", self.train)


FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (FakeGPU(16, 3.25 * 2**30, FULL), "about 3.2 GiB of the 10.0 free on a GPU, measured: 2 steps of 16 rows x"),
        (FakeGPU(16, 12 * 2**30, FULL), "about 12.0 GiB are needed and 10.0 are there"),
        (FakeGPU(4, 9 * 2**30, FULL), "--per_device_train_batch_size 4 --gradient_accumulation_steps 16 does"),
        (FakeGPU(0, 0.0, FULL), "one row of 1,105 tokens does not fit; lower --max_comp"),
        (FakeGPU(0, 0.0, RuntimeError("Failed to find C compiler")), "C compiler (apt-get install gcc"),
    ],
)
def test_a_gpu_that_is_here_is_measured(
    gpu: FakeGPU, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    grpo, model = parse_train(
        ["--config", "configs/tiny.yaml", "--output_dir", str(tmp_path / "run"), "--dry_run", "true"]
    )
    grpo.use_cpu, grpo.per_device_train_batch_size, grpo.gradient_accumulation_steps = False, 16, 4
    console = Console(file=io.StringIO(), width=1_000)
    with monkeypatch.context() as patch:
        gpu.put_in(patch)
        if "measured" not in words:
            with pytest.raises(DryRunError, match=re.escape(words)):
                dry_run.dry_run(grpo, model, console)
            return
        assert (
            dry_run.dry_run(grpo, model, console) == 3.25 * 2**30 != dry_run.dry_run(grpo, model, console, probe=False)
        )
    assert words in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_disk_that_is_too_small_is_a_problem(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.training.checkpointing.free_bytes", lambda _: 1_000)
    status, _, wrong = plan("--config", "configs/tiny.yaml", "--save_strategy", "steps")
    assert status == 2
    assert "--save_total_limit" in wrong


def test_a_cpu_that_is_too_small_is_a_problem(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "main_memory", lambda: 1.0 * 2**30)
    status, _, wrong = plan("--config", "configs/tiny.yaml")
    assert status == 2
    assert "--per_device_train_batch_size 8 --gradient_accumulation_steps 8" in wrong


def test_environment_servers_are_asked(plan: Plan, tmp_path: Path) -> None:
    with serving(tmp_path, Path("synthetic")) as environments:
        status, said, _ = plan("--config", "configs/tiny.yaml", "--env", environments.url, "--env_token", "geheim")
    assert status == 0
    assert "preflight OK" in said


def test_a_server_that_cannot_take_the_adapter_or_serves_another_model(
    plan: Plan, models: Path, vllm: tuple[str, type[StandIn]]
) -> None:
    url, server = vllm
    server.model, server.context = "some/other-model", 2_048
    flags = ["--config", "configs/small-gpu.yaml", "--model_name_or_path", str(models / "Qwen3-1.7B")]
    flags += ["--use_vllm", "true", "--vllm_server_base_url", url]
    status, said, wrong = plan(*flags, "--lora_r", "64")
    assert status == 2
    assert "takes adapters up to rank 32, and this one has rank 64" in wrong
    assert "start it with --weight_sync lora --max_lora_rank 64" in wrong
    status, said, wrong = plan(*flags)
    assert (status, wrong) == (0, "")
    assert f"{url} serves some/other-model, 2,048 tokens" in said
    assert "the first weight sync tells whether it is the same model" in said
    assert "longer episodes drop their oldest turns" in said
