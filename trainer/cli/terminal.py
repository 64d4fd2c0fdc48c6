"""Lines that a person types: editing, history and completion in a terminal; what is piped is read as it comes.

prompt_toolkit, since a query that is pasted with its line breaks stays one entry, where readline makes an entry, and so
a paid step, of each line; and it is the same editor everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.shortcuts import CompleteStyle


def line_reader(history: str, words: Callable[[], Iterable[str]]) -> Callable[[str], str]:
    """Return what reads an entry after a prompt; it raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C.

    `history` names what is kept from one session to the next; `words` is what Tab completes.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda prompt: input(prompt).strip()
    session: PromptSession[str] = PromptSession(
        history=_history(history),
        completer=WordCompleter(lambda: list(words()), ignore_case=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )
    return lambda prompt: session.prompt(FormattedText([("bold", prompt)])).strip()


def _history(name: str) -> History:
    """What was typed before, or where that cannot be kept a history of this session."""
    file = Path(platformdirs.user_state_dir("sqlenv")) / f"{name}_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)
