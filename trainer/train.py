"""`sqlenv train`: GRPO on SQLEnv, with evaluation before and after, and the report.

Arguments are TRL's (`GRPOConfig`, `ModelConfig`) plus `SQLEnvArguments`, from flags and `--config FILE.yaml`. All
that a run writes is in its `output_dir`: config.json, metrics.jsonl, episodes.jsonl, evaluations/, checkpoints,
model/ and report.html.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config
from trl.models import unwrap_model_for_generation

from env_server.data.loading import load_dataset
from env_server.data.questions import Question, Split
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from inference.hf import HFEngine
from trainer.config import ConfigError, SQLEnvArguments, config_errors, token_of
from trainer.environments import AnyEnvironments, open_environments
from trainer.episodes import Episode, record
from trainer.evaluate import (
    PolicyError,
    choose_questions,
    excluded_by_reason,
    in_process_engine,
    play_model,
    play_scripted,
)
from trainer.grpo import SQLEnvRollout, prompt_rows, use_engine
from trainer.prompts import ChatRenderer
from trainer.report import write_report
from trainer.rewards import REWARD_FUNCTIONS
from trainer.rollout import RolloutClient, RolloutSettings
from trainer.run_files import Evaluation, RunFolder
from trainer.run_log import RunLog
from trainer.statistics import summarize
from trainer.summary_table import difficulty_table, interval_text, percent, summary_table
from trainer.tiny import BASE_NOTES
from trainer.transcript import TokenBudget

MODEL = "model"
"""Where the trained policy is saved, inside the run's folder."""

OnEpisode = Callable[[Episode], None]

LABELS = ("random", "before", "after", "oracle")
"""The evaluations of a run in the order of the comparison table."""


def run(argv: Sequence[str]) -> int:
    """Parse the arguments, then evaluate, train, evaluate and report. Raises SQLEnvError."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, and TRL is pinned
    arguments, grpo, model_config = parse_arguments(argv)
    if arguments.torch_threads:
        torch.set_num_threads(arguments.torch_threads)
    Training(arguments, grpo, model_config, Console()).run()
    return 0


def parse_arguments(argv: Sequence[str]) -> tuple[SQLEnvArguments, GRPOConfig, ModelConfig]:
    """Read flags and `--config`. Raises ConfigError."""
    parser = TrlParser((SQLEnvArguments, GRPOConfig, ModelConfig), prog="sqlenv train", description=__doc__)
    # TRL recomputes the logprobs with dropout on, and they would not be those that were sampled under.
    parser.set_defaults(lora_dropout=0.0)
    with config_errors():
        arguments, grpo, model_config = parser.parse_args_and_config(list(argv))
    if not model_config.model_name_or_path:
        raise ConfigError("name the policy to train with --model_name_or_path (a folder or a model on the Hub)")
    if grpo.use_vllm:
        raise ConfigError("this version generates with Hugging Face generate; leave --use_vllm out")
    if grpo.world_size > 1:
        raise ConfigError("this version trains in one process; start it without a launcher")
    if grpo.max_completion_length is None or grpo.max_completion_length <= 0:
        raise ConfigError(f"--max_completion_length must be positive, not {grpo.max_completion_length}")
    if str(grpo.resume_from_checkpoint).lower() == "true":
        grpo.resume_from_checkpoint = get_last_checkpoint(grpo.output_dir) if Path(grpo.output_dir).is_dir() else None
        if grpo.resume_from_checkpoint is None:
            raise ConfigError(f"{grpo.output_dir} holds no checkpoint to resume from; was save_strategy set?")
    return arguments, grpo, model_config


class InProcessWeights:
    """Weight sync for an engine that shares the trainer's model: only the version moves on."""

    def __init__(self, engine: HFEngine, trainer: GRPOTrainer) -> None:
        self._engine = engine
        self._trainer = trainer

    def sync_weights(self) -> None:
        """Stamp the number of updates that the weights have had."""
        self._engine.set_policy_version(self._trainer.state.global_step)


