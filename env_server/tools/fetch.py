"""Spider from the Hugging Face Hub, into a folder that `spider:PATH` reads.

The Hub holds no copy by Spider's authors, so one by a third party is taken, and only the file whose SHA-256 is known:
`repo` names another copy of the same file. Whose copy, at which commit, and the licence are stated before the download.
The Hub's own client downloads, and resumes an interrupted download. The archive is then verified, unpacked (a file gets
its name when it is whole) and removed, and the folder is read once, so that success means that it can be used.

Of BIRD no checksum is known, so it is not downloaded: the error says where to get it. Every failure is a DataError
that says what to do; nothing else is raised for what the network, the Hub or the disk does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from env_server.data.layout import SPIDER, read_layout
from env_server.data.raw import RawDataset
from env_server.errors import DataError
from env_server.tools.terminal import disk_errors

REPO = "HAL-9001/spider-databases"
ARCHIVE = "spider_data.zip"
SHA256 = "00636695dabed6b5f4b8328a16b13e069a2f16591d5efcce57660669c85b121b"
LICENCE = "CC BY-SA 4.0 (Yu et al., EMNLP 2018; https://yale-lily.github.io/spider)"
NAMES = ("spider", "bird")
_MANUAL = "download it elsewhere and unpack it into the folder"


def fetch(
    name: str,
    folder: Path,
    *,
    repo: str = REPO,
    revision: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RawDataset:
    """Download Spider into the folder and return it as its reader reads it. Raises DataError, for BIRD always."""
    if name != "spider":
        raise DataError(
            "BIRD is not downloaded, since no checksum of it is known. Get it from https://bird-bench.github.io under "
            f"its licence, unpack it into {folder}, and load it as bird:{folder}"
        )
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise DataError("huggingface_hub, which downloads, is missing. Install: pip install huggingface_hub") from error
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _hub_errors(repo, revision):
            found = HfApi().dataset_info(repo, revision=revision, files_metadata=True)
        size = next((each.size or 0 for each in found.siblings or () if each.rfilename == ARCHIVE), None)
        if size is None:
            raise DataError(f"{repo} holds no {ARCHIVE}. Name another copy with --repo")
        say(f"Spider, {LICENCE}, from a copy that is not its authors': {repo} on the Hugging Face Hub, at {found.sha}")
        say(f"fetching {ARCHIVE}, {size / 1e6:.1f} MB; its SHA-256 must be {SHA256}")
        with _hub_errors(repo, revision):
            hf_hub_download(repo, ARCHIVE, repo_type="dataset", revision=found.sha, local_dir=folder)
        archive = folder / ARCHIVE
        _verify(archive)
        say(f"verified; unpacking {ARCHIVE}")
        _unpack(archive, folder)
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


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the known archive; what is interrupted leaves no file that is cut off."""
    with ZipFile(archive) as opened, TemporaryDirectory(dir=folder, prefix=".unpacking-") as scratch:
        for member in opened.infolist():
            if not member.is_dir() and not member.filename.startswith("__MACOSX"):
                target = folder / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                Path(opened.extract(member, scratch)).replace(target)


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Raise what the Hub or the network refuses as a DataError; leave errors of the disk alone."""
    import httpx
    from huggingface_hub import errors

    texts: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{repo} wants you to accept its terms on the Hub. Do so, then: hf auth login",
        errors.RevisionNotFoundError: f"{repo} has no revision {revision!r}. Leave --revision out for the newest",
        errors.RepositoryNotFoundError: f"the Hub has no data set {repo!r} that you can see. Name another with --repo",
        errors.HFValidationError: f"{repo!r} is no name of a repository. Write it as OWNER/NAME",
        errors.OfflineModeIsEnabled: f"HF_HUB_OFFLINE is set. Unset it to download {repo}, or {_MANUAL}",
    }
    failed: tuple[type[Exception], ...] = (
        *(*texts, errors.LocalEntryNotFoundError, errors.FileMetadataError, errors.XetDownloadError),
        *(httpx.HTTPError, ConnectionError, TimeoutError, RuntimeError),  # the last: the Hub's storage
    )
    try:
        yield
    except failed as error:
        text = next((text for kind, text in texts.items() if isinstance(error, kind)), None)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(text or f"downloading {repo} failed ({reason}). Check the network, or {_MANUAL}") from error
