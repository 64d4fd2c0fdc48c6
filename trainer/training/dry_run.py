"""`sqlenv train --dry_run`: a preflight that finds what is wrong with a run before it starts.

Flags are resolved as for a run. It loads the data, the model's config and tokenizer, tries the chat template, begins an
episode on each environment, queries the inference servers, and checks the Hub token where the policy is to be pushed.
On the GPU that is here it takes two optimizer steps on made-up rows of the greatest length, with the model, optimizer
and loss of the run; where a micro-batch does not fit it is halved until one does, so that the flags that fit are known.
Elsewhere memory is estimated (`trainer.training.memory`). Nothing is written where the run would write, nor on the Hub.

The plan is one table. Every problem is reported, all at once, and the exit status is then 2.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import shutil
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from datasets import Dataset as HubDataset
from peft import PeftConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig, PreTrainedTokenizerBase, SchedulerType
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question, Split
from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from inference.engine import EngineError
from inference.launch.plan import WeightSyncMode
from inference.out_of_memory import is_out_of_memory, release
from inference.vllm.api import ReplicaError, ReplicaUnavailableError, VLLMServer, WorkerFacts
from inference.vllm.engine import VLLMSettings
from inference.vllm.fleet import every_server
from inference.weight_files import check_shapes, check_weights
from inference.weights.nccl import facts_here, has_vllm, why_not_from
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.chat.prompts import first_message
from trainer.config import token_of
from trainer.engines import choose_weight_sync, is_served, server_command, server_urls
from trainer.eval.run_files import RunFolder
from trainer.export.hub import Destination
from trainer.flags.configs import SQLEnvConfig
from trainer.grpo import SQLEnvTrainer, model_arguments, use_engine
from trainer.models import base_config, load_tokenizer
from trainer.out_of_memory import smaller_batch
from trainer.policy import resolve_policy
from trainer.rollout.environments import open_environments
from trainer.rollout.players import Examples
from trainer.rollout.rewards import rewards_of, try_rewards, weights_of
from trainer.training.checkpointing import require_room
from trainer.training.memory import GIB, estimate, main_memory, meta_model, peak
from trainer.training.questions import QuestionFilter, require_questions

SERVER_S = 60.0
"""For a server's answer; its settings take it seconds."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
T = TypeVar("T")


class DryRunError(SQLEnvError):
    """The run cannot work; the text holds a sentence for each problem."""


