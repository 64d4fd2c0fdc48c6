"""A database from a script, and what suites need of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.profile import DatabaseProfile, read_profile


def database(folder: Path, script: str) -> Path:
    """Make a database file."""
    path = folder / "db.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


def profile_of(path: Path) -> DatabaseProfile:
    """Read a database's profile."""
    sandbox = Sandbox(path, SandboxSettings())
    try:
        return read_profile(sandbox)
    finally:
        sandbox.close()
