"""`sqlenv train --dry_run true`: everything that can be wrong with a run, found before it starts.

Flags are resolved as for a run. Data is loaded, the model's config and tokenizer are read, the chat template is tried,
an episode is begun on each environment, inference servers are asked what they serve, the Hub is asked whether it
accepts the token where the policy is to be pushed, and memory is estimated. No weights are loaded, nothing is trained,
and nothing is written where the run would write, nor on the Hub.

The plan is printed. What is in the way is said in sentences, all of them at once, and the exit status is then 2.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from trl import GRPOConfig, ModelConfig, get_peft_config

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question, Split
from env_server.errors import SQLEnvError
from env_server.types import AnswerMode, SQLObservation
from inference.engine import EngineError
from inference.launch.plan import WeightSyncMode
from inference.vllm.addresses import every_server
from inference.vllm.api import ReplicaError, ReplicaUnavailableError, VLLMServer
from inference.weight_files import check_shapes, check_weights
from inference.weights.device_facts import Sender, WorkerFacts, allocator_settings, ask, facts_here, has_vllm
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.chat.prompts import first_message
from trainer.config import SQLEnvArguments, token_of
from trainer.engines import choose_weight_sync, is_served, server_command, server_urls
from trainer.eval.run_files import RunFolder
from trainer.export.hub import Destination
from trainer.models import base_config, load_tokenizer
from trainer.policy import resolve_policy
from trainer.rollout.environments import open_environments
from trainer.rollout.examples import Examples
from trainer.rollout.rewards import rewards_of, try_rewards, weights_of
from trainer.training.arguments import require_questions
from trainer.training.memory import GIB, Estimate, estimate, shape_of, shapes_of
from trainer.training.memory_plan import bits_of, device_of, load_of, memory_table, remedy
from trainer.training.prerequisites import DryRunError, compiler, unprepared
from trainer.training.questions import QuestionFilter

SERVER_S = 60.0
"""For a server's answer; what it says of its settings takes it seconds."""
TIGHT = 0.9
"""Share of the memory from which on the plan says that it is tight."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


@dataclass
class Plan:
    """What is known of a run so far: rows of the tables, and what is in the way."""

    rows: list[tuple[str, Text]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def say(self, name: str, text: str | Text) -> None:
        """Add a row."""
        self.rows.append((name, Text(text) if isinstance(text, str) else text))

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """Take what is wrong in the block as a problem, and go on after it."""
        try:
            yield
        except (SQLEnvError, EngineError, OSError, ValueError) as error:
            text = " ".join(str(error).split())
            self.problems.append(text)
            self.say(name, Text(text, "red"))


def dry_run(
    arguments: SQLEnvArguments, grpo: GRPOConfig, model_config: ModelConfig, console: Console
) -> Estimate | None:
    """Check everything and print the plan; returns the memory that it estimates. Raises DryRunError."""
    plan = Plan()
    run = _Run(arguments, grpo, model_config, plan)
    run.check()
    table = Table(title=f"sqlenv train, {grpo.output_dir}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in plan.rows:
        table.add_row(*row)
    console.print(table)
    if run.memory is not None:
        console.print(memory_table(run.memory, run.device))
    if plan.problems:
        raise DryRunError("this run cannot work: " + "; ".join(plan.problems))
    console.print("Nothing is in the way of this run.")
    return run.memory


class _Run:
    """The checks, in the order in which a run would meet what they look for."""

    def __init__(self, arguments: SQLEnvArguments, grpo: GRPOConfig, model_config: ModelConfig, plan: Plan) -> None:
        self._arguments = arguments
        self._grpo = grpo
        self._model_config = model_config
        self._plan = plan
        self._answer_mode = AnswerMode(arguments.answer_mode)
        self.device = device_of(arguments, grpo)
        self.memory: Estimate | None = None

    def check(self) -> None:
        """Do all of them; each one that fails leaves out what it would have told."""
        plan = self._plan
        dataset = tokenizer = config = adapter = observation = None
        with plan.checking("output"):
            self._check_output()
        with plan.checking("hub"):
            self._check_hub()
        with plan.checking("data"):
            dataset = self._check_data()
        with plan.checking("model"):
            config, adapter = self._check_model()
        with plan.checking("tokenizer"):
            tokenizer = load_tokenizer(self._model_config, trust_remote_code=self._grpo.trust_remote_code)
            self._check_vocabulary(tokenizer, config)
        if dataset is not None:
            with plan.checking("environments"):
                observation = self._check_environments(dataset)
        prompt = 0
        if dataset is not None and tokenizer is not None and observation is not None:
            with plan.checking("template"):
                prompt = self._check_template(dataset, tokenizer, observation, config)
        if self._grpo.use_vllm:
            with plan.checking("inference"):
                self._check_servers(config, adapter, prompt)
        else:
            plan.say("inference", "Hugging Face generate, in this process")
        self._say_steps(dataset)
        if self.device.on_gpu and not self._arguments.dry_run_gpu:  # else it is another machine that would train
            with plan.checking("compiler"):
                plan.say(
                    "compiler", compiler(os.environ, shutil.which, Path(sysconfig.get_path("include", "posix_prefix")))
                )
        if config is not None:
            with plan.checking("memory"):
                self._check_memory(config, adapter, prompt)

    def _check_output(self) -> None:
        path = Path(self._grpo.output_dir)
        if self._grpo.resume_from_checkpoint:
            checkpoint = Path(str(self._grpo.resume_from_checkpoint))
            RunFolder.open(path)
            if not (checkpoint / "trainer_state.json").is_file():
                raise DryRunError(f"--resume_from_checkpoint {checkpoint} is no checkpoint of a run")
            self._plan.say("output", f"{path}, going on from {checkpoint.name}")
            return
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise DryRunError(f"--output_dir {path}: {there} cannot be written to by user {os.getuid()}")
        self._plan.say("output", f"{path}, {shutil.disk_usage(there).free / GIB:,.0f} GiB free")

    def _check_hub(self) -> None:
        destination = Destination.of(self._grpo)
        if destination is not None:
            destination.check_token()
            self._plan.say("hub", f"the policy will be pushed to {destination.repo}; the token is valid")

    def _check_data(self) -> Dataset:
        dataset = load_dataset(self._arguments.data, answer_mode=self._answer_mode)
        train, held_out = self._asked(dataset), dataset.select(Split.EVAL)
        self._plan.say(
            "data",
            f"{self._arguments.data}, {self._answer_mode.value} mode: {_extent(train)} to train on, "
            f"{_extent(held_out)} to evaluate on",
        )
        require_questions(train, self._grpo, self._arguments.reward_functions)
        try_rewards(rewards_of(self._arguments.reward_functions), dataset, self._answer_mode)
        return dataset

    def _asked(self, dataset: Dataset) -> list[Question]:
        return QuestionFilter.of(self._arguments).asked(dataset, self._arguments.data)

    def _check_model(self) -> tuple[PretrainedConfig, PeftConfig | None]:
        name = str(self._model_config.model_name_or_path)
        policy = resolve_policy(name, self._model_config.model_revision)
        config = base_config(policy, trust_remote_code=self._grpo.trust_remote_code)
        folder = Path(policy.base.location)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            raise DryRunError(f"{folder} has a config and no weights ({', '.join(WEIGHT_FILES)})")
        adapter = None
        if policy.adapter is not None:
            place = policy.adapter.place
            adapter = PeftConfig.from_pretrained(place.location, revision=place.revision)
            adapter.inference_mode = False
        elif self._model_config.use_peft:
            adapter = get_peft_config(self._model_config)
        if folder.is_dir():
            expected = shapes_of(config, trust_remote_code=self._grpo.trust_remote_code)
            check_shapes(check_weights(folder), expected, str(folder))
        kind = "all weights" if adapter is None else f"LoRA of rank {getattr(adapter, 'r', '?')}"
        bits = bits_of(self._model_config)
        precision = f"{self._model_config.dtype or 'float32'}{f', {bits} bits' if bits else ''}"
        computes = "bfloat16" if self._grpo.bf16 else "float16" if self._grpo.fp16 else "no mixed precision"
        self._plan.say("model", f"{name} ({config.model_type}), {kind}, {precision}, {computes}")
        return config, adapter

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None) -> None:
        words = config.get_text_config(decoder=True).vocab_size if config is not None else math.inf
        if len(tokenizer) > words:
            raise DryRunError(
                f"the tokenizer has {len(tokenizer):,} tokens and the model {words:,}; they do not belong together"
            )

    def _check_environments(self, dataset: Dataset) -> SQLObservation:
        arguments = self._arguments
        token = token_of(arguments.env_token)
        environments = open_environments(arguments.env_server, token, dataset, arguments.environment, self._answer_mode)
        longest = max(self._asked(dataset), key=lambda question: len(question.text))
        with closing(environments), environments.blocking() as session:
            observation = session.reset(question_id=longest.question_id)
        self._plan.say(
            "environments", f"{arguments.env_server}, {arguments.step_budget} steps an episode; one was begun"
        )
        return observation

    def _check_template(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        observation: SQLObservation,
        config: PretrainedConfig | None,
    ) -> int:
        arguments = self._arguments
        examples = Examples.play(dataset, arguments.few_shot, self._answer_mode, arguments.step_budget)
        settings = ChatSettings.of(arguments, self._grpo.chat_template_kwargs)
        chat = ChatFormat(tokenizer, settings, examples.conversations)
        for line in chat.lines:
            self._plan.say("thinking", line)
        prompt = len(chat.prompt_ids(first_message(observation)))
        turn = arguments.max_turn_length + chat.reasoning_length
        self._plan.say("template", f"the prompt of the longest question is {prompt} tokens, a turn at most {turn}")
        context = self._context(config)
        if prompt + turn > context:
            raise DryRunError(
                f"the context of {context} tokens does not hold the prompt of {prompt} and a turn of {turn}; lower "
                "--max_turn_length"
            )
        return prompt

    def _context(self, config: PretrainedConfig | None) -> int:
        if config is None:
            return sum((self._grpo.max_completion_length, self._arguments.max_turn_length))
        return int(config.get_text_config(decoder=True).max_position_embeddings)

    def _check_servers(self, config: PretrainedConfig | None, adapter: PeftConfig | None, prompt: int) -> None:
        needed = min(self._context(config), prompt + self._grpo.max_completion_length)
        name = resolve_policy(
            str(self._model_config.model_name_or_path), self._model_config.model_revision
        ).base.location
        for url in every_server(server_urls(self._grpo)):
            with self._plan.checking("inference"):
                self._plan.say("inference", asyncio.run(self._ask(url, name, adapter, needed)))

    async def _ask(self, url: str, name: str, adapter: PeftConfig | None, needed: int) -> str:
        """What a server says of itself. Raises DryRunError, ReplicaError."""
        timeout = httpx.Timeout(SERVER_S, connect=5.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            server = VLLMServer(url, client)
            try:
                await server.health(SERVER_S)
            except ReplicaUnavailableError as error:
                command = server_command(name, self._arguments.weight_sync, getattr(adapter, "r", 0))
                raise DryRunError(f"{error}; start one with `{command}`") from error
            served = await server.served_model()
            settings = await _settings_of(server)
            workers = await _workers_of(server)
        words = [f"{url} serves {served.name}, {served.max_model_len:,} tokens"]
        if not is_served(name, served.name, workers):
            words.append(f"the policy is {name}: the first push of the weights tells whether it is the same model")
        if served.max_model_len < needed:
            words.append(f"rows may be {needed:,}: longer episodes drop their oldest turns")
        transport = self._transport(adapter, workers)
        words.append(f"weights by {transport.value}" if transport else "weights by what suits that machine's GPU")
        if transport and settings and (wrong := unprepared(transport, getattr(adapter, "r", 0), settings)):
            raise DryRunError(f"{url} {wrong}")
        return "; ".join(words)

    def _transport(self, adapter: PeftConfig | None, workers: Sequence[WorkerFacts]) -> WeightSyncMode | None:
        """Return the transport of the weights; None where it depends on a GPU that is not here."""
        arguments = self._arguments
        asked, has_cuda = arguments.weight_sync, self.device.on_gpu and torch.cuda.is_available()
        if asked == "auto" and adapter is None and self.device.on_gpu and not has_cuda:
            return None
        sender = Sender(has_cuda, has_vllm(), self._grpo.world_size, allocator_settings())
        here = WorkerFacts() if sender.refusal(WeightSyncMode.NCCL) else facts_here(self._grpo.device)
        return choose_weight_sync(asked, adapter is not None, sender, here, (workers,))

    def _say_steps(self, dataset: Dataset | None) -> None:
        grpo = self._grpo
        episodes = grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps * grpo.world_size
        questions = episodes // (grpo.num_generations * grpo.num_iterations)
        steps = grpo.max_steps
        if steps <= 0 and dataset is not None:
            steps = math.ceil(grpo.num_train_epochs * len(self._asked(dataset)) / max(1, questions))
        ranks = f" on {grpo.world_size} ranks" if grpo.world_size > 1 else ""
        tokens = grpo.max_completion_length
        self._plan.say(
            "steps",
            f"{steps:,} of {questions} questions x {grpo.num_generations} episodes{ranks}; {episodes} episodes of at "
            f"most {tokens:,} tokens, {episodes * tokens:,} in all",
        )
        rewards = rewards_of(self._arguments.reward_functions)
        weights = zip(rewards, weights_of(rewards, grpo.reward_weights), strict=True)
        self._plan.say(
            "learning",
            f"{grpo.loss_type}, rate {grpo.learning_rate:g} ({grpo.lr_scheduler_type.value}), beta {grpo.beta:g}, "
            f"temperature {grpo.temperature:g}, {self._arguments.reward_weighting} reward weights "
            f"({', '.join(f'{reward.name} {weight:g}' for reward, weight in weights)}), {grpo.optim.value}",
        )
        self._plan.say("evaluation", f"{self._arguments.eval_episodes} questions, before and after, greedily")

    def _check_memory(self, config: PretrainedConfig, adapter: PeftConfig | None, prompt: int) -> None:
        shape = shape_of(config, adapter, trust_remote_code=self._grpo.trust_remote_code)
        width = min(self._context(config), prompt + self._grpo.max_completion_length)
        load = load_of(
            self._arguments, self._grpo, self._model_config, config, self.device, adapter is not None, prompt, width
        )
        self.memory = estimate(shape, load)
        needed, there = self.memory.total, self.device.bytes
        self._plan.say(
            "memory",
            f"about {needed / GIB:.1f} GiB of the {there / GIB:.1f} of {self.device.name}"
            + (", which is tight" if TIGHT * there < needed <= there else ""),
        )
        if needed > there:
            raise DryRunError(
                f"about {needed / GIB:.1f} GiB are needed, and {self.device.name} has {there / GIB:.1f}; "
                f"{remedy(shape, load, there, self._grpo)}"
            )


def _extent(questions: Sequence[Question]) -> str:
    return f"{len(questions):,} questions on {len({question.db_id for question in questions})} databases"


async def _settings_of(server: VLLMServer) -> dict[str, Any]:
    """What a server tells those who may change its weights; empty when it does not."""
    try:
        return dict(await server.settings())
    except (ReplicaError, LookupError, TypeError):
        return {}


async def _workers_of(server: VLLMServer) -> tuple[WorkerFacts, ...]:
    """What a server's workers say of themselves; nothing where it does not let them."""
    try:
        return await ask(server)
    except ReplicaError:
        return ()
