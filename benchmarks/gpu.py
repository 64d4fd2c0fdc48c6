"""One walk over everything that is to be measured on a machine with GPUs, as far as this machine can.

    python -m benchmarks.gpu [--only ROW ...] [--model NAME] [--small_model FOLDER] [--out FILE] [--again] [--list]

Each row is a child process with a deadline: one that fails or hangs is killed with all that it started, and the walk
goes on. Results are appended to FILE (JSON lines) as they come; the same command goes on where it stopped. A row that
the machine cannot run is marked "not run", with what it lacks. At the end: a table, and one JSON line.

The rows do what the other benchmarks and `sqlenv train` do. Every machine plays the tiny policy; `--small_model` adds a
second one; `--model` is for a GPU, as the configs are. docs/tuning.md says what to expect.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.gpu_rows import MODEL, Machine, Row, all_rows, chosen, gpus_of, lacking
from benchmarks.server_process import ROOT
from inference.launch.plan import LaunchError
from inference.launch.process import find_python, see_machine

OUT = ROOT / "runs" / "gpu" / "results.jsonl"
CPU_DEADLINE_S, GPU_DEADLINE_S = 900.0, 1_800.0
"""For a row; on a GPU a model may have to be fetched first."""
GRACE_S = 20.0
"""Between SIGTERM and SIGKILL."""
POLL_S = 0.1

OK, FAILED, LATE, NOT_RUN = "ok", "failed", "too late", "not run"


def done(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the last record of each row that has run; what was not run may be able to now."""
    last = {str(record["row"]): record for record in records}
    return {name: record for name, record in last.items() if record["state"] != NOT_RUN}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the results so far; a line that a killed walk left half written is not one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def last_object(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            return found if isinstance(found, dict) else None
    return None


def judged(status: int | None, out: str, err: str) -> tuple[str, str, dict[str, Any]]:
    """Return a row's state, the reason where it is not ok, and its result; `status` None: it was too late."""
    result = last_object(out) or {}
    if status is None:
        return LATE, "the deadline passed", {}
    transports = result.get("transports", {}).values()
    refused = next((each["cannot"] for each in transports if "cannot" in each), None)
    if status or not result or refused:
        lines = [line for line in err.splitlines() if line.strip()]
        return FAILED, refused or (lines[-1].strip() if lines else f"status {status}, and no result"), result
    if "not_run" in result:
        return NOT_RUN, str(result["not_run"]), {}
    return OK, "", result


def figures(result: Mapping[str, Any]) -> str:
    """Put a benchmark's result into one line of the table."""
    match result.get("benchmark"):
        case "engines":
            sides = {
                f"{name}, {count}": side for count, each in result["results"].items() for name, side in each.items()
            }
            return "; ".join(
                f"{name} in flight: {side['episodes_per_s']:g} episodes/s, {side['tokens_per_s']:g} tokens/s"
                for name, side in sides.items()
                if isinstance(side, dict)
            )
        case "weight_sync":
            return "; ".join(
                f"{each['seconds']:g} s, {each['bytes'] / 1e6:.3g} MB, gap {each['gap']:.2g} nats"
                for each in result["transports"].values()
            )
        case "two_steps":
            return (
                f"{result['step_s']:g} s a step, {result['episodes_per_s']:g} episodes/s, {result['tokens_per_s']:g} "
                f"tokens/s, ratio {result['ratio_min']:.5f} to {result['ratio_max']:.5f}, {result['peak_gib']:g} GiB "
                f"of {result['longest_gib']:g} for the longest rows, server {result['server_gib']:g}"
            )
        case _:
            return json.dumps(result)


def see() -> Machine:
    """Look at this machine."""
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    try:
        command = ("nvidia-smi", query, "--format=csv,noheader,nounits")
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""
    try:
        vllm = str(see_machine(find_python(None, os.environ, (ROOT,)), os.environ).built_for)
    except LaunchError:
        vllm = ""
    return replace(
        gpus_of(text, os.environ.get("CUDA_VISIBLE_DEVICES")),
        vllm=vllm,
        vllm_here=importlib.util.find_spec("vllm") is not None,
        bitsandbytes=importlib.util.find_spec("bitsandbytes") is not None,
    )


def walk(
    rows: Sequence[Row],
    machine: Machine,
    records: dict[str, Mapping[str, Any]],
    out: Path,
    deadline_s: float,
    console: Console,
) -> None:
    """Run what has no record yet; adds records as they come, to the file too."""
    logs = out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows, 1):
        if row.name in records:
            continue
        console.print(f"{number}/{len(rows)} {row.name} ...")
        reason = lacking(row.needs, machine)
        nothing = {"row": row.name, "state": NOT_RUN, "reason": reason, "seconds": 0.0, "result": {}}
        record = nothing if reason else run(row, machine, deadline_s, logs)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**record, "machine": asdict(machine)}) + "\n")
        records[row.name] = record
        console.print(f"    {record['state']} {record['reason']}".rstrip())


