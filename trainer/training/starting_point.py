"""What training starts from when the policy that the user names is a LoRA adapter.

`--adapter continue`: the adapter goes on being trained, with its own rank, scaling and modules. Its base stays what it
was, so that servers which hold the base take what is pushed, and so does whoever uses the result. A KL term (`--beta`)
is measured from the adapter as it was at the start, also in a run that is resumed.

`--adapter merge`: the adapter is merged into its base first, summed in float32, as the full checkpoint
OUTPUT_DIR/merged. All of its weights are trained then, or a fresh adapter on it with `--use_peft`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from trl import GRPOConfig, ModelConfig, SFTConfig

from inference.adapters import CONFIG, NamedPolicy
from trainer.config import ConfigError
from trainer.policy.loading import resolve_policy
from trainer.ranks import Ranks
from trainer.shipping.export import DTYPES, export

MERGED = "merged"
"""The full checkpoint that `--adapter merge` makes, inside the output folder."""

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


class AdapterUse(StrEnum):
    """What becomes of an adapter."""

    CONTINUE = "continue"
    MERGE = "merge"


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The policy that training starts from, and what becomes of an adapter; `use` is None for a full checkpoint."""

    policy: NamedPolicy
    use: AdapterUse | None

    @property
    def implied(self) -> dict[str, Any]:
        """The flags that follow from it, as defaults of those that were not given."""
        adapter = self.policy.adapter
        if adapter is None or self.use is not AdapterUse.CONTINUE:
            return {} if self.use is None else {"adapter": self.use.value}
        shape = {flag: adapter.config.get(key) for flag, key in _LORA.items()}
        return {"adapter": self.use.value, "use_peft": True, **{k: v for k, v in shape.items() if v is not None}}

    def describe(self) -> str:
        """Say in one line where training starts."""
        adapter = self.policy.adapter
        if adapter is None:
            return f"starting from {self.policy.name}"
        if self.use is AdapterUse.MERGE:
            return f"starting from the adapter {self.policy.name}, merged into {self.policy.base.location}"
        modules = adapter.config.get("target_modules")
        where = modules if isinstance(modules, str) else ", ".join(sorted(modules or []))
        base = self.policy.base.location
        return f"going on with the adapter {self.policy.name} (rank {adapter.rank}, {where}) on {base}"


def starting_point(given: Mapping[str, Any]) -> StartingPoint:
    """Decide by the flags that were given, `model_name_or_path` among them. Raises ConfigError, PolicyError."""
    policy = resolve_policy(str(given["model_name_or_path"]), given.get("model_revision"))
    asked = given.get("adapter")
    if policy.adapter is None:
        if asked is not None:
            raise ConfigError(
                f"--adapter {asked} says what becomes of an adapter, and {policy.name} is a full checkpoint; leave the "
                "flag out"
            )
        return StartingPoint(policy, None)
    use = AdapterUse(asked or AdapterUse.CONTINUE)
    if use is AdapterUse.MERGE:
        if given.get("weight_sync") == "lora":
            raise ConfigError(
                "--weight_sync lora sends adapters to servers that hold their base, and --adapter merge makes a new "
                f"base: merge it first (sqlenv export {policy.name} --out FOLDER), and name FOLDER here and to "
                "`sqlenv inference`"
            )
        return StartingPoint(policy, use)
    if given.get("use_peft") is False:
        raise ConfigError(
            f"--use_peft false trains all weights, and {policy.name} is an adapter; add --adapter merge, which merges "
            "it into its base first"
        )
    for flag, key in _LORA.items():
        if flag in given and not _same(given[flag], own := policy.adapter.config.get(key)):
            raise ConfigError(
                f"--{flag} {_text(given[flag])}: the adapter {policy.name} was made with {_text(own)}, and goes on "
                "being trained as it is; leave the flag out, or add --adapter merge and --use_peft for a fresh adapter"
            )
    return StartingPoint(policy, use)


def merged_start(
    model_config: ModelConfig, config: GRPOConfig | SFTConfig, use: str | None, ranks: Ranks
) -> ModelConfig:
    """Return what to load: for `--adapter merge` the merged checkpoint, which the main rank writes. A meeting.

    A folder that holds a run keeps the checkpoint that the run began with: what it has trained may rest on it.
    Raises SQLEnvError.
    """
    if use != AdapterUse.MERGE:
        return model_config
    output = Path(config.output_dir)
    folder = output / MERGED
    if ranks.is_main and not (folder.is_dir() and (output / CONFIG).is_file()):
        shutil.rmtree(folder, ignore_errors=True)
        name, dtype = str(model_config.model_name_or_path), DTYPES.get(model_config.dtype or "")
        export(name, folder, dtype=dtype, trust_remote_code=config.trust_remote_code)
    ranks.gather([])  # nobody reads what is not whole yet
    return replace(model_config, model_name_or_path=str(folder))


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
