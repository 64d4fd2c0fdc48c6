"""The network of the cluster test: hosts reach each other, and only each other; cables are slow and cut as asked."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.network import Network, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DELAY_S = 0.1
ASK = "import socket, sys; socket.create_connection((sys.argv[1], 8000), timeout=float(sys.argv[2])).close()"
LISTEN = (
    "import socket; server = socket.create_server(('', 8000)); print('ready', flush=True)\nwhile True: server.accept()"
)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    log = tmp_path_factory.mktemp("network") / "log"
    with Network("one", "two", "three") as network:
        for name in ("one", "two"):
            network[name].start([sys.executable, "-c", LISTEN], log, {})
        deadline = time.monotonic() + 60
        while log.read_text().count("ready") < 2:
            assert time.monotonic() < deadline, log.read_text()
        yield network


def connects(network: Network, name: str, tmp_path: Path, patience_s: float = 60.0) -> bool:
    log = tmp_path / "log"
    return network["three"].start([sys.executable, "-c", ASK, name, str(patience_s)], log, {}).wait() == 0


def test_hosts_reach_each_other_by_name_and_nobody_else(network: Network, tmp_path: Path) -> None:
    assert connects(network, "one", tmp_path)
    assert connects(network, "two", tmp_path)
    assert not connects(network, "192.0.2.1", tmp_path), "there is no way out"
    assert "unreachable" in (tmp_path / "log").read_text()


def test_a_slow_cable_takes_its_time(network: Network, tmp_path: Path) -> None:
    network.connect("one", delay_s=DELAY_S)
    started = time.monotonic()
    assert connects(network, "one", tmp_path)
    network.connect("one")
    assert time.monotonic() - started >= 2 * DELAY_S, "there and back"


def test_a_cut_cable_carries_nothing_until_it_is_mended(network: Network, tmp_path: Path) -> None:
    network.connect("one", up=False)
    assert not connects(network, "one", tmp_path, patience_s=1.0)
    network.connect("one")
    assert connects(network, "one", tmp_path)


def test_a_name_changes_what_it_stands_for(network: Network, tmp_path: Path) -> None:
    assert not connects(network, "env", tmp_path)
    network.resolve({"env": ["two"]})
    assert connects(network, "env", tmp_path)


def test_nothing_is_left() -> None:
    with Network("alone") as network:
        namespace = network["alone"].namespace
        assert namespace in subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert namespace not in subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert not (Path("/etc/netns") / namespace).exists()
