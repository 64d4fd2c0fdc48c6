"""From a run to what is done with its policy: evaluated as it was trained, exported, pushed. One real run, short."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from env_server.data.loading import load_dataset
from sqlenv import cli
from tests.integration.training import save_policy, surroundings_in
from tests.trainer.fake_hub import TOKEN, pointed_at, running_hub
from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import interval_text, percent
from trainer.policy import SETTINGS_FILE

FLAGS = [
    *("--data", "synthetic", "--eval_episodes", "8", "--step_budget", "6", "--max_turn_length", "16"),
    *("--max_completion_length", "192", "--max_steps", "2"),
    *("--gradient_accumulation_steps", "1"),
    *("--per_device_train_batch_size", "4", "--num_generations", "4", "--learning_rate", "1e-3"),
    *("--lr_scheduler_type", "constant", "--save_strategy", "steps", "--save_steps", "1", "--report_to", "none"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
    *(
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
        "--seed",
        "3",
        "--chat_template_kwargs",
        '{"opening": "DESCRIBE "}',
    ),
]


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture(scope="module")
def base(
    surroundings: None, random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A policy whose chat template has a variable."""
    texts = [question.text for question in load_dataset("synthetic").questions]
    policy = save_policy(random_policy, texts, tmp_path_factory.mktemp("policy"))
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<act>{% endif %}", "<act>{{ opening }}{% endif %}"))
    return policy


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    target = tmp_path_factory.mktemp("runs") / "run"
    assert train(base, target) == 0
    return RunFolder.open(target)


def train(base: Path, target: Path, *flags: str) -> int:
    return cli.main(["train", "--model_name_or_path", str(base), "--output_dir", str(target), *FLAGS, *flags])


def evaluate(policy: Path, out: Path, *flags: str) -> list[dict[str, object]]:
    """Return the episodes of `sqlenv evaluate`."""
    assert cli.main(["evaluate", "--policy", str(policy), "--episodes_out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def after(run: RunFolder) -> list[dict[str, object]]:
    lines = (run.evaluations_path / "after.episodes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("part", ["", "model"])
def test_an_evaluation_is_the_runs_own(
    part: str, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(run.path / part, tmp_path / "e.jsonl") == after(run)
    said = capsys.readouterr().err
    assert f"taken over from {run.path / part}" in said
    assert "it had" not in said


def test_an_evaluation_keeps_the_context_that_the_model_allows(base: Path, tmp_path: Path) -> None:
    evaluate(base, tmp_path / "e.jsonl", "--episodes", "1", "--step_budget", "2")
    (about,) = tmp_path.glob("*.evaluation.json")
    settings = json.loads(about.read_text(encoding="utf-8"))["settings"]
    allowed = json.loads((base / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    assert settings["max_context_length"] == allowed, "as training saves it: the same play compares as the same"


def test_a_flag_that_differs_is_said_and_obeyed(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--step_budget", "3", "--episodes", "4", "--chat_template_kwargs", '{"opening": ""}')
    played = evaluate(run.path, tmp_path / "e.jsonl", *flags)
    _, _, said = capsys.readouterr().err.partition("changed by flag")
    assert "step_budget 3 (it had 6)" in said
    assert "episodes 4 (it had 8)" in said
    assert 'chat_template_kwargs {"opening": ""} (it had {"opening": "DESCRIBE "})' in said
    assert len(played) == 4
    assert played != after(run)[:4]


def test_a_checkpoint_is_played_as_it_was_trained_too(run: RunFolder, tmp_path: Path) -> None:
    last = run.path / "checkpoint-2"
    assert (last / SETTINGS_FILE).read_bytes() == (run.path / "model" / SETTINGS_FILE).read_bytes()
    assert not (last / "README.md").exists(), "the card is the exported policy's"
    assert evaluate(last, tmp_path / "e.jsonl") == after(run)


def test_an_exported_run_plays_as_the_run_does(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    assert cli.main(["export", str(run.path), "--out", str(out)]) == 0
    assert f"float32, in {out}" in capsys.readouterr().out.replace("\n", "")
    assert evaluate(out, tmp_path / "e.jsonl") == after(run)
    card = (out / "README.md").read_text(encoding="utf-8")
    (last,) = [e.summary for e in run.evaluations() if e.label == "after"]
    row = f"| **this policy** | {percent(last.success_rate)} | {interval_text(last.interval)} |"
    assert row in card
    assert "- Training steps: 2" in card
    assert "- Trained with sqlenv" in card
    assert {path.name for path in (out / "evaluations").iterdir()} == {
        f"{label}.json" for label in ("random", "before", "after", "oracle")
    }


def test_an_exported_checkpoint_claims_the_evaluation_after_its_step_alone(run: RunFolder, tmp_path: Path) -> None:
    assert cli.main(["export", str(run.path / "checkpoint-1"), "--out", str(tmp_path / "exported")]) == 0
    assert cli.main(["export", str(run.path / "checkpoint-2"), "--out", str(tmp_path / "evaluated")]) == 0
    card, other = ((tmp_path / name / "README.md").read_text(encoding="utf-8") for name in ("exported", "evaluated"))
    assert "**this policy**" not in card
    assert "was not evaluated itself" in card
    assert "- Training steps: 1" in card
    assert "**this policy**" in other
    assert "was not evaluated itself" not in other


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # by the Hub's own client
def test_a_run_pushes_its_policy_and_nothing_else(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ("--use_peft", "true", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--max_steps", "1")
    with running_hub() as hub, pointed_at(hub, str(tmp_path)):
        push = ("--push_to_hub", "true", "--hub_model_id", "mine", "--hub_private_repo", "true", "--hub_token", TOKEN)
        assert train(base, tmp_path / "run", *lora, *push) == 0
        pushed = hub.repos["me/mine"]["main"]
        assert f"{hub.url}/me/mine" in capsys.readouterr().out.replace("\n", "")
    assert hub.visibility == {"me/mine": "private"}
    exported = tmp_path / "run" / "export"
    assert pushed == {str(p.relative_to(exported)): p.read_bytes() for p in exported.rglob("*") if p.is_file()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "evaluations/after.json"} <= set(pushed)
    assert not any(name in path for path in pushed for name in ("checkpoint", "episodes", "metrics", "adapter"))
    assert not any(text.encode() in content for content in pushed.values() for text in (TOKEN, str(tmp_path), "/tmp"))
    assert b"# me/mine" in pushed["README.md"]
    assert RunFolder.open(tmp_path / "run").config()["grpo"]["push_to_hub"] is True
    assert TOKEN.encode() not in (tmp_path / "run" / "config.json").read_bytes()


def test_a_push_that_fails_loses_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    push = (
        "--push_to_hub",
        "true",
        "--hub_token",
        TOKEN,
        "--eval_strategy",
        "no",
        "--eval_episodes",
        "0",
        "--max_steps",
        "1",
    )
    with running_hub() as hub, pointed_at(hub, str(tmp_path)):
        hub.breaks = True
        assert train(base, tmp_path / "run", *push) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert (
            f"The policy is saved in {tmp_path}/run/model; to push it, run sqlenv export {tmp_path}/run --out" in said
        )
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_token_that_may_not_write_is_refused_before_training(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_hub() as hub, pointed_at(hub, str(tmp_path)):
        push = ("--push_to_hub", "true", "--hub_model_id", "them/theirs", "--hub_token", TOKEN)
        assert train(base, tmp_path / "run", *push) == 2
    assert "403 for them/theirs: the token may not write there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
