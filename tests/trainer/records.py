"""Records of episodes, as a run's files have them."""

from __future__ import annotations

from typing import Any

from trainer.rollout.episodes import EpisodeRecord


def make_record(question: str, outcome: str = "correct", db: str = "db", /, **fields: Any) -> EpisodeRecord:
    """An episode of two steps where it was won, else of four; `fields` are set as they are."""
    won = outcome == "correct"
    usual: dict[str, Any] = {
        "episode_id": f"episode-{question}",
        "question_id": question,
        "db_id": db,
        "question": f"question {question}",
        "hardness": "easy",
        "family": "count",
        "outcome": outcome,
        "reward": 1.0 if won else -0.1,
        "steps": 2 if won else 4,
        "parse_rate": 1.0 if won else 0.5,
        "tokens": 10,
        "failure": "ConnectionError: gone" if outcome == "failed" else "",
    }
    return EpisodeRecord(**usual | fields)
