"""`sqlenv train`: GRPO on SQLEnv, with evaluation before and after, and the report.

`SQLEnvConfig` and TRL's `ModelConfig` come from flags and `--config FILE.yaml`. All that a run writes is in its
`output_dir`: config.json, metrics.jsonl, episodes.jsonl, evaluations/, checkpoints, model/ and report.html.

On several ranks (`accelerate launch`, `torchrun`) each plays and trains on its part of a batch, and plays its part of
an evaluation. Rank 0 alone writes and speaks. SIGTERM and Ctrl-C stop a run so that it can go on later; see
`trainer.signals`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from trainer.engines import RolloutSetup, find_servers, open_policy, server_command, server_urls
from trainer.eval.output_folder import remove_on_failure
from trainer.eval.run_files import RunFolder, versions
from trainer.eval.statistics import EvaluationSummary
from trainer.evaluate import choose_questions
from trainer.export.checkpoint import publish
from trainer.export.hub import Destination
from trainer.flags.configs import SQLEnvConfig
from trainer.grpo import SQLEnvTrainer, build_trainer, stop_at_turns_ends
from trainer.models import load_tokenizer
from trainer.next_command import NextCommand, what_next
from trainer.out_of_memory import memory_errors
from trainer.ranks import Ranks, abort_together
from trainer.report.report import write_report
from trainer.report.tables import for_terminal, group_table, success_table
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import RolloutClient
from trainer.rollout.environments import open_environments
from trainer.rollout.episodes import EpisodeRecord
from trainer.rollout.players import Examples
from trainer.rollout.rewards import rewards_of, try_rewards, weights_of
from trainer.signals import StopAfterStep, StopSignals
from trainer.tiny import BASE_NOTES
from trainer.training.adaptive import AdaptiveWeights, GuidedStarts
from trainer.training.arguments import parse_train
from trainer.training.batches import Batches
from trainer.training.checkpointing import Saved, SaveStates, policy_kept, writes_in_one_line
from trainer.training.dry_run import dry_run
from trainer.training.evaluations import RunEvaluations
from trainer.training.health import HealthMonitor, RunInfo
from trainer.training.questions import BatchShape, EpochOrder, QuestionFilter, require_questions
from trainer.training.run_log import RunLog, episode_lines, provenance, writing_into


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
        dry_run(config, model_config, console)
        return ranks
    with memory_errors(config, "this run does not fit"), writes_in_one_line(config.output_dir), writing_into(config):
        _train(config, model_config, ranks, console, stopping)
    return ranks


def _train(
    config: SQLEnvConfig, model_config: ModelConfig, ranks: Ranks, console: Console, stopping: StopSignals
) -> None:
    say = partial(console.print, highlight=False, soft_wrap=True)
    folder = RunFolder(Path(config.output_dir))
    model = str(model_config.model_name_or_path)
    # TRL would start a client of its own; see `grpo.use_engine`. And transformers would push the run's folder.
    use_vllm, config.use_vllm = config.use_vllm, False
    destination = Destination.of(config)
    config.push_to_hub = False
    if destination is not None and ranks.is_main:
        destination = destination.prepared()

    # Data.
    mode = AnswerMode(config.answer_mode)
    with ranks.local_main_process_first():
        dataset = load_dataset(config.data, answer_mode=mode)
    examples = Examples.play(dataset, config.few_shot, mode, config.step_budget)
    questions = examples.without(QuestionFilter.of(config).asked(dataset, config.data))
    require_questions(questions, config)
    held_out = choose_questions(dataset, Split.EVAL, config.eval_episodes)
    evaluations = RunEvaluations(folder, dataset, config.data, held_out, mode, config.seed, ranks, console)
    rewards = rewards_of(config.reward_functions)
    try_rewards(rewards, dataset, mode)
    tokenizer = load_tokenizer(model_config, trust_remote_code=config.trust_remote_code)
    say(f"data    {config.data}: {len(questions):,} questions to train on, {len(held_out):,} to evaluate on")

    with ExitStack() as stack:
        if ranks.is_main and not config.resume_from_checkpoint:
            stack.enter_context(remove_on_failure(folder.path, lambda: not folder.has_trained))
        token = token_of(config.env_token)
        environments = open_environments(config.env_server, token, dataset, config.environment, mode)
        stack.enter_context(closing(environments))
        loop = stack.enter_context(RolloutLoop())
        if use_vllm:
            rank = model_config.lora_r if model_config.use_peft else 0
            start = server_command(model, config.weight_sync, rank)
            find_servers(server_urls(config), config.vllm_server_timeout, start, ranks, loop)
        environments.prepare([*questions, *held_out])

        # The trainer, with the policy.
        trainer = build_trainer(config, model_config, tokenizer, questions, held_out, rewards)
        chat = ChatFormat(tokenizer, ChatSettings.of(config, config.chat_template_kwargs), examples.conversations)
        stop_at_turns_ends(trainer, chat)
        say(f"policy  {model}: {_size(trainer.model)}, on {config.device.type}")
        setup = RolloutSetup(trainer, chat, config, ranks, loop, use_vllm)
        settings = setup.settings
        advise("sqlenv train", chat.lines)
        play = replace(
            config.play_settings(),
            chat_template_kwargs=chat.settings.chat_template_kwargs,
            max_context_length=settings.budget.max_context,
        )
        if room := trainer.try_saving(play.save):
            say(f"disk    {room}")

        # Rollouts.
        policy = open_policy(setup, say)
        stack.callback(lambda: loop.run(policy.aclose()))
        log = None
        if ranks.is_main:
            _open_folder(folder, config, model_config, use_vllm=use_vllm, pushes=destination is not None)
            log = stack.enter_context(closing(RunLog(folder, console)))

        def keep(step: int, records: Sequence[EpisodeRecord]) -> None:
            # Each rank makes the lines of its own: the main one alone would be the slower the more ranks there are.
            for lines in ranks.gather_on_main(episode_lines(step, records)):
                if log is not None:
                    log.write_episodes(lines)

        lag = BatchShape.of(config).lag(config.staleness)
        adaptive, guided = None, None
        if config.reward_weighting == "adaptive":
            adaptive = AdaptiveWeights(weights_of(rewards, config.reward_weights), lag)
        if config.guided_starts:
            databases = stack.enter_context(closing(DatabasePool(dataset.databases, config.environment.sandbox)))
            guided = GuidedStarts(dataset, databases, mode, lag)
        batches = Batches(
            dataset,
            EpochOrder([q.question_id for q in questions], config.seed, shuffle=config.shuffle_dataset),
            config,
            ranks,
            loop,
            RolloutClient(policy.engine, environments, chat, settings),
            rewards,
            adaptive,
            guided,
            on_batch=keep,
        )
        greedy = RolloutClient(policy.engine, environments, chat, replace(settings, temperature=0.0))

        def evaluate_on_the_way() -> EvaluationSummary | None:
            step = trainer.state.global_step
            known = evaluations.known(step)
            if known is not None:
                return known
            trainer.sync_engine()
            summary = evaluations.during_training(step, greedy, loop, stopping)
            if stopping.agreed():
                stopping.stop_training(trainer.args, trainer.state, trainer.control)
            return summary

        trainer.train_on(batches, policy, evaluate_on_the_way)
        if log is not None:
            trainer.add_callback(log)
            trainer.add_callback(HealthMonitor(folder, RunInfo.of(config, ranks.count), say))
        trainer.add_callback(StopAfterStep(stopping))
        states = []
        if adaptive is not None:
            states.append(Saved(adaptive, "reward_weights.json", "--reward_weighting adaptive"))
        if guided is not None:
            states.append(Saved(guided, "guided_starts.json", "--guided_starts"))
        trainer.add_callback(evaluations)
        trainer.add_callback(SaveStates(play, states))

        # Evaluate, train, evaluate.
        def evaluate(label: str, name: str) -> EvaluationSummary | None:
            policy.sync_weights()
            return evaluations.policy(label, name, trainer.state.global_step, greedy, loop)

        if not config.resume_from_checkpoint:
            if held_out:
                say("evaluating random, oracle and policy")
            if ranks.is_main:
                evaluations.scripted("random", environments)
                evaluations.scripted("oracle", environments)
            evaluate("before", model)
        stopping.begin_training(ranks)
        length = f"{config.max_steps} steps" if config.max_steps > 0 else f"{config.num_train_epochs:g} epochs"
        say(f"training for {length}, {config.generation_batch_size} episodes at a time, into {folder.path}")
        path = folder.path / RUN_MODEL

        def save() -> Path:
            return trainer.save_policy(path, play.save)

        with nullcontext() if trainer.is_sharded else policy_kept(save, lambda: trainer.state.global_step):
            trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        if stopping.stopped_after is not None:
            return
        save()
        if stopping.end_training(path, config.data):
            return
        is_best = config.load_best_model_at_end and trainer.state.best_model_checkpoint is not None
        step = trainer.state.best_global_step if is_best else trainer.state.global_step
        if not evaluations.take_over(step, str(path), is_best):
            summary = evaluate("after", str(path))
            if summary is not None:
                trainer.log_evaluation(summary)
        stopping.conclude()

    if ranks.is_main:
        _report(folder, config, evaluations, trainer, destination, stopping, console)


def _open_folder(
    folder: RunFolder, config: SQLEnvConfig, model_config: ModelConfig, *, use_vllm: bool, pushes: bool
) -> None:
    """Create the run's folder with config.json, or open it to go on in it."""
    if config.resume_from_checkpoint:
        RunFolder.open(folder.path)
        return
    facts: dict[str, Any] = {
        "sqlenv": config.to_log(),
        "grpo": {**config.trl_dict(), "use_vllm": use_vllm, "push_to_hub": pushes},
        "model": asdict(model_config),
        "versions": versions(),
        "departures": config.changed,
        "machine": provenance(),
    }
    notes = Path(str(model_config.model_name_or_path)) / BASE_NOTES
    if notes.is_file():
        facts["base_notes"] = notes.read_text(encoding="utf-8")
    RunFolder.create(folder.path, facts)


