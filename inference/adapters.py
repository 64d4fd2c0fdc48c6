"""What a policy's name stands for: a full checkpoint, or a LoRA adapter of PEFT on the base that it was trained on.

A policy is named by the folder of a checkpoint or of an adapter, by a run's folder (its `model/` is meant, or that of
its last stage), or by a name on the Hub. `find_policy` looks at files alone: it loads no weights and imports no torch,
so that the launcher of servers, training, evaluation and export agree on what a name means before anything is loaded.

An adapter's configuration names its base as whoever trained it did. A relative path is looked for from the working
directory first, then from the adapter's folder upwards, so that a folder that holds both may be moved. A base on the
Hub is read from the Hub's cache, else from `local_copy`, else from the Hub: an adapter works offline where either is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from inference.engine import EngineError
from inference.missing import why_not_there

ADAPTER_CONFIG = "adapter_config.json"
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
RUN_MODEL = "model"
"""Where a run saves its trained policy, inside its folder."""
STAGES_FILE = "stages.json"
"""What a run of several stages says of itself: the folders of all its `stages`, and those that are `finished`."""

_UNSERVED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save",
    "rank_pattern": "a rank_pattern",
    "alpha_pattern": "an alpha_pattern",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trainable_token_indices",
    "lora_bias": "lora_bias",
}
"""Settings of PEFT that vLLM refuses or, worse, does not read."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model, which a server would not know of."""


class PolicyNameError(EngineError):
    """A name stands for no policy, or for an adapter whose base is not to be found; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A folder, or a repository on the Hub and its revision (None: the newest)."""

    location: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: where it is, and what its adapter_config.json says."""

    ref: ModelRef
    config: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """LoRA's r."""
        return int(self.config["r"])

    @property
    def remedy(self) -> str:
        """What to do where its base is not to be had."""
        file, base = Path(self.ref.location) / ADAPTER_CONFIG, self.config.get("base_model_name_or_path")
        copy = f"put a copy of the base into {local_copy(base)}, or " if base and _is_hub_id(base) else ""
        return f"{copy}write the folder or the Hub name of the base as base_model_name_or_path in {file}"


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy as the user named it, and what it consists of: `base` alone, or `adapter` on `base`."""

    name: str
    base: ModelRef
    adapter: Adapter | None
    tokenizer: ModelRef
    """The adapter's own tokenizer where it has one, else the base's."""

    @property
    def ref(self) -> ModelRef:
        """Where the checkpoint is, or the adapter."""
        return self.base if self.adapter is None else self.adapter.ref

    @property
    def base_line(self) -> str:
        """What to tell the user of an adapter's base that is read from its `local_copy`; else ""."""
        written = "" if self.adapter is None else str(self.adapter.config["base_model_name_or_path"])
        if not _is_hub_id(written) or self.base.location != str(local_copy(written)):
            return ""
        return f"the base of {self.name}, {written}, is read from {self.base.location}"


def find_policy(name: str, revision: str | None = None) -> NamedPolicy:
    """Return what the name stands for; `revision` is of what is named, on the Hub. Raises PolicyNameError.

    A name that is no folder, and of which the Hub knows no adapter, is taken for a checkpoint on the Hub.
    """
    if not Path(name).is_dir() and (reason := why_not_there(name, revision, (CONFIG, ADAPTER_CONFIG))) is not None:
        raise PolicyNameError(reason)
    ref = ModelRef(_folder_of_run(name), revision)
    config = _read(ref, ADAPTER_CONFIG)
    if config is None:
        return NamedPolicy(name, ref, None, ref)
    if config.get("peft_type") != "LORA":
        raise PolicyNameError(f"{name} is an adapter of type {config.get('peft_type')}; only LoRA is supported")
    adapter = Adapter(ref, config)
    base = _base_of(adapter)
    if _read(base, ADAPTER_CONFIG) is not None:
        raise PolicyNameError(
            f"the adapter {name} was trained on {base.location}, which is an adapter itself; merge that one into its "
            f"base first (sqlenv export {base.location} --out FOLDER), and write FOLDER as base_model_name_or_path in "
            f"{Path(ref.location) / ADAPTER_CONFIG}"
        )
    tokenizer = base if _find(ref, TOKENIZER_CONFIG) is None else ref
    return NamedPolicy(name, base, adapter, tokenizer)


def width_of(ref: ModelRef) -> int | None:
    """Return the size of a checkpoint's hidden states; None where its config.json does not say, or cannot be read."""
    try:
        width = (_read(ref, CONFIG) or {}).get("hidden_size")
    except PolicyNameError:
        return None  # whoever loads the model says so
    return width if isinstance(width, int) else None


