"""The `sqlenv` command: one subcommand per job, each package imported only when its subcommand runs."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from env_server.errors import SQLEnvError
from sqlenv.parser import did_you_mean

USAGE = """\
usage: sqlenv COMMAND [flags]        (sqlenv COMMAND --help says more, sqlenv --version which one this is)

  train      train a policy on SQLEnv with GRPO: evaluate, train, evaluate, report
  evaluate   play a policy on a split and print its success with a 95% interval
  compare    two evaluations or runs, question by question: which is better, how sure, and where
  export     a trained policy as a plain checkpoint, with its card, to ship or to push to the Hub
  warmup     raise a base policy on play that the environment has verified
  view       runs in your browser: curves, every episode, failures, comparisons; live while they train
  report     write a run's report.html again
  chat       ask a policy about your own data: it explores, turn by turn, and answers
  play       play an episode yourself, in this terminal
  inference  start vLLM as the policy server, for training with --use_vllm
  serve      the environment as a network service, for training runs here or elsewhere
  mcp        the environment as tools for any agent that speaks the Model Context Protocol
  data       check, fix, extend, convert and fetch data sets: sqlenv data doctor | suggest | build | export | fetch

A first run:  sqlenv train --config configs/tiny.yaml --output_dir runs/first
"""

_FLAGS = ("--help", "--version")
TRAIN_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "matplotlib",
    "scipy",
    "jinja2",
    "httpx",
    "aiohttp",
)
"""What the extra `train` installs; the environment works without."""
SERVE_PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "pydantic_settings", "prometheus_client")
"""What the extra `serve` installs; the environment in this process works without."""

EXTRAS = {"train": TRAIN_PACKAGES, "serve": SERVE_PACKAGES, "mcp": ("mcp", "mcp_types")}

_OF_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)
"""What the system says of files and folders that cannot be read or written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; a SQLEnvError becomes one line on stderr and status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _escape_what_has_no_encoding()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(f"sqlenv {_version()}")
        return 0
    if name not in _COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        print(
            f"sqlenv: there is no {what} {name}{did_you_mean(name, (*_COMMANDS, *_FLAGS))} (sqlenv --help lists them)",
            file=sys.stderr,
        )
        return 2
    try:
        return _COMMANDS[name](rest)
    except SQLEnvError as error:
        print(f"sqlenv {name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _OF_FILES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"sqlenv {name}: {where}{error.strerror}. Check who may read and write it, and the room", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        fix = f"in SQLEnv's folder: pip install -e '.[{extra}]'"
        print(f"sqlenv {name}: {package} is not installed; {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"sqlenv {name}: interrupted", file=sys.stderr)
        return 130


def _escape_what_has_no_encoding() -> None:
    """Let a terminal of another encoding, such as ASCII, show escapes of what it cannot, in place of an error."""
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _version() -> str:
    # Its module takes a tenth of a second to import.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sqlenv")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def _train(argv: Sequence[str]) -> int:
    with _nothing_to_save():
        from trainer.flags.early import Command, look

        look(Command.TRAIN, argv)
        _loading("train")
        from trainer import stages

    return stages.run(argv)


def _loading(name: str) -> None:
    """Say what takes the first seconds, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"sqlenv {name}: loading torch and TRL ...", flush=True)


@contextmanager
def _nothing_to_save() -> Iterator[None]:
    """End with status 0 on SIGTERM, as a run does that is stopped: the packages of training take seconds to import."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _evaluate(argv: Sequence[str]) -> int:
    from trainer import evaluate

    return evaluate.run(argv)


def _compare(argv: Sequence[str]) -> int:
    from trainer.report import compare

    return compare.run(argv)


def _export(argv: Sequence[str]) -> int:
    from trainer.cli import export

    return export.run(argv)


def _warmup(argv: Sequence[str]) -> int:
    with _nothing_to_save():
        from trainer.flags.early import Command, look

        look(Command.WARMUP, argv)
        _loading("warmup")
        from trainer import warmup

    return warmup.run(argv)


def _report(argv: Sequence[str]) -> int:
    from trainer.report import report

    return report.run(argv)


def _view(argv: Sequence[str]) -> int:
    from trainer.viewer import view

    return view.run(argv)


def _play(argv: Sequence[str]) -> int:
    from trainer.cli import play

    return play.run(argv)


def _chat(argv: Sequence[str]) -> int:
    from trainer.cli import chat

    return chat.run(argv)


def _serve(argv: Sequence[str]) -> int:
    from env_server.service import serve

    return serve.run(argv)


def _mcp(argv: Sequence[str]) -> int:
    from env_server.service import mcp_command

    return mcp_command.run(argv)


def _inference(argv: Sequence[str]) -> int:
    from inference.launch import launcher

    return launcher.run(argv)


def _data(argv: Sequence[str]) -> int:
    from env_server.tools import commands

    return commands.run(argv)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "evaluate": _evaluate,
    "compare": _compare,
    "export": _export,
    "warmup": _warmup,
    "view": _view,
    "report": _report,
    "chat": _chat,
    "play": _play,
    "inference": _inference,
    "serve": _serve,
    "mcp": _mcp,
    "data": _data,
}
