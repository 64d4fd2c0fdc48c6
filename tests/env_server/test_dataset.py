"""A data set answers what is asked of it at each reset without looking at its questions."""

from __future__ import annotations

from env_server.dataset import Dataset, Split


def test_a_split_is_selected_once(pets: Dataset) -> None:
    for split in Split:
        assert pets.select(split) is pets.select(split)
        assert [q for q in pets.questions if split in (q.split, Split.ALL)] == list(pets.select(split))
