"""The file of `--config`: YAML in UTF-8, one key for each flag. Imports no torch.

Stricter than PyYAML, where its reading surprises:

1. A key that is there twice is refused, with both lines; PyYAML takes the last one without a word.
2. `no` and `yes` are words, as on the command line, where they are a flag's value (`save_strategy: no`); the flag's
   type decides. Deeper down (`chat_template_kwargs: {enable_thinking: no}`), where no flag decides, they are switches.
3. `2e-1` is a number also in a list, and `2026-11-25` is no date but a name.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError

CONFIG_FLAG = "--config"
STAGES = "stages"
_BOOL, _TEXT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "str", "float"))
_MERGE, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("merge", "timestamp"))
_WORDS = ("yes", "no")


def read_config(path: str) -> dict[str, Any]:
    """Return the keys of a config file. Raises ConfigError, which names the file, the line and what is wrong there."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path}: {error.strerror}") from error
    text = _decoded(path, raw)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            _keep_words(node)
        written = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path}{_where(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ConfigError(f"{CONFIG_FLAG} {path} must hold one key for each flag, such as learning_rate: 1.0e-5")
    return written


def _decoded(path: str, raw: bytes) -> str:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or raw.count(0) > len(raw) // 4:
        raise ConfigError(f"{CONFIG_FLAG} {path} is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{CONFIG_FLAG} {path}, line {line}: not UTF-8; save it as UTF-8") from error


def _where(error: yaml.MarkedYAMLError) -> str:
    """The end of a sentence: the line, and what is wrong there."""
    mark = error.problem_mark or error.context_mark
    line = "" if mark is None else f", line {mark.line + 1}"
    if error.problem is not None and r"'\t'" in error.problem:
        return f"{line}: a tab, where YAML takes spaces alone"
    return f"{line}: {error.problem or error.context}"


def _keep_words(node: yaml.MappingNode) -> None:
    """Make text of what would be a switch, where it is the value of a flag."""
    for key, value in node.value:
        if key.value == STAGES and isinstance(value, yaml.SequenceNode):
            for stage in value.value:
                if isinstance(stage, yaml.MappingNode):
                    _keep_words(stage)
            continue
        for scalar in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if scalar.tag == _BOOL and scalar.value.lower() in _WORDS:
                scalar.tag = _TEXT


class _Loader(yaml.SafeLoader):
    """PyYAML's, with keys that are text, and there once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML's. Raises ComposerError."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be a word", key.start_mark)
            if key.tag == _MERGE:
                continue
            key.tag = _TEXT
            line = key.start_mark.line + 1
            if key.value in lines:
                problem = f"{key.value} is there already, in line {lines[key.value]}; keep one of them"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIME]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), "-+.0123456789")
