"""The file of `--config`: YAML, one key for each flag. Imports no torch.

Stricter than PyYAML, where what it reads surprises:

1. A key that is there twice is refused, with its line; PyYAML takes the last one without a word.
2. `no` and `yes` are words, as on the command line, where they are a flag's value (`save_strategy: no`); the flag's
   type decides. Deeper down (`chat_template_kwargs: {enable_thinking: no}`), where no flag decides, they are switches.
3. `2e-1` is a number also in a list, and `2026-11-25` is no date but a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from sqlenv.parser import did_you_mean
from trainer.config import ConfigError
from trainer.next_command import split_flags

CONFIG, STAGES = "config", "stages"
_BOOL, _TEXT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("bool", "str", "float", "timestamp"))


def read_config(path: str) -> dict[str, Any]:
    """Return the keys of a config file. Raises ConfigError, which names the file and what is wrong there."""
    if not path:
        raise ConfigError(f"--{CONFIG} needs the path of a YAML file")
    if not Path(path).is_file():
        near = did_you_mean(path, map(str, Path(path).parent.glob("*.y*ml")))
        raise ConfigError(f"--{CONFIG} {path}: there is no such file{near}")
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            _keep_words(node)
        written = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"--{CONFIG} {path}{line}: {error.problem or error.context}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--{CONFIG} {path}: not UTF-8; save it as UTF-8") from error
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--{CONFIG} {path}: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ConfigError(f"--{CONFIG} {path} must hold one key for each flag, such as learning_rate: 1.0e-5")
    return written


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the config file that flags name, if any, and the other words of a command line."""
    flags = split_flags(argv)
    if CONFIG not in flags:
        return None, list(argv)
    first, *more = flags.pop(CONFIG)
    _, equals, path = first.partition("=")
    if not equals:
        path, *more = more or [""]
    return path, [*more, *chain(*flags.values())]


def as_defaults(written: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as defaults of a parser, which judges text by its flag's type, and takes a number as it is."""
    return {name: str(value) if isinstance(value, float) else value for name, value in written.items()}


def _keep_words(node: yaml.MappingNode) -> None:
    """Make text of what would be a switch, where it is the value of a flag."""
    for key, value in node.value:
        values = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for each in values:
            if key.value == STAGES and isinstance(each, yaml.MappingNode):
                _keep_words(each)
            elif each.tag == _BOOL and each.value.lower() in ("yes", "no"):
                each.tag = _TEXT


class _Loader(yaml.SafeLoader):
    """PyYAML's, with keys that are text, and there once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML's. Raises ComposerError."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value} is there twice", key.start_mark)
            if key.value != "<<":
                key.tag = _TEXT
                seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIME]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), "-+.0123456789")
