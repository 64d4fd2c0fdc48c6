"""`sqlenv serve`: the flags, what is printed at the start, and the server.

Standard output says what the settings are and, once connections are taken, where the server is; events are logged on
standard error (`logs`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from env_server.dataset import Dataset
from env_server.service.settings import ServiceSettings, read_settings
from env_server.service.workers.run import load_data, serve
from env_server.test_suites.building import TITLE
from sqlenv.progress import reported


def run(argv: Sequence[str]) -> int:
    """Run `sqlenv serve`; return its exit status. Raises SQLEnvError for what a person has to correct."""
    settings, resolved = read_settings(argv)
    _say(f"sqlenv serve, with these settings:\n{resolved}")
    if settings.insecure and settings.token is None:
        _say("insecure: everyone who reaches this address can use the server")
    return serve(settings, load=_load, announce=lambda url: _say(f"serving at {url}"))


def _load(settings: ServiceSettings) -> Dataset:
    with reported(TITLE, console=Console()) as progress:
        dataset = load_data(settings, progress.update)
    _say(f"{dataset.name}: {len(dataset.questions):,} questions about {len(dataset.databases):,} databases")
    return dataset


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it, which is no reason to stop
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
