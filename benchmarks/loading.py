"""What it costs to load a data set: seconds and memory, against a bare reading of the same golds.

Each side runs in a process of its own, in both answer modes, after its imports. Ours is `load_dataset`: files checked,
golds run in the sandbox, hardness graded, duplicates found. Again is the same with what an earlier load left in the
cache. The bare side is what a script would do: read the JSON, run each gold with Python's sqlite3, keep the rows. `mb`
is how much the peak of the resident memory grew, `process_mb` is the peak itself. `questions` are the usable ones; of
the bare side, the golds with rows. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.types import AnswerMode


def peak_mb() -> float:
    """The process's largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def load_ours(folder: Path, mode: AnswerMode) -> int:
    """Load the data set; return the number of usable questions."""
    return len(load_dataset(f"spider:{folder}", answer_mode=mode).questions)


def load_bare(folder: Path, mode: AnswerMode) -> int:
    """Read the questions and the rows of each gold, and nothing else; return the number of golds with rows."""
    files = [folder / name for name in ("train_spider.json", "train_others.json", "dev.json")]
    entries = [entry for file in files if file.is_file() for entry in json.loads(file.read_text(encoding="utf-8"))]
    limit = 21 if mode is AnswerMode.VALUE else 1_001
    by_database: dict[str, list[str]] = {}
    for entry in entries:
        by_database.setdefault(entry["db_id"], []).append(entry["query"])
    golds: list[list[Any]] = []
    for db_id, queries in by_database.items():
        file = folder / "database" / db_id / f"{db_id}.sqlite"
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = bytes
            for sql in queries:
                try:
                    golds.append(connection.execute(sql).fetchmany(limit))
                except sqlite3.Error:
                    golds.append([])
    return sum(map(bool, golds))


SIDES = {"ours": load_ours, "again": load_ours, "bare": load_bare}


def one(side: str, folder: Path, mode: AnswerMode) -> dict[str, float]:
    """Load once, in this process."""
    memory, start = peak_mb(), time.perf_counter()
    questions = SIDES[side](folder, mode)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mb": peak_mb() - memory, "process_mb": peak_mb(), "questions": questions}


def best(side: str, folder: Path, mode: AnswerMode, repeats: int) -> dict[str, float]:
    """Load in fresh processes; return the fastest."""
    command = [sys.executable, __file__, str(folder), "--side", side, "--answer_mode", mode.value]
    runs: list[dict[str, float]] = []
    with TemporaryDirectory() as cache:
        for number in range(repeats + (side == "again")):
            own_cache = cache if side == "again" else str(Path(cache, str(number)))
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), CACHE_VARIABLE: own_cache}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
            runs.append(json.loads(done.stdout))
    return min(runs[side == "again" :], key=lambda run: float(run["seconds"]))


def main() -> None:
    """Measure both sides in both modes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get("SQLENV_SPIDER_DIR"), help="a Spider folder")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each side; the fastest counts")
    parser.add_argument("--side", choices=list(SIDES), help="load once in this process and print that")
    parser.add_argument("--answer_mode", type=AnswerMode, default=AnswerMode.VALUE, help="with --side")
    args = parser.parse_args()
    if not args.folder:
        parser.error("name a Spider folder, or set SQLENV_SPIDER_DIR")
    folder = Path(args.folder)
    if args.side:
        print(json.dumps(one(args.side, folder, args.answer_mode)))
        return
    modes = {
        mode.value: {side: best(side, folder, mode, args.repeats) for side in SIDES}
        for mode in (AnswerMode.VALUE, AnswerMode.SQL)
    }
    ratios = {mode: sides["ours"]["seconds"] / sides["bare"]["seconds"] for mode, sides in modes.items()}
    print(json.dumps({"benchmark": "loading", "ratio": max(ratios.values()), "ratios": ratios, **modes}))


if __name__ == "__main__":
    main()
