"""How training is cut into batches, how batches are filled, and which flags of that go together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trl import GRPOConfig

from trainer.config import ConfigError, SQLEnvArguments


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How TRL cuts training into batches. A step is one update of the weights."""

    rows: int
    """Of one rank, in a batch."""
    generations: int
    """Episodes of a group."""
    batches_per_step: int
    steps_per_batch: int
    """One of the two is 1."""

    @classmethod
    def of(cls, grpo: GRPOConfig) -> BatchShape:
        """The shape of a run's batches."""
        micro_batches = grpo.steps_per_generation * grpo.num_iterations
        accumulated = grpo.gradient_accumulation_steps
        return cls(
            rows=grpo.per_device_train_batch_size * grpo.steps_per_generation,
            generations=grpo.num_generations,
            batches_per_step=max(1, accumulated // micro_batches),
            steps_per_batch=ceil(micro_batches / accumulated),
        )

    def step_of(self, batch: int) -> int:
        """The first step that trains on a batch."""
        return batch // self.batches_per_step * self.steps_per_batch

    def first_batch(self, step: int) -> int:
        """The first batch that is generated in a step, or that the step is in the midst of."""
        return step // self.steps_per_batch * self.batches_per_step

    def lag(self, staleness: int) -> int:
        """So many batches just before one may not have ended when it may be begun."""
        return (staleness + 1) * self.batches_per_step - 1 if staleness else 0


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How batches are filled."""

    staleness: int = 0
    """Updates that a token may be old when it is trained on."""
    dynamic_sampling: float = 0.0
    """Groups that may be played in the place of those without signal, for each group of a batch."""
    rollout_downsampling: int = 1
    """Episodes that are played for each one that is trained on."""
    turn_advantages: bool = False
    """Whether turns have advantages of their own, beside their episode's (`trainer.rollout.credit`)."""
    guided_starts: bool = False
    """Whether groups that are all wrong are played again with steps given (`trainer.training.adaptive`)."""

    @classmethod
    def of(cls, arguments: SQLEnvArguments) -> BatchSettings:
        """The settings that flags ask for."""
        return cls(
            arguments.staleness,
            arguments.dynamic_sampling,
            arguments.rollout_downsampling,
            arguments.advantages == "turn",
            arguments.guided_starts,
        )

    @property
    def judges(self) -> bool:
        """Whether results choose what is trained on."""
        return self.dynamic_sampling > 0 or self.rollout_downsampling > 1 or self.guided_starts


def check_batches(grpo: GRPOConfig, settings: BatchSettings) -> None:
    """Refuse what the settings do not work with. Raises ConfigError."""
    shape = BatchShape.of(grpo)
    if settings.staleness and shape.steps_per_batch > 1:
        raise ConfigError(
            f"--staleness {settings.staleness} needs batches that are trained on in one update, and here it is "
            f"{shape.steps_per_batch} (--steps_per_generation {grpo.steps_per_generation}, --num_iterations "
            f"{grpo.num_iterations}, --gradient_accumulation_steps {grpo.gradient_accumulation_steps}); leave the "
            "first two out, or --staleness"
        )
    if settings.staleness and not grpo.use_vllm:
        raise ConfigError(
            f"--staleness {settings.staleness} has rollouts and training at the same time, and Hugging Face generate "
            "uses the very model that is trained; add --use_vllm true, or leave --staleness out"
        )
    if settings.staleness and not grpo.vllm_importance_sampling_correction:
        raise ConfigError(
            f"--staleness {settings.staleness} trains on samples of earlier weights, which "
            "--vllm_importance_sampling_correction false leaves uncorrected; leave one of them out"
        )
    if settings.turn_advantages and grpo.use_liger_kernel:
        raise ConfigError("--advantages turn gives each token its own, which Liger's loss does not take; leave out one")
    if settings.turn_advantages and grpo.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError(
            f"--advantages turn compares sums of rewards, and --multi_objective_aggregation "
            f"{grpo.multi_objective_aggregation} scales each one for itself; leave one of them out"
        )
    of_groups = {
        "--dynamic_sampling": settings.dynamic_sampling > 0,
        "--rollout_downsampling": settings.rollout_downsampling > 1,
        "--guided_starts": settings.guided_starts,
        "--advantages turn": settings.turn_advantages,
    }
    flag = next((flag for flag, given in of_groups.items() if given), None)
    if flag and shape.rows % shape.generations:
        raise ConfigError(
            f"{flag} judges whole groups, and each rank has {shape.rows} rows, no multiple of --num_generations "
            f"{shape.generations}; change --per_device_train_batch_size or --gradient_accumulation_steps"
        )
