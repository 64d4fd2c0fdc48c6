"""Several servers behind one name."""

from __future__ import annotations

import socket

from inference.vllm.addresses import every_server, look_up

V4, V6 = socket.AF_INET, socket.AF_INET6
NAMES = {
    "inference": [(V4, "10.0.0.3"), (V4, "10.0.0.2"), (V4, "10.0.0.2")],
    "six": [(V6, "fd00::2"), (V6, "fd00::1")],
    "both": [(V4, "10.0.0.9"), (V6, "fd00::9")],
}


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        return NAMES[host]
    except KeyError:
        raise socket.gaierror("there is no such name") from None


def test_a_name_with_several_addresses_is_several_servers() -> None:
    assert every_server(["http://inference:8000"], resolve) == ("http://10.0.0.2:8000", "http://10.0.0.3:8000")
    assert every_server(["http://six"], resolve) == ("http://[fd00::1]:80", "http://[fd00::2]:80")


def test_one_address_of_each_kind_is_one_server() -> None:
    assert every_server(["http://both:8000"], resolve) == ("http://both:8000",)


def test_a_certificate_is_for_the_name() -> None:
    assert every_server(["https://inference:8000"], resolve) == ("https://inference:8000",)


def test_a_name_that_is_not_there_yet_stays() -> None:
    assert every_server(["http://later:8000", "http://both:1"], resolve) == ("http://later:8000", "http://both:1")


def test_no_server_comes_twice() -> None:
    urls = ["http://inference:8000", "http://10.0.0.2:8000"]
    assert every_server(urls, resolve) == ("http://10.0.0.2:8000", "http://10.0.0.3:8000")


def test_the_system_resolves() -> None:
    assert (V4, "127.0.0.1") in look_up("localhost", 80)
    assert every_server(["http://127.0.0.1:8000"]) == ("http://127.0.0.1:8000",)
