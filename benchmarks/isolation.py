"""What do hostile sessions cost the others?

    python benchmarks/isolation.py [--quick]

64 sessions play whole episodes, each taking a step 20 times a second. Beside them, in every other round, 16 sessions
fire, without pause, the worst queries that their writer could think of. Half of them send ones that are endless, eat
memory, or are long to plan, to parse or to sort; the other half send ones that are just cheap enough to be answered at
once, as many as the server lets them. No text is sent twice. A step's latency counts from when it was due. What must
not change is compared byte by byte: everything that the 64 sessions see. One JSON line: both sides' latencies, where
the steps ran, and how many sessions saw something else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from benchmarks import traffic
from benchmarks.load_generator import Load, Outcome
from benchmarks.server_process import SERVE, Generator, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import quote_identifier
from env_server.types import ActionType

SESSIONS = 64
STEPS_PER_S = 20
HOSTILES = 16
HOSTILE_EPISODES = 300
HEAD_START_S = 1.0
"""The hostile sessions are at it when the others begin, and still when they end."""

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
MEGABYTE = "hex(zeroblob(499000))"
ALIASES = [first + second for first in "abcdefgh" for second in "jklmnopq"][:60]


def hostile_queries(table: str, number: int) -> list[str]:
    """Return the worst queries on a table; `number` makes their texts differ from all others."""
    chain = " AND ".join(f"{a}.rowid = {b}.rowid" for a, b in pairwise(ALIASES))
    doubling = ", ".join(
        f"c{level}(x) AS (SELECT * FROM c{level - 1} UNION ALL SELECT * FROM c{level - 1})" for level in range(1, 40)
    )
    short = f"SELECT count(*) + {number} FROM {table} aa"
    return [
        ENDLESS + f"SELECT count(*) + {number} FROM n",
        ENDLESS + f"SELECT i FROM n WHERE i < -{number}",
        f"SELECT count(*) + {number} FROM {table} a, {table} b, {table} c, {table} d, {table} e",
        f"SELECT a.rowid + {number} FROM {table} a, {table} b, {table} c ORDER BY a.rowid + b.rowid * c.rowid",
        f"SELECT sum(a.rowid) OVER (ORDER BY b.rowid) + {number} FROM {table} a, {table} b, {table} c",
        ENDLESS + f"SELECT {MEGABYTE} || i FROM n ORDER BY 1 LIMIT {number}",
        ENDLESS + f"SELECT group_concat({MEGABYTE} || i) FROM n WHERE i < {number}",
        ENDLESS + f"SELECT json_group_array(hex(zeroblob(5000)) || i) FROM n WHERE i > -{number}",
        f"SELECT {', '.join([MEGABYTE] * 300)}, {number}",
        f"SELECT instr({MEGABYTE}, substr({MEGABYTE}, 1, 490000) || 'b') + {number}",
        ENDLESS + f"SELECT count(*) FROM n WHERE {MEGABYTE} LIKE '%' || i || '%0%1%2%{number}%'",
        f"SELECT count(*) + {number} FROM {', '.join(f'{table} {alias}' for alias in ALIASES)} WHERE {chain}",
        fitted(short, [f" NATURAL JOIN {table} {alias}" for alias in ALIASES[1:]]),
        fitted(short, [f" LEFT JOIN {table} {alias} ON {alias}.rowid=aa.rowid" for alias in ALIASES[1:]]),
        f"WITH c0(x) AS (SELECT {number}), {doubling} SELECT * FROM c39",
        f"SELECT {number} WHERE " + " OR ".join(f"{place} = {number}" for place in range(1_200)),
        "SELECT " + "(" * 4_000 + str(number) + ")" * 4_000,
        f"SELECT '{'x' * 19_000}', {number}",
    ]


def busy_queries(table: str, number: int) -> list[str]:
    """Return queries of some ten thousand steps; `number` makes their texts differ from all others."""
    pairs = f"(SELECT rowid r FROM {table} LIMIT 36) a, (SELECT rowid r FROM {table} LIMIT 36) b"
    return [
        f"SELECT a.r FROM {pairs} ORDER BY a.r * b.r - {number}",
        f"SELECT DISTINCT a.r * b.r + {number} FROM {pairs}",
        f"SELECT a.r * b.r, count(*) FROM {pairs} GROUP BY 1 HAVING count(*) <> {number}",
        " UNION ".join([f"SELECT * FROM {table}"] * 15) + f" LIMIT {number}",
    ]


def fitted(text: str, parts: list[str], size: int = 1_000) -> str:
    """Append as many parts as fit into what the server may take for a short statement."""
    for part in parts:
        if len(text) + len(part) > size:
            break
        text += part
    return text


def hostile_scripts(dataset: Dataset) -> list[list[str]]:
    """Return what each hostile session sends: episodes that are all queries."""
    pool = DatabasePool(dataset.databases, EnvSettings().sandbox)
    chance = random.Random(0)
    budget = EnvSettings().step_budget
    texts: list[list[str]] = []
    number = 1_000_000
    for session in range(HOSTILES):
        queries_on = hostile_queries if session % 2 else busy_queries
        messages: list[str] = []
        for _ in range(HOSTILE_EPISODES):
            question: Question = chance.choice(dataset.questions)
            tables = pool.schema(question.db_id).tables
            # The short name leaves room for more joins; the large table makes each of them cost more.
            table = chance.choice([min(tables, key=lambda t: len(t.name)), max(tables, key=lambda t: t.row_count or 0)])
            messages.append(traffic.reset(question.question_id))
            for _ in range(budget):
                number += 1
                sql = chance.choice(queries_on(quote_identifier(table.name), number))
                messages.append(traffic.step(ActionType.QUERY, sql))
        texts.append(messages)
    pool.close()
    return texts


class Round(NamedTuple):
    """How one round went for the sessions and the hostile ones, and what the server looked like at its end."""

    outcome: Outcome
    attack: Outcome | None
    server_mb: float
    ways: dict[str, dict[str, float]]
    """Steps by where their query ran, all sessions together."""


def play(data: str, scratch: Path, seconds: float, *, hostile: bool) -> Round:
    """Run one round on a fresh server."""
    rounds = int(seconds * STEPS_PER_S)
    with ServerProcess([*SERVE, "--data", data], scratch / "server.log") as server:
        load = Load(
            port=server.port,
            messages_file=scratch / "messages.json",
            episode=traffic.EPISODE,
            interval_s=1 / STEPS_PER_S,
            rounds=rounds,
            digest=True,
        )
        others = Generator(load, scratch)
        others.connect()
        enemy = None
        if hostile:
            attack = Load(
                port=server.port,
                messages_file=scratch / "hostile.json",
                episode=EnvSettings().step_budget + 1,
                warmup_s=HEAD_START_S,
                seconds=seconds + HEAD_START_S,
            )
            enemy = Generator(attack, scratch)
            enemy.connect()
            enemy.start()
        try:
            others.start()
            outcome = others.outcome()
            attacked = enemy.outcome() if enemy else None
            return Round(outcome, attacked, server.rss() / 1e6, ways(server))
        finally:
            others.stop()
            if enemy:
                enemy.stop()


def ways(server: ServerProcess) -> dict[str, dict[str, float]]:
    """Return how many steps took which way, and their mean time in the server."""
    found: dict[str, dict[str, float]] = {}
    for source, count in server.metric_by_label("sqlenv_step_seconds_count").items():
        seconds = server.metric_by_label("sqlenv_step_seconds_sum")[source]
        found[source] = {"steps": count, "mean_ms": seconds / count * 1e3}
    return found


def summary(rounds: list[Round]) -> dict[str, object]:
    """Return medians over the rounds, in milliseconds, the most memory, and the last round's ways."""
    return {
        "p50_ms": median(each.outcome.p50_s for each in rounds) * 1e3,
        "p99_ms": median(each.outcome.p99_s for each in rounds) * 1e3,
        "max_ms": median(each.outcome.max_s for each in rounds) * 1e3,
        "server_mb": max(each.server_mb for each in rounds),
        "ways": rounds[-1].ways,
    }


