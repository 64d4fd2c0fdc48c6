"""`sqlenv train`: GRPO on SQLEnv, with evaluation before and after, and the report.

Arguments are TRL's (`GRPOConfig`, `ModelConfig`) plus `SQLEnvArguments`, from flags and `--config FILE.yaml`. All
that a run writes is in its `output_dir`: config.json, metrics.jsonl, episodes.jsonl, evaluations/, checkpoints,
model/ and report.html.

On several ranks (`accelerate launch`, `torchrun`) each plays and trains on its part of a batch, and plays its part of
an evaluation. Rank 0 alone writes and speaks. SIGTERM stops a run so that it can go on later; see `trainer.stopping`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from env_server.data.loading import load_dataset
from env_server.data.questions import Split
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from trainer.config import ConfigError, SQLEnvArguments, config_errors, token_of
from trainer.engines import PolicyEngine, check_vllm_flags, hf_policy, vllm_policy
from trainer.environments import AnyEnvironments, open_environments
from trainer.episodes import Episode, EpisodeRecord, record
from trainer.evaluate import (
    PolicyError,
    choose_questions,
    excluded_by_reason,
    play_scripted,
)
from trainer.grpo import SQLEnvRollout, prompt_rows, use_engine
from trainer.prompts import ChatRenderer
from trainer.ranks import Ranks, ending_together
from trainer.report import write_report
from trainer.rewards import REWARD_FUNCTIONS
from trainer.rollout import RolloutClient, RolloutSettings, derive_seed, request_for
from trainer.run_files import Evaluation, RunFolder
from trainer.run_log import RunLog
from trainer.statistics import summarize
from trainer.stopping import StopAfterStep, Stopping
from trainer.summary_table import difficulty_table, interval_text, percent, summary_table
from trainer.tiny import BASE_NOTES
from trainer.transcript import TokenBudget

TURN_S = 300.0
"""Longest turn of an engine that is there."""
MODEL = "model"
"""Where the trained policy is saved, inside the run's folder."""

OnEpisode = Callable[[Episode], None]

LABELS = ("random", "before", "after", "oracle")
"""The evaluations of a run in the order of the comparison table."""


