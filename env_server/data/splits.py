"""Which questions are for training and which for evaluation: decided by a hash, the same everywhere and for ever.

Normally whole databases are split, so that the schema of an evaluation question is unseen. Pure functions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from env_server.dataset import Split

EVAL_FRACTION = 0.25


def split_databases(db_ids: Iterable[str]) -> dict[str, Split]:
    """Assign each database to TRAIN or EVAL by the SHA-256 of its id: about EVAL_FRACTION of them to EVAL.

    Each id is decided on its own, so a database stays on its side when others come or go, except that of two or
    more databases neither side is left empty: the one whose hash is nearest to the threshold then changes sides.
    """
    places = {db_id: _unit_hash(db_id) for db_id in db_ids}
    splits = {db_id: Split.EVAL if place < EVAL_FRACTION else Split.TRAIN for db_id, place in places.items()}
    if len(places) > 1 and len(set(splits.values())) == 1:
        nearest = min(places, key=lambda db_id: abs(places[db_id] - EVAL_FRACTION))
        splits[nearest] = Split.TRAIN if splits[nearest] is Split.EVAL else Split.EVAL
    return splits


def split_queries(queries: Sequence[str]) -> list[Split]:
    """Assign questions, given as their queries, to TRAIN or EVAL: no more than EVAL_FRACTION of them to EVAL.

    Questions with the same query, up to layout and case, are on the same side. They go to EVAL in the order of
    their hashes, as far as there is room, so that even few questions are divided as asked; of two or more different
    queries neither side is left empty. One query alone is TRAIN.
    """
    keys = [" ".join(query.split()).rstrip("; ").casefold() for query in queries]
    counts = Counter(keys)
    room = int(len(keys) * EVAL_FRACTION)
    chosen: set[str] = set()
    for key in sorted(counts, key=lambda key: (_unit_hash(key), key)):
        if counts[key] <= room:
            chosen.add(key)
            room -= counts[key]
    if not chosen and len(counts) > 1:
        chosen.add(min(counts, key=lambda key: (counts[key], _unit_hash(key), key)))
    return [Split.EVAL if key in chosen else Split.TRAIN for key in keys]


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48
