"""`sqlenv train --dry_run true`, through the command: the plan, each thing that can be in the way, and every config.

The models are of the true shapes: a dry run reads their configs, and loads no weights. The inference server is a
stand-in that answers as vLLM does.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from transformers import AutoConfig
from trl import GRPOConfig

from env_server.types import AnswerMode
from sqlenv import cli
from tests.dry_run import MODELS, StandIn, make_checkpoints, standing_in
from tests.integration.service import serving
from tests.integration.training import surroundings_in
from tests.trainer.fake_hub import TOKEN, pointed_at, running_hub
from trainer.policy import PlaySettings
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.memory import GIB, Load, estimate, shape_of
from trainer.training.memory_plan import remedy

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
def test_every_config_passes_on_the_machine_that_it_says_it_needs(
    name: str, plan: Plan, models: Path, vllm: tuple[str, type[StandIn]], tmp_path: Path
) -> None:
    config = CONFIGS[name]
    url, server = vllm
    header = config.read_text(encoding="utf-8").partition("\n\n")[0]
    needs, _, memory = header.partition("# Memory: about ")
    flags = ["--config", str(config), "--model_name_or_path", folder_of(models, config)]
    if gpu := re.search(r"(\d+) GiB", needs):
        flags += ["--dry_run_gpu", gpu[1]]
    written = yaml.safe_load(config.read_text(encoding="utf-8"))
    if written.get("use_vllm"):
        server.model = folder_of(models, config)
        server.settings = StandIn.settings | {"weight_transfer_config": {"backend": written["weight_sync"]}}
        flags += ["--vllm_server_base_url", url]
    if "env_server" in written:
        with serving(tmp_path, Path("synthetic")) as environments:
            status, said, wrong = plan(*flags, "--env", environments.url, "--env_token", "geheim")
    else:
        status, said, wrong = plan(*flags)
    assert status == 0
    assert all("taken over from " in line for line in wrong.splitlines()), "of stages, by the next one"
    assert "Nothing is in the way of this run." in said
    planned = re.search(r"about ([\d.]+) GiB of", said)
    assert planned is not None
    assert float(planned[1]) == pytest.approx(float(memory.partition(" GiB")[0]), rel=0.05)


def test_the_plan_tells_what_the_run_would_do(plan: Plan) -> None:
    status, said, _ = plan("--config", "configs/tiny.yaml")
    assert status == 0
    assert "synthetic, value mode: 2,871 questions on 48 databases to train on" in said
    assert "trainer/tiny/base (qwen3), all weights, float32, no mixed precision" in said
    assert "60 of 8 questions x 8 episodes; 64 episodes of at most 1,024 tokens, 65,536 in all" in said
    assert "local, 15 steps an episode; one was begun" in said
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "key-value cache", "in all"):
        assert f" {part} " in said


def test_the_plan_is_of_the_task_that_the_policy_was_taught(plan: Plan, tmp_path: Path) -> None:
    policy = tmp_path / "warm"
    shutil.copytree(BASE_CHECKPOINT, policy)
    PlaySettings(answer_mode=AnswerMode.SQL, step_budget=6).save(policy)
    status, said, told = plan("--config", "configs/tiny.yaml", "--model_name_or_path", str(policy))
    assert status == 0
    assert "synthetic, sql mode: " in said
    assert "local, 6 steps an episode" in said
    assert f"taken over from {policy}: " in told


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
            ("--max_turn_length", "2000", "--dry_run_gpu", "1"),
            [
                "the context of 2048 tokens does not hold the prompt of 81 and a turn of 2000",
                "are needed, and a GPU with 1 GiB has 1.0",
            ],
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
    assert (status, "is no checkpoint of a run" in wrong) == (2, True)
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    status, said, wrong = plan(*flags, "--resume_from_checkpoint", str(checkpoint))
    assert (status, wrong) == (0, "")
    assert "going on from checkpoint-5" in said


PUSH = ("--config", "configs/tiny.yaml", "--push_to_hub", "true", "--hub_model_id", "me/mine")


def test_a_push_is_checked_without_changing_the_hub(plan: Plan, tmp_path: Path) -> None:
    with running_hub() as hub, pointed_at(hub, str(tmp_path)):
        status, said, _ = plan(*PUSH, "--hub_token", TOKEN)
    assert (status, "me/mine" in said) == (0, True)
    assert (hub.repos, hub.requests) == ({}, [("GET", "/api/whoami-v2")])


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


def test_what_makes_a_run_fit_is_said_and_does() -> None:
    config = AutoConfig.from_pretrained(MODELS / "Qwen3-1.7B.json")
    shape = shape_of(config, LoraConfig(r=32, target_modules="all-linear"))
    load = Load(rows=16, prompt=400, completion=4_096, weight_bytes=2, autocast=True, generating=64)
    grpo = GRPOConfig(per_device_train_batch_size=16, gradient_accumulation_steps=4, use_cpu=True, bf16=False)
    for gib, checkpointing in ((80, False), (24, False), (16, True)):
        said = remedy(shape, load, gib * GIB, grpo).removesuffix(" fits").split()
        flags = dict(zip(said[::2], said[1::2], strict=True))
        rows = int(flags["--per_device_train_batch_size"])
        assert rows * int(flags["--gradient_accumulation_steps"]) == 64
        assert ("--gradient_checkpointing" in flags) == checkpointing
        generating = int(flags.get("--max_concurrency", load.generating))
        fitting = replace(load, gradient_checkpointing=checkpointing, generating=generating, rows=rows)
        assert estimate(shape, fitting).total <= gib * GIB < estimate(shape, replace(fitting, rows=2 * rows)).total
    least = remedy(shape, load, 4 * GIB, grpo)
    assert least == (
        "even one row at a time does not fit; take --load_in_4bit true, shorter episodes or a smaller model"
    )


def test_a_server_that_cannot_take_the_adapter_or_serves_another_model(
    plan: Plan, models: Path, vllm: tuple[str, type[StandIn]]
) -> None:
    url, server = vllm
    server.model, server.context = "some/other-model", 2_048
    flags = ["--config", "configs/two-gpus.yaml", "--model_name_or_path", str(models / "Qwen3-1.7B")]
    flags += ["--vllm_server_base_url", url, "--dry_run_gpu", "24"]
    status, said, wrong = plan(*flags, "--lora_r", "64")
    assert status == 2
    assert "takes adapters up to rank 32, and this one has rank 64" in wrong
    assert "start it with --weight_sync lora --max_lora_rank 64" in wrong
    status, said, wrong = plan(*flags)
    assert (status, wrong) == (0, "")
    assert f"{url} serves some/other-model, 2,048 tokens" in said
    assert "the first push of the weights tells whether it is the same model" in said
    assert "longer episodes drop their oldest turns" in said