def run(argv: Sequence[str]) -> int:
    """Parse the arguments, then evaluate, train, evaluate and report; returns the exit status. Raises SQLEnvError."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, and TRL is pinned
    with ending_together("sqlenv train"), Stopping("sqlenv train") as stopping:
        arguments, grpo, model_config = parse_arguments(argv)
        if arguments.torch_threads:
            torch.set_num_threads(arguments.torch_threads)
        ranks = Ranks.of(grpo)
        ranks.hush_others()
        Training(arguments, grpo, model_config, ranks, Console(quiet=not ranks.is_main), stopping).run()
    return stopping.status


def parse_arguments(argv: Sequence[str]) -> tuple[SQLEnvArguments, GRPOConfig, ModelConfig]:
    """Read flags and `--config`. Raises ConfigError."""
    parser = TrlParser((SQLEnvArguments, GRPOConfig, ModelConfig), prog="sqlenv train", description=__doc__)
    # TRL recomputes the logprobs with dropout on, and they would not be those that were sampled under.
    parser.set_defaults(lora_dropout=0.0)
    # Servers are the only way here; and the default mode of the correction silently drops long episodes.
    parser.set_defaults(vllm_mode="server", vllm_importance_sampling_mode="token_truncate")
    with config_errors():
        arguments, grpo, model_config = parser.parse_args_and_config(list(argv))
    if not model_config.model_name_or_path:
        raise ConfigError("name the policy to train with --model_name_or_path (a folder or a model on the Hub)")
    if grpo.use_vllm:
        check_vllm_flags(arguments, grpo, model_config)
    if grpo.max_completion_length is None or grpo.max_completion_length <= 0:
        raise ConfigError(f"--max_completion_length must be positive, not {grpo.max_completion_length}")
    if grpo.enable_jit_checkpoint:
        raise ConfigError(
            "leave --enable_jit_checkpoint out: SIGTERM saves a checkpoint anyway, at the end of the step"
        )
    if str(grpo.resume_from_checkpoint).lower() == "true":
        grpo.resume_from_checkpoint = get_last_checkpoint(grpo.output_dir) if Path(grpo.output_dir).is_dir() else None
        if grpo.resume_from_checkpoint is None:
            raise ConfigError(f"{grpo.output_dir} holds no checkpoint to resume from; was save_strategy set?")
    return arguments, grpo, model_config


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
        self,
        arguments: SQLEnvArguments,
        grpo: GRPOConfig,
        model_config: ModelConfig,
        ranks: Ranks,
        console: Console,
        stopping: Stopping,
    ) -> None:
        self._arguments = arguments
        self._grpo = grpo
        # TRL would start a client of its own; see `grpo.use_engine`.
        self._use_vllm, grpo.use_vllm = grpo.use_vllm, False
        self._model_config = model_config
        self._ranks = ranks
        self._console = console
        self._stopping = stopping
        self._answer_mode = AnswerMode(arguments.answer_mode)
        self._env_settings = EnvSettings(step_budget=arguments.step_budget)
        with ranks.one_goes_first():
            self._dataset = load_dataset(arguments.data, answer_mode=self._answer_mode)
        self._unseen_databases = all(len(splits) == 1 for splits in self._dataset.splits().values())
        _require_questions(len(self._dataset.select(Split.TRAIN)), grpo)
        self._questions = choose_questions(self._dataset, Split.EVAL, arguments.eval_episodes)
        self._tokenizer = load_tokenizer(model_config)
        self._folder = RunFolder(Path(grpo.output_dir))

    def run(self) -> None:
        """Evaluate, train, evaluate and report, or stop on the way."""
        grpo = self._grpo
        with ExitStack() as stack:
            environments = stack.enter_context(closing(self._open_environments()))
            runner = stack.enter_context(asyncio.Runner())
            rollout = SQLEnvRollout(self._dataset, grpo.seed, self._env_settings.reward, self._ranks, runner)
            trainer = self._build_trainer(rollout)
            renderer = ChatRenderer(self._tokenizer, grpo.chat_template_kwargs)
            settings = self._settings(trainer)
            policy = self._open_engine(trainer, renderer, settings)
            stack.callback(lambda: runner.run(policy.aclose()))
            use_engine(trainer, policy)
            # Made only now, so that a run which cannot start leaves no folder behind.
            log = self._open_log(stack) if self._ranks.is_main else None
            if log is not None:
                trainer.add_callback(log)
            trainer.add_callback(StopAfterStep(self._stopping))
            rollout.play_with(RolloutClient(policy.engine, environments, renderer, settings), log and log.write_batch)
            greedy = RolloutClient(policy.engine, environments, renderer, replace(settings, temperature=0.0))

            def evaluate(label: str, name: str) -> None:
                policy.sync_weights()
                self._evaluate_policy(label, name, greedy, runner)

            whole = self._train(trainer, environments, evaluate)
        self._ranks.part()
        if self._ranks.is_main and whole:
            self._conclude()

    def _open_engine(self, trainer: GRPOTrainer, renderer: ChatRenderer, settings: RolloutSettings) -> PolicyEngine:
        """What generates, for training and evaluation alike."""
        if self._use_vllm:
            return vllm_policy(trainer, renderer, settings, self._arguments, self._ranks)
        return hf_policy(trainer, self._tokenizer, renderer, settings)

    def _open_log(self, stack: ExitStack) -> RunLog:
        self._folder = self._open_folder()
        stack.callback(self._leave_room)
        return stack.enter_context(closing(RunLog(self._folder, self._console)))

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

    def _train(self, trainer: GRPOTrainer, environments: AnyEnvironments, evaluate: Callable[[str, str], None]) -> bool:
        """Evaluate, train and evaluate; returns False when that was stopped."""
        resuming = self._grpo.resume_from_checkpoint
        if not resuming:
            if self._ranks.is_main:
                self._evaluate_scripted("random", environments)
                self._evaluate_scripted("oracle", environments)
            evaluate("before", str(self._model_config.model_name_or_path))
        self._stopping.begin_training(self._ranks)
        trainer.train(resume_from_checkpoint=resuming)
        if self._stopping.stopped_after is not None:
            return False
        path = self._folder.path / MODEL
        trainer.save_model(str(path))
        if self._ranks.is_main:
            self._tokenizer.save_pretrained(path)
        if self._stopping.end_training(path, self._arguments.data):
            return False
        evaluate("after", str(path))
        self._stopping.conclude()
        return True

    def _open_folder(self) -> RunFolder:
        path = Path(self._grpo.output_dir)
        if self._grpo.resume_from_checkpoint:
            return RunFolder.open(path)
        config: dict[str, Any] = {
            "sqlenv": self._arguments.to_log(),
            "grpo": {**self._grpo.to_dict(), "use_vllm": self._use_vllm},
            "model": asdict(self._model_config),
        }
        notes = Path(str(self._model_config.model_name_or_path)) / BASE_NOTES
        if notes.is_file():
            config["base_notes"] = notes.read_text(encoding="utf-8")
        return RunFolder.create(path, config)

    def _leave_room(self) -> None:
        """Let the same command start again, when it was stopped before it has trained: a folder holds but one run."""
        if self._stopping.in_vain and not self._grpo.resume_from_checkpoint:
            for path in (*self._folder.evaluations_path.glob("*"), self._folder.config_path):
                path.unlink(missing_ok=True)

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
            if error.filename is not None and str(error.filename).startswith(grpo.output_dir):
                raise ConfigError(
                    f"--output_dir {grpo.output_dir}: {error.strerror}; it has to belong to the user who runs this, "
                    f"number {os.getuid()}"
                ) from error
            raise PolicyError(f"{self._model_config.model_name_or_path}: {' '.join(str(error).split())}") from error
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        return trainer

    def _settings(self, trainer: GRPOTrainer) -> RolloutSettings:
        context = self._arguments.max_context_length or trainer.model.config.max_position_embeddings
        # A turn may have to wait for a server to come back, and then be generated.
        waiting_s = self._grpo.vllm_server_timeout if self._use_vllm else 0.0
        return RolloutSettings(
            budget=TokenBudget(self._grpo.max_completion_length, context, self._arguments.max_turn_length),
            temperature=self._grpo.temperature,
            max_concurrency=self._arguments.max_concurrency,
            engine_timeout_s=TURN_S + waiting_s,
            answer_mode=self._answer_mode,
        )

    def _evaluate_scripted(self, policy: str, environments: AnyEnvironments) -> None:
        questions = self._questions
        if not questions:
            return
        with self._progress(policy, len(questions)) as advance:
            episodes = play_scripted(policy, environments, questions, self._answer_mode, self._grpo.seed, advance)
        self._keep_evaluation(policy, policy, [record(e) for e in episodes])

    def _evaluate_policy(self, label: str, policy: str, client: RolloutClient, runner: asyncio.Runner) -> None:
        """Play this rank's share of the questions, and keep what all ranks played."""
        if not self._questions:
            return
        requests = [request_for(q, derive_seed(self._grpo.seed, i)) for i, q in enumerate(self._questions)]
        mine = self._ranks.share(requests)
        with self._progress(label, len(mine)) as advance:
            episodes = runner.run(client.play(mine, advance))
        records = self._ranks.gather([record(e) for e in episodes])
        if self._ranks.is_main:
            self._keep_evaluation(label, policy, records)

    @contextmanager
    def _progress(self, label: str, total: int) -> Iterator[OnEpisode]:
        with Progress(console=self._console, transient=True) as progress:
            bar = progress.add_task(f"evaluating: {label}", total=total)
            yield lambda _: progress.advance(bar)

    def _keep_evaluation(self, label: str, policy: str, records: Sequence[EpisodeRecord]) -> None:
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
