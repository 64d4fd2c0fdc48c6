"""What queries and answers are worth to a question, remembered.

The rollouts of a group play one question, and ask and answer much the same. A score is a function of the question and
the text, since the same statement gives the same rows; so what is remembered is what would be computed.

Memory is bounded: by a number of scores, and by `LONGEST_TEXT`. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from env_server.judging.verdict import Judgement
from env_server.lru import LRUCache

MAX_SCORES = 8_192
LONGEST_TEXT = 1_000
"""Characters of a query or an answer that is remembered."""

T = TypeVar("T", float, Judgement)


class ScoreCache(Generic[T]):
    """Scores of texts; the least recently used are given up first."""

    def __init__(self, max_scores: int) -> None:
        self._scores: LRUCache[tuple[str, str], T] = LRUCache(max_scores)

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, question_id: str, text: str, compute: Callable[[], T]) -> T:
        """Return what a text is worth to a question; computed, and remembered, when it is not known."""
        key = (question_id, text)
        score = self._scores.get(key)
        if score is None:
            score = compute()
            if len(text) <= LONGEST_TEXT:
                self._scores.put(key, score)
        return score


class Scores:
    """The scores of a data set's questions. For all environments that play on it with the same settings."""

    def __init__(self, max_scores: int = MAX_SCORES) -> None:
        self.phi = ScoreCache[float](max_scores)
        """Of queries: how close their rows are to the gold rows."""
        self.judgements = ScoreCache[Judgement](max_scores)
        """Of typed answers."""
