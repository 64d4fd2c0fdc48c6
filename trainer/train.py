"""`sqlenv train`: GRPO on SQLEnv, with evaluation before and after, and the report.

`SQLEnvConfig` and TRL's `ModelConfig` come from flags and `--config FILE.yaml`. All that a run writes is in its
`output_dir`: config.json, metrics.jsonl, episodes.jsonl, evaluations/, checkpoints, model/ and report.html.

On several ranks (`accelerate launch`, `torchrun`) each plays and trains on its part of a batch, and plays its part of
an evaluation. Rank 0 alone writes and speaks. SIGTERM and Ctrl-C stop a run so that it can go on later; see
`trainer.signals`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from trl import ModelConfig

from env_server.data.loading import load_dataset
from env_server.dataset import Split
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode
from inference.adapters import RUN_MODEL
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.config import advise, token_of
from trainer.engines import RolloutSetup, find_servers, open_policy
from trainer.eval.output_folder import remove_on_failure
from trainer.eval.run_files import RunFolder, versions
from trainer.eval.statistics import EvaluationSummary
from trainer.evaluate import choose_questions
from trainer.export.checkpoint import publish
from trainer.export.hub import Destination
from trainer.flags.configs import SQLEnvConfig, context_advice
from trainer.grpo import SQLEnvTrainer, build_trainer, stop_at_turns_ends, use_engine
from trainer.models import SavePlaySettings, load_tokenizer
from trainer.next_command import NextCommand, what_next
from trainer.out_of_memory import memory_errors
from trainer.policy import PlaySettings
from trainer.ranks import Ranks, abort_together
from trainer.report.report import write_report
from trainer.report.tables import for_terminal, group_table, success_table
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import RolloutClient
from trainer.rollout.environments import AnyEnvironments, open_environments
from trainer.rollout.episodes import EpisodeRecord
from trainer.rollout.players import Examples
from trainer.rollout.rewards import rewards_of, try_rewards, weights_of
from trainer.signals import StopAfterStep, StopSignals
from trainer.tiny import BASE_NOTES
from trainer.training.arguments import parse_train
from trainer.training.batch_shape import BatchSettings, BatchShape
from trainer.training.batches import Batches
from trainer.training.dry_run import dry_run
from trainer.training.evaluating import EvaluateAtStart
from trainer.training.evaluations import RunEvaluations
from trainer.training.guided_starts import GuidedStarts
from trainer.training.health import HealthMonitor, RunInfo
from trainer.training.provenance import provenance
from trainer.training.questions import EpochOrder, QuestionFilter, require_questions
from trainer.training.reward_weights import AdaptiveWeights
from trainer.training.run_log import RunLog, episode_lines
from trainer.training.saving import policy_kept, require_saved_in, writes_in_one_line
from trainer.training.stateful import Saved, SaveStates
from trainer.training.trackers import writing_into

Evaluate = Callable[[str, str], EvaluationSummary | None]
"""Evaluates the policy under a label and a name; None where there is nothing to evaluate on."""


def run(argv: Sequence[str]) -> int:
    """Parse the arguments, then evaluate, train, evaluate and report; returns the exit status. Raises SQLEnvError."""
    with abort_together("sqlenv train"), StopSignals("sqlenv train", NextCommand.of("sqlenv train", argv)) as stopping:
        train(argv, stopping).disconnect()
    return stopping.status


def train(argv: Sequence[str], stopping: StopSignals) -> Ranks:
    """`run` within the `with` block of a `StopSignals`, which knows afterwards whether the run came to its end.

    Returns the ranks, still connected.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, and TRL is pinned
    config, model_config = parse_train(argv)
    ranks = Ranks.of(config)
    ranks.log_on_rank_0()
    console = Console(quiet=not ranks.is_main)
    if config.dry_run:
        dry_run(config, config, model_config, console)
        return ranks
    with memory_errors(config, "this run does not fit"), writes_in_one_line(config.output_dir), writing_into(config):
        Training(config, model_config, ranks, console, stopping).run()
    return ranks


