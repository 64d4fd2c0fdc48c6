"""Evaluation: the environment, the rollout client and the prompts of training, on questions of a chosen split.

`--policy` is `random`, `oracle`, or a model (a run's folder, a checkpoint or a Hub name). A model that SQLEnv trained
is played as it was in its training, on the same data: what no flag says is taken from the `sqlenv.json` beside its
weights, and a flag that says otherwise is pointed out. Models play greedily unless asked otherwise. Questions are
spread evenly over the databases, so that a limit does not favour the first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from env_server.data.loading import SYNTAX, load_dataset
from env_server.dataset import Dataset, Question, Split, in_turn
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from trainer.chat.format import ChatFormat, Conversation
from trainer.config import (
    ACTION_FORMAT_HELP,
    ENV_HELP,
    FEW_SHOT_HELP,
    SYSTEM_PROMPT_HELP,
    THINKING_HELP,
    TOKEN_HELP,
    TRACE_HELP,
    ActionFormat,
    prompt_in,
    token_of,
)
from trainer.policy.play_settings import SETTING_NAMES, PlaySettings, SavedPlay, differences, saved_play
from trainer.results.statistics import EvaluationSummary, summarize
from trainer.results.summary_table import difficulty_table, summary_table
from trainer.rollout.client import RolloutClient, RolloutSettings, derive_seed, request_for
from trainer.rollout.environments import LOCAL, AnyEnvironments, Environments, open_environments
from trainer.rollout.episodes import Episode, EpisodeRecord, record
from trainer.rollout.examples import Examples
from trainer.rollout.players import OraclePlayer, Player, RandomPlayer, play
from trainer.rollout.trace import Trace
from trainer.rollout.transcript import TokenBudget

if TYPE_CHECKING:
    # Where a model plays, its packages are imported: they take seconds, and the scripted players need none of them.
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from inference.hf.engine import HFEngine
    from inference.vllm.engine import VLLMEngine

SCRIPTED = ("random", "oracle")
VLLM_URL = "http://127.0.0.1:8000"
"""Where `sqlenv inference` serves, if it is not told otherwise."""


def choose_questions(dataset: Dataset, split: Split, limit: int) -> list[Question]:
    """The first `limit` questions of the split, taken in turn from each database; all of them for -1."""
    questions = in_turn(dataset.select(split))
    return questions if limit < 0 else questions[:limit]


def play_scripted(
    policy: str,
    environments: AnyEnvironments,
    questions: Sequence[Question],
    answer_mode: AnswerMode,
    seed: int,
    on_episode: Callable[[Episode], None],
) -> list[Episode]:
    """Play the questions with the random player or the oracle."""
    episodes = []
    with environments.blocking() as environment:
        for index, question in enumerate(questions):
            player: Player = (
                OraclePlayer(question, answer_mode)
                if policy == "oracle"
                else RandomPlayer(derive_seed(seed, index), answer_mode)
            )
            episode, _ = play(environment, question, player)
            episodes.append(episode)
            on_episode(episode)
    return episodes


def in_process_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    settings: RolloutSettings,
    generation_context: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
) -> HFEngine:
    """An engine on a model in this process, with room for every episode in flight; arguments as `HFEngine`'s."""
    from inference.hf.engine import HFEngine

    return HFEngine(
        model,
        stop_ids=chat.stop_ids,
        pad_id=chat.stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        max_batch=settings.max_concurrency,
        max_context=settings.budget.max_context,
        generation_context=generation_context,
    )


def play_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    environments: Environments,
    questions: Sequence[Question],
    settings: RolloutSettings,
    seed: int,
    on_episode: Callable[[Episode], None],
    chat: ChatFormat,
) -> list[Episode]:
    """Play the questions with a model in this process."""
    engine = in_process_engine(model, tokenizer, chat, settings)
    return play_on(engine, chat, environments, questions, settings, seed, on_episode)


def play_on(
    engine: HFEngine | VLLMEngine,
    chat: ChatFormat,
    environments: Environments,
    questions: Sequence[Question],
    settings: RolloutSettings,
    seed: int,
    on_episode: Callable[[Episode], None],
) -> list[Episode]:
    """Play the questions with an engine, and close it."""
    requests = [request_for(question, derive_seed(seed, index)) for index, question in enumerate(questions)]

    async def run() -> list[Episode]:
        try:
            return await RolloutClient(engine, environments, chat, settings).play(requests, on_episode)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def excluded_by_reason(dataset: Dataset) -> dict[str, int]:
    """How many questions the data set left out, by reason."""
    return dict(Counter(exclusion.reason.value for exclusion in dataset.excluded))


