"""What every benchmark does: its arguments, its rounds with the sides in alternation, and its one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

Measured = TypeVar("Measured")


def parser(description: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Return a parser with a benchmark's docstring as its help; `quick` says what --quick does, where there is one."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        found.add_argument("--quick", action="store_true", help=f"{quick}: shows that it runs, measures little")
    return found


def spider_or_synthetic() -> str:
    """Return real databases where SQLENV_SPIDER_DIR names their folder, else the generated ones."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    return f"spider:{folder}" if folder else "synthetic"


def progress(text: str) -> None:
    """Show what is being measured, over what was."""
    print(f"\r{text:<70}", end="", file=sys.stderr, flush=True)


def rounds(
    sides: Sequence[str], count: int, measure: Callable[[str, int], Measured], what: str = ""
) -> dict[str, list[Measured]]:
    """Measure every side `count` times, each round beginning with another; `measure` gets the side and the round."""
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(count):
        for place in range(len(sides)):
            side = sides[(number + place) % len(sides)]
            progress(f"{what} {side}, round {number + 1} of {count}")
            found[side].append(measure(side, number))
    return found


def rounded(number: float) -> float:
    """Keep four digits."""
    return float(f"{number:.4g}")


def medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of every number over the rounds."""
    return {name: rounded(median(one[name] for one in each)) for name in each[0]}


def ratio(above: Sequence[Mapping[str, float]], below: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the median of the rounds' ratios."""
    return rounded(median(a[name] / b[name] for a, b in zip(above, below, strict=True)))


def report(benchmark: str, **result: Any) -> None:
    """Print the line."""
    print(file=sys.stderr)
    print(json.dumps({"benchmark": benchmark, **result}))
