"""What a person types at the terminal, for the commands that ask about one thing after another."""

from __future__ import annotations

from rich.console import Console


def typed(console: Console, asked: str, otherwise: str = "") -> str:
    """Return a line without blanks around it; `otherwise` where the person has had enough, and types Ctrl-D."""
    try:
        return console.input(asked, markup=False).strip()
    except EOFError:
        console.print()
        return otherwise
