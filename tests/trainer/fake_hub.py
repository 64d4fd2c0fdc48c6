"""A Hub on loopback that takes models: what `huggingface_hub` asks of the real one in order to push."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TOKEN = "hf_geheim"
"""The one that may write, in the repositories of `me`."""
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What is in the repositories, by name, then branch, then path; `requests` are method and path."""

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    visibility: dict[str, str | None] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    breaks: bool = False
    """Refuse the large files of a push."""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the answer, which is JSON."""
        path = path.partition("?")[0]
        self.requests.append((method, path))
        if path.startswith("/objects/") and self.breaks:
            return 400, {"error": "no room"}
        if path.startswith("/objects/"):
            self.objects[path.removeprefix("/objects/")] = body
            return 200, {}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]}
        owner, name, *rest = path.removeprefix("/api/models/").split("/")
        branches = self.repos.get(f"{owner}/{name}")
        if branches is not None and not rest:
            return 200, {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []}
        if branches is None:
            return 404, {"error": "Repository not found"}
        action, *rest = rest
        if action == "auth-check":
            return (200, {}) if owner == "me" else (403, {"error": "Forbidden: no right to write"})
        if action == "branch":
            known = rest[0] in branches
            branches.setdefault(rest[0], {})
            return (409 if known else 201), {}
        if action == "revision" or (action == "preupload" and rest[0] not in branches):
            return (200, {"sha": COMMIT, "siblings": []}) if rest[0] in branches else (404, {"error": "no revision"})
        if action == "preupload":
            return 200, {"files": [_mode(file) for file in json.loads(body)["files"]]}
        assert action == "commit", path
        self._commit(branches[rest[0]], body)
        return 200, {"commitUrl": f"{self.url}/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if repo in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"}
        if not repo.startswith("me/"):
            return 403, {"error": f"You don't have the rights to create a model under {wanted['organization']}"}
        self.repos[repo] = {"main": {}}
        self.visibility[repo] = wanted.get("visibility")
        return 200, {"url": f"{self.url}/{repo}"}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.url}/objects/{wanted['oid']}"}}}

    def _commit(self, branch: dict[str, bytes], body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branch[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branch[value["path"]] = self.objects[value["oid"]]


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith(".safetensors")
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a Hub without repositories."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, answer = hub.answer(self.command, self.path, token, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"}
            if status == 404:
                headers["X-Error-Code"] = "RevisionNotFound" if "revision" in answer["error"] else "RepoNotFound"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_PUT = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()


@contextmanager
def pointed_at(hub: Hub, home: str) -> Iterator[None]:
    """Have the Hub's client in this process speak to `hub`, without the user's token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", f"{home}/token")
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        patch.delenv("HF_TOKEN", raising=False)
        yield
