"""`sqlenv export`: a trained policy as a plain checkpoint, which needs neither SQLEnv nor PEFT.

Guarantees:

1. An adapter is merged into its base by PEFT, in float32, and rounded once; the base is loaded in full precision, also
   where training had it quantised. No tensor of a full checkpoint changes, unless `--dtype` asks for it.
2. Generation ends where a turn ends: the template's end-of-turn token is the tokenizer's EOS, and the first of the
   generation config's. Nothing that only training needed stays in a config.
3. The folder appears complete, or not at all. One that holds anything is refused.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from env_server.errors import SQLEnvError
from inference.adapters import ADAPTER_CONFIG, RUN_MODEL, NamedPolicy
from trainer.chat.format import ChatFormat
from trainer.eval.run_files import Evaluation, RunFolder, versions
from trainer.export.hub import Destination, HubError
from trainer.export.model_card import CardFacts, data_name, model_card
from trainer.models import base_config, load_policy
from trainer.policy import resolve_policy, saved_play, settle

EXPORT = "export"
"""Where a run keeps what it pushes, inside its folder."""
SHARD = "5GB"
"""The largest file of weights."""


class ExportError(SQLEnvError):
    """The policy cannot be exported; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written; `lines` say how the policy is played."""

    folder: Path
    parameters: int
    dtype: str
    lines: Sequence[str] = ()


def export(
    policy: str,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the policy's folder. Raises SQLEnvError.

    `name` is what the policy will be called on the Hub; what is published names no path of this machine. Everything
    happens on the CPU, so that a GPU may stay in use.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ExportError(f"--out {out} is there and is no folder; name another one")
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f"--out {out} holds something already; name another folder")
    named = resolve_policy(policy)
    stored = _stored_dtype(named, trust_remote_code)
    target = dtype or stored
    summed = target if named.adapter is None else torch.float32
    loaded, tokenizer = load_policy(policy, dtype=summed, device="cpu", trust_remote_code=trust_remote_code)
    model: PreTrainedModel = loaded.merge_and_unload() if isinstance(loaded, PeftModel) else loaded
    model = model.to(target)
    settled = settle(policy, saved_play(named.ref), {})
    play = settled.settings if name is None else replace(settled.settings, data=data_name(settled.settings.data))
    chat = ChatFormat(tokenizer, play.chat)
    play = replace(play, chat_template_kwargs=chat.settings.chat_template_kwargs)
    _finish(model, tokenizer, chat.stop_ids)
    parameters, label = model.num_parameters(), str(target).removeprefix("torch.")
    config, evaluations, step = _origin(named)
    adapter = None if named.adapter is None else named.adapter.config
    trained = adapter["base_model_name_or_path"] if adapter else config.get("model", {}).get("model_name_or_path")
    facts = CardFacts(
        name or out.resolve().name,
        play,
        label,
        parameters,
        base=trained,
        adapter=adapter,
        step=step,
        config=config,
        evaluations=evaluations,
        versions=versions(),
    )
    with _appearing(out) as folder:
        model.save_pretrained(folder, max_shard_size=SHARD)
        tokenizer.save_pretrained(folder)
        play.save(folder)
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
        for evaluation in evaluations:
            (folder / "evaluations").mkdir(exist_ok=True)
            public = replace(evaluation, policy=evaluation.label, data=data_name(evaluation.data))
            text = json.dumps(asdict(public), ensure_ascii=False, indent=2)
            (folder / "evaluations" / f"{evaluation.label}.json").write_text(text + "\n", encoding="utf-8")
    base_line = [named.base_line] if named.base_line else []
    return Exported(out, parameters, label, (*base_line, *settled.lines, *chat.lines))


def publish(run_folder: Path, destination: Destination, *, trust_remote_code: bool = False) -> str:
    """Export a run's policy into its folder, push it, and return its address. Raises HubError."""
    out = run_folder / EXPORT
    try:
        shutil.rmtree(out, ignore_errors=True)  # of a push that failed, in a run that was then resumed
        export(str(run_folder), out, name=destination.repo, trust_remote_code=trust_remote_code)
        return destination.push(out)
    except SQLEnvError as error:
        retry = f"sqlenv export {run_folder} --out FOLDER --push_to_hub {destination.repo}"
        raise HubError(f"{error}. The policy is saved in {run_folder / RUN_MODEL}; to push it, run {retry}") from error


def _origin(named: NamedPolicy) -> tuple[Mapping[str, Any], Sequence[Evaluation], int | None]:
    """Return the config, the evaluations and the last step of the run that the policy lies in; nothing without one."""
    folder = Path(named.ref.location)
    run = RunFolder(folder.resolve().parent)
    if not folder.is_dir() or not (run.config_path.is_file() and run.evaluations_path.is_dir()):
        return {}, (), None
    config, evaluations = run.config(), run.evaluations()
    checkpoint = re.fullmatch(PREFIX_CHECKPOINT_DIR + r"-(\d+)", folder.resolve().name)
    if checkpoint:
        # The evaluation after training is not of it; one that was played after its step is.
        own = dict(run.evaluations_during()).get(int(checkpoint[1]))
        others = [e for e in evaluations if e.label != "after"]
        return config, [*others, *([replace(own, label="after")] if own else [])], int(checkpoint[1])
    rows = run.episodes(turns=False)  # metrics are not logged at every step
    return config, evaluations, rows[-1].step if rows else None


def _stored_dtype(named: NamedPolicy, trust_remote_code: bool) -> torch.dtype:
    """Return the dtype of the checkpoint, or of an adapter's base. Raises SQLEnvError when it is quantised."""
    config = base_config(named, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is None:
        return config.dtype or torch.float32
    file = Path(named.ref.location) / ADAPTER_CONFIG
    fix = f"; write the model that it was quantised from as base_model_name_or_path in {file}" if named.adapter else ""
    raise ExportError(f"the weights of {named.base.location} are stored quantised, and cannot be merged into{fix}")


def _finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
    """Set the configs right for generation; `stop_ids` end a turn, the first as the template writes it."""
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop_ids[0])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(stop_ids[-1])
    tokenizer.padding_side = "left"
    # It would change SQL: "a . b" is not "a. b" in a string.
    tokenizer.clean_up_tokenization_spaces = False
    config = model.config
    tokenizer.model_max_length = config.get_text_config(decoder=True).max_position_embeddings
    config.use_cache = True
    config.eos_token_id, config.pad_token_id = stop_ids[0], tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=list(stop_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` when that is done. Raises ExportError when it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            folder = Path(scratch) / "policy"
            folder.mkdir()
            yield folder
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ExportError(f"--out {out} cannot be written: {reason}; free space, or name another folder") from error
