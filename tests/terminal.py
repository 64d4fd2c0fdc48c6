"""A `sqlenv` command on a real pseudo-terminal, typed into and read as a person would."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from types import TracebackType

from benchmarks.server_process import ROOT

ENTER, TAB, BACKSPACE, CTRL_C, CTRL_D = "\r", "\t", "\x7f", "\x03", "\x04"
UP, LEFT = "\x1b[A", "\x1b[D"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
"""What a terminal puts around text that is pasted."""

# Ctrl-C is a signal where the terminal is the process's own: a session's leader makes it that by opening it.
_PROGRAM = "import os, runpy; os.close(os.open(os.ttyname(0), os.O_RDWR)); runpy.run_module('sqlenv', None, '__main__')"

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>()78]\w?|\r")


class Terminal:
    """Runs `sqlenv` with the given arguments and variables in a terminal of 120 columns; a context manager."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (50, 120))
        # Nobody here answers where the cursor is, which prompt_toolkit would ask.
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **variables}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(slave)
        self._unread = ""

    @property
    def pid(self) -> int:
        """The command's process."""
        return self._process.pid

    def press(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._master, keys.encode())

    def read_until(self, text: str) -> str:
        """Wait until the terminal shows `text` after what was read before, and return what it showed up to there."""
        while text not in self._unread:
            assert self._more(), f"the command ended without {text!r}; it showed:\n{self._unread}"
        shown, text, self._unread = self._unread.partition(text)
        return shown + text

    def read_to_end(self) -> str:
        """Wait for the command's end, and return what the terminal showed since it was read last."""
        while self._more():
            pass
        return self._unread

    def status(self) -> int:
        """Wait for the command's end, and return its exit status."""
        return self._process.wait()

    def _more(self) -> bool:
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # Linux reports the end of the other side so
            return False
        self._unread += _CONTROL.sub("", data.decode("utf-8", "replace"))
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)
