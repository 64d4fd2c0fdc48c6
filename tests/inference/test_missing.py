"""Names that are no folders: what is refused without the Hub, how often it is asked, and which folders are near."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from inference.adapters import ModelRef, PolicyNameError, find_policy
from inference.missing import near


class Hub:
    """Answers every request with `status` and the Hub's error code; `asked` are the paths."""

    def __init__(self) -> None:
        self.status, self.code = 404, "RepoNotFound"
        self.asked: list[str] = []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            hub.asked.append(self.path)
            self.send_response(hub.status)
            if hub.code:
                self.send_header("X-Error-Code", hub.code)
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path)
        yield hub
        server.shutdown()
        thread.join()


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://x"])
def test_a_proxy_that_no_client_can_use_is_named_with_the_fix(
    proxy: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(PolicyNameError) as caught:
        find_policy("somebody/model")
    assert proxy.partition(":")[0] in str(caught.value)
    assert "socks5://" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hub.asked == []


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    for name in ("runs/first", "runs/second/model", "checkpoints/warm", "models"):
        (folder / name).mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("runs/frist", ["runs/first"]),
        ("./runs/frist", ["runs/first"]),
        ("run/first", ["runs/first"]),
        ("runs/secnd/model", ["runs/second/model"]),
        ("runs/secnd/nothing", []),
        ("first", ["runs/first"]),
        ("model", ["models"]),
        ("Qwen/Qwen3-0.6B", []),
        ("checkpoint/warm", ["checkpoints/warm"]),
    ],
)
def test_the_folders_that_are_near_are_named(name: str, found: list[str]) -> None:
    assert near(name) == found


def test_a_path_from_the_root_is_looked_for_where_it_leads(here: Path) -> None:
    assert near(str(here / "runs" / "fisrt")) == [str(here / "runs" / "first")]
    assert near("/nothing/of/the/kind") == []


@pytest.mark.parametrize("name", ["./frist", "/no/such/folder", "~/frist", "runs/frist/model", "runs/frist/"])
def test_what_only_a_path_can_be_is_refused_without_the_hub(name: str, hub: Hub) -> None:
    with pytest.raises(PolicyNameError, match=f"the policy '{name}' is no folder here"):
        find_policy(name)
    assert hub.asked == []


def test_a_file_is_named_as_one(hub: Hub) -> None:
    Path("runs/first/model.safetensors").touch()
    with pytest.raises(PolicyNameError, match="but a file: name the folder that it is in"):
        find_policy("runs/first/model.safetensors")


def test_what_the_hub_does_not_have_is_refused_after_one_request(hub: Hub) -> None:
    with pytest.raises(PolicyNameError) as refused:
        find_policy("runs/frist")
    assert str(refused.value) == (
        "the policy 'runs/frist' is no folder here, and no model on the Hub; of a private one, `hf auth login` comes "
        "first; near that name: runs/first"
    )
    assert hub.asked == ["/runs/frist/resolve/main/config.json"]


def test_a_hub_that_cannot_be_reached_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    connections = []

    def hang_up(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.append(1)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        point_at(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path)
        thread = threading.Thread(target=hang_up, args=(server,))
        thread.start()
        with pytest.raises(PolicyNameError, match=r"and the Hub cannot be asked \(.*near that name: runs/first"):
            find_policy("runs/frist")
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert connections == [1]


def test_no_name_of_a_model_is_refused(hub: Hub) -> None:
    with pytest.raises(PolicyNameError, match="and no name of a model on the Hub either"):
        find_policy("my model")


@pytest.mark.parametrize(("status", "code"), [(403, "GatedRepo"), (404, "RevisionNotFound"), (404, "EntryNotFound")])
def test_what_the_hub_has_is_left_to_whoever_loads_it(status: int, code: str, hub: Hub) -> None:
    hub.status, hub.code = status, code
    assert find_policy("me/mine").base == ModelRef("me/mine")


def test_a_model_in_the_cache_is_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / ("c0ffee" + "0" * 34)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--me--mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    hub.code = "EntryNotFound"
    assert find_policy("me/mine").base == ModelRef("me/mine")
    assert not any("config.json" in path and "adapter" not in path for path in hub.asked)