def load_tokenizer(model_config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer. Raises PolicyError."""
    name = model_config.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(name, revision=model_config.model_revision)
    except (OSError, ValueError) as error:
        raise PolicyError(f"the policy {name!r} cannot be loaded: {' '.join(str(error).split())}") from error


def _require_questions(count: int, grpo: GRPOConfig) -> None:
    """Refuse a data set that does not fill one step: TRL would drop the step, and train nothing without a word."""
    wanted = grpo.generation_batch_size // grpo.num_generations
    if count < wanted:
        fix = "Give more questions, or lower --per_device_train_batch_size or --gradient_accumulation_steps"
        raise ConfigError(f"one step plays {wanted} questions, and the data set has {count} for training. {fix}")


class Training:
    """One run, from its arguments to its report."""

    def __init__(
        self, arguments: SQLEnvArguments, grpo: GRPOConfig, model_config: ModelConfig, console: Console
    ) -> None:
        self._arguments = arguments
        self._grpo = grpo
        self._model_config = model_config
        self._console = console
        self._answer_mode = AnswerMode(arguments.answer_mode)
        self._env_settings = EnvSettings(step_budget=arguments.step_budget)
        self._dataset = load_dataset(arguments.data, answer_mode=self._answer_mode)
        self._unseen_databases = all(len(splits) == 1 for splits in self._dataset.splits().values())
        _require_questions(len(self._dataset.select(Split.TRAIN)), grpo)
        self._tokenizer = load_tokenizer(model_config)
        self._folder = RunFolder(Path(grpo.output_dir))

    def run(self) -> None:
        """Evaluate, train, evaluate and report."""
        grpo = self._grpo
        with ExitStack() as stack:
            environments = self._open_environments()
            stack.callback(environments.close)
            rollout = SQLEnvRollout(self._dataset, grpo.seed, self._env_settings.reward)
            stack.callback(rollout.close)
            trainer = self._build_trainer(rollout)
            # Made only now, so that a run which cannot start leaves no folder behind.
            self._folder = self._open_folder()
            log = RunLog(self._folder, self._console)
            stack.callback(log.close)
            trainer.add_callback(log)
            renderer = ChatRenderer(self._tokenizer, grpo.chat_template_kwargs)
            settings = self._settings(trainer.model)
            engine = in_process_engine(
                trainer.model,
                self._tokenizer,
                renderer,
                settings,
                lambda: unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator),
            )
            stack.callback(lambda: asyncio.run(engine.aclose()))
            use_engine(trainer, InProcessWeights(engine, trainer))
            client = RolloutClient(engine, environments, renderer, settings)
            rollout.play_with(client, log.write_batch)
            self._train(trainer, environments)
        self._conclude()

    def _open_environments(self) -> AnyEnvironments:
        arguments = self._arguments
        return open_environments(
            arguments.env_server,
            token_of(arguments.env_token),
            self._dataset,
            self._env_settings,
            self._answer_mode,
            arguments.env_threads,
        )

    def _train(self, trainer: GRPOTrainer, environments: AnyEnvironments) -> None:
        resuming = self._grpo.resume_from_checkpoint
        if not resuming:
            self._evaluate_scripted("random", environments)
            self._evaluate_scripted("oracle", environments)
            self._evaluate_policy("before", str(self._model_config.model_name_or_path), trainer.model, environments)
        trainer.train(resume_from_checkpoint=resuming)
        path = str(self._folder.path / MODEL)
        trainer.save_model(path)
        self._tokenizer.save_pretrained(path)
        self._evaluate_policy("after", path, trainer.model, environments)

    def _open_folder(self) -> RunFolder:
        path = Path(self._grpo.output_dir)
        if self._grpo.resume_from_checkpoint:
            return RunFolder.open(path)
        config: dict[str, Any] = {
            "sqlenv": self._arguments.to_log(),
            "grpo": self._grpo.to_dict(),
            "model": asdict(self._model_config),
        }
        notes = Path(str(self._model_config.model_name_or_path)) / BASE_NOTES
        if notes.is_file():
            config["base_notes"] = notes.read_text(encoding="utf-8")
        return RunFolder.create(path, config)

    def _build_trainer(self, rollout: SQLEnvRollout) -> GRPOTrainer:
        """TRL's trainer, with our rewards and rollout. Raises PolicyError."""
        grpo = self._grpo
        grpo.model_init_kwargs = {
            "revision": self._model_config.model_revision,
            "attn_implementation": self._model_config.attn_implementation,
            "dtype": self._model_config.dtype,
            **(grpo.model_init_kwargs or {}),
        }

        try:
            trainer = GRPOTrainer(
                model=self._model_config.model_name_or_path,
                reward_funcs=list(REWARD_FUNCTIONS),
                args=grpo,
                train_dataset=prompt_rows(self._dataset.select(Split.TRAIN)),
                processing_class=self._tokenizer,
                peft_config=get_peft_config(self._model_config),
                rollout_func=rollout,
            )
        except OSError as error:
            raise PolicyError(f"{self._model_config.model_name_or_path}: {' '.join(str(error).split())}") from error
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        return trainer

    def _settings(self, model: PreTrainedModel, temperature: float | None = None) -> RolloutSettings:
        context = self._arguments.max_context_length or model.config.max_position_embeddings
        return RolloutSettings(
            budget=TokenBudget(self._grpo.max_completion_length, context, self._arguments.max_turn_length),
            temperature=self._grpo.temperature if temperature is None else temperature,
            max_concurrency=self._arguments.max_concurrency,
            answer_mode=self._answer_mode,
        )

    def _evaluate_scripted(self, policy: str, environments: AnyEnvironments) -> None:
        def play(questions: Sequence[Question], advance: OnEpisode) -> list[Episode]:
            return play_scripted(policy, environments, questions, self._answer_mode, self._grpo.seed, advance)

        self._evaluate(policy, policy, play)

    def _evaluate_policy(self, label: str, policy: str, model: PreTrainedModel, environments: AnyEnvironments) -> None:
        settings = self._settings(model, temperature=0.0)

        def play(questions: Sequence[Question], advance: OnEpisode) -> list[Episode]:
            return play_model(
                model,
                self._tokenizer,
                environments,
                questions,
                settings,
                self._grpo.seed,
                advance,
                self._grpo.chat_template_kwargs,
            )

        self._evaluate(label, policy, play)

    def _evaluate(
        self, label: str, policy: str, play: Callable[[Sequence[Question], OnEpisode], list[Episode]]
    ) -> None:
        """Play the evaluation questions and keep the result under `label`."""
        questions = choose_questions(self._dataset, Split.EVAL, self._arguments.eval_episodes)
        if not questions:
            return
        with Progress(console=self._console, transient=True) as progress:
            bar = progress.add_task(f"evaluating: {label}", total=len(questions))
            records = [record(e) for e in play(questions, lambda _: progress.advance(bar))]
        summary = summarize(records, excluded_by_reason(self._dataset))
        evaluation = Evaluation(
            label=label,
            policy=policy,
            data=self._arguments.data,
            split=Split.EVAL.value,
            answer_mode=self._answer_mode.value,
            order=LABELS.index(label),
            summary=summary,
            unseen_databases=self._unseen_databases,
        )
        self._folder.write_evaluation(evaluation, records)
        self._console.print(
            f"evaluated {label}: {percent(summary.success_rate)} of {summary.episodes} questions "
            f"({interval_text(summary.interval)})",
            highlight=False,
        )

    def _conclude(self) -> None:
        evaluations = self._folder.evaluations()
        if evaluations:
            rows = [(evaluation.label, evaluation.summary) for evaluation in evaluations]
            unseen = "unseen databases" if self._unseen_databases else "unseen questions"
            self._console.print(summary_table(rows, title=f"{self._arguments.data}, {unseen}, greedy"))
            self._console.print(difficulty_table(rows))
        report = write_report(self._folder.path)
        self._console.print(f"policy  {self._folder.path / MODEL}\nreport  {report}", highlight=False)