class Training:
    """One run, from its arguments to its report."""

    def __init__(
        self,
        config: SQLEnvConfig,
        model_config: ModelConfig,
        ranks: Ranks,
        console: Console,
        stopping: StopSignals,
    ) -> None:
        self._config = config
        # TRL would start a client of its own; see `grpo.use_engine`.
        self._use_vllm, config.use_vllm = config.use_vllm, False
        self._destination = Destination.of(config)
        if self._destination and ranks.is_main:
            self._destination = self._destination.prepared()
        config.push_to_hub = False  # transformers would push the run's folder
        self._model_config = model_config
        self._ranks = ranks
        self._console = console
        self._stopping = stopping
        self._answer_mode = AnswerMode(config.answer_mode)
        self._env_settings = config.environment
        self._say = partial(console.print, highlight=False, soft_wrap=True)
        self._folder = RunFolder(Path(config.output_dir))
        with ranks.local_main_process_first():
            self._dataset = load_dataset(config.data, answer_mode=self._answer_mode)
        self._examples = Examples.play(self._dataset, config.few_shot, self._answer_mode, config.step_budget)
        asked = QuestionFilter.of(config).asked(self._dataset, config.data)
        self._questions = self._examples.without(asked)
        require_questions(self._questions, config)
        self._rewards = rewards_of(config.reward_functions)
        try_rewards(self._rewards, self._dataset, self._answer_mode)
        self._chat = ChatSettings.of(config, config.chat_template_kwargs)
        self._tokenizer = load_tokenizer(model_config, trust_remote_code=config.trust_remote_code)
        self._evaluations = RunEvaluations(
            self._folder,
            self._dataset,
            config.data,
            choose_questions(self._dataset, Split.EVAL, config.eval_episodes),
            self._answer_mode,
            config.seed,
            ranks,
            console,
        )
        to_evaluate = len(self._evaluations.questions)
        self._say(
            f"data    {config.data}: {len(self._questions):,} questions to train on, {to_evaluate:,} to evaluate on"
        )

    def run(self) -> None:
        """Evaluate, train, evaluate and report, or stop on the way."""
        config = self._config
        with ExitStack() as stack:
            if self._ranks.is_main and not config.resume_from_checkpoint:
                stack.enter_context(remove_on_failure(self._folder.path, lambda: not self._folder.has_trained))
            environments = stack.enter_context(closing(self._open_environments()))
            loop = stack.enter_context(RolloutLoop())
            if self._use_vllm:
                find_servers(config, config, self._model_config, self._ranks, loop)
            environments.prepare([*self._questions, *self._evaluations.questions])
            lag = BatchShape.of(config).lag(self._config.staleness)
            order = EpochOrder([q.question_id for q in self._questions], config.seed, shuffle=config.shuffle_dataset)
            filled = BatchSettings.of(config)
            adaptive = self._adaptive_weights(lag)
            guided = self._guided_starts(stack, lag)
            batches = Batches(self._dataset, order, config, self._ranks, loop, filled, self._rewards, adaptive, guided)
            trainer = build_trainer(
                config, self._model_config, self._tokenizer, self._questions, self._evaluations.questions, batches
            )
            chat = ChatFormat(self._tokenizer, self._chat, self._examples.conversations)
            stop_at_turns_ends(trainer, chat)
            self._say(
                f"policy  {self._model_config.model_name_or_path}: {_size(trainer.model)}, on {config.device.type}"
            )
            setup = RolloutSetup(trainer, chat, self._config, self._ranks, loop, self._use_vllm)
            settings = setup.settings
            advise("sqlenv train", [*chat.lines, *context_advice(settings.budget.max_context, settings.budget.turn)])
            play = replace(
                config.play_settings(),
                chat_template_kwargs=chat.settings.chat_template_kwargs,
                max_context_length=settings.budget.max_context,
            )
            if room := trainer.try_saving(play.save):
                self._say(f"disk    {room}")
            policy = open_policy(setup, self._say)
            stack.callback(lambda: loop.run(policy.aclose()))
            use_engine(trainer, trainer.times.timing(policy))
            log = self._open_log(stack) if self._ranks.is_main else None
            if log is not None:
                trainer.add_callback(log)
                run = RunInfo.of(config, config, self._ranks.count)
                trainer.add_callback(HealthMonitor(self._folder, run, self._say))
            trainer.add_callback(StopAfterStep(self._stopping))
            states = []
            if adaptive is not None:
                states.append(Saved(adaptive, "reward_weights.json", "--reward_weighting adaptive"))
            if guided is not None:
                states.append(Saved(guided, "guided_starts.json", "--guided_starts"))
            trainer.add_callback(SaveStates(*states))
            trainer.add_callback(SavePlaySettings(play))  # the last one: it marks a checkpoint as whole
            client = RolloutClient(policy.engine, environments, chat, settings)

            def keep(step: int, records: Sequence[EpisodeRecord]) -> None:
                # Each rank makes the lines of its own: the main one alone would be the slower the more ranks there are.
                for lines in self._ranks.gather_on_main(episode_lines(step, records)):
                    if log is not None:
                        log.write_episodes(lines)

            batches.play_with(client, keep)
            greedy = RolloutClient(policy.engine, environments, chat, replace(settings, temperature=0.0))

            def evaluate(label: str, name: str) -> EvaluationSummary | None:
                policy.sync_weights()
                return self._evaluations.policy(label, name, trainer.state.global_step, greedy, loop)

            def evaluate_on_the_way() -> EvaluationSummary | None:
                step = trainer.state.global_step
                known = self._evaluations.known(step)
                if known is not None:
                    return known
                trainer.sync_engine()
                summary = self._evaluations.during_training(step, greedy, loop, self._stopping)
                if self._stopping.agreed():
                    self._stopping.stop_training(trainer.args, trainer.state, trainer.control)
                return summary

            trainer.evaluate_with(evaluate_on_the_way)
            trainer.add_callback(EvaluateAtStart(self._evaluations))
            whole = self._train(trainer, environments, evaluate, play)
        if self._ranks.is_main and whole:
            self._conclude(trainer)

    def _open_log(self, stack: ExitStack) -> RunLog:
        self._open_folder()
        return stack.enter_context(closing(RunLog(self._folder, self._console)))

    def _adaptive_weights(self, lag: int) -> AdaptiveWeights | None:
        if self._config.reward_weighting == "fixed":
            return None
        return AdaptiveWeights(weights_of(self._rewards, self._config.reward_weights), lag)

    def _guided_starts(self, stack: ExitStack, lag: int) -> GuidedStarts | None:
        if not self._config.guided_starts:
            return None
        databases = stack.enter_context(closing(DatabasePool(self._dataset.databases, self._env_settings.sandbox)))
        return GuidedStarts(self._dataset, databases, self._answer_mode, lag)

    def _open_environments(self) -> AnyEnvironments:
        config = self._config
        return open_environments(
            config.env_server,
            token_of(config.env_token),
            self._dataset,
            self._env_settings,
            self._answer_mode,
        )

    def _train(
        self, trainer: SQLEnvTrainer, environments: AnyEnvironments, evaluate: Evaluate, play: PlaySettings
    ) -> bool:
        """Evaluate, train and evaluate; returns False when that was stopped."""
        config, resuming = self._config, self._config.resume_from_checkpoint
        if not resuming:
            if self._evaluations.questions:
                self._say("evaluating what chance, the oracle and the policy come to before training")
            if self._ranks.is_main:
                self._evaluations.scripted("random", environments)
                self._evaluations.scripted("oracle", environments)
            evaluate("before", str(self._model_config.model_name_or_path))
        self._stopping.begin_training(self._ranks)
        length = f"{config.max_steps} steps" if config.max_steps > 0 else f"{config.num_train_epochs:g} epochs"
        self._say(f"training for {length}, {config.generation_batch_size} episodes at a time, into {self._folder.path}")
        path = self._folder.path / RUN_MODEL

        def save() -> Path:
            return trainer.save_policy(path, play.save)

        with nullcontext() if trainer.is_sharded else policy_kept(save, lambda: trainer.state.global_step):
            trainer.train(resume_from_checkpoint=resuming)
        if self._stopping.stopped_after is not None:
            return False
        require_saved_in(path, self._ranks.broadcast(save()))
        if self._stopping.end_training(path, self._config.data):
            return False
        is_best = self._config.load_best_model_at_end and trainer.state.best_model_checkpoint is not None
        step = trainer.state.best_global_step if is_best else trainer.state.global_step
        if not self._evaluations.take_over(step, str(path), is_best):
            summary = evaluate("after", str(path))
            if summary is not None:
                trainer.log_evaluation(summary)
        self._stopping.conclude()
        return True

    def _open_folder(self) -> None:
        path = self._folder.path
        if self._config.resume_from_checkpoint:
            RunFolder.open(path)
            return
        config: dict[str, Any] = {
            "sqlenv": self._config.to_log(),
            "grpo": {
                **self._config.trl_dict(),
                "use_vllm": self._use_vllm,
                "push_to_hub": self._destination is not None,
            },
            "model": asdict(self._model_config),
            "versions": versions(),
            "departures": self._config.changed,
            "machine": provenance(),
        }
        notes = Path(str(self._model_config.model_name_or_path)) / BASE_NOTES
        if notes.is_file():
            config["base_notes"] = notes.read_text(encoding="utf-8")
        RunFolder.create(path, config)

    def _conclude(self, trainer: SQLEnvTrainer) -> None:
        evaluations = self._folder.evaluations()
        if evaluations:
            summaries = {evaluation.label: evaluation.summary for evaluation in evaluations}
            unseen = "unseen databases" if self._evaluations.unseen_databases else "unseen questions"
            title = f"{self._config.data}, {unseen}, greedy"
            for table in (success_table(summaries, title), group_table("difficulty", summaries, intervals=False)):
                if table is not None:
                    self._console.print(for_terminal(table))
        report = write_report(self._folder.path)
        trainer.save_state()  # it says that the run is finished; see `trainer.eval.output_folder`
        self._console.print(f"policy  {self._folder.path / RUN_MODEL}\nreport  {report}", highlight=False)
        if self._destination:
            url = publish(self._folder.path, self._destination, trust_remote_code=self._config.trust_remote_code)
            self._console.print(f"pushed  {url}", highlight=False)
        if not self._stopping.part:
            run, data = str(self._folder.path), str(self._config.data)
            compared = [["compare", f"{run}:before", run]] if len(evaluations) > 1 else []
            further = what_next(["view", run], *compared, ["chat", run, "--data", data])
            self._console.print(further, highlight=False, soft_wrap=True)


def _size(model: nn.Module) -> str:
    """How many parameters a model has, and how many of them are trained, where those are not all."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rest = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    part = f", {trained / 1e6:.1f} of them trained" if rest else ""
    return f"{(trained + rest) / 1e6:.1f} million parameters{part}"
