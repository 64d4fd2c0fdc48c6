"""What a server costs whose databases are many and large: its start, its memory, the first query on a cold one.

    python -m benchmarks.many_databases [--databases 1000] [--total_gb 100] [--full_mb 200]

A folder of generated databases, each with a few tables and small rows, ten questions each. Their files are as large as
--total_gb says, but sparse: the tail is a hole, which takes no disk, and which no query reads. One more is full of
rows, --full_mb of them. Measured is `sqlenv serve` with one worker on a tenth of the databases and on all: its first
start, with an empty cache, which runs every gold query and counts every row, and a later one, which does not; both
until it answers, with the memory of all its processes, what they share counted once. Then, on all, one episode on a
database that is in nobody's cache: the operating system is asked to forget the files first. Prints one JSON line;
`ratio` is the later start on all databases to the one on a tenth of them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks import harness
from benchmarks.server_process import SERVE, ServerProcess
from env_server.client import SyncSQLEnvClient
from env_server.types import ActionType, SQLAction

QUESTIONS = 10
TABLES = ("customers", "orders", "items", "suppliers", "payments", "stores", "staff", "visits")
ROWS = 50
START_S = 900.0
"""The first start of a large folder on a busy machine."""


def build(folder: Path, databases: int, total_gb: float, full_mb: int) -> None:
    """Make the folder: sparse databases, the full one last, and the questions."""
    each = int(total_gb * 1e9 / databases)
    questions = []
    for number in range(databases):
        name = f"shop_{number:04d}"
        file = folder / f"{name}.sqlite"
        with closing(sqlite3.connect(file)) as connection, connection:
            for table in TABLES:
                connection.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, name TEXT, amount REAL, day TEXT)")
                rows = [
                    (i, f"{table} {number} {i}", i * 1.5 + number, f"2024-01-{i % 28 + 1:02d}") for i in range(ROWS)
                ]
                connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", rows)
        os.truncate(file, max(each, file.stat().st_size))
        for place in range(QUESTIONS):
            table = TABLES[place % len(TABLES)]
            sql = f"SELECT MAX(amount) FROM {table} WHERE id < {10 + place}"
            questions.append({"question": f"The largest of {table}, {place}?", "sql": sql, "database": name})
    _fill(folder / "full.sqlite", full_mb)
    questions.append({"question": "How many readings?", "sql": "SELECT COUNT(*) FROM readings", "database": "full"})
    (folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))


def _fill(file: Path, megabytes: int) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE readings (id INTEGER PRIMARY KEY, place TEXT, value REAL)")
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO readings SELECT i, printf('place %0180d', i), i * 0.5 FROM n",
            (megabytes * 5_000,),
        )


def start(folder: Path, cache: Path, log: Path) -> ServerProcess:
    """Return a server that is not waited for yet."""
    command = [*SERVE, "--data", str(folder), "--max_sessions", "64"]
    return ServerProcess(command, log, {"SQLENV_CACHE_DIR": str(cache)}, start_s=START_S)


def measure(folder: Path, cache: Path, log: Path) -> dict[str, float]:
    """Start a server and stop it; return its seconds and memory."""
    began = time.perf_counter()
    with start(folder, cache, log) as server:
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "mb": sum(map(proportional_mb, server.pids()))}


def proportional_mb(pid: int) -> float:
    """Return the memory of a process, of what it shares only its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6


def forget(folder: Path) -> None:
    """Ask the operating system to drop the files from its cache."""
    for file in folder.glob("*.sqlite"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_steps(folder: Path, cache: Path, log: Path) -> dict[str, float]:
    """Play an episode on the full database and one on a sparse one, all cold; return the milliseconds of each step."""
    found: dict[str, float] = {}
    with start(folder, cache, log) as server:
        forget(folder)
        for name, question in (("sparse", "questions-0003"), ("full", f"questions-{_last(folder):04d}")):
            with SyncSQLEnvClient(server.ws_url) as client:
                table = "readings" if name == "full" else TABLES[3]
                began = time.perf_counter()
                client.reset(question_id=question)
                found[f"{name}_reset_ms"] = 1e3 * (time.perf_counter() - began)
                for kind, argument in (
                    (ActionType.DESCRIBE, table),
                    (ActionType.QUERY, f"SELECT COUNT(*) FROM {table} WHERE id % 7 = 1"),
                ):
                    began = time.perf_counter()
                    client.step(SQLAction(action_type=kind, argument=argument))
                    found[f"{name}_{kind.value.lower()}_ms"] = 1e3 * (time.perf_counter() - began)
    return found


def _last(folder: Path) -> int:
    return len((folder / "questions.jsonl").read_text().splitlines()) - 1


def main() -> None:
    """Build both folders, measure, print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--databases", type=int, default=1000)
    parser.add_argument("--total_gb", type=float, default=100.0, help="of the sparse files, as large as they look")
    parser.add_argument("--full_mb", type=int, default=200, help="of the database that is full of rows")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        sides = {}
        log = Path(place, "server.log")
        for name, databases in (("tenth", max(1, args.databases // 10)), ("all", args.databases)):
            folder, cache = Path(place, name), Path(place, f"{name}-cache")
            folder.mkdir()
            build(folder, databases, args.total_gb * databases / args.databases, args.full_mb)
            first, later = measure(folder, cache, log), measure(folder, cache, log)
            sides[name] = {"databases": databases + 1, "first": first, "later": later}
        cold = cold_steps(folder, cache, log)
    ratio = sides["all"]["later"]["seconds"] / sides["tenth"]["later"]["seconds"]
    harness.report("many_databases", ratio=ratio, **sides, cold=cold)


if __name__ == "__main__":
    main()
