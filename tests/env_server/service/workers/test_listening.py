"""Listening sockets: one set for each worker, on every address of the host."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from env_server.service.workers.listening import ListenError, bind_again, close_all, listen, url_of


@contextmanager
def listening(host: str = "127.0.0.1", port: int = 0, workers: int = 1) -> Iterator[list[list[socket.socket]]]:
    made = listen(host, port, workers)
    try:
        yield made
    finally:
        for sockets in made:
            close_all(sockets)


def reaches(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("workers", [1, 3])
def test_the_workers_share_an_address(workers: int) -> None:
    with listening(workers=workers) as made:
        assert len(made) == workers
        addresses = {each.getsockname() for sockets in made for each in sockets}
        assert len(addresses) == 1
        assert reaches(addresses.pop())


def test_connections_are_spread_over_the_workers() -> None:
    with listening(workers=2) as made:
        address = made[0][0].getsockname()
        clients = [socket.create_connection(address) for _ in range(64)]
        taken = []
        for (listener,) in made:
            accepted = []
            while True:
                try:
                    accepted.append(listener.accept()[0])
                except BlockingIOError:
                    break
            taken.append(len(accepted))
            close_all(accepted)
        close_all(clients)
        assert sum(taken) == 64
        assert min(taken) > 8, "each gets a share; fewer than nine of 64 is a chance of one in a billion"


def test_a_socket_that_was_bound_again_gets_connections_only_once_it_listens() -> None:
    with listening(workers=2) as made:
        address = made[0][0].getsockname()
        close_all(made.pop())
        again = bind_again(made[0])
        made.append(again)
        clients = [socket.create_connection(address) for _ in range(32)]
        taken = [made[0][0].accept()[0] for _ in clients]
        again[0].listen()
        more = [socket.create_connection(address) for _ in range(32)]
        taken.append(again[0].accept()[0])
        close_all([*clients, *taken, *more])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("others", [1, 2])
def test_a_port_in_use_is_an_error_that_says_so(workers: int, others: int) -> None:
    with listening(workers=workers) as made:
        port = made[0][0].getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} of 127.0.0.1 is in use. Choose another with --port"):
            listen("127.0.0.1", port, others)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", "host 'no-such-host.invalid' is not known here"),
        ("203.0.113.7", "203.0.113.7 is no address of this machine. Choose another with --host"),
    ],
)
def test_an_address_that_cannot_be_used(host: str, message: str) -> None:
    with pytest.raises(ListenError, match=message):
        listen(host, 0)


def test_a_name_stands_for_all_of_its_addresses() -> None:
    wanted = {info[0] for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with listening("localhost", workers=2) as made:
        for sockets in made:
            assert {each.family for each in sockets} <= wanted
            assert sockets
        assert len({each.getsockname()[1] for sockets in made for each in sockets}) == 1, "one port for all"


@pytest.mark.parametrize("workers", [1, 2])
def test_every_address_is_that_of_ipv4_and_ipv6(workers: int) -> None:
    with listening("::", workers=workers) as made:
        port = made[0][0].getsockname()[1]
        assert reaches(("::1", port))
        assert reaches(("127.0.0.1", port))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_url_is_one_that_a_browser_opens(host: str, shown: str) -> None:
    with listening(host) as made:
        assert url_of(made[0]) == f"http://{shown}:{made[0][0].getsockname()[1]}"


def test_dead_peers_are_looked_for() -> None:
    with listening() as made:
        (listener,) = made[0]
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        close_all([client, connection])
