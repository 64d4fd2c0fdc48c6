"""What training starts from when the policy that the user names is a LoRA adapter.

The adapter goes on being trained, with its own rank, scaling and modules. Its base stays what it was, so that servers
which hold the base take what is pushed, and so does whoever uses the result. A KL term (`--beta`) is measured from the
adapter as it was at the start, also in a run that is resumed. Who wants another shape, or all weights, merges it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.adapters import NamedPolicy
from trainer.config import ConfigError

_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""ModelConfig's flags that shape an adapter, and what PEFT calls them."""

EVERY_LAYER = "all-linear"
"""PEFT writes down which layers that was."""


def implied_flags(policy: NamedPolicy, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the flags that were not given, as an adapter has them; nothing for a full checkpoint.

    Raises ConfigError for flags that it contradicts.
    """
    adapter = policy.adapter
    if adapter is None:
        return {}
    merge = f"merge it first (sqlenv export {policy.name} --out FOLDER), and name FOLDER"
    if given.get("use_peft") is False:
        raise ConfigError(f"--use_peft false trains all weights, and {policy.name} is an adapter; {merge}")
    for flag, key in _LORA.items():
        if flag in given and not _same(given[flag], own := adapter.config.get(key)):
            raise ConfigError(
                f"--{flag} {_text(given[flag])}: the adapter {policy.name} was made with {_text(own)}, and goes on "
                f"being trained as it is; leave the flag out, or {merge}"
            )
    shape = {flag: adapter.config.get(key) for flag, key in _LORA.items()}
    return {"use_peft": True, **{flag: value for flag, value in shape.items() if value is not None}}


def starting_line(policy: NamedPolicy) -> list[str]:
    """Say where training starts, in one line, when that is an adapter."""
    adapter = policy.adapter
    if adapter is None:
        return []
    modules = adapter.config.get("target_modules")
    where = modules if isinstance(modules, str) else ", ".join(sorted(modules or []))
    return [f"going on with the adapter {policy.name} (rank {adapter.rank}, {where}) on {policy.base.location}"]


def _same(given: Any, own: Any) -> bool:
    if given == EVERY_LAYER:
        return True
    if isinstance(given, list) or isinstance(own, list):
        return set(_as_list(given)) == set(_as_list(own))
    return bool(given == own) or not (given or own)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _text(value: Any) -> str:
    return " ".join(map(str, _as_list(value))) or "none"
