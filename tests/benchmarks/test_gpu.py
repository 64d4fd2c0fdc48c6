"""The walk of `benchmarks/gpu.py`: which rows run where, what a child's end means, going on, the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from benchmarks.gpu import FAILED, LATE, NOT_RUN, OK, done, judged, last_object, read_records, run, table, walk
from benchmarks.gpu_rows import MODEL, Machine, Needs, Row, all_rows, chosen, gpus_of, lacking
from benchmarks.server_process import ROOT
from benchmarks.two_steps import server_flags, summary

NOTHING = Machine(vllm="cpu")
ONE = Machine(("NVIDIA L4",), 22.5, 8.9, 580, "cuda", vllm_here=True, bitsandbytes=True)
T4 = Machine(("Tesla T4",), 15.0, 7.5, 580, "cuda", vllm_here=True)
TWO = Machine(("NVIDIA H100", "NVIDIA H100"), 79.6, 9.0, 590, "cuda", vllm_here=True, bitsandbytes=True)


def runnable(machine: Machine, small_model: str | None = None) -> set[str]:
    return {row.name for row in all_rows(machine, MODEL, small_model) if not lacking(row.needs, machine)}


def test_every_row_is_there_on_every_machine() -> None:
    names = [row.name for row in all_rows(NOTHING, MODEL, None)]
    assert len(set(names)) == len(names)
    assert names == [row.name for row in all_rows(TWO, MODEL, None)]
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"stages"} == {
        name.split("/")[1] for name in names if name.startswith("steps/")
    }


def test_a_cpu_runs_the_tiny_policy_with_both_engines_and_two_transports() -> None:
    pushes = {f"tiny/push/{sync}/{dtype}" for sync in ("disk", "lora") for dtype in ("float32", "bfloat16")}
    rollouts = {"tiny/rollouts/hf", "tiny/rollouts/vllm"}
    assert runnable(NOTHING) == rollouts | pushes | {
        "steps/tiny",
        "steps/tiny/vllm",
    }
    assert runnable(replace(NOTHING, vllm="")) == {
        name for name in runnable(NOTHING) if "push" not in name and "vllm" not in name
    }
    assert {"small/rollouts/vllm", "small/push/lora/bfloat16", "steps/smollm2"} <= runnable(NOTHING, "folder")


def test_one_gpu_of_24_gib_runs_what_needs_neither_a_second_nor_a_larger_one() -> None:
    names = {row.name for row in all_rows(ONE, MODEL, None)}
    assert names - runnable(ONE) == {name for name in names if "nccl" in name} | {"steps/full-80gb"}
    assert runnable(TWO) == names
    assert "steps/t4" in runnable(T4)
    assert not {"steps/small-gpu", "model/push/disk/bfloat16"} & runnable(T4)


@pytest.mark.parametrize(
    ("needs", "machine", "reason"),
    [
        (Needs(gpus=1), NOTHING, "needs a GPU"),
        (Needs(gpus=2), NOTHING, "needs two GPUs"),
        (Needs(gpus=2), ONE, "needs a second GPU"),
        (Needs(gpus=1, gib=80), ONE, "needs 80 GiB, and the GPU has 22.5"),
        (Needs(gpus=1, gib=24), ONE, ""),
        (Needs(gpus=1, bfloat16=True), T4, "needs a GPU with bfloat16"),
        (Needs(bfloat16=True), NOTHING, ""),
        (Needs(), replace(ONE, driver=575), "needs driver 580 or newer, and this is 575"),
        (Needs(vllm=True), replace(ONE, vllm=""), "needs vLLM"),
        (Needs(vllm=True), replace(ONE, vllm="cpu"), "needs vLLM for CUDA"),
        (Needs(vllm_here=True), replace(ONE, vllm_here=False), "needs vLLM beside the trainer"),
        (Needs(bitsandbytes=True), T4, "needs bitsandbytes"),
    ],
)
def test_what_a_machine_lacks(needs: Needs, machine: Machine, reason: str) -> None:
    assert lacking(needs, machine) == reason


@pytest.mark.parametrize(
    ("visible", "gpus", "gib", "second"),
    [(None, 2, 22.5, "1"), ("1", 1, 79.6, "1"), ("1,0", 2, 22.5, "0"), ("", 0, 0.0, "1"), ("GPU-a", 1, 22.5, "1")],
)
def test_what_nvidia_smi_says(visible: str | None, gpus: int, gib: float, second: str) -> None:
    text = "NVIDIA L4, 23034, 8.9, 580.95.05\nNVIDIA H100 80GB HBM3, 81559, 9.0, 580.95.05\n"
    found = gpus_of(text, visible)
    assert (len(found.gpus), found.gib, found.second_gpu) == (gpus, gib, second)
    assert found.driver == (580 if gpus else 0)


def test_rows_are_picked_by_name_beginning_or_pattern() -> None:
    rows = all_rows(NOTHING, MODEL, None)
    assert chosen(rows, ()) == rows
    assert [row.name for row in chosen(rows, ("steps/tiny",))] == ["steps/tiny", "steps/tiny/vllm"]
    assert {row.name for row in chosen(rows, ("*/rollouts/hf", "tiny/rollouts/"))} == {
        *("tiny/rollouts/hf", "model/rollouts/hf", "tiny/rollouts/vllm")
    }
    assert chosen(rows, ("nothing",)) == []


def test_on_one_gpu_a_server_leaves_room_and_on_two_it_has_its_own() -> None:
    rows = {row.name: " ".join(row.command) for row in all_rows(ONE, MODEL, None)}
    assert "--share_gpu --max_model_len 4096" in rows["model/push/disk/bfloat16"]
    assert "--share_gpu" not in rows["model/push/nccl/bfloat16"]
    assert "--server_gpu=1" in rows["model/push/nccl/bfloat16"]
    config = yaml.safe_load((ROOT / "configs" / "small-gpu.yaml").read_text())
    assert server_flags(config, "m", gpu=True, own_gpu=False) == (
        ["--model", "m", "--weight_sync", "lora", "--max_lora_rank", "32", "--max_model_len", "4096", "--share_gpu"]
    )
    tiny = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    assert server_flags(tiny, "m", gpu=False, own_gpu=False) == ["--model", "m", "--weight_sync", "disk"]


def test_two_steps_are_summed_up() -> None:
    ratio = "sampling/importance_sampling_ratio"
    row = {
        "step_time": 2.0,
        "rollout/seconds": 1.0,
        "rollout/episodes_per_second": 64.0,
        "rollout/trained_tokens": 900.0,
    }
    first = row | {f"{ratio}/min": 0.9, f"{ratio}/mean": 1.0, f"{ratio}/max": 1.1}
    found = summary([first, first | {f"{ratio}/min": 0.8}])
    assert (found["ratio_min"], found["ratio_max"], found["tokens_per_s"]) == (0.8, 1.1, 900.0)


def test_the_result_is_the_last_line_that_is_an_object() -> None:
    assert last_object('{"a": 1}\nstep 1\n{"b": 2}\n{half\n') == {"b": 2}
    assert last_object("nothing") is None


@pytest.mark.parametrize(
    ("status", "out", "err", "state", "reason"),
    [
        (0, '{"x": 1}', "", OK, ""),
        (0, "", "", FAILED, "status 0, and no result"),
        (1, '{"x": 1}', "Traceback\nKeyError: 'x'\n", FAILED, "KeyError: 'x'"),
        (None, '{"x": 1}', "", LATE, "the deadline passed"),
        (0, '{"not_run": "50 GiB are needed"}', "", NOT_RUN, "50 GiB are needed"),
        (0, '{"transports": {"nccl": {"cannot": "no handle"}}}', "", FAILED, "no handle"),
    ],
)
def test_what_the_end_of_a_child_means(status: int | None, out: str, err: str, state: str, reason: str) -> None:
    assert judged(status, out, err)[:2] == (state, reason)


def test_a_walk_survives_its_rows_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text('{"other": 1}')
    rows = [
        Row("good", ("json.tool", "--compact", str(answer))),
        Row("broken", ("no_such_module",)),
        Row("elsewhere", ("json.tool",), Needs(gpus=1)),
    ]
    out, quiet = tmp_path / "results" / "results.jsonl", Console(quiet=True)
    records: dict[str, Any] = {}
    walk(rows, NOTHING, records, out, 60.0, quiet)
    assert [records[row.name]["state"] for row in rows] == [OK, FAILED, NOT_RUN]
    assert "no_such_module" in records["broken"]["reason"]
    with out.open("a") as file:
        file.write('{"row": "half')
    again = dict(done(read_records(out)))
    assert set(again) == {"good", "broken"}
    answer.unlink()  # a row that is run again would fail now
    walk(rows, NOTHING, again, out, 60.0, quiet)
    assert again["good"]["state"] == OK
    console = Console(record=True, width=120, quiet=False, file=(tmp_path / "shown").open("w"))
    console.print(table([*rows, Row("later", ())], again, NOTHING))
    console.file.close()
    shown = console.export_text()
    for part in ("no GPU; vLLM: cpu", "other", "needs a GPU", "interrupted"):
        assert part in shown


def test_a_row_that_hangs_is_ended_at_its_deadline(tmp_path: Path) -> None:
    record = run(Row("hangs", ("http.server", "0", "--bind", "127.0.0.1")), NOTHING, 0.5, tmp_path)
    assert (record["state"], record["reason"]) == (LATE, "the deadline passed")
    assert json.loads(json.dumps(record)) == record
