"""A built data set on disk: one SQLite file for each database, the questions, and a manifest that vouches for them.

A directory is complete or absent: it is built beside its place and renamed into it, so that a crash or a second
process never leaves or sees half of one. It is trusted only if the manifest names the same recipe and every file
has the recorded digest; otherwise it is built again. A directory that holds anything else is never touched.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from env_server.data.raw import RawDataset, RawQuestion
from env_server.dataset import Hardness, Split
from env_server.errors import DataError

MANIFEST = "manifest.json"
QUESTIONS = "questions.jsonl"
_SUFFIX = ".sqlite"

Recipe = dict[str, str | int]
Built = Iterable[tuple[str, bytes, list[RawQuestion]]]
"""For each database its id, its SQLite file and its questions."""


def cached(directory: Path, recipe: Recipe, build: Callable[[], Built]) -> RawDataset:
    """Return the data set of `directory`, built there first if it is absent, broken or of another recipe.

    Raises DataError if the directory holds files that are not a data set's.
    """
    directory = directory.absolute()
    loaded = load(directory, recipe)
    if loaded is not None:
        return loaded
    _refuse_foreign_files(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        fresh = Path(scratch, "new")
        _write(fresh, recipe, build())
        _install(fresh, directory, Path(scratch, "old"), recipe)
    loaded = load(directory, recipe)
    if loaded is None:
        raise DataError(f"{directory} was changed while it was built; give each recipe a directory of its own")
    return loaded


def load(directory: Path, recipe: Recipe) -> RawDataset | None:
    """Return the data set of `directory`, or None if it is absent, broken or of another recipe."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["recipe"] != recipe:
            return None
        contents = {file: (directory / file).read_bytes() for file in manifest["digests"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(_digest(contents[file]) != digest for file, digest in manifest["digests"].items()):
        return None
    lines = contents[QUESTIONS].decode("utf-8").splitlines()
    files = {file.removesuffix(_SUFFIX): directory / file for file in contents if file.endswith(_SUFFIX)}
    return RawDataset(str(recipe["name"]), tuple(_parse(line) for line in lines), files)


def _write(directory: Path, recipe: Recipe, built: Built) -> None:
    directory.mkdir()
    digests: dict[str, str] = {}
    lines: list[str] = []
    for db_id, content, questions in built:
        digests[db_id + _SUFFIX] = _digest(content)
        (directory / (db_id + _SUFFIX)).write_bytes(content)
        lines.extend(json.dumps(asdict(q)) + "\n" for q in questions)
    text = "".join(lines).encode("utf-8")
    digests[QUESTIONS] = _digest(text)
    (directory / QUESTIONS).write_bytes(text)
    manifest = {"recipe": recipe, "digests": digests}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _install(fresh: Path, directory: Path, old: Path, recipe: Recipe) -> None:
    """Rename `fresh` to `directory`; if another process was first with a good one, leave that."""
    try:
        fresh.rename(directory)
    except OSError:
        if load(directory, recipe) is not None:
            return
        _refuse_foreign_files(directory)
        directory.rename(old)
        fresh.rename(directory)


def _refuse_foreign_files(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise DataError(f"{directory} is a file; give a directory for the generated data set")
    foreign = [p.name for p in directory.iterdir() if p.suffix != _SUFFIX and p.name not in (MANIFEST, QUESTIONS)]
    if foreign:
        raise DataError(f"{directory} holds other files ({', '.join(sorted(foreign)[:3])}); give an empty directory")


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _parse(line: str) -> RawQuestion:
    fields = json.loads(line)
    hardness = fields["hardness"]
    typed = {"split": Split(fields["split"]), "hardness": hardness and Hardness(hardness), "answer": ()}
    return RawQuestion(**fields | typed)
