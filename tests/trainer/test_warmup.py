"""The warm-up: learns the policy's words alone, on the very ids of a rollout; the command makes a policy that plays."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset as HubDataset
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

import trainer.demos.demonstrations
import trainer.warmup
from env_server.cache import CACHE_VARIABLE
from env_server.dataset import Dataset, Hardness, Split
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.tools.findings import Kind
from env_server.types import AnswerMode, SQLAction
from inference.adapters import find_policy
from inference.engine import Completion, FinishReason, Sampling
from policies.tiny.tokenizer import build_tokenizer
from sqlenv import cli
from tests.env_server.tools.planted import Planted, plant
from trainer.chat.format import ChatFormat, Conversation
from trainer.demos.demonstrations import play_demonstrations
from trainer.eval.run_files import RunFolder
from trainer.logprobs import IGNORED
from trainer.models import load_policy
from trainer.policy import SETTINGS_FILE, saved_play
from trainer.ranks import Ranks
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.players import OraclePlayer, play
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.questions import QuestionFilter
from trainer.warmup import (
    Deadline,
    EpochsByLength,
    WarmupTrainer,
    _stop_where_turns_end,
    encode,
)

CHAT = ChatFormat(build_tokenizer(["How many cats are there pets owners name"]))
FEW = [
    *("--max_episodes", "40", "--max_steps", "2", "--per_device_train_batch_size", "4", "--logging_steps", "1"),
    *("--gradient_accumulation_steps", "1", "--save_strategy", "no", "--report_to", "none"),
]
LORA = ["--use_peft", "true", "--lora_r", "4", "--learning_rate", "0.01"]
ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"]


def act(action_type: str, argument: str) -> SQLAction:
    return SQLAction(action_type=action_type, argument=argument)


class RecitingEngine:
    """Says the words of a conversation, as the ids that the tokenizer makes of them."""

    def __init__(self, conversation: Conversation) -> None:
        self._said = iter([action for action, _ in conversation.turns])

    def session(self, key: int) -> RecitingEngine:
        return self

    async def __aenter__(self) -> RecitingEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        ids = CHAT.turn_ids(next(self._said))
        return Completion(tuple(ids), (0.0,) * len(ids), FinishReason.STOP, 0)

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("question_id", ["cats", "oldest", "oslo", "species"])
async def test_the_ids_are_those_of_a_rollout_that_says_the_same(
    question_id: str, pets: Dataset, environment: SQLEnvironment
) -> None:
    question = pets.question(question_id)
    _, conversation = play(environment, question, OraclePlayer(question))
    learned = encode(conversation, CHAT)

    environments = LocalEnvironments(pets)
    settings = RolloutSettings(TokenBudget(4_000, 8_000, 400))
    client = RolloutClient(RecitingEngine(conversation), environments, CHAT, settings)
    (episode,) = await client.play([EpisodeRequest(question_id, 0)])
    environments.close()
    row = episode.row
    assert episode.correct
    assert learned["input_ids"] == row.prompt_ids + row.completion_ids
    trained = [0] * len(row.prompt_ids) + row.env_mask
    assert [label != IGNORED for label in learned["labels"]] == [mask == 1 for mask in trained]


def test_mistakes_are_read_and_not_learned() -> None:
    wrong, right = act("QUERY", "SELECT nothing"), act("QUERY", "SELECT age FROM pets")
    turns = ((wrong, "Error: no such column: nothing"), (right, "age\n3"), (act("ANSWER", "3"), ""))
    whole, masked = encode(Conversation("?", turns), CHAT), encode(Conversation("?", turns, frozenset({0})), CHAT)
    assert masked["input_ids"] == whole["input_ids"]
    learned = [token for token in masked["labels"] if token != IGNORED]
    assert learned == [*CHAT.turn_ids(right), *CHAT.turn_ids(turns[-1][0])]


def test_the_trainer_learns_from_the_labels_as_they_are_however_little_it_computes(
    random_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path
) -> None:
    """TRL neither tokenises again nor makes labels of its own."""
    tokenizer = build_tokenizer(["pets"])
    chat = ChatFormat(tokenizer)
    conversations = [
        Conversation("pets?", ((act("DESCRIBE", "pets"), "age"), (act("ANSWER", "2"), ""))),
        Conversation("How?", ((act("ANSWER", "3"), ""),)),
    ]
    rows = [encode(conversation, chat) for conversation in conversations]
    found, measured = [], []
    for kind in (SFTTrainer, WarmupTrainer):
        model = random_policy(tokenizer)
        sft = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
        sft_trainer = kind(model=model, args=sft, train_dataset=HubDataset.from_list(rows), processing_class=tokenizer)
        (batch,) = sft_trainer.get_train_dataloader()
        sft_trainer.compute_loss(sft_trainer.model, batch).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        measured.append({name: values[-1] for name, values in sft_trainer._metrics["eval"].items()})
    shown = list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert len(shown) == len(rows)
    for row in rows:
        length = len(row["input_ids"])
        (labels,) = (labels for ids, labels in shown if ids[:length] == row["input_ids"])
        assert labels[:length] == row["labels"]
        assert set(labels[length:]) <= {IGNORED}
    for expected, gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, expected)
    assert measured[0].keys() >= {"entropy", "mean_token_accuracy", "num_tokens"}
    assert measured[1] == pytest.approx(measured[0])


def test_every_training_question_is_played_once_and_no_other(pets: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.demos.demonstrations, "load_dataset", lambda _, **__: pets)
    played = play_demonstrations(["one", "two"], 0, Console(quiet=True))
    openings = [conversation.opening for conversation in played]
    expected = [question.text for question in pets.select(Split.TRAIN)] * 2
    assert [opening.splitlines()[0] for opening in openings] == [f"Question: {text}" for text in expected]


BEGINS: Any = SimpleNamespace(resume_from_checkpoint=None)


@pytest.mark.parametrize(("elapsed", "stops"), [(0.0, False), (89.0, False), (90.0, True), (500.0, True)])
def test_a_deadline_stops_the_trainer(elapsed: float, stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1_000.0)
    monkeypatch.setattr(trainer.warmup, "time", clock)
    deadline, control = Deadline(1.5, Ranks()), TrainerControl()
    deadline.on_train_begin(BEGINS, TrainerState(), control)
    clock.monotonic = lambda: 1_000.0 + elapsed
    deadline.on_step_end(BEGINS, TrainerState(), control)
    assert control.should_training_stop is stops


def test_minutes_count_over_all_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1_000.0)
    monkeypatch.setattr(trainer.warmup, "time", clock)
    deadline, control = Deadline(1.5, Ranks()), TrainerControl()
    deadline.on_train_begin(BEGINS, TrainerState(), control)
    clock.monotonic = lambda: 1_060.0
    kept = deadline.state_dict()
    clock.monotonic = lambda: 5_000.0  # what was done after the checkpoint is lost
    again = Deadline(1.5, Ranks())
    again.on_train_begin(BEGINS, TrainerState(), control)
    again.load_state_dict(kept)
    for seconds, stops in ((29.0, False), (30.0, True)):
        clock.monotonic = lambda seconds=seconds: 5_000.0 + seconds
        again.on_step_end(BEGINS, TrainerState(), control)
        assert control.should_training_stop is stops


@pytest.fixture(scope="module")
def cache(generated_cache: Path) -> Iterator[None]:
    """The generated data of the tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(generated_cache))
        yield


