"""Commands of README, docs/, configs/ and `--help` that stand together fit together: a server, and a run that uses it.

Each pair is taken out of its page and goes through what plans it: `sqlenv inference` down to vLLM's command line, then
the dry run of `sqlenv train` against a stand-in that answers as a vLLM of that command line does. The text before says
how large the GPU is, and what is estimated of it; both are held against what the dry run estimates.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from safetensors.torch import save_file

from inference.launch.launcher import EPILOG, read_arguments
from inference.launch.plan import Device, Machine, ReplicaPlan, plan
from inference.launch.process import see_model
from sqlenv import cli
from tests.docker import kubernetes
from tests.docker.compose import GPU, compose, resolved
from tests.dry_run import make_checkpoints, standing_in
from tests.integration.training import surroundings_in
from trainer.tiny import BASE_CHECKPOINT

ROOT = Path(__file__).parents[2]
TINY = "trainer/tiny/base"
ON_CPU = Machine("python", (), Device.CPU, cores=2)
ON_GPUS = Machine("python", (), Device.CUDA, gpus=("0", "1"), cores=16)
GIB = 2**30
DEFAULT_URL = "http://127.0.0.1:8001"
"""Whom a run asks that names no server: TRL's port, on this machine."""
OVERHEAD_GIB = 1.5
"""What vLLM needs beside weights, keys and values: CUDA's context, activations of a step, captured graphs. Assumed."""


@dataclass(frozen=True)
class Recipe:
    """A server's command and a run's, and what is said of them. `gpu` in GiB; None without a GPU."""

    where: str
    inference: tuple[str, ...]
    train: tuple[str, ...]
    gpu: float | None
    estimated: float | None


def commands(lines: Sequence[str]) -> list[list[str]]:
    """The `sqlenv` commands, word by word, without variables before them and comments behind."""
    text = re.sub(r" *\\\n\s*", " ", "\n".join(lines))
    found = (re.sub(r"^(?:[A-Z_]+=\S+ )*", "", line.strip()) for line in text.splitlines())
    return [shlex.split(line, comments=True)[1:] for line in found if line.startswith("sqlenv ")]


def recipes() -> Iterator[Recipe]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = ""
        for index, part in enumerate(re.split(r"^```\n?", path.read_text(encoding="utf-8"), flags=re.MULTILINE)):
            if index % 2:
                yield from paired(f"{path.name}: ", commands(part.splitlines()), before)
            before = part
    for part in EPILOG.split("\n\n"):
        yield from paired("--help: ", commands(part.splitlines()), part)
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        header = [line[1:] for line in path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()]
        yield from paired(f"{path.name}: ", commands(header), "\n".join(header).partition("sqlenv ")[0])


def paired(where: str, found: list[list[str]], before: str) -> Iterator[Recipe]:
    servers = [command for command in found if command[0] == "inference"]
    runs = [command for command in found if command[0] == "train" and uses_vllm(command)]
    if servers and runs:
        (server,), (run,) = servers, runs
        said = before.rpartition("```")[2]
        sizes = re.findall(r"(?:card|cards|GPU|GPUs|needs) (?:of|with)? ?(\d+) GiB", " ".join(said.split()))
        estimated = re.search(r"estimated at ([\d.]+) GiB", " ".join(said.split()))
        gpu = float(sizes[-1]) if sizes else None
        yield Recipe(where + " ".join(server), tuple(server), tuple(run), gpu, estimated and float(estimated[1]))


def value(words: Sequence[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def config_of(train: Sequence[str]) -> dict[str, object]:
    path = value(train, "--config")
    return dict(yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))) if path else {}


def uses_vllm(train: Sequence[str]) -> bool:
    return value(train, "--use_vllm") == "true" or bool(config_of(train).get("use_vllm"))


