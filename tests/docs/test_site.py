"""The site of docs/: it builds without a warning, has every page and every flag, and asks nobody else for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sqlenv import cli

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
LOADED = re.compile(r"""<(?:script|link|img|iframe)[^>]*?(?:src|href)=["']?(https?://[^"'\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(CONFIG), "--site-dir", str(folder)]
    # Material for MkDocs tells of its successor at each start, in whatever it prints.
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=quiet)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file(), f"{page.name} is not in the navigation"
    assert "SQLEnv trains small language models" in (site / "index.html").read_text(encoding="utf-8")
    assert not list(site.rglob("*.py"))


def test_every_command_tells_its_flags(site: Path) -> None:
    text = (site / "flags.html").read_text(encoding="utf-8")
    for name in cli._COMMANDS:
        assert f"<code>sqlenv {name}" in text, f"{name} is missing in docs/site/pages.py"
    for flag in ("--max_sessions", "--num_generations", "--few_shot", "--weight_sync", "--reward_weighting"):
        assert flag in text


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = LOADED.findall(page.read_text(encoding="utf-8"))
        assert not [address for address in loaded if "canonical" not in address], page.name


def test_the_navigation_names_each_page_once() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        found: list[str] = []
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            found += pages(inner)
        return found

    named = pages(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"])
    assert len(named) == len(set(named))