def _report(
    folder: RunFolder,
    config: SQLEnvConfig,
    evaluations: RunEvaluations,
    trainer: SQLEnvTrainer,
    destination: Destination | None,
    stopping: StopSignals,
    console: Console,
) -> None:
    """Print the tables, write the report, push the policy, and say what to do next."""
    evaluated = folder.evaluations()
    if evaluated:
        summaries = {evaluation.label: evaluation.summary for evaluation in evaluated}
        unseen = "unseen databases" if evaluations.unseen_databases else "unseen questions"
        title = f"{config.data}, {unseen}, greedy"
        for table in (success_table(summaries, title), group_table("difficulty", summaries, intervals=False)):
            if table is not None:
                console.print(for_terminal(table))
    report = write_report(folder.path)
    trainer.save_state()  # it says that the run is finished; see `trainer.eval.output_folder`
    console.print(f"policy  {folder.path / RUN_MODEL}\nreport  {report}", highlight=False)
    if destination is not None:
        url = publish(folder.path, destination, trust_remote_code=config.trust_remote_code)
        console.print(f"pushed  {url}", highlight=False)
    if not stopping.part:
        run, data = str(folder.path), str(config.data)
        compared = [["compare", f"{run}:before", run]] if len(evaluated) > 1 else []
        further = what_next(["view", run], *compared, ["chat", run, "--data", data])
        console.print(further, highlight=False, soft_wrap=True)


def _size(model: nn.Module) -> str:
    """How many parameters a model has, and how many of them are trained, where those are not all."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rest = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    part = f", {trained / 1e6:.1f} of them trained" if rest else ""
    return f"{(trained + rest) / 1e6:.1f} million parameters{part}"