def summary_json(summary: EvaluationSummary, **extra: object) -> str:
    """One JSON object on one line, with `success_rate`, `interval`, `episodes` and `excluded` among its keys."""
    return json.dumps({**extra, **asdict(summary, dict_factory=_intervals_as_pairs)}, sort_keys=True)


def _intervals_as_pairs(items: list[tuple[str, Any]]) -> Any:
    """Write an `Interval` as [low, high]."""
    fields = dict(items)
    return [fields["low"], fields["high"]] if fields.keys() == {"low", "high"} else fields


def build_parser() -> argparse.ArgumentParser:
    """The flags of `sqlenv evaluate`."""
    parser = argparse.ArgumentParser(
        prog="sqlenv evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  sqlenv evaluate --policy oracle --split all\n"
        "  sqlenv evaluate --policy runs/tiny/model --episodes 300 --json\n"
        "  sqlenv evaluate --policy Qwen/Qwen2.5-0.5B-Instruct --data spider:PATH\n"
        "  sqlenv evaluate --policy runs/tiny/model --env ws://host:8000,ws://other:8000\n"
        "  sqlenv evaluate --policy runs/tiny/model --use_vllm      (after: sqlenv inference --model runs/tiny/model)",
    )
    defaults = PlaySettings()
    parser.add_argument(
        "--policy", required=True, help="random, oracle, a run's or a checkpoint's folder, or a model on the Hub"
    )
    parser.add_argument("--data", help=f"{SYNTAX} (default: the run's, else {defaults.data})")
    parser.add_argument("--split", type=Split, choices=list(Split), default=Split.EVAL, help="default: eval")
    parser.add_argument(
        "--answer_mode",
        type=AnswerMode,
        choices=list(AnswerMode),
        help=f"default: the run's, else {defaults.answer_mode}",
    )
    parser.add_argument(
        "--action_format",
        type=ActionFormat,
        choices=list(ActionFormat),
        help=f"{ACTION_FORMAT_HELP} Default: the run's.",
    )
    parser.add_argument(
        "--system_prompt",
        type=_text_of,
        dest="custom_system_prompt",
        metavar="FILE",
        help=f"{SYSTEM_PROMPT_HELP} Default: the run's.",
    )
    parser.add_argument("--few_shot", type=_not_negative, metavar="N", help=f"{FEW_SHOT_HELP} Default: the run's.")
    parser.add_argument(
        "--max_thinking_length", type=_not_negative, metavar="N", help=f"{THINKING_HELP} Default: the run's."
    )
    parser.add_argument(
        "--chat_template_kwargs", type=_json_object, help="variables of the chat template, in JSON (default: the run's)"
    )
    parser.add_argument(
        "--episodes",
        type=int,
        dest="eval_episodes",
        help="how many questions, -1 for all (default: as many as the run's evaluations had, else all)",
    )
    parser.add_argument("--temperature", type=_temperature, default=0.0, help="0 plays greedily (default)")
    parser.add_argument("--seed", type=int, help=f"default: the run's, else {defaults.seed}")
    for name, what in (
        ("step_budget", "steps in an episode"),
        ("max_completion_length", "tokens of an episode"),
        ("max_turn_length", "tokens of one turn"),
    ):
        number = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=_positive, help=f"{what} (default: the run's, else {number:,})")
    parser.add_argument(
        "--max_context_length",
        type=_positive,
        help="tokens of prompt and completion together (default: the run's, else what the model's config allows)",
    )
    parser.add_argument("--env", default=LOCAL, help=ENV_HELP)
    parser.add_argument("--env_token", help=TOKEN_HELP)
    parser.add_argument("--use_vllm", action="store_true", help="generate on vLLM servers that serve the policy")
    parser.add_argument(
        "--vllm_server_base_url", default=VLLM_URL, help=f"their URLs, separated by commas (default: {VLLM_URL})"
    )
    parser.add_argument("--max_concurrency", type=_positive, default=64, help="episodes in flight")
    parser.add_argument("--trace", metavar="FILE", help=TRACE_HELP)
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the policy")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.add_argument("--episodes_out", help="write every episode, turn by turn, to this JSONL file")
    return parser


