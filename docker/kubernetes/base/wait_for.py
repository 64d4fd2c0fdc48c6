"""Wait until servers answer, however long they need.

python wait_for.py URL[,URL...] ...    a URL without a path is asked for /health
"""

from __future__ import annotations

import sys
import time
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

EVERY_S = 2.0
SAY_EVERY_S = 60.0


def answers(url: str) -> bool:
    """Say whether a GET of the URL is answered with 200. No proxy is asked, whatever the environment says."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=8) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


def main() -> None:
    """Return when all have answered."""
    for url in (url for word in sys.argv[1:] for url in word.split(",")):
        asked = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/health"
        said = -SAY_EVERY_S
        while not answers(asked):
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                print(f"waiting for {asked}", flush=True)
            time.sleep(EVERY_S)
        print(f"{asked} answers", flush=True)


if __name__ == "__main__":
    main()
