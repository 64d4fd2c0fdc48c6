"""The built-in data sets: generated databases with questions and gold SQL, deterministic from a seed.

`build_synthetic` makes the default data set: sixteen domains, four databases each, whole domains held out for
evaluation. `build_scrambled` makes databases for a tiny policy to warm up on: the structures are drawn from the
training domains only, names and values at random from the words of all domains, the held-out ones included. So a
policy warmed up on them has met the words of the evaluation databases, and not their tables.

Both are entries of the cache (`env_server.cache`): one SQLite file for each database, and the questions. The same seed
gives the same bytes. All randomness comes from `random.Random` seeded with text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

from env_server.cache import Cache, key_of
from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.synthetic.builder import open_in_memory, questions
from env_server.data.synthetic.domains import all_domains
from env_server.data.synthetic.schema import draft, populate, scramble
from env_server.dataset import Hardness, Split

VARIANTS = 4
"""Databases of each domain."""
QUESTIONS_PER_DATABASE = 60
KIND = "generated"
_QUESTIONS = "questions.jsonl"

_Item = tuple[str, bytes, list[RawQuestion]]
"""A database's id, its SQLite file and its questions."""


def build_synthetic(cache_dir: Path, seed: int = 0) -> RawDataset:
    """Return the default data set, from the cache or built there (a few seconds).

    The evaluation split holds whole domains. Raises DataError where the cache cannot be written.
    """
    return _cached(cache_dir, "synthetic", f"synthetic-seed{seed}", _synthetic(seed))


def build_scrambled(
    cache_dir: Path, seed: int = 0, databases: int = 600, questions_per_database: int = 12
) -> RawDataset:
    """Return `databases` databases with random names and values, all in the training split; cached likewise."""
    name = f"scrambled-seed{seed}-{key_of(databases, questions_per_database)[:8]}"
    return _cached(cache_dir, "scrambled", name, _scrambled(seed, databases, questions_per_database))


def _cached(cache_dir: Path, name: str, entry: str, items: Iterable[_Item]) -> RawDataset:
    def make(folder: Path) -> None:
        folder.mkdir()
        with (folder / _QUESTIONS).open("w", encoding="utf-8") as file:
            for db_id, content, kept in items:
                (folder / f"{db_id}.sqlite").write_bytes(content)
                file.writelines(json.dumps(asdict(question)) + "\n" for question in kept)

    folder = Cache(cache_dir).made(KIND, entry, make)
    lines = (folder / _QUESTIONS).read_text(encoding="utf-8").splitlines()
    kept = tuple(_question(json.loads(line)) for line in lines)
    databases = {db_id: folder / f"{db_id}.sqlite" for db_id in dict.fromkeys(question.db_id for question in kept)}
    return RawDataset(name, kept, databases)


def _question(fields: dict[str, str]) -> RawQuestion:
    typed = {"split": Split(fields["split"]), "hardness": Hardness(fields["hardness"]), "answer": ()}
    return RawQuestion(**fields | typed)  # type: ignore[arg-type]


def _synthetic(seed: int) -> Iterator[_Item]:
    for domain in all_domains():
        for variant in range(1, VARIANTS + 1):
            db_id = f"{domain.name}_{variant}"
            rng = Random(f"synthetic/{seed}/{db_id}")
            database = populate(db_id, draft(domain, rng), rng)
            with open_in_memory(database) as connection:
                kept = questions(database, connection, QUESTIONS_PER_DATABASE, domain.split, "synthetic", rng)
                yield db_id, connection.serialize("main"), kept


def _scrambled(seed: int, databases: int, questions_per_database: int) -> Iterator[_Item]:
    shapes = [d for d in all_domains() if d.split is Split.TRAIN]
    for index in range(databases):
        db_id = f"scrambled_{index:04d}"
        rng = Random(f"scrambled/{seed}/{db_id}")
        shape = draft(shapes[index % len(shapes)], rng)
        database = populate(db_id, scramble(shape, rng), rng)
        with open_in_memory(database) as connection:
            kept = questions(database, connection, questions_per_database, Split.TRAIN, "scrambled", rng)
            yield db_id, connection.serialize("main"), kept
