"""How the ranks of a run share work, meet, and end: in one process, and in two real ones over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.server_process import ROOT
from env_server.errors import SQLEnvError
from tests.rank_state import rank_state
from trainer.config import ConfigError
from trainer.ranks import Ranks, abort_together, require_whole_model

WAIT_S = 120.0

TwoRanks = tuple[Path, subprocess.CompletedProcess[str]]

PROGRAM = """
import signal, sys
from pathlib import Path
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from trainer.next_command import NextCommand
from trainer.ranks import Ranks, abort_together
from trainer.signals import StopAfterStep, StopSignals

folder = Path(sys.argv[1])
arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, bf16=False)
with abort_together("sqlenv train"):
    ranks = Ranks.of(arguments)
    assert ranks.is_main == (ranks.index == 0)
    with ranks.local_main_process_first():
        found = (folder / "cache").exists()
        (folder / "cache").write_text("whole")
    mine = ranks.share("abcde")
    (folder / f"met-{ranks.index}").write_text(f"{found} {mine!r} {ranks.gather(list(mine))} {ranks.gather([])}")
    (folder / f"on-main-{ranks.index}").write_text(str(ranks.gather_on_main(mine)))
    torch.save(torch.ones(2), folder / f"tensor-{ranks.index}")
    torch.load(folder / f"tensor-{ranks.index}", map_location=arguments.device)

    for told_at in (3, 5):
        with StopSignals("steps", NextCommand("", "")) as stopping:
            stopping.begin_training(ranks)
            callback, control = StopAfterStep(stopping), TrainerControl()
            for step in range(1, 6):
                if ranks.index == 1 and step == told_at:
                    signal.raise_signal(signal.SIGTERM)
                callback.on_step_end(arguments, TrainerState(global_step=step, max_steps=5), control)
                if control.should_training_stop:
                    break
            stopped = stopping.stopped_after or stopping.end_training(folder / "model", "synthetic")
            with (folder / f"stopped-{ranks.index}").open("a") as file:
                file.write(f"{step} {stopped} {stopping.status} ")

    if ranks.index == 1:
        raise KeyboardInterrupt
    ranks.gather([])
"""
"""Two ranks meet; the second one alone is told to stop, in the third of five steps and in the last, and then fails."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """The folder that the program has written into, started by torchrun, and how it ended."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(program), str(folder)]
    return folder, subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


@given(st.lists(st.integers()), st.integers(1, 9))
def test_the_shares_of_all_ranks_are_the_whole_in_order_and_even(items: list[int], count: int) -> None:
    shares = [list(Ranks(rank_state(index, count)).share(items)) for index in range(count)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_that_is_alone_waits_for_nobody() -> None:
    ranks = Ranks()
    with ranks.local_main_process_first():
        assert ranks.is_main
    assert ranks.gather(["a", "b"]) == ["a", "b"]
    assert ranks.gather_on_main("ab") == ["ab"]
    ranks.disconnect()
    assert not torch.distributed.is_initialized()


def test_two_ranks_meet(two_ranks: TwoRanks) -> None:
    folder, ended = two_ranks
    assert (folder / "met-0").read_text() == "False 'ab' ['a', 'b', 'c', 'd', 'e'] []", ended.stderr
    assert (folder / "met-1").read_text() == "True 'cde' ['a', 'b', 'c', 'd', 'e'] []", "the second finds the cache"
    assert [(folder / f"on-main-{rank}").read_text() for rank in (0, 1)] == ["['ab', 'cde']", "[]"]


def test_ranks_stop_together_when_one_is_told(two_ranks: TwoRanks) -> None:
    folder, ended = two_ranks
    assert [(folder / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["3 3 0 5 True 0 "] * 2, ended.stderr
    assert [line.partition(",")[0] for line in ended.stdout.splitlines() if line[0] != " "] == [
        "stopped after step 3 of 5",
        f"the policy is trained and saved in {folder / 'model'}",
    ]


def test_the_rank_that_fails_first_says_why_and_the_one_that_it_takes_down_is_silent(two_ranks: TwoRanks) -> None:
    _, ended = two_ranks
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("sqlenv train:")]
    assert said == ["sqlenv train: interrupted"]


def test_alone_an_error_is_just_raised() -> None:
    with pytest.raises(SQLEnvError, match="wrong"), abort_together("sqlenv train"):
        raise SQLEnvError("wrong")


def accelerator(kind: DistributedType, zero_stage: int | None = None) -> Any:
    """What is read of an Accelerator."""
    plugin = None if zero_stage is None else SimpleNamespace(zero_stage=zero_stage)
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin))


def test_a_model_that_is_shared_out_cannot_generate_in_the_trainers_process() -> None:
    for kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        require_whole_model(accelerator(kind))
    require_whole_model(accelerator(DistributedType.DEEPSPEED, zero_stage=2))
    with pytest.raises(ConfigError, match=r"^FSDP leaves each rank a part .*--use_vllm"):
        require_whole_model(accelerator(DistributedType.FSDP))
    with pytest.raises(ConfigError, match=r"^DeepSpeed ZeRO-3 leaves"):
        require_whole_model(accelerator(DistributedType.DEEPSPEED, zero_stage=3))
