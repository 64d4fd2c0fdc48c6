"""Which model a folder holds, told by what is in it: a name on the Hub, a cached snapshot of it and a copy are one.

Both sides use it: vLLM's worker for what it serves, the trainer for what it was told to train. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

PART = 2**20
"""Bytes that are read at either end of each file of weights: training changes them all."""
VOLATILE = ("_name_or_path", "transformers_version")
"""What a configuration says of where and how it was written."""


def identity(location: str, revision: str | None = None) -> dict[str, str]:
    """Return `location`, and digests of the `config` and the `weights` there; "" for what is not to be found here.

    A folder is read. A name is looked up in the Hub's cache, and nothing is fetched.
    """
    folder = _folder(location, revision)
    return {"location": location, "config": _config(folder), "weights": _weights(folder)}


def _folder(location: str, revision: str | None) -> Path | None:
    if Path(location).is_dir():
        return Path(location)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(location, "config.json", revision=revision)
    except (ImportError, ValueError):  # it is no name either
        return None
    return Path(found).parent if isinstance(found, str) else None


def _config(folder: Path | None) -> str:
    if folder is None:
        return ""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if not isinstance(config, dict):
        return ""
    told = {name: value for name, value in config.items() if name not in VOLATILE}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _weights(folder: Path | None) -> str:
    files = [] if folder is None else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            digest.update(f"{file.name} {size}\n".encode())
            for start in (0, max(0, size - PART)):
                stream.seek(start)
                digest.update(stream.read(PART))
    return digest.hexdigest()