def warm_up(target: Path, *flags: str) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    assert cli.main(["warmup", *ON_CPU, *FEW, "--output_dir", str(target), *flags]) == 0
    return load_policy(str(target))


def test_the_command_trains_a_policy_the_same_twice_and_then_further(cache: None, tmp_path: Path) -> None:
    base = ("--model_name_or_path", str(BASE_CHECKPOINT))
    model, tokenizer = warm_up(tmp_path / "new", *base)
    again, _ = warm_up(tmp_path / "again", *base)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    other = ("--noisy_expert_fraction", "0.5", "--answer_mode", "sql", "--step_budget", "9")
    shop = plant(Planted(Kind.EMPTY_TABLE), tmp_path)
    further, same = warm_up(
        tmp_path / "further", "--model_name_or_path", str(tmp_path / "new"), "--data", f"{shop},synthetic", *other
    )
    assert same.get_vocab() == tokenizer.get_vocab()
    assert same.chat_template == tokenizer.chat_template
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), further.parameters(), strict=True))
    saved = saved_play(find_policy(str(tmp_path / "further")).ref)
    assert saved is not None
    assert saved.settings.answer_mode is AnswerMode.SQL
    assert saved.settings.environment == EnvSettings(step_budget=9)
    assert saved.settings.data == str(shop), "the first of several is what it is evaluated on"


def test_a_warm_up_that_is_killed_goes_on_to_the_bit(cache: None, tmp_path: Path) -> None:
    epochs = ("--max_episodes", "24", "--max_steps", "-1", "--num_train_epochs", "2")
    saving = ("--save_strategy", "steps", "--save_steps", "2", "--model_name_or_path", str(BASE_CHECKPOINT))
    whole, _ = warm_up(tmp_path / "whole", *saving, *epochs)
    assert not list((tmp_path / "whole").rglob("README.md")), "a card is the exported policy's"
    again = [*ON_CPU, *FEW, "--output_dir", str(tmp_path / "whole"), *saving, *epochs]
    assert cli.main(["warmup", *again, "--resume_from_checkpoint", "true"]) == 2, "it is finished"
    for step in (4, 8, 12):  # in the first epoch, in the second one, at the end
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        half = shutil.copytree(folder / f"checkpoint-{step}", folder / f"checkpoint-{step + 1}")
        (half / SETTINGS_FILE).unlink()  # it was being written
        resumed, _ = warm_up(folder, *saving, *epochs, "--resume_from_checkpoint", "true")
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        histories = [
            json.loads((run / "checkpoint-12" / "trainer_state.json").read_bytes())["log_history"]
            for run in (tmp_path / "whole", folder)
        ]
        assert histories[0] == histories[1]


