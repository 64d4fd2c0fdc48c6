"""Hosts on one machine: network namespaces that see each other through a switch whose cables a test cuts.

A `Network` needs root, `ip` and /dev/net/tun; `missing` says what is not there. Each host has an address, a file of
names of its own (/etc/hosts, as `ip netns exec` shows it), and no way to the machine's other networks. Files are
shared, as on a cluster with a shared volume. When the network is closed, its processes are ended and nothing is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from benchmarks.server_process import ROOT
from tests.cluster.switch import TUN, Cable

MTU = 9_000
"""Large frames, for each is carried by hand."""
STOP_S = 30.0
POLL_S = 0.1
_NAMES = Path("/etc/netns")


def missing() -> str | None:
    """Return what this machine lacks for a network of its own; None when all is there."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not Path(TUN).exists():
        return f"there is no {TUN}"
    return None


class Host:
    """One host: a namespace, its address, and the processes that run there."""

    def __init__(self, name: str, namespace: str, address: str) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command there, in a process group of its own; what it says goes into `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def get(self, url: str, token: str = "") -> str | None:
        """What a URL answers, asked from this host; None unless that is a 200."""
        command = ["curl", "--silent", "--fail", "--max-time", "5", "--header", f"Authorization: Bearer {token}", url]
        inside = ["ip", "netns", "exec", self.namespace, *command]
        done = subprocess.run(inside, check=False, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    def wait_for(self, url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
        """Wait until a process that was started here answers at a URL. Raises AssertionError with its log's end."""
        deadline = time.monotonic() + seconds
        while self.get(url) is None:
            said = log.read_text(errors="replace")[-4000:]
            assert process.poll() is None, f"{self.name}: status {process.returncode}:\n{said}"
            assert time.monotonic() < deadline, f"{self.name}: {url} does not answer:\n{said}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL to all that runs there, in whatever process group it is."""
        while found := subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=False, capture_output=True, text=True
        ).stdout.split():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for process in self._processes:
                process.wait()

    def stop(self) -> None:
        """SIGTERM to what was started there; SIGKILL to what is left."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


class Network:
    """Hosts by name; a context manager."""

    def __init__(self, *names: str) -> None:
        own = f"sqlenv{os.getpid()}"
        self.hosts = {
            name: Host(name, f"{own}-{name}", f"10.77.0.{place}") for place, name in enumerate(names, start=11)
        }
        self._devices = {name: f"sq{os.getpid() % 100_000}-{place}" for place, name in enumerate(names)}
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def connect(self, name: str, *, delay_s: float = 0.0, loss: float = 0.0, up: bool = True) -> None:
        """Give a host another cable."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        condition = {"host": self._devices[name], **asdict(Cable(delay_s, loss, up))}
        self._switch.stdin.write(json.dumps(condition).encode() + b"\n")
        self._switch.stdin.flush()

    def resolve(self, names: Mapping[str, Sequence[str]]) -> None:
        """Say for all hosts which hosts a name stands for; connections that are open stay."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self[host].address} {host}" for host in self.hosts]
        lines += [f"{self[host].address} {name}" for name, hosts in names.items() for host in hosts]
        for host in self.hosts.values():
            # Written in place: the file is mounted over /etc/hosts of what runs there.
            (_NAMES / host.namespace / "hosts").write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        """End all that runs there, and remove it."""
        for host in self.hosts.values():
            host.stop()
        if self._switch is not None:
            with self._switch as switch:
                switch.kill()
            self._switch = None
        for host in self.hosts.values():
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)
            shutil.rmtree(_NAMES / host.namespace, ignore_errors=True)

    def _build(self) -> None:
        for host in self.hosts.values():
            folder = _NAMES / host.namespace
            folder.mkdir(parents=True)
            (folder / "host.conf").write_text("multi on\n")  # a name may stand for several hosts
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            (folder / "hosts").touch()
            _ip("netns", "add", host.namespace)
        self.resolve({})
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.switch", *self._devices.values()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == b"ready\n", "the switch did not start"
        for name, device in self._devices.items():
            host = self.hosts[name]
            _ip("link", "set", device, "netns", host.namespace, "name", "eth0", "mtu", str(MTU))
            inside = ("-n", host.namespace)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
