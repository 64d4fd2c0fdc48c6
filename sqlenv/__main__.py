"""`python -m sqlenv` is the `sqlenv` command."""

from __future__ import annotations

import sys

from sqlenv.cli import main

if __name__ == "__main__":
    sys.exit(main())
