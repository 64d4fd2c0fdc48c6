"""Run health checks, each provoked by a real run of `sqlenv train` with the fault.

A few steps each, of a network of two layers that begins with habits: which token it writes after which. A reward that
has stopped rising takes a hundred steps, more than a test has: tests/trainer/training/test_health.py has made-up logs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from policies.tiny.tokenizer import build_tokenizer
from sqlenv import cli
from tests.integration.training import surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.training import health
from trainer.training.health import CHECKS, Check

FLAGS = [
    *("--eval_episodes", "0", "--step_budget", "3", "--max_turn_length", "8", "--max_completion_length", "256"),
    *("--gradient_accumulation_steps", "1", "--num_generations", "8", "--lr_scheduler_type", "constant"),
    *("--warmup_steps", "0", "--report_to", "none", "--save_strategy", "no", "--seed", "3"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
]
Habits = Mapping[str, Mapping[str, float]]
"""After a token, what is added to the logits of others."""
ENDS: Habits = {"1": {"<end>": 10}, "2": {"<end>": 10}, "items": {"<end>": 10}}
DESCRIBES: Habits = {**ENDS, "DESCRIBE ": {"items": 9, "1": 7}, "SAMPLE ": {"items": 9, "1": 7}}
ANSWERS: Habits = {**DESCRIBES, "<act>": {"ANSWER ": 10, "DESCRIBE ": 8}, "ANSWER ": {"1": 8, "2": 8}}
EXPLORES: Habits = {**ANSWERS, "<act>": {"ANSWER ": 8, "DESCRIBE ": 8, "SAMPLE ": 7}}
SELDOM_RIGHT: Habits = {**EXPLORES, "ANSWER ": {"1": 8, "2": 5}}
ALWAYS_TWO: Habits = {"<act>": {"ANSWER ": 14}, "ANSWER ": {"2": 14}, "2": {"<end>": 14}}
BABBLES: Habits = {}


@dataclass(frozen=True)
class Case:
    """A run, and all of its alerts, or some where `others_follow`."""

    habits: Habits
    steps: int
    episodes: int
    rate: str
    flags: tuple[str, ...]
    alerts: set[Check]
    others_follow: bool = False
    data: str = "half"
    """Of the questions with the answer 2."""
    attention_dropout: float = 0.0
    context: int = 512


FORMAT_UNPAID = (
    "--warmup_steps",
    "40",
    "--reward_weights",
    "0",
    "0",
    "-1",
    "0",
    "--step_budget",
    "4",
    "--scale_rewards",
    "group",
)
CORRECTNESS_OVERWHELMS = ("--reward_weights", "1", "0", "0.1", "0", "--scale_rewards", "none")
CASES = {
    "no format": Case(BABBLES, 5, 64, "1e-4", (), {health.ALL_FAIL, health.NO_FORMAT, health.TURNS_CUT}),
    "all right": Case(ALWAYS_TWO, 5, 64, "1e-4", (), {health.ALL_SUCCEED}, data="all"),
    "no chance": Case(ALWAYS_TWO, 5, 64, "1e-4", (), {health.ZERO_VARIANCE, health.NO_ENTROPY}),
    "no weights": Case(EXPLORES, 1, 16, "1e-4", ("--reward_weights", *"0000"), {health.NO_SPREAD}),
    "short": Case(EXPLORES, 5, 16, "1e-4", ("--max_completion_length", "24"), {health.OUT_OF_TOKENS}),
    "narrow": Case(EXPLORES, 5, 16, "1e-4", ("--step_budget", "6"), {health.MASKED}, context=90),
    "far too fast": Case(EXPLORES, 2, 16, "1e10", (), {health.NOT_FINITE}),
    "too fast": Case(
        EXPLORES, 10, 16, "0.05", ("--beta", "0.001"), {health.HIGH_KL, health.FORMAT_LOST}, others_follow=True
    ),
    "too fast on one batch": Case(EXPLORES, 8, 16, "0.05", ("--num_iterations", "4"), {health.CLIPPED}),
    "steps are paid": Case(
        ANSWERS, 10, 64, "0.02", FORMAT_UNPAID, {health.FORMAT_LOST, health.LONGER}, others_follow=True
    ),
    "few decide": Case(SELDOM_RIGHT, 24, 8, "1e-5", CORRECTNESS_OVERWHELMS, {health.SPIKES}, data="all"),
    "dropout": Case(
        *(EXPLORES, 5, 16, "1e-6", ("--disable_dropout", "false"), {health.MISMATCH}),
        others_follow=True,
        attention_dropout=0.9,
    ),
}
Train = Callable[[Case], RunFolder]


def questions(folder: Path, answer: Callable[[int], int]) -> Path:
    """A table of three rows, and questions that ask for a number of them."""
    folder.mkdir()
    (folder / "items.csv").write_text("item_id,name\n1,lamp\n2,desk\n3,sofa\n")
    asked = [f"How many items come before number {n} and {answer(n) + 1}?" for n in range(4, 44)]
    golds = [f"SELECT COUNT(*) FROM items WHERE item_id < {n} AND item_id < {answer(n) + 1}" for n in range(4, 44)]
    lines = [json.dumps({"question": q, "sql": sql}) + "\n" for q, sql in zip(asked, golds, strict=True)]
    (folder / "questions.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("health")
    questions(folder / "all", lambda _: 2)
    questions(folder / "half", lambda n: 1 + n % 2)
    with surroundings_in(folder / "cache"):
        yield folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["How many items come before number and"])


def give_habits(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, habits: Habits) -> None:
    """The first hidden dimensions tell the token; their columns of the head are what it adds to the logits."""

    def index(word: str) -> int:
        (found,) = tokenizer(word, add_special_tokens=False)["input_ids"]
        return int(found)

    with torch.no_grad():
        model.model.embed_tokens.weight[:, : len(habits)] = 0.0
        for place, (token, follows) in enumerate(habits.items()):
            model.model.embed_tokens.weight[index(token), place] = 1.0
            for word, bias in follows.items():
                model.lm_head.weight[index(word), place] = bias / model.config.hidden_size**0.5


@pytest.fixture(scope="module")
def train(random_policy: Callable[..., Qwen3ForCausalLM], tokenizer: PreTrainedTokenizerFast, work: Path) -> Train:
    def run(case: Case) -> RunFolder:
        number = len(list(work.glob("run-*")))
        policy, output = work / f"policy-{number}", work / f"run-{number}"
        model = random_policy(tokenizer, context=case.context)
        give_habits(model, tokenizer, case.habits)
        if case.attention_dropout:
            model.config.attention_dropout = case.attention_dropout
            with torch.no_grad():
                # What is attended to matters, else it does not matter that some of it is dropped.
                for layer in model.model.layers:
                    layer.self_attn.o_proj.weight *= 90.0
        model.save_pretrained(policy)
        tokenizer.save_pretrained(policy)
        command = ["train", "--model_name_or_path", str(policy), "--output_dir", str(output), *FLAGS]
        command += ["--data", str(work / case.data), "--max_steps", str(case.steps), "--learning_rate", case.rate]
        assert cli.main([*command, "--per_device_train_batch_size", str(case.episodes), *case.flags]) == 0
        return RunFolder.open(output)

    return run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_fault_alerts(case: Case, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(case)
    messages = [alert.message for alert in folder.alerts()]
    expected = {check.message for check in case.alerts}
    assert expected <= set(messages)
    assert case.others_follow or expected == set(messages)
    assert len(messages) == len(set(messages))
    said, report = capsys.readouterr().out, folder.report_path.read_text(encoding="utf-8")
    for alert in folder.alerts():
        assert f"warning at step {alert.step}: {alert.message} (" in said
        assert f"Step {alert.step}: <b>{alert.message}</b>" in report


def test_every_check_has_its_run() -> None:
    provoked = {check for case in CASES.values() for check in case.alerts}
    assert provoked == set(CHECKS) - {health.FLAT}


def test_a_run_that_learns_is_silent(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(Case(EXPLORES, 16, 64, "5e-3", (), set()))
    rates = [row["rollout/success_rate"] for row in folder.metrics()]
    assert sum(rates[-4:]) > sum(rates[:4]) + 0.4
    assert folder.alerts() == []
    assert "warning" not in capsys.readouterr().out
    assert "health alert" not in folder.report_path.read_text(encoding="utf-8")


def test_a_group_whose_smaller_rewards_alone_differ_has_no_signal(train: Train) -> None:
    """All wrong, in different ways."""
    row = train(Case({**EXPLORES, "ANSWER ": {"1": 14}}, 1, 32, "1e-4", (), set(), data="all")).metrics()[0]
    assert row["rollout/success_rate"] == 0
    assert row["reward_std"] > 0.01
    assert row["rollout/no_signal"] == 1.0
    assert row["gradient_share/correctness"] == 0.0
