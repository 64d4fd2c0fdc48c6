"""The dependency rule: what each package may import, in its source and when it really runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINING = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
"""What only training and inference need."""

FORBIDDEN = {
    "env_server": ("inference", "trainer", *TRAINING),
    "inference": ("env_server", "trainer", "trl", "datasets"),
}

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def loaded_by(code: str, *arguments: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running the code, which prints them."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def imported_in_source(package: str) -> dict[str, set[str]]:
    """The top-level modules that each file of a package imports anywhere, also in functions and for types."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                names.add(str(node.module).partition(".")[0])
        found[str(path.relative_to(ROOT))] = names
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_source_imports_only_what_it_may(package: str) -> None:
    imported = imported_in_source(package)
    assert len(imported) > 3
    broken = {path: names & set(FORBIDDEN[package]) for path, names in imported.items()}
    assert not {path: names for path, names in broken.items() if names}


def test_trainer_imports_both() -> None:
    assert {"env_server", "inference"} <= set().union(*imported_in_source("trainer").values())


def test_the_environment_runs_without_torch_or_the_trainer() -> None:
    loaded = loaded_by(IMPORT_ALL, "env_server")
    assert "env_server" in loaded
    assert not loaded & set(FORBIDDEN["env_server"])


def test_inference_runs_without_the_others() -> None:
    loaded = loaded_by(IMPORT_ALL, "inference")
    assert {"inference", "torch"} <= loaded
    assert not loaded & {"env_server", "trainer", "trl"}


@pytest.mark.parametrize("module", ["sqlenv", "trainer.config", "env_server.data.cli.inspection"])
def test_light_modules_stay_light(module: str) -> None:
    loaded = loaded_by(f'import sys, {module}; print(*{{name.partition(".")[0] for name in sys.modules}})')
    assert module.partition(".")[0] in loaded
    assert not loaded & set(TRAINING)


def test_the_usage_needs_no_torch() -> None:
    code = 'import sys, sqlenv; sqlenv.main([]); print(*{name.partition(".")[0] for name in sys.modules})'
    assert not loaded_by(code) & set(TRAINING)
