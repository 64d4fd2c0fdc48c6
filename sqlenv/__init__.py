"""SQLEnv: a question about a hidden database, answered by DESCRIBE, SAMPLE, QUERY and ANSWER.

    import sqlenv

    env = sqlenv.make("my.csv")                # or a folder, "spider:PATH", "synthetic"; ws://HOST:8000 is a server
    env.reset(question="Who spent most?")
    print(env.query("SELECT name, spent FROM my ORDER BY spent DESC LIMIT 3"))

`make` and `connect` return an `Environment` (`sqlenv.environment`). The other names are what its methods take and give.
The `sqlenv` command is `sqlenv.cli`.

Importing this package imports nothing else: each name is loaded when it is first used. For it lies both above and below
the others. They all take `sqlenv.parser` and `sqlenv.progress`, which know none of them; the rest of this package knows
them all. `tests/test_dependencies.py` holds it to that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from env_server.data.loading import load_dataset
    from env_server.dataset import Dataset, Question, Split
    from env_server.errors import SQLEnvError
    from env_server.settings import EnvSettings, RewardSettings
    from env_server.types import AnswerMode, RewardComponents, SQLAction, SQLObservation, Verdict
    from sqlenv.environment import Environment
    from sqlenv.making import connect, make

__all__ = [
    "AnswerMode",
    "Dataset",
    "EnvSettings",
    "Environment",
    "Question",
    "RewardComponents",
    "RewardSettings",
    "SQLAction",
    "SQLEnvError",
    "SQLObservation",
    "Split",
    "Verdict",
    "connect",
    "load_dataset",
    "make",
]

_MODULES = {
    "Environment": "sqlenv.environment",
    **dict.fromkeys(("connect", "make"), "sqlenv.making"),
    "load_dataset": "env_server.data.loading",
    "SQLEnvError": "env_server.errors",
    **dict.fromkeys(("Dataset", "Question", "Split"), "env_server.dataset"),
    **dict.fromkeys(("EnvSettings", "RewardSettings"), "env_server.settings"),
    **dict.fromkeys(("AnswerMode", "RewardComponents", "SQLAction", "SQLObservation", "Verdict"), "env_server.types"),
}


if not TYPE_CHECKING:  # so that a checker knows the names above, and no others

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'sqlenv' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
