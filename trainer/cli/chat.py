"""`sqlenv chat`: a policy explores a person's own databases for the questions that the person types.

There are no gold answers, so nothing is judged: each turn is shown as it is taken, then the answer, and the query that
returned it, or that none did. Two policies are asked one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from env_server.cache import default_cache_dir
from env_server.data.loading import has_no_questions, is_named, load_dataset, read_databases, typed_question
from env_server.dataset import Dataset
from inference.launch.plan import VLLM_URL
from sqlenv.parser import Parser, whole_number

MOST_POLICIES = 2
WEB_HOST, WEB_PORT = "127.0.0.1", 8_002
"""A port beside those of `sqlenv serve` and `sqlenv inference`."""
_DESCRIPTION = """\
A policy explores your own database for a question that you type, turn by turn, and says its answer and the query that
it rests on. A policy that SQLEnv trained is played as it was trained: what was saved with it decides. Two policies,
such as before and after training, are asked one after the other.
"""


def build_parser() -> Parser:
    """The flags of `sqlenv chat`."""
    parser = Parser(
        prog="sqlenv chat",
        description=_DESCRIPTION,
        epilog="examples:\n  sqlenv chat runs/first --data orders.csv\n"
        "  sqlenv chat runs/warm runs/first --data shop.sqlite --question 'How many orders are open?'\n"
        "  sqlenv chat runs/first --data spider:PATH --database concert_singer\n"
        "  sqlenv chat runs/first --data my-shop --use_vllm      (after: sqlenv inference --model runs/first)",
    )
    parser.add_argument(
        "policies",
        nargs="+",
        metavar="MODEL",
        help="a run's or a checkpoint's folder, or a model on the Hub; two at most",
    )
    parser.add_argument(
        "--data",
        required=True,
        help="a .csv, .tsv, .parquet, .sqlite or .db file, a folder of such files, or a data set: synthetic[:SEED], "
        "spider:PATH, bird:PATH",
    )
    parser.add_argument("--database", metavar="NAME", help="the database that is asked about, where there are several")
    parser.add_argument("--question", metavar="TEXT", help="ask this, and end")
    parser.add_argument(
        "--few_shot",
        type=whole_number(0),
        metavar="N",
        help="worked episodes in the prompt (default: as the policy was trained)",
    )
    parser.add_argument(
        "--samples",
        type=whole_number(1),
        default=1,
        metavar="K",
        help="play the question K times, at temperature 1, and give the answer that most samples agree on (default: "
        "once, greedily)",
    )
    parser.add_argument("--use_vllm", action="store_true", help="generate on vLLM servers that serve the policy")
    parser.add_argument(
        "--vllm_server_base_url", metavar="URLS", help=f"their URLs, separated by commas (default: {VLLM_URL})"
    )
    parser.add_argument(
        "--web", action="store_true", help="in the browser: the playground, with the policies in it, two side by side"
    )
    parser.add_argument("--port", type=int, help=f"with --web (default: {WEB_PORT})")
    parser.add_argument(
        "--host", help=f"with --web (default: {WEB_HOST}, for this machine alone; else set SQLENV_TOKEN to a secret)"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the policy")
    return parser


def run(argv: Sequence[str]) -> int:
    """Answer questions; returns 0, or of a `--question` 1 when it was left without an answer."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    dataset = read_data(args.data, questions=args.web)
    # The flag is wrong before a model is loaded, not after.
    database = "" if args.web else typed_question("", dataset.databases, args.database).questions[0].db_id
    from transformers.utils import logging

    from trainer.cli.conversation import Conversation
    from trainer.cli.session import PolicySession

    logging.disable_progress_bar()  # the status line says what is loaded
    console = Console(highlight=False)
    policies = []
    for name in args.policies:
        with console.status(f"loading {name}"):
            policies.append(
                PolicySession.load(
                    name,
                    dataset,
                    few_shot=args.few_shot,
                    samples=args.samples,
                    vllm_urls=(args.vllm_server_base_url or VLLM_URL) if args.use_vllm else None,
                    trust_remote_code=args.trust_remote_code,
                    say=lambda line: sys.stderr.write(f"sqlenv chat: {line}\n"),
                )
            )
    if args.web:
        from trainer.cli.web import serve_policies

        def announce(url: str) -> None:
            names = " and ".join(args.policies)
            console.print(f"the playground, with {names}: {url}  (Ctrl-C ends it)", soft_wrap=True)

        return serve_policies(policies, dataset, args.host or WEB_HOST, args.port or WEB_PORT, announce)
    with closing(Conversation(policies, database, console)) as conversation:
        if args.question is not None:
            return 0 if conversation.ask(args.question) else 1
        conversation.converse()
    return 0


def check(parser: Parser, args: argparse.Namespace) -> None:
    """End with status 2 where flags do not go together."""
    if len(args.policies) > MOST_POLICIES:
        parser.error(f"{len(args.policies)} policies were given; two can be compared, one after the other")
    if args.question is not None and not args.question.strip():
        parser.error("--question is empty")
    if args.use_vllm and len(args.policies) > 1:
        parser.error("--use_vllm asks one policy: servers hold one. Leave the flag out, or ask them one by one")
    if args.web and args.samples > 1:
        parser.error("--samples is for the terminal")
    for flag, value in (("--question", args.question), ("--database", args.database)):
        if args.web and value is not None:
            parser.error(f"{flag} is for the terminal; with --web it is chosen in the page")
    for flag, value in (("--host", args.host), ("--port", args.port)):
        if not args.web and value is not None:
            parser.error(f"{flag} needs --web")
    if args.vllm_server_base_url and not args.use_vllm:
        parser.error("--vllm_server_base_url needs --use_vllm")


def read_data(spec: str, *, questions: bool) -> Dataset:
    """Return the databases that `--data` names, with the `questions` that a folder may have. Raises DataError."""
    path = Path(spec).expanduser()
    if is_named(spec) or (questions and not has_no_questions(path)):
        return load_dataset(spec)
    return Dataset(path.name, (), read_databases(path, default_cache_dir()))
