"""`sqlenv export`: a trained policy as a plain checkpoint, which needs neither SQLEnv nor PEFT.

Promises:

1. An adapter is merged into its base, summed in float32 and rounded once; the base is loaded in full precision, also
   where training had it quantised. No tensor of a full checkpoint changes, unless `--dtype` asks for it.
2. Generation ends where a turn ends: the template's end-of-turn token is the tokenizer's EOS, and the first of the
   generation config's. Nothing that only training needed stays in a config.
3. The folder appears complete, with everything in it on disk, or not at all. One that holds anything is refused.
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
from accelerate import Accelerator
from peft import PeftModel
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from env_server.errors import SQLEnvError
from inference.adapters import ADAPTER_CONFIG, RUN_MODEL, NamedPolicy
from inference.weights.gather import full_weights, sync_to_disk, write_checkpoint
from trainer.chat.format import ChatFormat
from trainer.eval.run_files import Evaluation, RunFolder, versions
from trainer.export.hub import Destination, HubError
from trainer.export.model_card import CardFacts, data_name, model_card
from trainer.models import base_config, load_policy
from trainer.policy import resolve_policy, saved_play, settle

EXPORT = "export"
"""Where a run keeps what it pushes, inside its folder."""


class ExportError(SQLEnvError):
    """The policy cannot be exported; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    parameters: int
    dtype: str
    taken_over: Sequence[str] = ()
    """What to say of how the policy is played, in lines."""


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
    _refuse_used(out)
    named = resolve_policy(policy)
    stored = _stored_dtype(named, trust_remote_code)
    target = dtype or stored
    # A sum that is rounded to the stored dtype, and then to the target, would be rounded twice.
    summed = torch.float32 if named.adapter is not None and target != stored else target
    model, tokenizer = load_policy(policy, dtype=summed, device="cpu", trust_remote_code=trust_remote_code)
    plain: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    settled = settle(policy, saved_play(named.place), {})
    play = settled.settings
    if name is not None:
        play = replace(play, data=data_name(play.data))
    chat = ChatFormat(tokenizer, play.chat)
    play = replace(play, chat_template_kwargs=chat.settings.chat_template_kwargs)
    _finish(plain, tokenizer, chat.stop_ids, target)
    weights = {
        key: tensor.to(target) if tensor.dtype == summed else tensor
        for key, tensor in full_weights(model, Accelerator()).items()
    }
    parameters, label = sum(tensor.numel() for tensor in weights.values()), str(target).removeprefix("torch.")
    origin = _Origin.of(named)
    facts = CardFacts(
        name or out.resolve().name,
        play,
        label,
        parameters,
        base=origin.base(named),
        adapter=None if named.adapter is None else named.adapter.config,
        step=origin.step,
        config=origin.config,
        evaluations=origin.evaluations,
        versions=versions(),
    )
    with _appearing(out, sum(tensor.nbytes for tensor in weights.values())) as folder:
        write_checkpoint(folder, weights)
        for part in (plain.config, plain.generation_config, tokenizer):
            part.save_pretrained(folder)
        play.save(folder)
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
        for evaluation in origin.evaluations:
            target_folder = folder / "evaluations"
            target_folder.mkdir(exist_ok=True)
            told = replace(evaluation, policy=evaluation.label, data=data_name(evaluation.data))
            text = json.dumps(asdict(told), ensure_ascii=False, indent=2)
            (target_folder / f"{evaluation.label}.json").write_text(text + "\n", encoding="utf-8")
    return Exported(out, parameters, label, (*settled.lines, *chat.lines))


def publish(run_folder: Path, destination: Destination, *, trust_remote_code: bool = False) -> str:
    """Export a run's policy into its folder, push it, and return its address. Raises HubError."""
    out = run_folder / EXPORT
    try:
        shutil.rmtree(out, ignore_errors=True)  # of a push that failed, in a run that was then resumed
        export(str(run_folder), out, name=destination.repo, trust_remote_code=trust_remote_code)
        return destination.push(out)
    except SQLEnvError as error:
        again = f"sqlenv export {run_folder} --out FOLDER --push_to_hub {destination.repo}"
        raise HubError(f"{error}. The policy is saved in {run_folder / RUN_MODEL}; to push it, run {again}") from error


@dataclass(frozen=True, slots=True)
class _Origin:
    """What the run says in which the policy lies; nothing where it lies in none."""

    config: Mapping[str, Any]
    evaluations: Sequence[Evaluation]
    step: int | None

    @classmethod
    def of(cls, named: NamedPolicy) -> _Origin:
        place = Path(named.place.location)
        run_folder = RunFolder(place.resolve().parent)
        if not place.is_dir() or not (run_folder.config_path.is_file() and run_folder.evaluations_path.is_dir()):
            return cls({}, (), None)
        config, evaluations = run_folder.config(), run_folder.evaluations()
        checkpoint = re.fullmatch(PREFIX_CHECKPOINT_DIR + r"-(\d+)", place.resolve().name)
        if checkpoint:
            # The evaluation after training is not of it; one that was played after its step is.
            own = dict(run_folder.evaluations_during()).get(int(checkpoint[1]))
            others = [e for e in evaluations if e.label != "after"]
            return cls(config, [*others, *([replace(own, label="after")] if own else [])], int(checkpoint[1]))
        rows = run_folder.episodes(turns=False)  # metrics are not logged at every step
        return cls(config, evaluations, rows[-1].step if rows else None)

    def base(self, named: NamedPolicy) -> str | None:
        """What was trained: an adapter's base, or the model that the run began with."""
        if named.adapter is not None:
            return named.base.location
        started: str | None = self.config.get("model", {}).get("model_name_or_path")
        return started


def _stored_dtype(named: NamedPolicy, trust_remote_code: bool) -> torch.dtype:
    """Return the dtype of the checkpoint, or of an adapter's base. Raises SQLEnvError when it is quantised."""
    config = base_config(named, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        fix = (
            ""
            if named.adapter is None
            else (
                f"; write the model that it was quantised from as base_model_name_or_path in "
                f"{Path(named.place.location) / ADAPTER_CONFIG}"
            )
        )
        raise ExportError(f"the weights of {named.base.location} are stored quantised, and cannot be merged into{fix}")
    return config.dtype or torch.float32


def _finish(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], dtype: torch.dtype
) -> None:
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
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.eos_token_id, config.pad_token_id = stop_ids[0], tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=list(stop_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )


def _refuse_used(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ExportError(f"--out {out} is there and is no folder; name another one")
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f"--out {out} holds something already; name another folder")


@contextmanager
def _appearing(out: Path, size: int) -> Iterator[Path]:
    """Yield the path of a folder for the caller to make and fill, which becomes `out`; `size` bytes must fit.

    Raises ExportError when it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < size:
            raise ExportError(
                f"--out {out}: {free / 1e9:.1f} GB are free, and {size / 1e9:.1f} GB are needed; free space, or name "
                "another folder"
            )
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            folder = Path(scratch) / "policy"
            yield folder
            for path in [*folder.rglob("*"), folder]:
                sync_to_disk(path)
            folder.rename(out)
        sync_to_disk(out.parent)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ExportError(f"--out {out} cannot be written: {reason}; free space, or name another folder") from error
