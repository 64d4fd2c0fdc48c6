"""Benchmarks from the Hugging Face Hub, into a folder that `spider:PATH` or `bird:PATH` reads.

The Hub's own client downloads; a download that was interrupted goes on where it stopped, and a file that is there is
not fetched again. Then archives are unpacked (`env_server.data.archives`) and removed, files are given the names that
the readers know, and the folder is read once, so that success means that it can be used.

Which repositories hold the databases is a fact about the Hub and may change; `repo` names another one. The release of
Spider is known by its checksum. Every failure is a DataError that says what to do; nothing else is raised for what
the network, the Hub or the disk does.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from env_server.data.archives import disk_errors, refuse_full_disk, size_text, unpack
from env_server.data.bird import read_bird
from env_server.data.cli.inspection import counted
from env_server.data.raw import RawDataset
from env_server.data.spider import read_spider
from env_server.errors import DataError

Say = Callable[[str], None]
"""Tells the user what is going on, in one line."""

_WANTED = ("*.json", "*.jsonl", "*.sqlite", "*.db", "*.zip")
_MANUAL = "download it elsewhere and unpack it into the folder"


@dataclass(frozen=True)
class Source:
    """Where a benchmark lies on the Hub.

    `files` are patterns of the repository's files; `names` maps a file, as it lies there, to the name that the reader
    looks for; `sha256` are the checksums that are known. `prefix` is how the folder is then loaded.
    """

    repo: str
    files: tuple[str, ...]
    prefix: str
    read: Callable[[Path], RawDataset]
    names: Mapping[str, str] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)


SOURCES = {
    "spider": Source(
        repo="HAL-9001/spider-databases",
        files=("spider_data.zip",),
        prefix="spider",
        read=read_spider,
        names={"train.json": "train_spider.json", "validation.json": "dev.json"},
        sha256={"spider_data.zip": "00636695dabed6b5f4b8328a16b13e069a2f16591d5efcce57660669c85b121b"},
    ),
    "bird": Source(
        repo="prem-research/birdbench",
        files=("validation/validation.json", "validation/dev_databases/*.sqlite"),
        prefix="bird",
        read=read_bird,
        names={"validation/validation.json": "validation/dev.json"},
    ),
    "bird-train": Source(
        repo="prem-research/birdbench",
        files=("train/train.json", "train/train_databases/*.sqlite"),
        prefix="bird",
        read=read_bird,
    ),
}


def fetch(
    name: str, folder: Path, *, repo: str | None = None, revision: str | None = None, say: Say = lambda _: None
) -> RawDataset:
    """Download a benchmark of SOURCES into the folder and return it as its reader reads it. Raises DataError.

    With another `repo`, every question file, database and archive in it is taken.
    """
    source = SOURCES[name]
    if repo is not None and repo != source.repo:
        source = replace(source, repo=repo, files=_WANTED, sha256={})
    if revision is not None:
        source = replace(source, sha256={})
    _require_hub()
    from huggingface_hub import HfApi, snapshot_download

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _hub_errors(source.repo, revision):
            found = HfApi().dataset_info(source.repo, revision=revision, files_metadata=True)
        files = {each.rfilename: each.size or 0 for each in found.siblings or () if _is_wanted(each.rfilename, source)}
        if not files:
            raise DataError(f"{source.repo} holds none of {', '.join(source.files)}. Name another with --repo")
        _refuse_full_disk(folder, files)
        size = size_text(sum(files.values()))
        say(f"fetching {counted(len(files), 'file')}, {size}, from {source.repo} at {found.sha}")
        with _hub_errors(source.repo, revision):
            snapshot_download(
                source.repo,
                repo_type="dataset",
                revision=found.sha,
                local_dir=folder,
                allow_patterns=[escape(name) for name in files],
            )
        _arrange(folder, list(files), source, say)
        return source.read(folder)


def _is_wanted(name: str, source: Source) -> bool:
    return any(fnmatch(name, pattern) for pattern in source.files)


def _arrange(folder: Path, files: Sequence[str], source: Source, say: Say) -> None:
    """Unpack what is packed, and copy what has another name than the reader looks for."""
    for file in files:
        if file.endswith(".zip"):
            archive = folder / file
            _check(archive, source.sha256.get(file))
            say(f"unpacking {file}")
            unpack(archive, archive.parent)
            archive.unlink()
    for name, known in source.names.items():
        if (folder / name).is_file() and not (folder / known).exists():
            shutil.copyfile(folder / name, folder / known)


def _check(archive: Path, expected: str | None) -> None:
    if expected is None:
        return
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        archive.unlink()
        raise DataError(
            f"{archive.name} is not the file that is known (SHA-256 {actual}), and was removed. Try again; if the "
            "repository has a new release that you trust, take it with --revision main"
        )


def _refuse_full_disk(folder: Path, files: Mapping[str, int]) -> None:
    """Before a download: refuse one that does not fit. What an earlier one has left there need not fit again."""
    begun = sum(file.stat().st_size for file in (folder / ".cache").rglob("*.incomplete"))
    needed = sum(size for name, size in files.items() if not (folder / name).is_file()) - begun
    refuse_full_disk(folder, needed)


def _require_hub() -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise DataError("huggingface_hub, which downloads, is missing. Install: pip install huggingface_hub") from error


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Raise what the Hub or the network refuses as a DataError; leave errors of the disk alone."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(f"{repo} wants you to accept its terms on the Hub. Do so, then: hf auth login") from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{repo} has no revision {revision!r}. Leave --revision out for the newest") from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(f"the Hub has no data set {repo!r} that you can see. Name another with --repo") from error
    except errors.HFValidationError as error:
        raise DataError(f"{repo!r} is no name of a repository. Write it as OWNER/NAME") from error
    except errors.OfflineModeIsEnabled as error:
        raise DataError(f"HF_HUB_OFFLINE is set. Unset it to download {repo}, or {_MANUAL}") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "unknown")
        raise DataError(f"the Hub answered status {status} for {repo}. Try again later, or {_MANUAL}") from error
    except (
        httpx.HTTPError,
        errors.LocalEntryNotFoundError,
        errors.FileMetadataError,
        errors.XetDownloadError,
        ConnectionError,
        TimeoutError,
        RuntimeError,  # the Hub's storage backend
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"downloading {repo} failed ({reason}). Check the network, or {_MANUAL}") from error
