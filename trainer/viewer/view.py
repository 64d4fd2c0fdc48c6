"""`sqlenv view [PATHS...]`: look at runs and evaluations in a browser, while they are written and afterwards.

PATHS are runs, folders of runs (the default: runs), or files that `sqlenv evaluate --episodes_out FILE.jsonl` wrote.
The page is for this machine alone; from another one: ssh -L 8060:127.0.0.1:8060 MACHINE, and the same address there.
"""

from __future__ import annotations

import argparse
import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import uvicorn

from env_server.errors import SQLEnvError
from sqlenv.parser import Parser
from trainer.viewer.app import create_app
from trainer.viewer.library import Library

HOST = "127.0.0.1"
PORT = 8060
DEFAULT = Path("runs")


class PortError(SQLEnvError):
    """The port is taken; the text says what to do."""


def build_parser() -> argparse.ArgumentParser:
    """The flags of `sqlenv view`."""
    parser = Parser(
        prog="sqlenv view",
        description=__doc__,
        epilog="examples:\n  sqlenv view\n  sqlenv view runs/first runs/second\n  sqlenv view base.jsonl runs/first",
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[DEFAULT], metavar="PATH", help="default: runs")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 takes any that is free (default: {PORT})")
    parser.add_argument(
        "--host",
        default=HOST,
        metavar="ADDRESS",
        help="for a container whose port is published on loopback: whoever reaches it sees the runs, without a token "
        f"(default: {HOST})",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    return parser


def run(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C. Raises SQLEnvError."""
    args = build_parser().parse_args(argv)
    library = Library(args.paths)
    with closing(_listen(args.host, args.port)) as listening:
        library.start()
        try:
            found = len(library.state()["sources"])
            what = (
                "nothing yet" if not found else "1 run or evaluation" if found == 1 else f"{found} runs and evaluations"
            )
            url = f"http://{HOST}:{listening.getsockname()[1]}/"
            sys.stdout.write(f"{what} at {url} (Ctrl-C ends it)\n")
            sys.stdout.flush()
            if args.open:
                webbrowser.open(url)
            config = uvicorn.Config(create_app(library), log_level="warning", access_log=False)
            with suppress(KeyboardInterrupt):  # the way to end it
                uvicorn.Server(config).run([listening])
        finally:
            library.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Take the port. Raises PortError."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except (OSError, OverflowError) as error:
        listening.close()
        raise PortError(
            f"port {port} is not available ({error}); choose another with --port, or any with --port 0"
        ) from error
    return listening