def dry_run(config: SQLEnvConfig, model_config: ModelConfig, console: Console, *, probe: bool = True) -> float:
    """Check everything and print the plan; returns the bytes of memory that training needs. Raises DryRunError.

    `probe`: a GPU that is here measures them; False for a policy that has no weights yet.
    """
    preflight = _Preflight(config, model_config, probe)
    preflight.check()
    table = Table(title=f"sqlenv train, {config.output_dir}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in preflight.rows:
        table.add_row(*row)
    console.print(table)
    if preflight.problems:
        raise DryRunError("this run cannot work: " + "; ".join(preflight.problems))
    console.print("preflight OK")
    return preflight.memory


class _Preflight:
    """The checks, in the order in which a run would meet what they look for."""

    def __init__(self, config: SQLEnvConfig, model_config: ModelConfig, probe: bool) -> None:
        self._config = config
        self._model_config = model_config
        self._answer_mode = AnswerMode(config.answer_mode)
        self._gpu_here = torch.cuda.is_available() and not config.use_cpu
        self._probe = probe and self._gpu_here
        self.rows: list[tuple[str, Text]] = []
        self.problems: list[str] = []
        self.memory = math.nan

    def say(self, name: str, text: str, style: str = "") -> None:
        """Add a row to the table."""
        self.rows.append((name, Text(text, style)))

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """Take an error in the block as a problem, and continue after it."""
        try:
            yield
        except (SQLEnvError, EngineError, OSError, ValueError) as error:
            text = " ".join(str(error).split())
            self.problems.append(text)
            self.say(name, text, "red")

    def check(self) -> None:
        """Run all checks; those that need the outcome of a failed one are left out."""
        dataset = tokenizer = config = adapter = None
        asked: list[Question] = []
        prompt = 0
        with self.checking("output"):
            self._check_output()
        with self.checking("hub"):
            if (destination := Destination.of(self._config)) is not None:
                destination.check_token()
                self.say("hub", f"the policy will be pushed to {destination.repo}; the token is valid")
        with self.checking("data"):
            dataset, asked = self._check_data()
        with self.checking("model"):
            config, adapter = self._check_model()
        with self.checking("tokenizer"):
            tokenizer = self._check_tokenizer(config)
        if dataset is not None:
            with self.checking("environments"):
                prompt = self._check_episode(dataset, asked, tokenizer, config)
        if self._config.use_vllm:
            for url in every_server(server_urls(self._config)):
                with self.checking("inference"):
                    self.say("inference", asyncio.run(self._query(url, adapter, self._width(config, prompt))))
        else:
            self.say("inference", "Hugging Face generate, in this process")
        self._say_steps(len(asked))
        if config is not None and tokenizer is not None:
            with self.checking("memory"):
                # It loads and trains the policy: with other problems, its error would not be the first.
                self._check_memory(config, adapter, tokenizer, prompt, probe=self._probe and not self.problems)

    def _check_output(self) -> None:
        path = Path(self._config.output_dir)
        if self._config.resume_from_checkpoint:
            checkpoint = Path(str(self._config.resume_from_checkpoint))
            RunFolder.open(path)
            if not (checkpoint / "trainer_state.json").is_file():
                raise DryRunError(f"--resume_from_checkpoint {checkpoint} is not a checkpoint of a run")
            self.say("output", f"{path}, resumed from {checkpoint.name}")
            return
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise DryRunError(f"--output_dir {path}: {parent} is not writable by user {os.getuid()}")
        self.say("output", f"{path}, {shutil.disk_usage(parent).free / GIB:,.0f} GiB free")

    def _check_data(self) -> tuple[Dataset, list[Question]]:
        dataset = load_dataset(self._config.data, answer_mode=self._answer_mode)
        asked = QuestionFilter.of(self._config).asked(dataset, self._config.data)
        self.say(
            "data",
            f"{self._config.data}, {self._answer_mode.value} mode: {_extent(asked)} to train on, "
            f"{_extent(dataset.select(Split.EVAL))} to evaluate on",
        )
        require_questions(asked, self._config)
        try_rewards(rewards_of(self._config.reward_functions), dataset, self._answer_mode)
        return dataset, asked

    def _check_model(self) -> tuple[PretrainedConfig, PeftConfig | None]:
        name = str(self._model_config.model_name_or_path)
        policy = resolve_policy(name, self._model_config.model_revision)
        config = base_config(policy, trust_remote_code=self._config.trust_remote_code)
        folder = Path(policy.base.location)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            raise DryRunError(f"{folder} has a config and no weights ({', '.join(WEIGHT_FILES)})")
        adapter = None
        if policy.adapter is not None:
            place = policy.adapter.ref
            adapter = PeftConfig.from_pretrained(place.location, revision=place.revision)
            adapter.inference_mode = False
        elif self._model_config.use_peft:
            adapter = get_peft_config(self._model_config)
        if folder.is_dir():
            tensors = meta_model(config, self._config.trust_remote_code).state_dict()
            expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            check_shapes(check_weights(folder), expected, str(folder))
        trained = "all weights" if adapter is None else f"LoRA of rank {getattr(adapter, 'r', '?')}"
        bits = 4 if self._model_config.load_in_4bit else 8 if self._model_config.load_in_8bit else 0
        precision = f"{self._model_config.dtype or 'float32'}{f', {bits} bits' if bits else ''}"
        computes = "bfloat16" if self._config.bf16 else "float16" if self._config.fp16 else "no mixed precision"
        self.say("model", f"{name} ({config.model_type}), {trained}, {precision}, {computes}")
        return config, adapter

    def _check_tokenizer(self, config: PretrainedConfig | None) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(self._model_config, trust_remote_code=self._config.trust_remote_code)
        size = config.get_text_config(decoder=True).vocab_size if config is not None else math.inf
        if len(tokenizer) > size:
            raise DryRunError(
                f"the tokenizer has {len(tokenizer):,} tokens and the model {size:,}; they do not belong together"
            )
        return tokenizer

    def _check_episode(
        self,
        dataset: Dataset,
        asked: Sequence[Question],
        tokenizer: PreTrainedTokenizerBase | None,
        config: PretrainedConfig | None,
    ) -> int:
        """Begin an episode of the longest question, and return the tokens of its prompt."""
        grpo = self._config
        environments = open_environments(
            grpo.env_server, token_of(grpo.env_token), dataset, grpo.environment, self._answer_mode
        )
        longest = max(asked, key=lambda question: len(question.text))
        with closing(environments), environments.blocking() as session:
            observation = session.reset(question_id=longest.question_id)
        self.say("environments", f"{grpo.env_server}, {grpo.step_budget} steps per episode; an episode was begun")
        prompt = 0
        if tokenizer is None:
            return prompt
        with self.checking("template"):
            examples = Examples.play(dataset, grpo.few_shot, self._answer_mode, grpo.step_budget)
            chat = ChatFormat(tokenizer, ChatSettings.of(grpo, grpo.chat_template_kwargs), examples.conversations)
            for line in chat.lines:
                self.say("thinking", line)
            prompt = len(chat.prompt_ids(first_message(observation)))
            turn = grpo.max_turn_length + chat.reasoning_length
            self.say("template", f"the prompt of the longest question is {prompt} tokens, a turn at most {turn}")
            if config is not None and prompt + turn > (context := _context(config)):
                raise DryRunError(
                    f"the context of {context} tokens does not hold the prompt of {prompt} and a turn of {turn}; lower "
                    "--max_turn_length"
                )
        return prompt

    def _width(self, config: PretrainedConfig | None, prompt: int) -> int:
        """The tokens of the longest row."""
        whole = prompt + self._config.max_completion_length
        return whole if config is None else min(_context(config), whole)

    async def _query(self, url: str, adapter: PeftConfig | None, needed: int) -> str:
        """What a server reports about itself. Raises DryRunError, ReplicaError."""
        rank = getattr(adapter, "r", 0)
        policy = resolve_policy(str(self._model_config.model_name_or_path), self._model_config.model_revision)
        name = policy.base.location
        async with VLLMSettings(request_timeout_s=SERVER_S).client() as client:
            server = VLLMServer(url, client)
            try:
                await server.health(SERVER_S)
            except ReplicaUnavailableError as error:
                command = server_command(name, self._config.weight_sync, rank)
                raise DryRunError(f"{error}; start one with `{command}`") from error
            served = await server.served_model()
            nothing: Mapping[str, Any] = {}
            settings = await _if_allowed(server.settings(), nothing)
            workers = await _if_allowed(server.facts(), ())
        parts = [f"{url} serves {served.name}, {served.max_model_len:,} tokens"]
        if not is_served(name, served.name, workers):
            parts.append(f"the policy is {name}: the first weight sync tells whether it is the same model")
        if served.max_model_len < needed:
            parts.append(f"rows may be {needed:,}: longer episodes drop their oldest turns")
        transport = self._transport(adapter, workers)
        parts.append(f"weights by {transport.value}" if transport else "weights by what suits that machine's GPU")
        if transport and settings and (wrong := unprepared(transport, rank, settings)):
            raise DryRunError(f"{url} {wrong}")
        return "; ".join(parts)

    def _transport(self, adapter: PeftConfig | None, workers: Sequence[WorkerFacts]) -> WeightSyncMode | None:
        """Return the transport of the weights; None where it depends on a GPU that is not here."""
        asked = self._config.weight_sync
        if asked == "auto" and adapter is None and self._config.plans_gpu:
            return None
        cannot = why_not_from(self._gpu_here, has_vllm())
        here = WorkerFacts() if cannot else facts_here(self._config.device)
        return choose_weight_sync(asked, adapter is not None, here, (workers,))

    def _say_steps(self, asked: int) -> None:
        grpo = self._config
        episodes = grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps * grpo.world_size
        questions = episodes // (grpo.num_generations * grpo.num_iterations)
        steps = grpo.max_steps
        if steps <= 0:
            steps = math.ceil(grpo.num_train_epochs * asked / max(1, questions))
        ranks = f" on {grpo.world_size} ranks" if grpo.world_size > 1 else ""
        tokens = grpo.max_completion_length
        self.say(
            "steps",
            f"{steps:,} of {questions} questions x {grpo.num_generations} episodes{ranks}; {episodes} episodes of at "
            f"most {tokens:,} tokens, {episodes * tokens:,} in all",
        )
        rewards = rewards_of(self._config.reward_functions)
        weights = zip(rewards, weights_of(rewards, grpo.reward_weights), strict=True)
        self.say(
            "learning",
            f"{grpo.loss_type}, rate {grpo.learning_rate:g} ({SchedulerType(grpo.lr_scheduler_type).value}), "
            f"beta {grpo.beta:g}, temperature {grpo.temperature:g}, {self._config.reward_weighting} reward weights "
            f"({', '.join(f'{reward.name} {weight:g}' for reward, weight in weights)}), {grpo.optim.value}",
        )
        self.say("evaluation", f"{self._config.eval_episodes} questions, before and after, greedily")

    def _check_memory(
        self,
        config: PretrainedConfig,
        adapter: PeftConfig | None,
        tokenizer: PreTrainedTokenizerBase,
        prompt: int,
        *,
        probe: bool,
    ) -> None:
        grpo = self._config
        width = self._width(config, prompt)
        evaluated = grpo.eval_episodes if grpo.eval_episodes >= 0 else grpo.max_concurrency
        batch = max(grpo.per_device_train_batch_size * grpo.steps_per_generation, evaluated)
        on_gpu = self._gpu_here or grpo.plans_gpu
        parts = estimate(
            *(config, adapter, grpo, self._model_config),
            prompt=prompt,
            width=width,
            generating=0 if grpo.use_vllm else min(grpo.max_concurrency, batch),
            on_gpu=on_gpu,
        )
        self.memory = peak(parts)
        how = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        how = f"estimated for the longest rows ({how}; training and generation take turns)"
        if grpo.plans_gpu:
            self.say("memory", f"about {self.memory / GIB:.1f} GiB of a GPU (there is none here), {how}")
            return
        with self.checking("disk"):
            self.say("disk", require_room(grpo, parts["gradients"], parts["optimizer"]))
        where, there = "of this machine", main_memory()
        if self._gpu_here:
            where, there = f"free on {torch.cuda.get_device_name()}", float(torch.cuda.mem_get_info()[0])
        rows = grpo.per_device_train_batch_size
        if probe:
            fitting, measured = measure(grpo, self._model_config, tokenizer, prompt, width)
            generation = (
                peak({**parts, "gradients": 0.0, "activations": 0.0, "logits": 0.0}) if not grpo.use_vllm else 0
            )
            self.memory = max(measured, generation)
            how = f"measured: 2 steps of {fitting} rows x {width:,} tokens, {measured / GIB:.2f}"
            how += f"; generation {generation / GIB:.2f}, estimated" if generation else ""
            if fitting < rows:
                raise DryRunError(f"{rows} rows x {width:,} tokens do not fit; {smaller_batch(grpo, fitting)} does")
        self.say("memory", f"about {self.memory / GIB:.1f} GiB of the {there / GIB:.1f} {where}, {how}")
        if self.memory > there:
            raise DryRunError(
                f"about {self.memory / GIB:.1f} GiB are needed and {there / GIB:.1f} are there; lower "
                f"{'--max_concurrency or ' if parts['generation'] else ''}--max_completion_length, or add "
                f"--gradient_checkpointing true, --use_peft true or {smaller_batch(grpo, max(1, rows // 2))}"
            )


def unprepared(transport: WeightSyncMode, rank: int, settings: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return what a server lacks for the weights of a run, "" where it lacks nothing.

    `rank` is the adapter's, `settings` are vLLM's, section by section.
    """
    allowed = (settings.get("lora_config") or {}).get("max_lora_rank", 0)
    receives = (settings.get("weight_transfer_config") or {}).get("backend")
    match transport:
        case WeightSyncMode.LORA if rank > allowed:
            takes = f"adapters up to rank {allowed}" if allowed else "no adapters"
            fix = f"--weight_sync lora --max_lora_rank {rank}"
            return f"takes {takes}, and this one has rank {rank}; start it with {fix}"
        case WeightSyncMode.NCCL if receives != transport:
            return "takes no weights by nccl, as this run sends them; start it with --weight_sync nccl"
        case _:
            return ""


async def _if_allowed(answer: Awaitable[T], otherwise: T) -> T:
    """What a server answers those who may change its weights."""
    try:
        return await answer
    except (ReplicaError, LookupError, TypeError):
        return otherwise


def _extent(questions: Sequence[Question]) -> str:
    return f"{len(questions):,} questions on {len({question.db_id for question in questions})} databases"


def _context(config: PretrainedConfig) -> int:
    return int(config.get_text_config(decoder=True).max_position_embeddings)


def measure(
    grpo: GRPOConfig, model_config: ModelConfig, tokenizer: PreTrainedTokenizerBase, prompt: int, width: int
) -> tuple[int, float]:
    """The rows of a micro-batch that fit on this GPU, halved until they do, and the bytes at the peak.

    Raises DryRunError when one row does not fit, or a step fails. Collective: every rank calls it.
    """
    rows = grpo.per_device_train_batch_size
    while True:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            train_longest(grpo, model_config, tokenizer, prompt, width, rows)
            return rows, float(torch.cuda.max_memory_reserved())
        except (RuntimeError, CalledProcessError) as error:
            if not is_out_of_memory(error):
                # Triton compiles TRL's fused loss, with a C compiler and Python's headers.
                fix = "apt-get install gcc libc6-dev python3-dev, if it is about a compiler or Python.h"
                raise DryRunError(f"a training step fails: {' '.join(str(error).split())} ({fix})") from error
            words = release(error)
        finally:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if rows == 1:
            raise DryRunError(
                f"one row of {width:,} tokens does not fit; lower --max_completion_length, or add "
                "--gradient_checkpointing true, --use_peft true or --load_in_4bit true, or take a smaller model "
                f"({words})"
            )
        rows //= 2


class _OneAttempt(SQLEnvTrainer):
    """Raises when memory runs out, where a run goes on with half the micro-batch."""

    training_step = GRPOTrainer.training_step


class _NoEngine:
    def sync_weights(self) -> None:
        """TRL asks for it; there is no engine."""


def train_longest(
    grpo: GRPOConfig,
    model_config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt: int,
    width: int,
    rows: int,
) -> None:
    """Take two optimizer steps, each of two micro-batches of so many made-up rows. Writes nothing that stays."""

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        def made_up(length: int) -> list[list[int]]:
            return torch.randint(len(tokenizer), (len(prompts), length)).tolist()

        completion, count = width - prompt, len(prompts)
        return {
            "prompt_ids": made_up(prompt),
            "completion_ids": made_up(completion),
            "logprobs": [[-1.0] * completion] * count,
            "env_mask": [[1] * completion] * count,
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    with TemporaryDirectory(prefix="sqlenv-preflight-") as folder:
        args = copy.copy(grpo)
        args.output_dir, args.report_to, args.disable_tqdm, args.push_to_hub = folder, [], True, False
        args.save_strategy, args.load_best_model_at_end = SaveStrategy.NO, False
        args.eval_strategy, args.eval_on_start, args.logging_strategy = IntervalStrategy.NO, False, IntervalStrategy.NO
        args.max_steps, args.gradient_accumulation_steps, args.steps_per_generation, args.num_iterations = 2, 2, 2, 1
        args.per_device_train_batch_size, args.generation_batch_size = rows, 2 * rows * grpo.world_size
        args.num_generations, args.max_completion_length = 2, width - prompt
        args.reward_weights, args.use_vllm = None, False
        trainer = _OneAttempt(
            **model_arguments(args, model_config),
            reward_funcs=reward,
            args=args,
            train_dataset=HubDataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * 64 * rows),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        use_engine(trainer, _NoEngine())
        trainer.train()
