"""Where SQLEnv keeps what it can make again: generated data sets, imported tables, variants."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "SQLENV_CACHE_DIR"


def default_cache_dir() -> Path:
    """Return the directory in the environment variable SQLENV_CACHE_DIR, else the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("sqlenv"))
