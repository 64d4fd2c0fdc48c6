"""An Ethernet switch in user space, whose cables can be slow, bad or cut: what `tc netem` does, on every kernel.

    python -m tests.cluster.switch NAME...      one TAP device each; conditions come on stdin, a JSON object a line

It prints `ready` when the devices are there; whoever started it then moves them into the namespaces of the hosts. A
condition is `{"host": NAME, "delay_s": S, "loss": P, "up": BOOL}`, for frames to and from that host: a frame between
two hosts has the delay of both, one way. The devices are gone when the process ends, which it does when stdin ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_LARGEST_FRAME = 65_536
_FRAMES_AT_ONCE = 64
"""Read from one device before the others have their turn."""


@dataclass(frozen=True, slots=True)
class Cable:
    """A host's connection to the switch: seconds that a frame takes, one way; share of frames lost; cut or not."""

    delay_s: float = 0.0
    loss: float = 0.0
    up: bool = True


def passage(a: Cable, b: Cable, luck: float) -> float | None:
    """Return the seconds that a frame takes through two cables, None where it is lost; `luck` is from 0 up to 1."""
    if not (a.up and b.up) or luck >= (1 - a.loss) * (1 - b.loss):
        return None
    return a.delay_s + b.delay_s


class Switch:
    """Carries frames between devices; learns which address is behind which."""

    def __init__(self, devices: dict[str, int], loop: asyncio.AbstractEventLoop, seed: int = 0) -> None:
        self._devices = devices
        self._cables = dict.fromkeys(devices, Cable())
        self._behind: dict[bytes, str] = {}
        self._loop = loop
        self._luck = random.Random(seed)
        for name, device in devices.items():
            loop.add_reader(device, self._readable, name)

    def set(self, host: str, cable: Cable) -> None:
        """Change a host's cable; frames that are under way arrive."""
        self._cables[host] = cable

    def _readable(self, name: str) -> None:
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = os.read(self._devices[name], _LARGEST_FRAME)
            except OSError:  # nothing more, or the interface is down
                return
            self._behind[frame[6:12]] = name
            for other in self._receivers(name, frame[:6]):
                self._send(name, other, frame)

    def _receivers(self, sender: str, address: bytes) -> Iterator[str]:
        if (known := self._behind.get(address)) is not None:
            yield known
        else:
            yield from (name for name in self._devices if name != sender)

    def _send(self, sender: str, receiver: str, frame: bytes) -> None:
        seconds = passage(self._cables[sender], self._cables[receiver], self._luck.random())
        if seconds is None:
            return
        if seconds:
            self._loop.call_later(seconds, self._write, receiver, frame)
        else:
            self._write(receiver, frame)

    def _write(self, receiver: str, frame: bytes) -> None:
        try:
            os.write(self._devices[receiver], frame)
        except OSError:  # full, or the interface is down: as on a wire, the frame is gone
            return


def open_tap(name: str) -> int:
    """Create a TAP device, which lives as long as the descriptor that is returned. Raises OSError."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


async def _run(names: Sequence[str]) -> None:
    loop = asyncio.get_running_loop()
    switch = Switch({name: open_tap(name) for name in names}, loop)
    told = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    print("ready", flush=True)
    while line := await told.readline():
        condition: dict[str, Any] = json.loads(line)
        switch.set(condition.pop("host"), Cable(**condition))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1:]))
