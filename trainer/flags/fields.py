"""The flags of `sqlenv train` and `sqlenv warmup`, told from the source of their dataclasses.

A typo is answered, and help shown, before TRL and torch are imported, which takes seconds: the names, types, defaults
and help texts of fields are literals in the source. A test compares what is read here with the dataclasses themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config import SQLEnvArguments, WarmupArguments

_HERE = Path(__file__).with_name("configs.py")
_BASE = (
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A field as a flag: its annotation, default and metadata; `own`: SQLEnv's, and none of TRL's."""

    name: str
    annotation: str
    default: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Its type as argparse takes it. What is no number is left to the parser that makes the dataclasses."""
        parts = {part.strip() for part in self.annotation.split("|")}
        if len(parts) > 1:  # as TRL's parser reads unions
            parts -= {"None"} if "None" in parts else {"str"}
        if len(parts) == 1 and (item := next(iter(parts))).startswith("list["):
            return {"nargs": "+", "type": {"list[float]": float}.get(item, str)}
        if "bool" in parts:
            return {"nargs": "?", "const": True}
        kind = {"int": int, "float": float}.get(parts.pop()) if len(parts) == 1 else None
        return {} if kind is None else {"type": _or_none(kind) if "None" in self.annotation else kind}


def _or_none(kind: type[int] | type[float]) -> Callable[[str], float | None]:
    def parse(text: str) -> float | None:
        return None if text.lower() in ("none", "null") else kind(text)

    parse.__name__ = kind.__name__  # argparse says what a value is not
    return parse


class Command(Enum):
    """The commands whose flags are TRL's: SQLEnv's dataclass, TRL's, and the class that unites them."""

    TRAIN = (SQLEnvArguments, "trainer/grpo_config.py", "GRPOConfig", "SQLEnvConfig")
    WARMUP = (WarmupArguments, "trainer/sft_config.py", "SFTConfig", "WarmupConfig")

    @property
    def prog(self) -> str:
        """The words that start it."""
        return f"sqlenv {self.name.lower()}"


@cache
def flags_of(command: Command) -> Mapping[str, Flag]:
    """All flags of a command, SQLEnv's first. Raises ModuleNotFoundError where TRL is not installed."""
    ours, *theirs, united = command.value
    found = {
        each.name: Flag(each.name, _annotation(each.type), _default(each), each.metadata, own=True)
        for each in fields(ours)
        if each.init
    }
    for package, *source in (*_BASE, ("trl", *theirs)):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        for flag in _read(Path(spec.submodule_search_locations[0], source[0]), source[1]):
            found[flag.name] = flag
    for flag in _read(_HERE, united):  # which says no help text again
        metadata = {**found[flag.name].metadata, **flag.metadata}
        found[flag.name] = replace(flag, metadata=metadata)
    return found


def _annotation(kind: Any) -> str:
    """As written; TRL's parser puts the type itself in the place of its name."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _default(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


def _read(path: Path, name: str) -> Iterator[Flag]:
    """The fields that a class's own body declares."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            continue
        said: dict[str | None, ast.expr] = {"default": node.value}
        if isinstance(node.value, ast.Call):
            said = {word.arg: word.value for word in node.value.keywords}
        if _literal(said.get("init")) is not False:
            default = said.get("default", said.get("default_factory"))
            metadata = _literal(said.get("metadata")) or {}
            yield Flag(node.target.id, ast.unparse(node.annotation), _literal(default), metadata)


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression, a factory's too; None where it is computed."""
    try:
        return None if node is None else ast.literal_eval(node.body if isinstance(node, ast.Lambda) else node)
    except ValueError:
        return None
