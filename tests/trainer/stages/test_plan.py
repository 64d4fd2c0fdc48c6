"""The plan of several stages: who gets which key, what is refused and in which words. No run, no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.stages.plan import STAGES, Kind, KnownFlags, Plan, StageError, read_plan, split_flags
from trainer.stages.run import known_flags

BOTH = ("seed", "max_steps", "data", "model_name_or_path", "model_revision", "output_dir", "loss_type")
KNOWN = {
    Kind.WARMUP: KnownFlags(frozenset({*BOTH, "explore"}), frozenset({"eval_strategy"}), {"loss_type": ("nll",)}),
    Kind.GRPO: KnownFlags(frozenset({*BOTH, "beta", "eval_strategy", "reward_weights", "env_server", "no_wait"})),
}
WARMUP: dict[str, Any] = {"kind": "warmup"}
GRPO: dict[str, Any] = {"kind": "grpo"}
Keys = dict[str, Any]


def plan(*stages: Keys, flags: str = "", **shared: Any) -> Plan:
    return read_plan({STAGES: list(stages), **shared}, flags.split(), KNOWN, "runs/here")


def test_each_stage_gets_the_shared_keys_of_its_kind_and_its_own_win() -> None:
    planned = plan(
        WARMUP | {"explore": 0.5}, GRPO | {"name": "easy", "seed": 9}, GRPO, seed=1, beta=0.1, model_name_or_path="m"
    )
    assert [stage.folder for stage in planned.stages] == ["1-warmup", "2-easy", "3-grpo"]
    assert [dict(stage.keys) for stage in planned.stages] == [
        {"seed": 1, "model_name_or_path": "m", "explore": 0.5},
        {"seed": 9, "beta": 0.1},
        {"seed": 1, "beta": 0.1},
    ]
    assert planned.title(planned.stages[1]) == "stage 2 of 3 (easy)"
    assert planned.output_dir == Path("runs/here")


def test_flags_go_where_shared_keys_go_and_win() -> None:
    planned = plan(
        WARMUP,
        GRPO | {"beta": 0.1},
        flags="--beta 0.5 --seed 3 --model-name-or-path m --reward_weights 1 0 -1 --env ws://a --no_wait",
    )
    warmup, grpo = planned.stages
    assert warmup.words == ["--seed", "3", "--model-name-or-path", "m"]
    assert grpo.words == [
        *("--beta", "0.5", "--seed", "3", "--reward_weights", "1", "0", "-1", "--env", "ws://a", "--no_wait"),
    ]
    assert grpo.settings == {
        "beta": "0.5", "seed": "3", "reward_weights": "1 0 -1", "env_server": "ws://a", "no_wait": "true"
    }  # fmt: skip


def test_a_value_that_one_kind_alone_honours_goes_there() -> None:
    planned = plan(WARMUP, GRPO, loss_type="dapo", eval_strategy="steps")
    assert [dict(stage.keys) for stage in planned.stages] == [{}, {"loss_type": "dapo", "eval_strategy": "steps"}]
    alone = plan(WARMUP, loss_type="dapo", eval_strategy="steps")
    assert dict(alone.stages[0].keys) == {"loss_type": "dapo", "eval_strategy": "steps"}, "it says why not"


def test_what_is_about_the_whole_run() -> None:
    planned = plan(GRPO, output_dir="runs/config", env={"A": "b"}, flags="--resume_from_checkpoint True")
    assert (planned.output_dir, planned.resume, planned.dry_run) == (Path("runs/config"), True, False)
    assert planned.stages[0].keys == {"env": {"A": "b"}}
    planned = plan(GRPO, output_dir="runs/config", flags="--output_dir runs/flag --dry-run --dry_run_gpu=24")
    assert (planned.output_dir, planned.dry_run) == (Path("runs/flag"), True)
    assert planned.dry_run_gpu == ("--dry_run_gpu=24",)
    assert planned.stages[0].words == []


@pytest.mark.parametrize(
    ("stages", "shared", "flags", "complaint"),
    [
        ([], {}, "", "stages must be a list of stages"),
        (["warmup"], {}, "", "stages must be a list of stages"),
        ([{"name": "x"}], {}, "", "stage 1: kind must be warmup or grpo, not None"),
        ([WARMUP, {"kind": "sft"}], {}, "", "stage 2: kind must be warmup or grpo, not 'sft'"),
        ([GRPO | {"name": "a/b"}], {}, "", "stage 1: name is letters"),
        ([GRPO, GRPO | {"name": "b", "explore": 1}], {}, "", "stage 2 (b): explore is no flag of sqlenv train"),
        ([GRPO | {"output_dir": "x"}], {}, "", "stage 1 (grpo): output_dir is about the run as a whole"),
        ([GRPO | {"dry_run": True}], {}, "", "stage 1 (grpo): dry_run is about the run as a whole"),
        (
            [WARMUP, GRPO | {"model_name_or_path": "x"}],
            {},
            "",
            "stage 2 (grpo): model_name_or_path is the first stage's; this one goes on from the stage before",
        ),
        ([GRPO], {"explore": 1}, "", "explore is for stages of the kind warmup, and there is none"),
        ([GRPO], {"explor": 1}, "", "explor is no flag of sqlenv warmup or sqlenv train"),
        ([GRPO], {}, "--explor 1", "--explor is no flag of sqlenv warmup or sqlenv train"),
        ([GRPO], {"resume_from_checkpoint": True}, "", "give --resume_from_checkpoint on the command line"),
        ([GRPO], {}, "--resume_from_checkpoint runs/x/checkpoint-3", "stages find their own checkpoint"),
        ([GRPO], {}, "runs/x --seed 1", "what is 'runs/x' for?"),
    ],
)
def test_what_cannot_be_is_refused_by_stage_and_key(
    stages: list[Any], shared: Keys, flags: str, complaint: str
) -> None:
    with pytest.raises(StageError) as refusal:
        plan(*stages, flags=flags, **shared)
    assert complaint in str(refusal.value)


def test_a_secret_is_not_among_what_is_compared_and_written() -> None:
    known = {kind: KnownFlags(frozenset({"env_token", "hub_token", "seed"})) for kind in Kind}
    written = {STAGES: [GRPO | {"hub_token": "geheim"}], "seed": 1}
    planned = read_plan(written, ["--env_token", "geheim"], known, "x")
    assert planned.stages[0].settings == {"seed": "1"}
    assert planned.stages[0].words == ["--env_token", "geheim"]


keys = st.dictionaries(st.sampled_from([*BOTH[:3], "beta", "explore"]), st.integers(0, 5), max_size=4)
lists = st.lists(st.sampled_from([WARMUP, GRPO]), min_size=1, max_size=4)


@given(entries=lists, shared=keys, flags=keys)
def test_nothing_that_is_accepted_is_lost(entries: list[Keys], shared: Keys, flags: Keys) -> None:
    words = " ".join(f"--{key} {value}" for key, value in flags.items())
    kinds = {Kind(entry["kind"]) for entry in entries}
    if not all(any(key in KNOWN[kind] for kind in kinds) for key in {**shared, **flags}):
        with pytest.raises(StageError, match="and there is none"):
            plan(*entries, flags=words, **shared)
        return
    planned = plan(*entries, flags=words, **shared)
    for key, value in {**shared, **flags}.items():
        got = [stage.settings[key] for stage in planned.stages if key in stage.settings]
        takers = [stage for stage in planned.stages if key in KNOWN[stage.kind]]
        assert got == [str(value)] * len(takers)
        assert got


@given(st.lists(st.tuples(st.sampled_from(["beta", "seed", "data"]), st.lists(st.integers(-9, 9), max_size=3))))
def test_flags_are_taken_apart_word_by_word(given_flags: list[tuple[str, list[int]]]) -> None:
    words = [word for name, values in given_flags for word in (f"--{name}", *map(str, values))]
    last = dict(given_flags)
    flags = {flag.name: flag for flag in split_flags(words, KNOWN)}
    assert {name: list(flag.words) for name, flag in flags.items()} == {
        name: [f"--{name}", *map(str, values)] for name, values in last.items()
    }


def test_the_kinds_know_the_flags_of_their_commands() -> None:
    known = known_flags()
    for name in ("seed", "difficulty", "data", "use_peft", "max_steps"):
        assert all(flags.honours(name, "x") for flags in known.values())
    assert not known[Kind.WARMUP].honours("loss_type", "dapo")
    assert known[Kind.GRPO].honours("loss_type", "dapo")
    assert "eval_strategy" in known[Kind.WARMUP]
    assert not known[Kind.WARMUP].honours("eval_strategy", "steps")
    assert "reward_weights" not in known[Kind.WARMUP]