def unserved_settings(config: Mapping[str, Any]) -> list[str]:
    """Return what of a PEFT configuration (`adapter_config.json`) a vLLM server cannot serve exactly."""
    found = [text for key, text in _UNSERVED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append(f"bias={config['bias']!r}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        found.append(f"init_lora_weights={start!r}, which changes the base model")
    return found


def saved_policy(folder: Path) -> Path | None:
    """Return where the policy is that a folder holds: at its top, in a run's `model/`, or in its last stage.

    None where it holds none. Raises PolicyNameError for stages that are not finished.
    """
    if not folder.is_dir():
        return None  # what is no folder would be looked for on the Hub
    if any(True for pattern in (ADAPTER_CONFIG, "*.safetensors", "*.bin") for _ in folder.glob(pattern)):
        return folder
    if (stages := _read(ModelRef(str(folder)), STAGES_FILE)) is not None:
        return saved_policy(_last_stage(folder, stages))
    model = folder / RUN_MODEL
    return model if any((model / file).is_file() for file in (CONFIG, ADAPTER_CONFIG)) else None


def _folder_of_run(name: str) -> str:
    """Return the folder of the policy where `name` is a run's folder, else the name. Raises PolicyNameError."""
    folder = Path(name)
    if (policy := saved_policy(folder)) is not None:
        return name if policy == folder else str(policy)
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        raise PolicyNameError(
            f"{name} is a run that has not saved its policy; name one of its checkpoints, such as {checkpoints[-1]}"
        )
    return name


def _last_stage(folder: Path, progress: Mapping[str, Any]) -> Path:
    """Return the folder of a run's last stage. Raises PolicyNameError when it is not finished."""
    try:
        stages: list[Path] = [folder / name for name in progress["stages"]]
        count = len(progress["finished"])
    except (KeyError, TypeError) as error:
        raise PolicyNameError(f"{folder / STAGES_FILE} does not say which stages there are") from error
    if count < len(stages):
        named = f"name one of those: {', '.join(map(str, stages[:count]))}" if count else "go on with it first"
        raise PolicyNameError(f"{folder} is a run of which {count} of {len(stages)} stages are finished; {named}")
    return stages[-1]


def _base_of(adapter: Adapter) -> ModelRef:
    """Return the place of the adapter's base. Raises PolicyNameError when a path leads nowhere."""
    written = adapter.config.get("base_model_name_or_path")
    if not written:
        raise PolicyNameError(
            f"the adapter {adapter.ref.location} does not say which model it is for; {adapter.remedy}"
        )
    here = Path(adapter.ref.location)
    above = [folder / written for folder in here.resolve().parents] if here.is_dir() else []
    for folder in (Path(written), *above):
        if (folder / CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file():
            return ModelRef(str(folder))
    if not _is_hub_id(written):
        raise PolicyNameError(
            f"the adapter {adapter.ref.location} was trained on {written}, which is not there any more; put it back, "
            f"or {adapter.remedy}"
        )
    on_hub = ModelRef(written, adapter.config.get("revision"))
    copy = local_copy(written)
    return ModelRef(str(copy)) if (copy / CONFIG).is_file() and not _is_cached(on_hub) else on_hub


def local_copy(hub_id: str) -> Path:
    """Return the folder in SQLEnv's cache where a copy of a base on the Hub is looked for."""
    named = os.environ.get("SQLENV_CACHE_DIR")
    cache = Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("sqlenv"))
    return cache / "models" / hub_id.rpartition("/")[2].lower()


def _is_hub_id(name: str) -> bool:
    return not (Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1)


def _is_cached(ref: ModelRef) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(ref.location, CONFIG, revision=ref.revision), str)


def _read(ref: ModelRef, file: str) -> dict[str, Any] | None:
    """Return the object that a JSON file of the policy holds; None when there is no such file."""
    found = _find(ref, file)
    if found is None:
        return None
    try:
        config = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyNameError(f"{found} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise PolicyNameError(f"{found} holds no JSON object")
    return config


def _find(ref: ModelRef, file: str) -> Path | None:
    """Return the file of a folder or of a repository on the Hub (downloaded); None when there is none."""
    if Path(ref.location).is_dir():
        found = Path(ref.location) / file
        return found if found.is_file() else None
    from huggingface_hub import hf_hub_download  # a client of HTTP, which a folder need not wait for

    try:
        return Path(hf_hub_download(ref.location, file, revision=ref.revision))
    except (OSError, ValueError):
        return None  # no such repository or file, or no network: whoever loads the model says which