def run(argv: Sequence[str]) -> int:
    """Evaluate as the flags say; print the table, and the JSON line when asked."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.eval_episodes is not None and (args.eval_episodes == 0 or args.eval_episodes < -1):
        parser.error(f"--episodes must be positive, or -1 for all; got {args.eval_episodes}")
    if args.episodes_out and not Path(args.episodes_out).parent.is_dir():
        parser.error(f"--episodes_out: there is no folder {Path(args.episodes_out).parent}")
    if args.trace and args.policy in SCRIPTED:
        parser.error(f"--trace is of what the episodes of a model wait for; {args.policy} waits for nothing")
    console = Console(stderr=True)
    saved = None if args.policy in SCRIPTED else _saved_with(args.policy)
    chosen = settle(args, saved)
    if saved is not None:
        for line in (f"{args.policy} is played as it was trained", *differences(chosen, saved)):
            console.print(line, highlight=False, soft_wrap=True)
    dataset = load_dataset(chosen.data, answer_mode=chosen.answer_mode)
    few_shot = 0 if args.policy in SCRIPTED else chosen.few_shot
    examples = Examples.play(dataset, few_shot, chosen.answer_mode, chosen.step_budget)
    questions = examples.without(choose_questions(dataset, args.split, chosen.eval_episodes))
    if not questions:
        parser.error(f"data set {chosen.data} has no usable question in split {args.split.value!r}")
    env_settings = EnvSettings(step_budget=chosen.step_budget)
    environments = open_environments(args.env, token_of(args.env_token), dataset, env_settings, chosen.answer_mode)
    tracing = Trace(Path(args.trace)) if args.trace else nullcontext()
    with closing(environments), tracing as trace, Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"playing as {args.policy}", total=len(questions))

        def advance(episode: Episode) -> None:
            progress.advance(bar)
            if trace is not None:
                trace.write_episode(episode)

        if args.policy in SCRIPTED:
            episodes = play_scripted(args.policy, environments, questions, chosen.answer_mode, chosen.seed, advance)
        else:
            episodes = _play_policy(args, chosen, environments, questions, examples.conversations, advance)
    records = [record(episode) for episode in episodes]
    summary = summarize(records, excluded_by_reason(dataset))
    rows = [(args.policy, summary)]
    out = Console()
    out.print(summary_table(rows, title=f"{chosen.data}, split {args.split.value}"), difficulty_table(rows))
    if dataset.excluded:
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(summary.excluded.items()))
        out.print(
            f"{len(dataset.excluded)} questions of the data set are excluded: {counts}", highlight=False, soft_wrap=True
        )
    if args.episodes_out:
        write_records(args.episodes_out, records)
    if args.json:
        print(  # noqa: T201
            summary_json(
                summary,
                policy=args.policy,
                data=chosen.data,
                split=args.split.value,
                answer_mode=chosen.answer_mode.value,
                seed=chosen.seed,
            )
        )
    return 0


def _saved_with(policy: str) -> SavedPlay | None:
    """Return what a model says of how it is to be played. Raises SQLEnvError."""
    from trainer.policy.loading import resolve_policy

    return saved_play(resolve_policy(policy).place)


def settle(args: argparse.Namespace, saved: SavedPlay | None) -> PlaySettings:
    """Return what the flags say, and where they are silent what the policy was saved with, else the defaults."""
    inherited = PlaySettings() if saved is None else saved.settings
    said = {name: value for name in SETTING_NAMES if (value := getattr(args, name)) is not None}
    own = replace(inherited, **said)
    comparable = own.data == inherited.data and args.split is Split.EVAL and inherited.eval_episodes != 0
    # A number of questions belongs to a data set and a split.
    return own if comparable or args.eval_episodes is not None else replace(own, eval_episodes=-1)


def _play_policy(
    args: argparse.Namespace,
    chosen: PlaySettings,
    environments: Environments,
    questions: Sequence[Question],
    examples: Sequence[Conversation],
    advance: Callable[[Episode], None],
) -> list[Episode]:
    from trainer.policy.loading import load_policy
    from trainer.policy.served import ServedPolicy

    def settings(context: int, chat: ChatFormat) -> RolloutSettings:
        return RolloutSettings(
            budget=TokenBudget(
                chosen.max_completion_length,
                chosen.max_context_length or context,
                chosen.max_turn_length,
                chat.thought_length,
            ),
            temperature=args.temperature,
            max_concurrency=args.max_concurrency,
        )

    if not args.use_vllm:
        model, tokenizer = load_policy(args.policy, trust_remote_code=args.trust_remote_code)
        chat = ChatFormat(tokenizer, chosen.chat, examples)
        room = settings(model.config.max_position_embeddings, chat)
        return play_model(model, tokenizer, environments, questions, room, chosen.seed, advance, chat)
    served = ServedPolicy.load(args.policy, trust_remote_code=args.trust_remote_code)
    chat = ChatFormat(served.tokenizer, chosen.chat, examples)
    engine = served.engine(args.vllm_server_base_url, chat)
    return play_on(engine, chat, environments, questions, settings(served.context, chat), chosen.seed, advance)


def write_records(path: str, records: Sequence[EpisodeRecord]) -> None:
    """Write records as JSON lines."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in records)


def _text_of(path: str) -> str:
    try:
        return prompt_in(path)
    except SQLEnvError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {number}")
    return number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"enable_thinking": false}}, not {text}')
    return value


def _temperature(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number >= 0, not {text}")
    return number
