"""A hook of MkDocs: the pages that are generated. The home page is the README; every flag is what --help prints.

Flags of `sqlenv train` are TRL's, too, and change with its version; a page written by hand would be wrong. Asking the
commands loads torch and TRL once, some seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sqlenv import cli

README = Path(__file__).parents[2] / "README.md"
COLUMNS = "100"
"""What a page is wide enough for."""
TRAINERS = ("train", "warmup")
"""They have TRL's flags, too, of which --help shows few."""
_COMMAND = re.compile(r"^  ([a-z]+) {2,}", re.M)
_SUBCOMMAND = re.compile(r"^    ([a-z]+) {2,}", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    files.append(File.generated(config, "index.md", content=home(README.read_text(encoding="utf-8"))))
    text = [
        "# Every flag\n",
        "What each command's `--help` prints in this version, or its `--help_all`, where there is one.\n",
    ]
    text += [f"## `sqlenv {command}`\n\n```text\n{help_of(command)}```\n" for command in commands()]
    files.append(File.generated(config, "flags.md", content="\n".join(text)))
    return files


def home(readme: str) -> str:
    """Return the README as a page of docs/: its links begin there, and files that are not on the site have none."""
    inside = readme.replace("](docs/", "](")
    outside = "|".join(re.findall(r"\]\((?!docs/|https?:|#)([^)#]+)", readme))
    return re.sub(rf"\[([^]]+)\]\((?:{outside})[^)]*\)", r"\1", inside) if outside else inside


def commands() -> list[str]:
    """Return all commands, as `sqlenv --help` and `sqlenv data --help` list them."""
    top = [name for name in _COMMAND.findall(help_of("")) if name != "data"]
    below = _SUBCOMMAND.findall(help_of("data"))
    if not top or not below:
        raise RuntimeError("sqlenv --help and sqlenv data --help list no commands any more")
    return top + [f"data {name}" for name in below]


def help_of(command: str) -> str:
    """Return what a command says of its flags."""
    flag = "--help_all" if command in TRAINERS else "--help"
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=COLUMNS), contextlib.redirect_stdout(printed):
        try:
            status = cli.main([*command.split(), flag])
        except SystemExit as end:
            status = int(end.code or 0)
    if status or "usage:" not in printed.getvalue():
        raise RuntimeError(f"sqlenv {command} {flag} ended with {status}: {printed.getvalue()[-500:]}")
    return printed.getvalue()
