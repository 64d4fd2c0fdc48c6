"""`sqlenv view [PATHS...]`: look at runs and evaluations in a browser, while they are written and afterwards.

PATHS are runs, folders of runs (the default: runs), or files that `sqlenv evaluate --episodes_out FILE.jsonl` wrote.
The page is for this machine alone; from another one: ssh -L 8060:127.0.0.1:8060 MACHINE, and the same address there.
"""

# Guarantees:
#
# 1. Nothing is written, and nothing is read but what `sqlenv view` was given: a request names sources and numbers,
#    never a path.
# 2. Only pages of this address reach it: a request for another host's name is rejected, so that no page elsewhere can
#    read along by a name that leads here.
# 3. The page cannot be made to run foreign code: no inline script or style, nothing from another host, and texts of
#    policies and databases are never parsed as HTML.

from __future__ import annotations

import argparse
import socket
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware.trustedhost import TrustedHostMiddleware

from env_server.errors import SQLEnvError
from env_server.service.pages import LOCAL_NAMES, SECURITY_HEADERS
from sqlenv.parser import Parser
from trainer.viewer.library import Filter, Library, UnknownError

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
        help="for a container whose port is published on loopback: all that reach it see the runs, without a token "
        f"(default: {HOST})",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    return parser


def run(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C. Raises SQLEnvError."""
    args = build_parser().parse_args(argv)
    library = Library(args.paths)
    with closing(_listen(args.host, args.port)) as listening:
        found = len(library.sources)
        what = "nothing yet" if not found else "1 run or evaluation" if found == 1 else f"{found} runs and evaluations"
        url = f"http://{HOST}:{listening.getsockname()[1]}/"
        sys.stdout.write(f"{what} at {url} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if args.open:
            webbrowser.open(url)
        config = uvicorn.Config(create_app(library), log_level="warning", access_log=False)
        with suppress(KeyboardInterrupt):  # the way to end it
            uvicorn.Server(config).run([listening])
    return 0


def create_app(library: Library) -> FastAPI:
    """Return the application: the page, and the library as JSON."""
    app = FastAPI(title="sqlenv view", openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOCAL_NAMES))

    @app.middleware("http")
    async def protect(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.update(SECURITY_HEADERS)
        response.headers["Cache-Control"] = "no-store" if request.url.path.startswith("/api/") else "no-cache"
        return response

    @app.exception_handler(SQLEnvError)
    @app.exception_handler(OverflowError)  # a number that SQLite cannot hold
    async def reject(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404 if isinstance(error, UnknownError) else 422)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/api/episodes")
    def episodes(wanted: Annotated[Filter, Query()]) -> dict[str, Any]:
        return library.episodes(wanted)

    # Plain functions, so that a slow one runs in a thread and delays no other; a non-finite number is null.
    app.get("/api/words")(library.words)
    app.get("/api/state")(library.state)
    app.get("/api/curves")(library.curves)
    app.get("/api/failures")(library.failures)
    app.get("/api/episodes/{number}")(library.episode)
    app.get("/api/episodes/{number}/gold")(library.gold)
    app.get("/api/compare")(library.compare)
    app.get("/api/differences")(library.differences)

    # The page's own files, and what it shares with the playground: its look and modules.
    app.mount("/playground", StaticFiles(packages=[("env_server.service", "playground")]))
    app.mount("/", StaticFiles(packages=[("trainer.viewer", "page")], html=True))
    return app


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
