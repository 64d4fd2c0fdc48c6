"""A hook of MkDocs: the page of every flag, which is what each command's --help prints.

Flags of `sqlenv train` are TRL's, too, and change with its version; a page written by hand would be wrong. Asking the
commands loads torch and TRL once, some seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sqlenv import cli

PAGE = "flags.md"
COLUMNS = "100"
"""What a page is wide enough for."""
COMMANDS = (
    *("train", "evaluate", "compare", "warmup", "export", "report", "play", "simulate", "inference", "serve"),
    *("data inspect", "data validate", "data export", "data fetch"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    text = ["# Every flag\n", "What each command's `--help` prints, in this version.\n"]
    text += [f"## `sqlenv {command}`\n\n```text\n{help_of(command)}```\n" for command in COMMANDS]
    files.append(File.generated(config, PAGE, content="\n".join(text)))
    return files


def help_of(command: str) -> str:
    """Return what a command's --help prints."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=COLUMNS), contextlib.redirect_stdout(printed):
        try:
            status = cli.main([*command.split(), "--help"])
        except SystemExit as end:
            status = int(end.code or 0)
    if status or "usage:" not in printed.getvalue():
        raise RuntimeError(f"sqlenv {command} --help ended with {status}: {printed.getvalue()[-500:]}")
    return printed.getvalue()
