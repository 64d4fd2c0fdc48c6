"""The notebook runs from top to bottom, as it is, and says at its end that training helped."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from env_server.cache import CACHE_VARIABLE
from trainer.policy import SETTINGS_FILE, read_play

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "train_grpo.ipynb"
CELL_S = 1_500
"""The longest that a cell may take, far beyond what it takes where nothing else runs."""

pytestmark = [
    pytest.mark.timeout(2_000),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(zmq|jupyter_client|traitlets|nbclient).*"),
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory, generated_cache: Path) -> Any:
    """The notebook with its outputs. It runs in a folder of its own, in a kernel that finds this checkout."""
    place = tmp_path_factory.mktemp("notebook")
    shutil.copy(NOTEBOOK, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(generated_cache))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(place / "runtime"))
        patch.setenv("IPYTHONDIR", str(place / "ipython"))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        resources = {"metadata": {"path": str(place)}}
        nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=resources).execute()
    policy = place / "runs" / "notebook" / "policy"
    assert (policy / "model.safetensors").is_file()
    assert read_play(policy / SETTINGS_FILE).settings.max_turn_length == 64, "it is played as it was trained"
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_it_runs_and_shows_what_it_did(executed: Any) -> None:
    shown = outputs(executed)
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    html = [output.data["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert len(pictures) == 3
    assert any("<th>" in text for text in html), "the results of an episode are tables"
    complaints = [output.text for output in shown if output.get("name") == "stderr" and "Warning" in output.text]
    assert complaints == []


def test_training_helps(executed: Any) -> None:
    said = "".join(output.get("text", "") for output in outputs(executed))
    assert len(re.findall(r"^step +\d+ of 15: ", said, re.M)) == 15
    (before,) = set(re.findall(r"^before: (\d+)% right", said, re.M))
    (after,) = set(re.findall(r"^after:  (\d+)% right", said, re.M))
    assert int(after) >= int(before) + 10


def test_it_is_kept_without_outputs() -> None:
    """Its numbers are those of whoever runs it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
