"""`sqlenv data fetch` against a Hub on loopback that holds a small release, and against none."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from env_server.data.loading import load_dataset
from env_server.errors import DataError
from env_server.tools.fetch import fetch

COMMIT = "c0ffee" + "0" * 34
SQL = "SELECT COUNT(*) FROM pets"


@dataclass
class Hub:
    """What the server holds, by repository, and which requests it has had."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return the status, body and headers for a path, as the Hub would."""
        kind, _, rest = path.partition("?")[0].strip("/").partition("/datasets/")
        owner, _, rest = (rest if kind == "api" else path.strip("/").removeprefix("datasets/")).partition("/")
        name, _, rest = rest.partition("/")
        files = self.files.get(f"{owner}/{name}")
        if name == "forbidden":
            return 403, b"", {}
        if files is None:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if kind == "api" and rest.startswith("revision/") and rest != f"revision/{COMMIT}":
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if kind == "api" and rest.startswith("tree/"):
            entries = [{"type": "file", "path": f, "size": len(d), "oid": _oid(d)} for f, d in files.items()]
            return 200, json.dumps(entries).encode(), {}
        if kind == "api":
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return 200, json.dumps({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings}).encode(), {}
        data = files[rest.removeprefix(f"resolve/{COMMIT}/")]
        return 200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append((self.command, self.path))
            status, body, headers = state.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()
        thread.join()


PROGRAM = """
import contextlib, io, json, sys
from env_server.tools import fetch
from sqlenv import cli
fetch.SHA256 = sys.argv[2] or fetch.SHA256
for argv in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = cli.main(["data", "fetch", *argv])
    print(json.dumps([status, out.getvalue(), error.getvalue()]))
"""


class Outcome(NamedTuple):
    """How the command ended."""

    status: int
    out: str
    error: str


def run(home: Path, *commands: Sequence[str], sha256: str = "", **environment: str) -> list[Outcome]:
    """Run `sqlenv data fetch` in a process of its own, since the Hub's client reads its settings at import.

    `sha256` is that of the release that is known there, Spider's own by default.
    """
    hub = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
    settings = {**os.environ, **hub, **environment}
    settings.pop("HF_TOKEN", None)
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands), sha256]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def questions(*databases: str) -> bytes:
    return json.dumps([{"db_id": name, "question": "How many?", "query": SQL} for name in databases]).encode()


@pytest.fixture
def database(pets_file: Path) -> bytes:
    return pets_file.read_bytes()


@pytest.fixture
def spider_zip(database: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("spider_data/train_spider.json", questions("pets"))
        archive.writestr("spider_data/dev.json", questions("zoo"))
        for name in ("pets", "zoo"):
            archive.writestr(f"spider_data/database/{name}/{name}.sqlite", database)
        archive.writestr("__MACOSX/spider_data/._dev.json", b"x")
    return buffer.getvalue()


def test_spider_is_verified_and_unpacked_into_what_the_reader_reads(
    hub: Hub, spider_zip: bytes, tmp_path: Path
) -> None:
    hub.files["me/mirror"] = {"spider_data.zip": spider_zip, "README.md": b"x", "other.bin": b"x"}
    out = tmp_path / "data" / "spider"
    known = hashlib.sha256(spider_zip).hexdigest()
    (done,) = run(tmp_path, ["spider", "--out", str(out), "--repo", "me/mirror"], sha256=known, HF_ENDPOINT=hub.url)
    assert (done.status, done.error) == (0, "")
    before, _, after = done.out.partition("unpacking")
    assert all(stated in before for stated in ("me/mirror", COMMIT, known, "CC BY-SA 4.0"))
    assert f"2 questions over 2 databases in {out}" in after
    assert f"next: sqlenv data doctor spider:{out}" in after
    assert not (out / "spider_data.zip").exists()
    assert not any("README" in path or "other" in path for _, path in hub.requests)
    dataset = load_dataset(f"spider:{out}")
    assert {q.question_id: q.split.value for q in dataset.questions} == {
        "train_spider-0000": "train",
        "dev-0000": "eval",
    }


def test_another_file_than_the_known_one_is_refused(hub: Hub, spider_zip: bytes, tmp_path: Path) -> None:
    hub.files["me/mirror"] = {"spider_data.zip": spider_zip}
    command = ["spider", "--out", str(tmp_path / "out"), "--repo", "me/mirror", "--revision", COMMIT]
    (done,) = run(tmp_path, command, HF_ENDPOINT=hub.url)
    assert done.status == 2
    assert hashlib.sha256(spider_zip).hexdigest() in done.error
    assert not list((tmp_path / "out").glob("[!.]*")), "what is not trusted is removed, and nothing of it unpacked"


def test_bird_is_not_downloaded_and_the_error_says_how_to_have_it(hub: Hub, tmp_path: Path) -> None:
    (done,) = run(tmp_path, ["bird", "--out", str(tmp_path / "out")], HF_ENDPOINT=hub.url)
    assert (done.status, hub.requests, (tmp_path / "out").exists()) == (2, [], False)
    (line,) = done.error.splitlines()
    assert "https://bird-bench.github.io" in line
    assert line.endswith(f"load it as bird:{tmp_path / 'out'}")


REFUSED = {
    ("--repo", "no/body"): "the Hub has no data set 'no/body' that you can see. Name another with --repo",
    ("--repo", "me/empty"): "me/empty holds no spider_data.zip",
    ("--repo", "me/mirror", "--revision", "v9"): "me/mirror has no revision 'v9'. Leave --revision out",
    ("--repo", "a b"): "'a b' is no name of a repository. Write it as OWNER/NAME",
    ("--repo", "me/forbidden"): "downloading me/forbidden failed (HfHubHTTPError: ",
}


def test_what_the_hub_refuses_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"me/mirror": {"spider_data.zip": b""}, "me/empty": {"a.txt": b"x"}}
    commands = [["spider", "--out", str(tmp_path / "out"), *flags] for flags in REFUSED]
    for done, words in zip(run(tmp_path, *commands, HF_ENDPOINT=hub.url), REFUSED.values(), strict=True):
        assert done.status == 2
        (line,) = done.error.splitlines()
        assert line.startswith("sqlenv data: ")
        assert words in line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set. Unset it to download HAL-9001/spider-databases, or download"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "downloading HAL-9001/spider-databases failed (ConnectError: "),
    ],
    ids=["offline mode", "no network"],
)
def test_without_internet_it_says_what_to_do(environment: dict[str, str], words: str, tmp_path: Path) -> None:
    (done,) = run(tmp_path, ["spider", "--out", str(tmp_path / "out")], **environment)
    assert done.status == 2
    assert words in done.error
    assert "download it elsewhere and unpack it into the folder" in done.error


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def dataset_info(self, *_: object, **__: object) -> SimpleNamespace:
            return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename="spider_data.zip", size=35 * 10**9)])

    def download(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (tmp_path / "file").write_text("x")
    for folder, reason in (("out", "No space left on device"), ("file/out", "Not a directory")):
        with pytest.raises(DataError, match=rf"out cannot be written: {reason}\. Free space, or choose another"):
            fetch("spider", tmp_path / folder)


def test_without_the_hub_client_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python marks what cannot be imported.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        fetch("spider", tmp_path)
