"""The built-in data sets: generated databases with questions and gold SQL, deterministic from a seed.

`build_synthetic` makes the default data set: sixteen domains, four databases each, whole domains held out for
evaluation. `build_scrambled` makes databases for a tiny policy to warm up on: the structures are drawn from the
training domains only, names and values at random from the words of all domains, the held-out ones included. So a
policy warmed up on them has met the words of the evaluation databases, and not their tables.

Both are cached in the directory that they are given; the same seed gives the same bytes. All randomness comes
from `random.Random` seeded with text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.synthetic.builder import open_in_memory, questions
from env_server.data.synthetic.cache import Recipe, cached
from env_server.data.synthetic.domains import DOMAINS
from env_server.data.synthetic.rows import populate
from env_server.data.synthetic.schema import draft, scramble
from env_server.dataset import Split
from env_server.sql.hardness import HARDNESS_VERSION

GENERATOR_VERSION = 1
"""Part of the cache's recipe: raise it with every change of what is generated."""
VERSION = f"{GENERATOR_VERSION}.{HARDNESS_VERSION}"
"""Of what the cache holds: what was generated, and the hardness of its queries."""
VARIANTS = 4
"""Databases of each domain."""
QUESTIONS_PER_DATABASE = 60

_Item = tuple[str, bytes, list[RawQuestion]]


def build_synthetic(directory: Path, seed: int = 0) -> RawDataset:
    """Return the default data set, from the cache in `directory` or built there (a few seconds).

    The evaluation split holds whole domains. Raises DataError if the directory holds other files.
    """
    recipe: Recipe = {"name": "synthetic", "version": VERSION, "seed": seed}
    return cached(directory, recipe, lambda: _synthetic(seed))


def build_scrambled(
    directory: Path, seed: int = 0, databases: int = 600, questions_per_database: int = 12
) -> RawDataset:
    """Return `databases` databases with random names and values, all in the training split; cached likewise."""
    recipe: Recipe = {
        "name": "scrambled",
        "version": VERSION,
        "seed": seed,
        "databases": databases,
        "questions_per_database": questions_per_database,
    }
    return cached(directory, recipe, lambda: _scrambled(seed, databases, questions_per_database))


def _synthetic(seed: int) -> Iterator[_Item]:
    for domain in DOMAINS:
        for variant in range(1, VARIANTS + 1):
            db_id = f"{domain.name}_{variant}"
            rng = Random(f"synthetic/{seed}/{db_id}")
            database = populate(db_id, draft(domain, rng), rng)
            with open_in_memory(database) as connection:
                kept = questions(database, connection, QUESTIONS_PER_DATABASE, domain.split, "synthetic", rng)
                yield db_id, connection.serialize("main"), kept


def _scrambled(seed: int, databases: int, questions_per_database: int) -> Iterator[_Item]:
    shapes = [d for d in DOMAINS if d.split is Split.TRAIN]
    for index in range(databases):
        db_id = f"scrambled_{index:04d}"
        rng = Random(f"scrambled/{seed}/{db_id}")
        shape = draft(shapes[index % len(shapes)], rng)
        database = populate(db_id, scramble(shape, rng), rng)
        with open_in_memory(database) as connection:
            kept = questions(database, connection, questions_per_database, Split.TRAIN, "scrambled", rng)
            yield db_id, connection.serialize("main"), kept
