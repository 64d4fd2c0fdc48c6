"""A parent that may not fork, run as a script by a test: the system refuses it another process.

It prints why the supervisor gave up, and how many more files are open than before there was one.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from env_server.service.settings import read_settings
from env_server.service.workers.listening import listen
from env_server.service.workers.supervisor import Supervisor, WorkersFailedError

NOBODY = 65534


def open_files() -> int:
    """Count this process's file descriptors."""
    count = 0
    for descriptor in range(256):
        with suppress(OSError):
            os.fstat(descriptor)
            count += 1
    return count


def never(*_: object, **__: object) -> None:
    """Make no application: no worker gets as far."""
    raise AssertionError("a worker was started")


def main() -> None:
    """Supervise workers that cannot be started."""
    settings, _ = read_settings(["--port=0", "--workers=2"])
    sockets = listen(settings.host, settings.port, settings.workers)
    before = open_files()
    supervisor = Supervisor(settings, None, never, sockets)
    if os.getuid() == 0:
        # The limit does not bind root.
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        supervisor.run()
    except WorkersFailedError as error:
        print(f"{error}; {open_files() - before} more files")


if __name__ == "__main__":
    main()
