"""How many files this process may have open: sockets are files, and many a shell allows 1,024."""

from __future__ import annotations

import resource

SPARE_FILES = 256
"""What a process has open besides the connections that it counts: libraries, logs, databases."""


def allow_open_files(needed: int) -> int:
    """Let this process have `needed` files open, as far as it may decide that itself; return how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else soft