RECIPES = list(recipes())


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Hub and a reader's own disk have: checkpoints, and an adapter as docs/training.md makes it."""
    folder = make_checkpoints(tmp_path_factory.mktemp("models"))
    warm = folder / "warm"
    base = str(folder / "SmolLM2-135M-Instruct")
    LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, target_modules="all-linear").save_pretrained(warm)
    save_file({}, warm / "adapter_model.safetensors")
    return folder


def local(name: str, models: Path) -> str:
    return name if name == TINY else str(models / name.rpartition("/")[2])


def served(recipe: Recipe, models: Path) -> tuple[ReplicaPlan, ...]:
    """The servers, as `sqlenv inference` plans them."""
    settings, _ = read_arguments([word if "/" not in word else local(word, models) for word in recipe.inference[1:]])
    return plan(settings, see_model(settings.model), ON_CPU if recipe.gpu is None else ON_GPUS)


def settings_of(arguments: Sequence[str]) -> dict[str, object]:
    """What a vLLM of this command line answers when it is asked for its settings."""
    transfer, rank = value(arguments, "--weight-transfer-config"), value(arguments, "--max-lora-rank")
    return {
        "lora_config": {"max_lora_rank": int(rank)} if rank and "--enable-lora" in arguments else None,
        "weight_transfer_config": json.loads(transfer) if transfer else None,
    }


def config_json(arguments: Sequence[str]) -> dict[str, int]:
    folder = ROOT / str(value(arguments, "--model"))
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def context_of(arguments: Sequence[str]) -> int:
    return int(value(arguments, "--max-model-len") or config_json(arguments)["max_position_embeddings"])


