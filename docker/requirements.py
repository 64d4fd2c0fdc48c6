"""Print what pyproject.toml requires, so that an image's dependencies are a layer of their own, older than the sources.

python docker/requirements.py [EXTRA ...] [--only NAME]
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Return the project's requirements, and those of the extras. Raises KeyError for an extra that there is not."""
    found = project["dependencies"]
    assert isinstance(found, list)
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    return [*found, *(each for extra in extras for each in optional[extra])]


def name_of(requirement: str) -> str:
    """Return the name of the distribution."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def main() -> None:
    """Print them, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="serve, train, vllm, ...")
    parser.add_argument("--only", metavar="NAME", help="this distribution alone")
    args = parser.parse_args()
    folder = Path(__file__).resolve().parent
    file = next(each for each in (folder / "pyproject.toml", folder.parent / "pyproject.toml") if each.exists())
    for each in requirements(tomllib.loads(file.read_text())["project"], args.extras):
        if args.only in (None, name_of(each)):
            print(each)


if __name__ == "__main__":
    main()
