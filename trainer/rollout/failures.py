"""Errored rollouts: how many failed episodes a run tolerates, and the error that ends it. Pure.

Guarantees:

1. A batch of which more than the allowed share has failed stops the run; one failed episode alone never does.
2. Where batches are so small that a single failure is more than the share, they are judged together as well, as soon as
   WINDOW episodes have been played: a run does not lose an episode of every batch for ever.
3. The error says how many failed of how many, the kinds of errors by number, and the first cause.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from env_server.errors import SQLEnvError

WINDOW = 100
"""Episodes that the last batches must hold together, at least, to be judged together."""
SHOWN_KINDS = 4


class RolloutError(SQLEnvError):
    """Too many episodes failed; the text names the share, the kinds of errors and the first cause."""


def check_failures(causes: Sequence[str], episodes: int, allowed_share: float, of: str = "") -> None:
    """Refuse `episodes` of which more than the allowed share has failed, for `causes`; one always may.

    Raises RolloutError, which says what they were episodes `of`.
    """
    if len(causes) <= max(1.0, allowed_share * episodes):
        return
    raise RolloutError(
        f"{len(causes)} of {episodes} episodes failed{of}, more than the {allowed_share:.0%} that a run "
        f"may lose{_kinds(causes)}; the first cause: {causes[0]}"
    )


class Failures:
    """The failed episodes of a batch of `episodes`, of which at most `allowed_share` may fail."""

    def __init__(self, episodes: int, allowed_share: float) -> None:
        self._causes: list[str] = []
        self._episodes = episodes
        self._allowed_share = allowed_share

    def add(self, cause: str) -> None:
        """Count one more. Raises RolloutError when that is too many."""
        self._causes.append(cause)
        check_failures(self._causes, self._episodes, self._allowed_share)


@contextmanager
def rollout_error_alone() -> Iterator[None]:
    """Raise the first RolloutError out of a task group that ended by it; a bug goes through as it is."""
    try:
        yield
    except ExceptionGroup as errors:
        stopped, bugs = errors.split(RolloutError)
        if stopped is None or bugs is not None:
            raise
        first: BaseException = stopped
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class FailureWindow:
    """The last batches of a run."""

    def __init__(self, allowed_share: float) -> None:
        self._allowed_share = allowed_share
        self._batches: deque[tuple[Sequence[str], int]] = deque()

    def add(self, causes: Sequence[str], episodes: int) -> None:
        """Judge a batch, and the last ones together. Raises RolloutError."""
        check_failures(causes, episodes, self._allowed_share)
        self._batches.append((causes, episodes))
        while sum(count for _, count in self._batches) - self._batches[0][1] >= WINDOW:
            self._batches.popleft()
        together = sum(count for _, count in self._batches)
        if together >= WINDOW:
            everything = [cause for batch, _ in self._batches for cause in batch]
            check_failures(everything, together, self._allowed_share, f" in the last {len(self._batches)} batches")


def _kinds(causes: Sequence[str]) -> str:
    """The kinds of errors by number, the most frequent first; nothing where there is but one."""
    kinds = Counter(cause.partition(":")[0] for cause in causes)
    if len(kinds) == 1:
        return ""
    named = [f"{count} {kind}" for kind, count in kinds.most_common(SHOWN_KINDS)]
    rest = len(causes) - sum(count for _, count in kinds.most_common(SHOWN_KINDS))
    return f" ({', '.join([*named, *([f'{rest} others'] if rest else [])])})"
