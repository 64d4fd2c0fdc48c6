"""docs/quickstart.md and the README: their scripts run as they are written, and print what is said."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from tests.env_server.conftest import RunningServer, settings
from tests.integration.service import write_data

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"), re.M | re.S
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, generated_cache: Path, pets: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the page names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(generated_cache))
    (tmp_path / "orders.csv").write_text("customer,amount\nAnn,3.5\nBob,10.25\n", encoding="utf-8")
    (tmp_path / "my-shop").mkdir()
    write_data(pets, tmp_path / "my-shop")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    running = RunningServer(settings(tmp_path), load_dataset("synthetic"))
    yield running.address
    running.stop()


def printed(script: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(script, "page", "exec"), {})
    return capsys.readouterr().out


def test_the_readme_prints_its_episode(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    (episode,) = (text for text in re.findall(r"^```text\n(.*?)^```$", README, re.M | re.S) if "> DESCRIBE" in text)
    assert printed(script, capsys) == episode


def test_the_scripts_of_the_page(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    episode, folder, file, server = SCRIPTS
    said = printed(episode, capsys)
    assert said.startswith("Question: Find the largest quantity of all harvests")
    assert said.endswith("The answer is correct.\n")
    assert printed(folder, capsys).endswith("Tables: owners, pets\n")
    assert printed(file, capsys).endswith("Bob | 10.25\n\n> ANSWER Bob (-0.02)\nThe answer is not judged.\n")
    said = printed(server.replace("127.0.0.1:8000", url), capsys)
    assert "> SAMPLE farmers (+0.00)\nfarmer_id | " in said


def test_the_script_for_openenv_runs_there(url: str) -> None:
    """In the environment that `make openenv` makes."""
    python = ROOT / ".venv-openenv" / "bin" / "python"
    if not python.exists():
        pytest.skip("upstream's openenv is not installed: `make openenv`")
    script = script_with("GenericEnvClient", url)
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    assert 0 < float(done.stdout) < 0.15, done.stderr


def script_with(name: str, url: str) -> str:
    """The script of the page on other trainers that has a name in it, for this server."""
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    (script,) = (text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if name in text)
    return str(script.replace("127.0.0.1:8000", url))


def test_the_script_for_mcp_plays_a_step(url: str) -> None:
    script = script_with("from mcp import", url)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    question, reply = done.stdout.rstrip().rsplit("\n", 1)[0], done.stdout.rstrip().rsplit(" ", 1)
    assert "Question: " in question, done.stderr
    assert 0 < float(reply[1]) < 0.15