def dry_run(
    recipe: Recipe, arguments: Sequence[str], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The run's status, and its plan in one line."""
    run = [*recipe.train[1:], "--data", "synthetic", "--output_dir", str(tmp_path / "run")]
    model = value(recipe.train, "--model_name_or_path") or str(config_of(recipe.train)["model_name_or_path"])
    with standing_in() as (url, server):
        server.model, server.context = str(value(arguments, "--model")), context_of(arguments)
        server.settings = settings_of(arguments)
        ours = ("--model_name_or_path", local(model, models), "--vllm_server_base_url", url, "--dry_run")
        status = cli.main(["train", *run, *ours])
    said = capsys.readouterr()
    return status, re.sub(r"[│\s]+", " ", said.out + said.err)


def test_the_pages_have_recipes() -> None:
    assert len(RECIPES) >= 13
    assert len([recipe for recipe in RECIPES if recipe.gpu]) >= 10


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.where)
def test_server_and_run_fit(
    recipe: Recipe, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    servers = served(recipe, models)
    arguments = servers[0].arguments
    asked = value(recipe.train, "--vllm_server_base_url") or config_of(recipe.train).get("vllm_server_base_url")
    assert ",".join(server.url for server in servers) == (asked or DEFAULT_URL)
    assert "..." not in (*recipe.inference, *recipe.train)
    if recipe.gpu:
        assert recipe.gpu * float(value(arguments, "--gpu-memory-utilization") or 0) > needs_gib(arguments)
    status, said = dry_run(recipe, arguments, models, tmp_path, capsys)
    assert status == 0, said
    assert "it is the same model" not in said
    assert "longer episodes drop their oldest turns" not in said
    planned = re.search(r"about ([\d.]+) GiB of", said)
    assert planned is not None
    if recipe.estimated:
        assert float(planned[1]) == pytest.approx(recipe.estimated, rel=0.05)
    if recipe.gpu:
        share = float(value(arguments, "--gpu-memory-utilization") or 0) if "--share_gpu" in recipe.inference else 0.0
        assert float(planned[1]) + share * recipe.gpu <= recipe.gpu


def needs_gib(arguments: Sequence[str]) -> float:
    """What vLLM has to hold before it starts: the weights in 16 bits, and one episode of the greatest length."""
    config = config_json(arguments)
    hidden, layers, words = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * size * heads + 3 * hidden * config["intermediate_size"]
    weights = 2 * (layers * layer + hidden * words * (1 if config.get("tie_word_embeddings") else 2))
    cache = 2 * layers * config["num_key_value_heads"] * size * 2 * context_of(arguments)
    return (weights + cache) / GIB + OVERHEAD_GIB


def test_the_context_of_the_model_itself_does_not_fit_beside_training(models: Path) -> None:
    """Why the commands say --max_model_len."""
    (recipe,) = (each for each in RECIPES if each.where.startswith("small-gpu"))
    words = list(recipe.inference)
    at = words.index("--max_model_len")
    without = Recipe("", tuple(words[:at] + words[at + 2 :]), recipe.train, recipe.gpu, None)
    arguments = served(without, models)[0].arguments
    assert context_of(arguments) == 40_960
    assert needs_gib(arguments) > 0.3 * 24


@pytest.mark.skipif(compose() is None, reason="Docker Compose is not installed")
def test_the_services_fit(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    services = resolved(GPU)
    inference, train = (
        shlex.split(command) if isinstance(command := services[name]["command"], str) else list(command)
        for name in ("inference", "trainer")
    )
    at = train.index("--env")
    recipe = Recipe("compose", tuple(inference), tuple(train[:at] + train[at + 2 :]), 16, None)
    arguments = served(recipe, models)[0].arguments
    assert needs_gib(arguments) < 16 * 0.3
    status, said = dry_run(recipe, arguments, models, tmp_path, capsys)
    assert status == 0, said
    assert "weights by lora" in said
    assert "oldest turns" not in said
    planned = re.search(r"about ([\d.]+) GiB of", said)
    stated = re.search(r"estimated at ([\d.]+) GiB", (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8"))
    assert planned is not None
    assert stated is not None
    assert float(planned[1]) == pytest.approx(float(stated[1]), rel=0.05)
    assert float(planned[1]) + 0.3 * 16 <= 16


@kubernetes.needs_kubectl
def test_the_manifests_fit(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of docker/kubernetes: each pod has a GPU to itself."""
    monkeypatch.chdir(ROOT)
    objects = kubernetes.manifests()
    inference, trainer = (
        kubernetes.pod_templates(objects)[name]["spec"]["containers"][0] for name in ("inference", "trainer")
    )
    words = kubernetes.command(objects, trainer)
    words = [*words[words.index("sqlenv") + 1 :], *kubernetes.variables(objects, trainer)["TRAIN_FLAGS"].split()]
    at = words.index("--env")
    server = tuple(kubernetes.command(objects, inference))
    recipe = Recipe("kubernetes", server, tuple(words[:at] + words[at + 2 :]), 16, None)
    arguments = served(recipe, models)[0].arguments
    assert needs_gib(arguments) < 16 * float(str(value(arguments, "--gpu-memory-utilization")))
    status, said = dry_run(recipe, arguments, models, tmp_path, capsys)
    assert status == 0, said
    assert "weights by lora" in said
    assert "oldest turns" not in said


def test_the_tiny_policy_is_where_the_pages_say() -> None:
    assert ROOT / TINY == BASE_CHECKPOINT


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_what_a_page_trains_is_the_adapter_of_its_warm_up(
    page: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = commands((ROOT / page).read_text(encoding="utf-8").splitlines())
    (warmup,) = (command for command in found if command[0] == "warmup")
    train = next(command for command in found if command[0] == "train" and "runs/warm" in command)
    adapter = tmp_path / "warm"
    shape = {"r": int(value(warmup, "--lora_r") or 16), "lora_alpha": int(value(warmup, "--lora_alpha") or 32)}
    base = local(str(value(warmup, "--model_name_or_path")), models)
    LoraConfig(
        task_type="CAUSAL_LM", base_model_name_or_path=base, target_modules="all-linear", **shape
    ).save_pretrained(adapter)
    save_file({}, adapter / "adapter_model.safetensors")
    words = [str(adapter) if word == "runs/warm" else word for word in train]
    status = cli.main([*words, "--data", "synthetic", "--output_dir", str(tmp_path / "run"), "--dry_run"])
    assert status == 0, capsys.readouterr().err
