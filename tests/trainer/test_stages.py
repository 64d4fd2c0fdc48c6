"""Several stages in one config: which stage gets which key, what is refused, and what a resumed run continues from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference.adapters import ModelRef, PolicyNameError, find_policy
from trainer.eval.output_folder import FINAL_STATE
from trainer.flags.config_file import STAGES
from trainer.flags.configs import honours
from trainer.stages import (
    COMMANDS,
    Stage,
    StageError,
    read_finished,
    read_stages,
    same_precision,
    write_finished,
)

WARMUP: dict[str, Any] = {"kind": "warmup"}
GRPO: dict[str, Any] = {"kind": "grpo"}
RUN = Path("runs/here")


def read(*stages: Any, flags: str = "", output: Path = RUN, **shared: Any) -> list[Stage]:
    return read_stages({STAGES: list(stages), **shared}, flags.split(), output)


def test_each_stage_gets_the_shared_keys_of_its_kind_and_its_own_win() -> None:
    stages = read(
        WARMUP | {"max_episodes": 5}, GRPO | {"name": "easy", "seed": 9}, GRPO,
        seed=1, beta=0.1, loss_type="dapo", model_name_or_path="m", env={"A": "b"}, output_dir="runs/x",
    )  # fmt: skip
    assert [stage.folder for stage in stages] == [RUN / "1-warmup", RUN / "2-easy", RUN / "3-grpo"]
    assert [stage.keys for stage in stages] == [
        {"max_episodes": 5, "seed": 1, "model_name_or_path": "m", "env": {"A": "b"}},
        {"seed": 9, "beta": 0.1, "loss_type": "dapo", "env": {"A": "b"}},
        {"seed": 1, "beta": 0.1, "loss_type": "dapo", "env": {"A": "b"}},
    ]


def test_flags_go_where_shared_keys_go_and_secrets_are_not_in_the_settings() -> None:
    flags = (
        "--beta=0.5 --seed 3 --model-name-or-path m --reward_weights 1 0 -1 --env ws://a --env_token geheim --no_bf16"
    )
    warmup, grpo = read(WARMUP, GRPO | {"beta": 0.1}, flags=flags)
    assert warmup.flags == {
        "seed": ["--seed", "3"],
        "model_name_or_path": ["--model-name-or-path", "m"],
        "bf16": ["--no_bf16"],
    }
    assert grpo.flags["reward_weights"] == ["--reward_weights", "1", "0", "-1"]
    assert grpo.flags["env_token"] == ["--env_token", "geheim"]
    assert grpo.settings == {
        "beta": "0.5", "seed": "3", "reward_weights": "1 0 -1", "env_server": "ws://a", "bf16": "false"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "shared", "flags", "named"),
    [
        ([], {}, "", "stages"),
        (["warmup"], {}, "", "stages"),
        ([{"name": "x"}], {}, "", "stage 1: kind"),
        ([WARMUP, {"kind": "sft"}], {}, "", "stage 2: kind"),
        ([GRPO | {"name": "a/b"}], {}, "", "stage 1: name"),
        ([GRPO | {"output_dir": "x"}], {}, "", "output_dir"),
        ([GRPO | {"dry_run": True}], {}, "", "dry_run"),
        ([WARMUP, GRPO | {"model_name_or_path": "x"}], {}, "", "stage 2 of 2 (grpo): model_name_or_path"),
        ([GRPO], {"max_episodes": 1}, "", "max_episodes"),
        ([WARMUP], {"loss_type": "dapo"}, "", "loss_type"),
        ([GRPO], {}, "--explor 1", "--explor"),
        ([GRPO], {"resume_from_checkpoint": True}, "", "--resume_from_checkpoint"),
        ([GRPO], {}, "runs/x --seed 1", "runs/x"),
    ],
)
def test_what_cannot_be_is_refused_by_stage_and_key(
    stages: list[Any], shared: dict[str, Any], flags: str, named: str
) -> None:
    with pytest.raises(StageError) as refusal:
        read(*stages, flags=flags, **shared)
    assert named in str(refusal.value)


keys = st.dictionaries(st.sampled_from(["seed", "max_steps", "beta", "max_episodes"]), st.integers(0, 5), max_size=4)


@given(entries=st.lists(st.sampled_from([WARMUP, GRPO]), min_size=1, max_size=4), shared=keys, flags=keys)
def test_nothing_that_is_accepted_is_lost(
    entries: list[dict[str, Any]], shared: dict[str, Any], flags: dict[str, Any]
) -> None:
    words = " ".join(f"--{key} {value}" for key, value in flags.items())
    if not all(any(honours(*COMMANDS[entry["kind"]], key, "1") for entry in entries) for key in {**shared, **flags}):
        with pytest.raises(StageError):
            read(*entries, flags=words, **shared)
        return
    for stage in read(*entries, flags=words, **shared):
        wanted = {
            key: str(value) for key, value in {**shared, **flags}.items() if honours(*COMMANDS[stage.kind], key, "1")
        }
        assert stage.settings == wanted


def three(folder: Path, **changed: Any) -> list[Stage]:
    keys = {"learning_rate": 0.1, "vllm_server_base_url": "http://there:1", "save_steps": 5} | changed
    return read(WARMUP | {"max_episodes": 1}, GRPO | {"name": "easy", **keys}, GRPO | {"name": "all"}, output=folder)


def test_what_is_finished_is_read_back_wherever_the_folder_and_the_servers_are(tmp_path: Path) -> None:
    write_finished(three(tmp_path / "run"), tmp_path / "run", 2)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert str(tmp_path) not in (moved / "stages.json").read_text()
    changed: dict[str, Any]
    for changed in ({}, {"vllm_server_base_url": "http://here:2"}, {"save_steps": 9}, {"max_concurrency": 8}):
        assert read_finished(three(moved, **changed), moved) == 2
    for changed in ({"learning_rate": 0.2}, {"beta": 1}):
        with pytest.raises(StageError, match=next(iter(changed))):
            read_finished(three(moved, **changed), moved)
    with pytest.raises(StageError, match="2 stages are finished, and the config has 1"):
        read_finished(three(moved)[:1], moved)


def test_the_folder_is_the_policy_of_its_last_stage(tmp_path: Path) -> None:
    stages = three(tmp_path)
    model = stages[-1].folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write_finished(stages, tmp_path, 2)
    with pytest.raises(PolicyNameError, match="2 of 3 stages are finished"):
        find_policy(str(tmp_path))
    write_finished(stages, tmp_path, 3)
    assert find_policy(str(tmp_path)).ref == ModelRef(str(model))


def test_a_stage_that_its_folder_says_is_finished_is(tmp_path: Path) -> None:
    stages = three(tmp_path)
    assert read_finished(stages, tmp_path) == 0
    write_finished(stages, tmp_path, 1)
    model = stages[1].folder / "model"
    model.mkdir(parents=True)
    (model.parent / FINAL_STATE).write_text('{"global_step": 3, "max_steps": 3}')
    assert read_finished(stages, tmp_path) == 1, "its policy is not there"
    (model / "config.json").write_text("{}")
    assert read_finished(stages, tmp_path) == 2
    (tmp_path / "stages.json").unlink()
    with pytest.raises(StageError, match="2-easy exists, and "):
        read_finished(stages, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"stages": []}', '{"finished": [{"name": 1}]}'])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text)
    with pytest.raises(StageError, match=r"stages\.json cannot be read"):
        read_finished(three(tmp_path), tmp_path)


def test_a_stage_leaves_the_precision_of_the_process_alone() -> None:
    backends: Any = torch.backends
    before = backends.fp32_precision
    with same_precision():
        backends.fp32_precision = "tf32"
    assert backends.fp32_precision == before
