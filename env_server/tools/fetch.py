"""Spider from the Hugging Face Hub, into a folder that `spider:PATH` reads.

The Hub holds no copy by Spider's authors, so one by a third party is taken, and only the file whose SHA-256 is known:
`repo` names another copy of the same file. Whose copy, at which commit, and the licence are stated before the download.
The Hub's own client downloads, and resumes an interrupted download. The archive is then verified, unpacked
(`env_server.tools.archives`) and removed, and the folder is read once, so that success means that it can be used.

Of BIRD no checksum is known, so it is not downloaded: the error says where to get it. Every failure is a DataError
that says what to do; nothing else is raised for what the network, the Hub or the disk does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from env_server.data.layout import SPIDER, read_layout
from env_server.data.raw import RawDataset
from env_server.errors import DataError
from env_server.tools.archives import disk_errors, refuse_full_disk, size_text, unpack

Say = Callable[[str], None]
"""Prints one line for the user."""

REPO = "HAL-9001/spider-databases"
ARCHIVE = "spider_data.zip"
SHA256 = "00636695dabed6b5f4b8328a16b13e069a2f16591d5efcce57660669c85b121b"
LICENCE = "CC BY-SA 4.0 (Yu et al., EMNLP 2018; https://yale-lily.github.io/spider)"
NAMES = ("spider", "bird")
_MANUAL = "download it elsewhere and unpack it into the folder"


def fetch(
    name: str, folder: Path, *, repo: str = REPO, revision: str | None = None, say: Say = lambda _: None
) -> RawDataset:
    """Download Spider into the folder and return it as its reader reads it. Raises DataError, for BIRD always."""
    if name != "spider":
        raise DataError(
            "BIRD is not downloaded, since no checksum of it is known. Get it from https://bird-bench.github.io under "
            f"its licence, unpack it into {folder}, and load it as bird:{folder}"
        )
    _require_hub()
    from huggingface_hub import HfApi, hf_hub_download

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _hub_errors(repo, revision):
            found = HfApi().dataset_info(repo, revision=revision, files_metadata=True)
        size = next((each.size or 0 for each in found.siblings or () if each.rfilename == ARCHIVE), None)
        if size is None:
            raise DataError(f"{repo} holds no {ARCHIVE}. Name another copy with --repo")
        archive = folder / ARCHIVE
        _refuse_full_disk(archive, size)
        say(f"Spider, {LICENCE}, from a copy that is not its authors': {repo} on the Hugging Face Hub, at {found.sha}")
        say(f"fetching {ARCHIVE}, {size_text(size)}; its SHA-256 must be {SHA256}")
        with _hub_errors(repo, revision):
            hf_hub_download(repo, ARCHIVE, repo_type="dataset", revision=found.sha, local_dir=folder)
        _verify(archive)
        say(f"verified; unpacking {ARCHIVE}")
        unpack(archive, folder)
        archive.unlink()
        return read_layout(SPIDER, folder)


def _verify(archive: Path) -> None:
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != SHA256:
        archive.unlink()
        raise DataError(
            f"{archive.name} is not the known release (SHA-256 {actual}), and was removed. Try again, or name another "
            "copy with --repo or --revision"
        )


def _refuse_full_disk(archive: Path, size: int) -> None:
    """Refuse a download that does not fit, before it begins; what an earlier one has left there need not fit again."""
    begun = sum(file.stat().st_size for file in (archive.parent / ".cache").rglob("*.incomplete"))
    refuse_full_disk(archive.parent, 0 if archive.is_file() else size - begun)


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