def main() -> None:
    """Measure and print."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=f"spider:{folder}" if folder else "synthetic", help="the data set")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures little")
    args = parser.parse_args()
    seconds, count = (5.0, 1) if args.quick else (args.seconds, args.rounds)
    dataset = load_dataset(args.data)
    alone: list[Round] = []
    beside: list[Round] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        (scratch / "hostile.json").write_text(json.dumps(hostile_scripts(dataset)))
        for turn in range(count):
            episodes = int(seconds * STEPS_PER_S / traffic.STEPS) + 2
            texts = traffic.scripts(dataset, "distinct", SESSIONS, episodes, seed=turn)
            (scratch / "messages.json").write_text(json.dumps(texts))
            for hostile in (turn % 2 == 1, turn % 2 == 0):
                print(f"\rround {turn + 1}/{count}, hostile: {hostile}   ", end="", file=sys.stderr, flush=True)
                (beside if hostile else alone).append(play(args.data, scratch, seconds, hostile=hostile))
    attacks = [each.attack for each in beside if each.attack]
    outcomes = [each.outcome for each in [*alone, *beside]] + attacks
    pairs = list(zip(alone, beside, strict=True))
    report = {
        "benchmark": "isolation",
        "p99_ratio": median(b.outcome.p99_s / a.outcome.p99_s for a, b in pairs),
        "sessions_that_saw_something_else": sum(
            before != after
            for a, b in pairs
            for before, after in zip(a.outcome.digests, b.outcome.digests, strict=True)
        ),
        "alone": summary(alone),
        "beside_hostiles": summary(beside),
        "hostile_steps_per_s": median(each.steps / each.seconds for each in attacks),
        "failures": sum(each.failures + each.lost for each in outcomes),
        "sessions": SESSIONS,
        "hostiles": HOSTILES,
        "data": dataset.name,
        "rounds": count,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
