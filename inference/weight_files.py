"""Whether the files of a checkpoint's weights are whole, told by their headers: no weights are read."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

from inference.engine import EngineError

Shape = tuple[int, ...]

LFS_POINTER = b"version https://git-lfs"
LARGEST_HEADER = 100_000_000
"""Of a safetensors file, in bytes; the format's own bound."""
MOST_NAMED = 3


class WeightFileError(EngineError):
    """A file of weights is missing, cut off, or holds something else; the text says what to do."""


def check_weights(folder: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors in a folder's safetensors files. Raises WeightFileError.

    Of files of the older format (`*.bin`) only the container is looked at: they tell no shapes.
    """
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index)
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= _checked(file)
    if not shapes:
        for file in sorted((*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model*.bin"))):
            _check_pickle(file)
    return shapes


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Compare tensors by name, as far as both sides have the name. Raises WeightFileError."""
    wrong = [name for name in found if name in expected and found[name] != expected[name]]
    if wrong:
        named = ", ".join(f"{name} {list(found[name])} for {list(expected[name])}" for name in wrong[:MOST_NAMED])
        raise WeightFileError(
            f"the weights in {where} are not of the shapes that its config.json says: {named}; put back the "
            "config.json that they were saved with"
        )


def _check_index(index: Path) -> None:
    try:
        shards = sorted(set(json.loads(_bytes(index))["weight_map"].values()))
        missing = [str(name) for name in shards if not (index.parent / name).is_file()]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise WeightFileError(f"{index} is no index of weights{_hint(_bytes(index))}") from None
    if missing:
        raise WeightFileError(
            f"{index.parent} lacks {len(missing)} of {len(shards)} files of weights, such as {missing[0]}; "
            "copy or download it again"
        )


def _checked(file: Path) -> dict[str, Shape]:
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            header = stream.read(length) if length <= LARGEST_HEADER else start
            size = stream.seek(0, 2)
    except OSError as error:
        raise WeightFileError(f"{file} cannot be read: {error.strerror or error}") from error
    if length <= LARGEST_HEADER and size < 8 + length:
        raise WeightFileError(f"{file} is cut off: it has {size:,} bytes; copy or download it again")
    try:
        tensors = {name: value for name, value in json.loads(header).items() if name != "__metadata__"}
        end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
        shapes = {name: tuple(map(int, value["shape"])) for name, value in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise WeightFileError(f"{file} is no safetensors file{_hint(_bytes(file))}") from None
    if size != end:
        raise WeightFileError(
            f"{file} is cut off: it has {size:,} bytes of {end:,}; copy or download it again"
            if size < end
            else f"{file} has {size - end:,} bytes too many; copy or download it again"
        )
    return shapes


def _check_pickle(file: Path) -> None:
    start = _bytes(file)
    # Since 1.6, torch writes an archive, whose directory is at its end; before, a pickle.
    if not zipfile.is_zipfile(file) and (start.startswith(b"PK") or start[:1] != pickle.PROTO):
        text = "is cut off: copy or download it again" if start.startswith(b"PK") else f"holds no weights{_hint(start)}"
        raise WeightFileError(f"{file} {text}")


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(LARGEST_HEADER if file.suffix == ".json" else 64)
    except OSError as error:
        raise WeightFileError(f"{file} cannot be read: {error.strerror or error}") from error


def _hint(start: bytes) -> str:
    if start.startswith(LFS_POINTER):
        return ", but a pointer of Git LFS to one: run `git lfs pull` where it was cloned"
    return "; copy or download it again"
