"""Pushing to the Hub, against one on loopback: what is asked before training, what is sent, what is said."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from tests.trainer.fake_hub import TOKEN, Hub, pointed_at, running_hub
from trainer.config import ConfigError
from trainer.export.hub import Destination, HubError
from trainer.training.arguments import parse_train

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # by the Hub's own client

FILES = {"README.md": b"---\ntags: [a]\n---\n# x\n", "model.safetensors": bytes(range(256)) * 64, "config.json": b"{}"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running, pointed_at(running, str(tmp_path)):
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "exported"
    target.mkdir()
    for name, content in FILES.items():
        (target / name).write_bytes(content)
    return target


def grpo(**flags: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": "runs/mine", "push_to_hub": True, "hub_strategy": "end", "bf16": False, **flags})


def test_the_flags_name_the_destination() -> None:
    assert Destination.of(grpo(push_to_hub=False)) is None
    assert Destination.of(grpo()) == Destination("mine")
    flags = {"hub_model_id": "me/x", "hub_private_repo": True, "hub_token": "t", "hub_revision": "dev"}
    assert Destination.of(grpo(**flags)) == Destination("me/x", True, "t", "dev")


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_other_ways_to_push_are_refused_before_anything_is_loaded(strategy: str) -> None:
    push = ["--push_to_hub", "true", "--hub_strategy", strategy]
    with pytest.raises(ConfigError, match=f"--hub_strategy {strategy} pushes the run's folder as it grows.*leave"):
        parse_train(["--model_name_or_path", "x", *push])


def test_a_policy_is_pushed_whole(hub: Hub, folder: Path) -> None:
    destination = Destination("mine", private=True, token=TOKEN).prepared()
    assert destination.repo == "me/mine"
    assert hub.visibility == {"me/mine": "private"}
    assert destination.push(folder).startswith(f"{hub.url}/me/mine/commit/")
    assert hub.repos["me/mine"]["main"] == FILES


def test_a_branch_is_made_and_a_repository_may_be_there(hub: Hub, folder: Path) -> None:
    hub.repos["me/mine"] = {"main": {"old": b""}, "dev": {}}
    for revision in ("dev", "new"):
        Destination("me/mine", token=TOKEN, revision=revision).prepared().push(folder)
        assert hub.repos["me/mine"][revision] == FILES
    assert hub.repos["me/mine"]["main"] == {"old": b""}


@pytest.mark.parametrize(
    ("destination", "words"),
    [
        (Destination("me/mine"), "needs a token of the Hub: `hf auth login`"),
        (Destination("me/mine", token="hf_old"), "401 for me/mine: the token is not valid"),
        (Destination("them/theirs", token=TOKEN), "403 for them/theirs: the token may not write there"),
        (Destination("them/new", token=TOKEN), "403 for them/new: the token may not write there"),
        (Destination("a b/c", token=TOKEN), "a b/c"),
    ],
    ids=["no token", "wrong token", "another's repository", "another's name", "no name"],
)
def test_what_will_be_refused_is_known_before(destination: Destination, words: str, hub: Hub) -> None:
    hub.repos["them/theirs"] = {"main": {}}
    with pytest.raises(HubError, match=words):
        destination.prepared()


def test_a_hub_that_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"the Hub cannot be reached to push to me/mine \(ConnectError"):
        Destination("me/mine", token=TOKEN).prepared()


def test_a_hub_that_never_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.export.hub.WHOAMI_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(HubError, match="ReadTimeout"):
            Destination("me/mine", token=TOKEN).prepared()


def test_an_upload_that_breaks_off_is_one_line(hub: Hub, folder: Path) -> None:
    destination = Destination("me/mine", token=TOKEN).prepared()
    hub.breaks = True
    with pytest.raises(HubError, match=r"me/mine.*model.safetensors"):
        destination.push(folder)
    assert hub.repos["me/mine"]["main"] == {}
