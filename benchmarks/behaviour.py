"""What a server says in scripted play, as hashes: two checkouts that print the same behave the same.

For each question, over one socket: a reset; each table described and sampled; queries that are right, wrong, forbidden,
empty and repeated; an answer, right for some questions and wrong for others. Every reply is hashed as it came over the
wire, so observations, rewards, verdicts and the frames themselves are all in it. `--tree` names the checkout whose
server is asked (this one if not given); questions and golds come from this one. Prints one JSON line.

    python -m benchmarks.behaviour --tree ../before > before.json
    python -m benchmarks.behaviour > after.json
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from websockets.sync.client import ClientConnection, connect

from benchmarks import harness
from benchmarks.server_process import ROOT, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Question
from env_server.judging.answers import format_answer
from env_server.types import AnswerMode

FRAMES = ('{"type":"state"}', "[]", "{", '{"type":"nothing"}', '{"type":"step","data":{"action":"QUERY"}}')
"""What is sent beside actions: the state, and frames that are wrong."""
LONG_S = 120.0


def actions(question: Question, tables: list[str], index: int, mode: AnswerMode) -> Iterator[tuple[str, str]]:
    """Yield the actions of one episode: type and argument."""
    yield "DESCRIBE", "no such table"
    for table in tables[:3]:
        yield "DESCRIBE", table
        yield "SAMPLE", table
    yield "QUERY", f'SELECT count(*) FROM "{tables[index % len(tables)]}"'
    yield "QUERY", f'SELECT * FROM "{tables[0]}" LIMIT 3'
    yield "QUERY", f'select *  from "{tables[0]}" limit 3'
    yield "QUERY", "DELETE FROM nothing"
    yield "QUERY", "SELECT datetime('now'), random()"
    yield "SELECT", "1"
    if index % 3:
        yield "QUERY", question.gold_sql
    if mode is AnswerMode.SQL:
        yield "ANSWER", question.gold_sql if index % 2 else f'SELECT count(*) FROM "{tables[0]}"'
    else:
        yield "ANSWER", format_answer(question.gold.rows) if index % 2 else "0"
    yield "QUERY", "SELECT 1"  # after the end


def ask(socket: ClientConnection, frame: str) -> str:
    """Send a frame and return the reply."""
    socket.send(frame)
    return str(socket.recv(timeout=LONG_S))


def play(socket: ClientConnection, question: Question, index: int, mode: AnswerMode) -> Iterator[str]:
    """Play a question's episode; yield every reply."""
    names = {"question_id": question.question_id, "episode_id": f"episode-{index}", "seed": index}
    opening = ask(socket, json.dumps({"type": "reset", "data": names}))
    yield opening
    schema = json.loads(opening)["data"]["observation"]["schema_info"]
    tables = [name.strip() for name in schema.partition(":")[2].partition("\n")[0].split(",")]
    for kind, argument in actions(question, tables, index, mode):
        yield ask(socket, json.dumps({"type": "step", "data": {"action_type": kind, "argument": argument}}))
    yield ask(socket, FRAMES[index % len(FRAMES)])


def behaviour(tree: Path, data: str, mode: AnswerMode, every: int) -> dict[str, object]:
    """Play against a server of that checkout; return the hashes and what they cover."""
    questions = load_dataset(data, answer_mode=mode).questions[::every]
    command = [sys.executable, "-P", "-m", "sqlenv", "serve", "--port", "{port}", "--data", data]
    digest, replies = hashlib.sha256(), 0
    per_database = {question.db_id: hashlib.sha256() for question in questions}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            ServerProcess([*command, "--answer_mode", mode.value], log, {"PYTHONPATH": str(tree)}) as server,
            connect(server.ws_url, max_size=None) as socket,
        ):
            for index, question in enumerate(questions):
                found = hashlib.sha256()
                for reply in play(socket, question, index, mode):
                    replies += 1
                    digest.update(reply.encode())
                    found.update(reply.encode())
                per_database[question.db_id].update(found.digest())
    parts = {name: one.hexdigest()[:12] for name, one in per_database.items()}
    return {"questions": len(questions), "replies": replies, "sha256": digest.hexdigest(), "databases": parts}


def main() -> None:
    """Play all data sets in both modes, print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose server is asked")
    parser.add_argument(
        "--data", nargs="+", default=["synthetic"], help="data sets, as `sqlenv serve --data` names them"
    )
    parser.add_argument("--every", type=int, default=1, help="play each Nth question")
    args = parser.parse_args()
    found = {
        f"{data.partition(':')[0]}/{mode.value}": behaviour(args.tree.resolve(), data, mode, args.every)
        for data in args.data
        for mode in (AnswerMode.VALUE, AnswerMode.SQL)
    }
    harness.report("behaviour", **found)


if __name__ == "__main__":
    main()
