"""What the commands of `sqlenv data` print and read at the terminal."""

from __future__ import annotations

from rich.console import Console


def say(text: str) -> None:
    """Print a line, however long."""
    Console(highlight=False).print(text, markup=False, soft_wrap=True)


def ask(console: Console, prompt: str, default: str = "") -> str:
    """Return a line that a person types; `default` after Ctrl-D."""
    try:
        return console.input(prompt, markup=False).strip()
    except EOFError:
        console.print()
        return default


def counted(count: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