def run(row: Row, machine: Machine, deadline_s: float, logs: Path) -> dict[str, Any]:
    """Run a row's child to its end, or kill it at the deadline with all that it has started; returns its record.

    It sees one GPU, as its commands say: transformers would spread a training step over all that it sees.
    """
    one = {"CUDA_VISIBLE_DEVICES": machine.visible[0]} if machine.visible else {}
    log = logs / row.name.replace("/", "-")
    began = time.monotonic()
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with out.open("wb") as output, err.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", *row.command],
            cwd=ROOT,
            env={**os.environ, **one},
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(child)
    state, reason, result = judged(status, out.read_text(errors="replace"), err.read_text(errors="replace"))
    seconds = round(time.monotonic() - began, 1)
    return {"row": row.name, "state": state, "reason": reason, "seconds": seconds, "result": result}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a child's session; vLLM, which leads one of its own, ends when its launcher does."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        try:
            os.killpg(child.pid, number)
            while time.monotonic() < deadline:
                child.poll()
                os.killpg(child.pid, 0)
                time.sleep(POLL_S)
        except ProcessLookupError:
            return


def table(rows: Sequence[Row], records: Mapping[str, Mapping[str, Any]], machine: Machine) -> Table:
    """The walk so far."""
    where = ", ".join(machine.gpus) or "no GPU"
    shown = Table(title=f"{where}; vLLM: {machine.vllm or 'none'}", title_justify="left")
    for name, fold in (("row", False), ("state", False), ("s", False), ("figures, or why not", True)):
        shown.add_column(name, no_wrap=not fold, justify="right" if name == "s" else "left", overflow="fold")
    for row in rows:
        record = records.get(row.name, {"state": NOT_RUN, "reason": "interrupted", "seconds": 0.0, "result": {}})
        text = figures(record["result"]) if record["state"] == OK else str(record["reason"])
        shown.add_row(row.name, str(record["state"]), f"{record['seconds']:.0f}", text)
    return shown


def main() -> None:
    """Walk, and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="names, their beginnings, or patterns")
    parser.add_argument("--model", default=MODEL, help=f"for the rows model/..., on a GPU (default: {MODEL})")
    parser.add_argument("--small_model", metavar="FOLDER", help="adds rows small/... on any machine: SmolLM2-135M, say")
    parser.add_argument("--out", type=Path, default=OUT, help=f"default: {OUT.relative_to(ROOT)}")
    parser.add_argument("--again", action="store_true", help="rows that FILE has, too")
    parser.add_argument("--deadline_s", type=float, help="of each row (default: 900; with a GPU 1800)")
    parser.add_argument("--list", action="store_true", help="name the rows, and what this machine lacks for them")
    args = parser.parse_args()
    machine = see()
    rows = chosen(all_rows(machine, args.model, args.small_model), args.only)
    if not rows:
        parser.error("--only names no row; --list has them all")
    if args.list:
        for row in rows:
            print(f"{row.name:28} {lacking(row.needs, machine) or 'runs here'}")
        return
    deadline_s = args.deadline_s or (GPU_DEADLINE_S if machine.gpus else CPU_DEADLINE_S)
    records = {} if args.again else dict(done(read_records(args.out)))
    console = Console(stderr=True, highlight=False)
    try:
        walk(rows, machine, records, args.out, deadline_s, console)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
    Console().print(table(rows, records, machine))
    print(json.dumps({"benchmark": "gpu", "machine": asdict(machine), "rows": [records.get(row.name) for row in rows]}))


if __name__ == "__main__":
    main()
