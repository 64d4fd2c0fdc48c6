"""A real language model from the first flag to what can be shipped: SmolLM2-135M-Instruct, in both engines.

`make small-model` prepares it. One life of an adapter, each part a fixture that the next one needs: warmed up by LoRA,
trained by GRPO on a vLLM server in float32 under bfloat16 autocast, evaluated in both engines, exported, and asked by
the scripts of the documents. Few episodes of few tokens: what is looked at is that every part fits the next one, and
not what is learned. test_real_model_exactness.py looks at the tokens.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import ROOT
from inference.adapters import ADAPTER_CONFIG
from inference.launch.plan import WeightSyncMode
from sqlenv import cli
from tests.fork_server import ForkServer
from tests.integration.exported import answer_in_transformers, answer_in_vllm
from tests.integration.training import surroundings_in
from tests.integration.vllm_server import VLLMHandle, mark_weights, vllm_server
from tests.small_model import SMALL_MODEL
from trainer.eval.run_files import RunFolder

# See tests/integration/test_vllm_training.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not SMALL_MODEL.is_dir(), reason="the model is not there: make small-model"),
]

SHIPPED = ROOT / "policies" / "smollm2-135m"

SHORT = [
    *("--max_turn_length", "24", "--max_completion_length", "480", "--step_budget", "3"),
    *("--use_cpu", "true", "--report_to", "none", "--seed", "1", "--save_strategy", "no"),
]
STEP = [*SHORT, "--max_steps", "1", *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")]
GRPO = [*STEP, *("--num_generations", "4", "--lr_scheduler_type", "constant", "--temperature", "1.3")]


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
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
    """An adapter that has seen a few episodes."""
    flags = ["--use_peft", "true", "--lora_r", "8", "--learning_rate", "2e-3", "--max_episodes", "8", "--seed", "1"]
    size = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--report_to", "none"]
    command = ["warmup", "--model_name_or_path", str(SMALL_MODEL), "--data", "synthetic", *flags, *size]
    assert cli.main([*command, "--output_dir", str(work / "warmed")]) == 0
    return work / "warmed"


@pytest.fixture(scope="module")
def adapters_server(vllm_forks: ForkServer, work: Path) -> Iterator[VLLMHandle]:
    """Holds the base in float32, and takes adapters."""
    with vllm_server(vllm_forks, SMALL_MODEL, work, weight_sync=WeightSyncMode.LORA, context=1_024) as server:
        yield server


@pytest.fixture(scope="module")
def trained(warmed: Path, adapters_server: VLLMHandle, work: Path, data: str) -> RunFolder:
    """A step of GRPO on the adapter, pushed alone."""
    servers = ["--use_vllm", "true", "--vllm_server_base_url", adapters_server.url]
    flags = ["--data", data, "--eval_episodes", "1", "--learning_rate", "1e-4", *GRPO, *servers]
    command = ["train", "--model_name_or_path", str(warmed), "--output_dir", str(work / "trained"), *flags]
    assert cli.main(command) == 0
    return RunFolder.open(work / "trained")


@pytest.fixture(scope="module")
def exported(trained: RunFolder, work: Path) -> Path:
    assert cli.main(["export", str(trained.path), "--out", str(work / "exported")]) == 0
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
    """Greedily, as the run's own settings say, in the server's float32."""

    def played(name: str, *flags: str) -> list[str]:
        file = work / f"{name}.jsonl"
        command = ["evaluate", "--policy", str(trained.path), "--episodes", "2", "--episodes_out", str(file)]
        assert cli.main([*command, *flags]) == 0
        return sorted(file.read_text(encoding="utf-8").splitlines())

    in_process = played("hf", "--dtype", "float32")
    assert len(in_process) == 2
    # A server that a run has pushed to is refused: it may hold anything. This one got adapters alone.
    mark_weights(adapters_server.url)
    assert played("vllm", "--use_vllm", "--vllm_server_base_url", adapters_server.url) == in_process


def test_the_policy_that_ships_answers_a_typed_question(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, data = work / "shipped", work / "customers.csv"
    shutil.copytree(SHIPPED, policy)
    config = json.loads((policy / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    config["base_model_name_or_path"] = str(SMALL_MODEL)  # instead of the Hub
    (policy / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    data.write_text("customer_id,name,city\n1,Ana,Lisbon\n2,Ben,Oslo\n3,Cem,Lisbon\n4,Dora,Paris\n", encoding="utf-8")
    assert cli.main(["chat", str(policy), "--data", str(data), "--question", "How many customers are there?"]) == 0
    assert "the answer: 4\nwhich this query returned:\nSELECT COUNT(*) FROM customers\n" in capsys.readouterr().out


def test_the_exported_folder_answers_without_this_project(
    exported: Path, trained: RunFolder, vllm_forks: ForkServer
) -> None:
    said = answer_in_transformers(exported)
    assert said
    assert said == answer_in_vllm(exported, vllm_forks)
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert "success" in card
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is True
    assert json.loads((exported / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"] == "<|im_end|>"
