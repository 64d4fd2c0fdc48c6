"""A line that a person types: editing, history and completion in a terminal; what is piped is read as it comes.

prompt_toolkit instead of readline: a query that is pasted with its line breaks stays one entry, where readline makes
an entry, and so a paid step, of each line; and it is the same editor everywhere, where Python's readline is GNU's,
editline or missing.
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
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

_CONTINUES = "\\"
_MORE = "... "


class LineEditor:
    """Reads entries. `history` names what is remembered from one session to the next; `words` is what Tab completes."""

    def __init__(self, history: str, words: Callable[[], Iterable[str]] = tuple) -> None:
        self._session: PromptSession[str] | None = None
        if sys.stdin.isatty() and sys.stdout.isatty():
            self._session = PromptSession(
                history=_history(history),
                completer=WordCompleter(lambda: list(words()), ignore_case=True),
                complete_while_typing=False,
                complete_style=CompleteStyle.READLINE_LIKE,
                multiline=True,
                prompt_continuation=_MORE,
                key_bindings=_keys(),
            )

    def read(self, prompt: str) -> str:
        r"""Return an entry, without white space around it; a line that ends with \ goes on in the next one.

        Raises EOFError on Ctrl-D and at the end of what is piped, KeyboardInterrupt on Ctrl-C.
        """
        if self._session is not None:
            entry = self._session.prompt(FormattedText([("bold", prompt)]))
            return entry.replace(f"{_CONTINUES}\n", "\n").strip()
        lines = [input(prompt)]
        while lines[-1].endswith(_CONTINUES):
            lines[-1] = lines[-1].removesuffix(_CONTINUES)
            lines.append(input(_MORE))
        return "\n".join(lines).strip()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith(_CONTINUES) and buffer.document.is_cursor_at_the_end:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return keys


def _history(name: str) -> History:
    """What was typed before, or where that cannot be kept a history of this session."""
    try:
        folder = Path(platformdirs.user_state_dir("sqlenv"))
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}_history"
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)