def test_the_first_step_of_a_warm_up_trains_too(cache: None, tmp_path: Path) -> None:
    trained, _ = warm_up(tmp_path, "--model_name_or_path", str(BASE_CHECKPOINT), "--max_steps", "1")
    base, _ = load_policy(str(BASE_CHECKPOINT))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))


def test_an_epoch_has_an_order_of_its_own_whatever_was_drawn_before() -> None:
    lengths = [place % 7 for place in range(100)]
    order, again = EpochsByLength(lengths, 10, 3), EpochsByLength(lengths, 10, 3)
    first = list(order)
    torch.rand(5)
    order.epoch = again.epoch = 1
    assert sorted(first) == list(range(100))
    assert list(order) == list(again) != first
    assert len(order) == 100


def test_the_questions_of_some_levels_are_played(cache: None, capsys: pytest.CaptureFixture[str]) -> None:
    play_demonstrations(["synthetic"], 0, Console(file=sys.stderr), limit=3, kept=QuestionFilter((Hardness.HARD,)))
    assert "on 3 of 450 questions" in capsys.readouterr().err


def test_with_lora_it_makes_an_adapter_and_goes_on_with_it(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--model_name_or_path", str(BASE_CHECKPOINT))
    first, _ = warm_up(tmp_path / "first", *base, *LORA)
    assert isinstance(first, PeftModel)
    assert saved_play(find_policy(str(tmp_path / "first")).ref) is not None
    assert "step 2/2  loss" in capsys.readouterr().err

    second, _ = warm_up(tmp_path / "second", "--model_name_or_path", str(tmp_path / "first"), "--learning_rate", "0.01")
    assert find_policy(str(tmp_path / "second")).base.location == str(BASE_CHECKPOINT)
    assert "continuing with the adapter" in capsys.readouterr().err
    moved = {
        name.rpartition(".default")[0]: not torch.equal(a, b)
        for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True)
    }
    assert all(changed == ("lora_" in name) for name, changed in moved.items() if name)
    # Two steps from B = 0, and then two more from there, not from the beginning.
    distance = [sum(float(p.abs().sum()) for n, p in m.named_parameters() if "lora_B" in n) for m in (first, second)]
    assert distance[1] > distance[0] > 0


def test_what_a_policy_played_right_is_learned(cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A round of rejection sampling: play training questions, then learn from what was right and nothing else."""
    base, file = str(BASE_CHECKPOINT), tmp_path / "episodes.jsonl"
    sampling = ("--split", "train", "--episodes", "4", "--samples", "6", "--temperature", "1", "--seed", "1")
    assert cli.main(["evaluate", "--policy", base, *sampling, "--episodes_out", str(file)]) == 0
    played = [json.loads(line) for line in file.read_text().splitlines()]
    right = {each["question_id"] for each in played if each["outcome"] == "correct"}
    assert right

    learned, _ = warm_up(
        tmp_path / "second",
        *(
            "--model_name_or_path",
            base,
            "--rejection_sampling",
            str(file),
            "--max_episodes",
            "0",
            "--learning_rate",
            "0.01",
        ),
    )
    said = capsys.readouterr().err
    assert f"of {len(right)} questions are replayed" in said
    assert "% of them right" not in said, "the oracle plays none"
    assert "tokens/s" in said
    before, _ = load_policy(base)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), learned.parameters(), strict=True))


def test_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 1})
    start = ["--model_name_or_path", str(BASE_CHECKPOINT), "--output_dir", str(run.path)]
    assert cli.main(["warmup", *ON_CPU, *start]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run.config() == {"seed": 1}


def test_generation_stops_where_turns_end(random_policy: Callable[..., Qwen3ForCausalLM]) -> None:
    tokenizer = build_tokenizer(["pets"])
    model = random_policy(tokenizer)
    for before, after in ((None, 3), (3, 3), (1, [3, 1]), ([1, 3], [3, 1])):
        model.generation_config.eos_token_id = before
        _stop_where_turns_end(model, ChatFormat(tokenizer))
        assert model.generation_config.eos_token_id == after


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "--model_name_or_path"),
        (("--noisy_expert_fraction", "-1"), "--noisy_expert_fraction"),
        (("--samples_per_question", "0"), "--samples_per_question"),
        (("--rejection_sampling", "/no/such.jsonl"), "/no/such.jsonl"),
        (("--config", "/no/such.yaml"), "/no/such.yaml"),
        (("--answer_mode", "yes"), "--answer_mode"),
        (("--max_episodes", "0"), "--max_episodes"),
        (("--chat_template_kwargs", "[1]"), "--chat_template_kwargs must be a JSON object"),
        (("--max_episodes", "4", "--max_length", "9"), "--max_length"),
    ],
)
def test_wrong_flags_are_one_line(
    cache: None, flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ("--model_name_or_path", str(BASE_CHECKPOINT)) if flags else ()
    try:
        status: object = cli.main(["warmup", *ON_CPU, *policy, *flags])
    except SystemExit as ended:  # of a value that does not fit its flag
        status = ended.code
    assert status == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert complaint in line
