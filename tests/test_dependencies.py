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

ROOMS = {
    "env_server": ["top", "client", "sql", "judging", "test_suites", "core", "data", "tools", "service"],
    "inference": ["top", "in_vllm", "hf", "vllm", "launch", "weights"],
    "trainer": [
        *("top", "chat", "policy", "models", "tiny", "rollout", "engines", "eval", "report"),
        *("evaluate", "export", "flags", "cli", "viewer", "training", "demos", "warmup", "core"),
    ],
}
"""The rooms of each package, folders and modules, from the bottom up: a room imports those before it, and never one
after it. "top" are the other modules, which all rooms use, "core" those that use the rooms."""

CORE = {
    "env_server": ("actions", "environment", "episode", "reward"),
    "inference": (),
    "trainer": ("train", "stages"),
}
BELOW = ("parser", "progress")
"""Of `sqlenv`, what all packages use. It knows none of them, nor the rest of `sqlenv`, which knows them all: a package
of its own in all but name, which takes its place from whom it may import and not from a second folder to install."""
BELONGS = {"grpo": "training"}
"""Modules beside the rooms that are part of one."""
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


def modules_of(package: str) -> dict[str, Path]:
    """Each module of a package by its dotted name; a package's own name is that of its `__init__`."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str, modules: dict[str, Path]) -> str:
    package, name = module.split(".")[:2]
    if name in BELONGS:
        return BELONGS[name]
    if modules[f"{package}.{name}"].name == "__init__.py" or name in ROOMS[package]:
        return name
    return "core" if name in CORE[package] else "top"


def imported_modules(path: Path) -> dict[str, set[str]]:
    """The modules that a file imports from, anywhere in its source, and the names."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def imports_inside(*packages: str) -> dict[str, set[str]]:
    """The modules of these packages that each module of theirs imports, anywhere in its source."""
    modules = {name: path for package in packages for name, path in modules_of(package).items()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = found.setdefault(module, set())
        for source, imported in imported_modules(path).items():
            if source in modules and source not in packages:
                names |= {f"{source}.{name}" for name in imported} & modules.keys() or {source}
    return found


def test_every_command_has_the_same_parser() -> None:
    found = [
        path
        for package in (*ROOMS, "sqlenv")
        for path in (ROOT / package).rglob("*.py")
        if "argparse.ArgumentParser(" in path.read_text(encoding="utf-8")
    ]
    assert not found, "sqlenv.parser.Parser says what was meant by a slip of the pen"


def test_the_other_packages_use_what_lies_below_them_in_sqlenv_and_nothing_above() -> None:
    used = {
        module
        for package in ROOMS
        for path in (ROOT / package).rglob("*.py")
        for module in imported_modules(path)
        if module.partition(".")[0] == "sqlenv"
    }
    assert used == {f"sqlenv.{name}" for name in BELOW}
    for name in BELOW:
        loaded = loaded_by(f"import sys, sqlenv.{name}; print(*sys.modules)")
        assert {each for each in loaded if each.partition(".")[0] == "sqlenv"} == {"sqlenv", f"sqlenv.{name}"}
        assert not {each.partition(".")[0] for each in loaded} & {*ROOMS, "pydantic", "apsw"}


@pytest.mark.parametrize("package", ROOMS)
def test_no_arrow_between_rooms_runs_back_up(package: str) -> None:
    modules, order = modules_of(package), ROOMS[package]
    rooms = {module: room_of(module, modules) for module in modules if module != package}
    assert set(rooms.values()) <= set(order), "a room that is not in the order"
    wrong = [
        f"{module} imports {other}"
        for module, others in imports_inside(package).items()
        if module != package
        for other in others
        if rooms[module] != rooms[other] and rooms[other] not in order[: order.index(rooms[module])]
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Over all packages at once, the imports inside functions included."""
    left = imports_inside(*ROOMS, "sqlenv")
    while leaves := [module for module, others in left.items() if not others & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left, f"each of these imports another of them: {sorted(left)}"


def test_the_client_needs_nothing_of_the_server() -> None:
    loaded = loaded_by('import sys, env_server.client; print(*{name.partition(".")[0] for name in sys.modules})')
    assert {"env_server", "pydantic", "websockets"} <= loaded
    assert not loaded & {"apsw", "sqlglot", "fastapi", "uvicorn", "prometheus_client"}


def test_a_query_process_holds_no_more_than_it_uses() -> None:
    loaded = loaded_by(
        "import sys, env_server.service.execution.process as _; "
        'print(*{name.partition(".")[0] for name in sys.modules})'
    )
    assert {"env_server", "apsw"} <= loaded
    assert not loaded & {"pydantic", "sqlglot", "fastapi", "asyncio"}, "a server has several of these processes"


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


@pytest.mark.parametrize(
    "module", ["sqlenv", "trainer.config", "inference.launch.launcher", "env_server.tools.commands"]
)
def test_light_modules_stay_light(module: str) -> None:
    loaded = loaded_by(f'import sys, {module}; print(*{{name.partition(".")[0] for name in sys.modules}})')
    assert module.partition(".")[0] in loaded
    assert not loaded & set(TRAINING)


def test_the_usage_needs_no_torch() -> None:
    code = 'import sys; from sqlenv import cli; cli.main([]); print(*{name.partition(".")[0] for name in sys.modules})'
    assert not loaded_by(code) & set(TRAINING)


HELP = """
import contextlib, io, sys
from sqlenv import cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    cli.main([*sys.argv[1:], "--help"])
print(*sys.modules)
"""
SLOW = {*TRAINING, "scipy", "pandas", "httpx", "aiohttp", "huggingface_hub", "safetensors"}
"""What takes a fifth of a second and more to import."""


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        ("evaluate", 800),
        ("compare", 800),
        ("report", 750),
        ("play", 850),
        ("chat", 850),
        ("view", 950),
        ("serve", 650),
        ("data doctor", 550),
        ("export", 250),
        ("inference", 300),
    ],
)
def test_a_command_answers_at_once(command: str, modules: int) -> None:
    """Counted in modules, which is what the time goes to: about a millisecond each."""
    loaded = loaded_by(HELP, *command.split())
    assert not {name.partition(".")[0] for name in loaded} & SLOW
    assert len(loaded) <= modules


EVALUATE = """
import sys
from sqlenv import cli
assert cli.main(["evaluate", "--policy", sys.argv[1], "--data", "synthetic", "--episodes", "2"]) == 0
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("policy", ["oracle", "random"])
def test_a_scripted_player_is_evaluated_without_the_packages_of_training(policy: str) -> None:
    loaded = loaded_by(EVALUATE, policy)
    assert "trainer" in loaded
    assert loaded & set(TRAINING) == set()
