"""What the Trainers of transformers and TRL get wrong: a first step at rate 0, resuming at the end, a full disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trainer.training.memory import optimizer_bytes
from trainer.training.saving import SaveError, Saving, require_room, size_of, write_failure

TRIAL = "trial-save"
"""The folder, in the run's, that the policy is saved to before training, to see whether it can be."""
WEIGHTS = ("*.safetensors", "*.bin")


class CheckpointingTrainer:
    """Mixed into a Trainer: no step when training has ended already, none at a learning rate of 0, and no model card.

    transformers looks whether training is to end after a step, not before one. A run that was broken off after its
    last step, or goes on from the step that it was to end after, would take another one.

    A learning-rate warm-up of n steps goes from 0/n to (n - 1)/n there, and a first step at rate 0 trains nothing.
    Here it goes from 1/n to n/n; what follows is transformers' own.

    TRL puts a card into each checkpoint, which calls a base that is a local folder `None`. `sqlenv export` writes one.

    A disk that is full ends a Trainer, and what was trained is gone. Here a checkpoint that cannot be written is left
    out, and the policy is kept in memory until it can be (`saving.Saving`). On several ranks a checkpoint's weights
    are tried again, and a failure to write what is beside them ends the run.
    """

    args: Any
    state: Any
    control: Any
    lr_scheduler: Any
    model: Any
    accelerator: Any

    saving: Saving | None = None
    """How to deal with a disk that is full; None: as the process's terminal allows."""
    _policy_bytes = 0
    _plain_save = False
    """Writes that fail are raised."""
    _saved_to: Path | None = None
    _beside: Callable[[Path], object] | None = None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]  # the Trainer's

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule, its warm-up a step ahead."""
        known = self.lr_scheduler
        scheduler = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]  # the Trainer's
        if known is None and isinstance(scheduler, LambdaLR):
            warmup = self.args.get_warmup_steps(num_training_steps)
            scheduler.lr_lambdas = [_ahead(share, warmup) for share in scheduler.lr_lambdas]
            for group, base, share in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * share(0)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        return scheduler

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none."""

    @property
    def is_sharded(self) -> bool:
        """Whether saving the policy takes all ranks."""
        return self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    def try_saving(self, beside: Callable[[Path], object]) -> str:
        """Save the policy as it is and remove it, and look for room for the run; returns what that comes to.

        `beside` writes what else is in a policy's folder. Raises SaveError. Collective: every rank calls it.
        """
        scratch = Path(self.args.output_dir) / TRIAL
        try:
            if self.is_sharded:  # weights come together only once the ranks have shared them out
                self._save_settings(scratch)
            else:
                self._plain_save = True
                self.save_model(str(scratch), _internal_call=True)
            if self.args.should_save:
                beside(scratch)
                self._policy_bytes = size_of(scratch)
                if not self.is_sharded and not any(any(scratch.glob(name)) for name in WEIGHTS):
                    raise SaveError("saving the policy writes no weights")
        except SaveError:
            raise
        except Exception as error:  # whatever it is, it would come at the end
            reason = write_failure(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise SaveError(f"the policy cannot be saved in {self.args.output_dir}: {reason}") from error
        finally:
            self._plain_save = False
            if self.args.should_save:
                shutil.rmtree(scratch, ignore_errors=True)
        if not self.args.should_save or self.is_sharded:
            return ""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        state = sum(p.numel() * optimizer_bytes(self.args.optim.value, p.element_size()) for p in trained)
        return require_room(self.args, self._policy_bytes, state)

    def save_policy(self, folder: Path, beside: Callable[[Path], object]) -> Path:
        """Save the policy, with what `beside` writes, and return where: on other ranks than the main one, `folder`.

        Raises SaveError. Collective: every rank calls it.
        """
        self._beside, self._saved_to = beside, None
        try:
            self.save_model(str(folder), _internal_call=True)
        finally:
            self._beside = None
        return self._saved_to or folder

    save_model: Callable[..., None]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        save, beside = super()._save, self._beside  # type: ignore[misc]
        if self._plain_save:
            save(output_dir, state_dict)
            return

        def write(folder: Path) -> None:
            save(str(folder), state_dict)
            if beside is not None:
                beside(folder)

        saving = self.saving or Saving.here()
        target = Path(output_dir or self.args.output_dir)
        self._saved_to = saving.keep_trying(write, target, self._policy_bytes, movable=beside is not None)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        save = super()._save_checkpoint  # type: ignore[misc]
        if self.args.world_size > 1:
            save(*args, **kwargs)
            return
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        saving = self.saving or Saving.here()
        self._plain_save = True
        try:
            if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
                # The run was asked to stop, and can go on from here alone.
                saving.keep_trying(lambda _: save(*args, **kwargs), folder, 3 * self._policy_bytes, movable=False)
            else:
                save(*args, **kwargs)
        except Exception as error:
            reason = write_failure(error)
            if reason is None:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            saving.say(f"{folder} is not saved: {reason}; training goes on without this checkpoint")
        finally:
            self._plain_save = False

    def _save_settings(self, folder: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if self.args.should_save:
            for part in (model.config, getattr(model, "generation_config", None), self.processing_class):
                if part is not None:
                    part.save_pretrained(str(folder))

    processing_class: Any


def _ahead(share: Callable[[int], float], warmup: int) -> Callable[[int], float]:
    """The share of the full rate at a step, while it warms up that of the next step."""
    return lambda step: share(step + (step < warmup))
