"""Evaluation: the environment, the rollout client and the prompts of training, on questions of a chosen split.

Questions are spread evenly over the databases, so that a limit does
not favour the first ones.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from env_server.data.loading import SYNTAX, load_dataset
from env_server.dataset import Dataset, Question, Split, round_robin
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode
from inference.launch.plan import VLLM_URL
from sqlenv.parser import Parser, choice, output_file, whole_number
from sqlenv.progress import reported
from trainer.chat.format import ChatFormat
from trainer.config import (
    ACTION_FORMAT_HELP,
    ENV_HELP,
    FEW_SHOT_HELP,
    SYSTEM_PROMPT_HELP,
    THINKING_HELP,
    TOKEN_HELP,
    ActionFormat,
    prompt_in,
    token_of,
)
from trainer.eval.failure_kinds import count_failures
from trainer.eval.run_files import Evaluation, write_episodes
from trainer.eval.statistics import EvaluationSummary, intervals_as_pairs, successful, summarize
from trainer.eval.summaries import FalsePositives, SampledSuccess, explore, false_positives, rows_key, sampled_success
from trainer.policy import SCRIPTED, SETTING_NAMES, PlaySettings, SavedPlay, resolve_policy, saved_play, settle
from trainer.report.tables import (
    excluded_table,
    exploration_table,
    failure_table,
    for_terminal,
    group_table,
    success_table,
)
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import PlayEpisode, RolloutClient, RolloutSettings, derive_seed, request_for
from trainer.rollout.environments import LOCAL, AnyEnvironments, Environments, open_environments
from trainer.rollout.episodes import Episode, EpisodeRecord, record
from trainer.rollout.players import Examples, OraclePlayer, Player, RandomPlayer, play, with_sql
from trainer.rollout.text_to_sql import SYSTEM_PROMPT, TEXT_TO_SQL_STEPS, TextToSQL

if TYPE_CHECKING:
    # Where a model plays, its packages are imported: they take seconds, and the scripted players need none of them.
    from transformers import PreTrainedTokenizerBase

    from inference.hf.engine import HFEngine
    from inference.vllm.engine import VLLMEngine


PROTOCOL_HELP = (
    "'explore' (default): the four actions on a database whose schema is hidden. 'text_to_sql', the usual baseline: "
    "the whole schema in the prompt and one query; its rows are the answer (with --answer_mode sql, the query is), "
    "judged alike. The schema is read from --data on this machine, with --env too: servers tell none."
)

SAMPLES_HELP = "episodes of each question, for pass@k and the answer that most of them agree on (default: 1)"


class EvaluationProtocol(StrEnum):
    """What an episode is: exploration, or the text-to-SQL baseline."""

    EXPLORE = "explore"
    TEXT_TO_SQL = "text_to_sql"


_DESCRIPTION = """\
Evaluation: the environment, the rollout client and the prompts of training, on questions of a chosen split.

`--policy` is `random`, `oracle`, or a model (a run's folder, a checkpoint or a Hub name). A model that SQLEnv trained
is played as it was in its training, on the same data: what no flag says is taken from the `sqlenv.json` beside its
weights, and a flag that says otherwise is pointed out. Models play greedily unless asked otherwise. Questions are
spread evenly over the databases, so that a limit does not favour the first ones.
"""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        prog="sqlenv evaluate",
        description=_DESCRIPTION,
        epilog="examples:\n  sqlenv evaluate --policy oracle --split all\n"
        "  sqlenv evaluate --policy runs/tiny/model --episodes 300 --json\n"
        "  sqlenv evaluate --policy Qwen/Qwen2.5-0.5B-Instruct --data spider:PATH\n"
        "  sqlenv evaluate --policy Qwen/Qwen2.5-0.5B-Instruct --data spider:PATH --protocol text_to_sql --few_shot 3\n"
        "  sqlenv evaluate --policy runs/tiny/model --env ws://host:8000,ws://other:8000\n"
        "  sqlenv evaluate --policy runs/tiny/model --split train --temperature 1 --samples 8 --episodes_out FILE\n"
        "  sqlenv evaluate --policy runs/tiny/model --use_vllm      (after: sqlenv inference --model runs/tiny/model)",
    )
    defaults = PlaySettings()
    add = parser.add_argument_group("what is played").add_argument
    add("--policy", required=True, help="random, oracle, a run's or a checkpoint's folder, or a model on the Hub")
    add("--data", help=f"{SYNTAX} (default: the run's, else {defaults.data})")
    add("--split", type=choice(Split), choices=list(Split), default=Split.EVAL, help="default: eval")
    add(
        "--episodes",
        type=int,
        dest="eval_episodes",
        metavar="N",
        help="how many questions, -1 for all (default: as many as the run's evaluations had, else all)",
    )
    add("--samples", type=whole_number(1), default=1, metavar="N", help=SAMPLES_HELP)
    add("--temperature", type=_temperature, default=0.0, metavar="X", help="0 plays greedily (default)")
    add("--seed", type=int, metavar="N", help=f"default: the run's, else {defaults.seed}")
    add(
        "--protocol",
        type=choice(EvaluationProtocol),
        choices=list(EvaluationProtocol),
        default=EvaluationProtocol.EXPLORE,
        help=PROTOCOL_HELP,
    )
    add = parser.add_argument_group("how it is played, by default as it was trained").add_argument
    add(
        "--answer_mode",
        type=choice(AnswerMode),
        choices=list(AnswerMode),
        help=f"default: the run's, else {defaults.answer_mode}",
    )
    add(
        "--action_format",
        type=choice(ActionFormat),
        choices=list(ActionFormat),
        help=f"{ACTION_FORMAT_HELP} Default: the run's.",
    )
    add(
        "--system_prompt",
        type=_text_of,
        dest="custom_system_prompt",
        metavar="FILE",
        help=f"{SYSTEM_PROMPT_HELP} Default: the run's.",
    )
    add("--few_shot", type=whole_number(0), metavar="N", help=f"{FEW_SHOT_HELP} Default: the run's.")
    add("--max_thinking_length", type=whole_number(0), metavar="N", help=f"{THINKING_HELP} Default: the run's.")
    add(
        "--chat_template_kwargs",
        type=_json_object,
        metavar="JSON",
        help="variables of the chat template (default: the run's)",
    )
    for name, what in (
        ("step_budget", "steps in an episode"),
        ("max_completion_length", "tokens of an episode"),
        ("max_turn_length", "tokens of one turn"),
    ):
        number = getattr(defaults, name)
        add(f"--{name}", type=whole_number(1), metavar="N", help=f"{what} (default: the run's, else {number:,})")
    add = parser.add_argument_group("where").add_argument
    add("--env", default=LOCAL, metavar="URLS", help=ENV_HELP)
    add("--env_token", metavar="TEXT", help=TOKEN_HELP)
    add("--use_vllm", action="store_true", help="generate on vLLM servers that serve the policy")
    add("--vllm_server_base_url", metavar="URLS", help=f"theirs, separated by commas (default: {VLLM_URL})")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: on a CPU the faster of float32 and bfloat16, measured; on a GPU bfloat16)",
    )
    add("--max_concurrency", type=whole_number(1), default=64, metavar="N", help="episodes in flight (default: 64)")
    add("--trust_remote_code", action="store_true", help="run code that comes with the policy")
    add = parser.add_argument_group("what comes of it").add_argument
    add("--json", action="store_true", help="print one JSON object on stdout, and the tables on stderr")
    add(
        "--episodes_out",
        type=output_file,
        metavar="FILE.jsonl",
        help="write every episode, turn by turn, to this file, and to FILE.evaluation.json what was played; sqlenv "
        "compare reads both",
    )
    return parser


def check(parser: Parser, args: argparse.Namespace) -> None:
    """End with status 2 where flags do not go together."""
    if args.eval_episodes is not None and (args.eval_episodes == 0 or args.eval_episodes < -1):
        parser.error(f"--episodes must be positive, or -1 for all; got {args.eval_episodes}")
    if args.episodes_out and args.episodes_out.exists() and not args.episodes_out.is_file():
        parser.error(f"--episodes_out {args.episodes_out} is no regular file, which would be replaced")
    if args.samples > 1 and (args.policy == "oracle" or (args.policy not in SCRIPTED and not args.temperature)):
        parser.error("--samples above 1 plays the same episodes again; give a --temperature above 0")
    if args.protocol is EvaluationProtocol.TEXT_TO_SQL:
        if args.policy in SCRIPTED:
            parser.error(f"--protocol text_to_sql is for a model; {args.policy} writes no SQL from a schema")
        if args.action_format is not None:
            parser.error("--action_format: with --protocol text_to_sql there are no actions, but one query")
        if args.step_budget is not None and args.step_budget < TEXT_TO_SQL_STEPS:
            parser.error(f"--step_budget {args.step_budget}: text_to_sql takes two steps, the query and its answer")


def without_effect(args: argparse.Namespace) -> list[str]:
    """Say of the flags that were given which do nothing beside the others, one line each."""
    given = [flag for flag, name in _MODELS_OWN.items() if getattr(args, name)]
    found = []
    if args.policy in SCRIPTED:
        found += [f"{flag} has no effect: {args.policy} plays without a model" for flag in given]
    elif args.vllm_server_base_url and not args.use_vllm:
        found.append("--vllm_server_base_url has no effect without --use_vllm")
    elif args.dtype and args.use_vllm:
        found.append("--dtype has no effect with --use_vllm: servers have that of sqlenv inference --dtype")
    if args.env_token and args.env == LOCAL:
        found.append("--env_token has no effect without --env")
    return found


_MODELS_OWN = {
    "--system_prompt": "custom_system_prompt",
    **{
        f"--{name}": name
        for name in (
            *("action_format", "few_shot", "max_thinking_length", "chat_template_kwargs", "temperature", "use_vllm"),
            *("max_completion_length", "max_turn_length", "vllm_server_base_url", "dtype"),
        )
    },
}
"""Flags about a model's play, and their names; false where they are not given, or ask for what is so anyway."""


def run(argv: Sequence[str]) -> int:
    """Evaluate as the flags say; print the tables, and with --json one object on stdout and the tables on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    console = Console(stderr=True)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    for line in without_effect(args):
        say(f"sqlenv evaluate: {line}")
    saved = None if args.policy in SCRIPTED else _saved_with(args.policy, console)
    chosen, lines = _chosen(args, saved)
    for line in lines:
        say(line)
    dataset = load_dataset(chosen.data, answer_mode=chosen.answer_mode)
    few_shot = 0 if args.policy in SCRIPTED else chosen.few_shot
    examples = Examples.play(dataset, few_shot, chosen.answer_mode, chosen.step_budget)
    questions = examples.without(choose_questions(dataset, args.split, chosen.eval_episodes))
    if not questions:
        parser.error(f"data set {chosen.data} has no usable question in split {args.split.value!r}")
    questions = [question for question in questions for _ in range(args.samples)]
    env_settings = chosen.environment
    environments = open_environments(args.env, token_of(args.env_token), dataset, env_settings, chosen.answer_mode)
    with ExitStack() as stack:
        stack.enter_context(closing(environments))
        policy = None if args.policy in SCRIPTED else _open_policy(args, chosen, examples, say)
        environments.prepare(questions)
        baseline = dtype = None
        if args.protocol is EvaluationProtocol.TEXT_TO_SQL:
            baseline = TextToSQL(dataset, env_settings, chosen.answer_mode, examples.questions)
            stack.enter_context(closing(baseline))
        progress = stack.enter_context(reported(f"playing as {args.policy}", len(questions), console))

        def advance(episode: Episode) -> None:
            progress.advance(episode.correct)

        if args.policy == "oracle":
            questions = with_sql(questions, "--policy oracle")
        if policy is None:
            episodes = play_scripted(args.policy, environments, questions, chosen.answer_mode, chosen.seed, advance)
        else:
            engine, chat, room, dtype = policy
            episodes = play_on(engine, chat, environments, questions, room, chosen.seed, advance, baseline)
            # As training saves them: what the model allows and how its template was used, where nothing was said.
            chosen = replace(
                chosen,
                max_context_length=room.budget.max_context,
                chat_template_kwargs=chat.settings.chat_template_kwargs,
            )
            for line in chat.lines:
                say(line)
    records = [record(episode) for episode in episodes]
    summary = summarize(records, excluded_by_reason(dataset))
    out = Console(stderr=args.json)
    title = f"{chosen.data}, split {args.split.value}" + (", text to SQL" if baseline else "")
    summaries, played = {args.policy: summary}, {args.policy: records}
    tables = [
        success_table(summaries, title),
        group_table("difficulty", summaries, intervals=False),
        failure_table(played) if summary.successes < summary.episodes else None,
        exploration_table(played, one_query=baseline is not None),
        excluded_table(summaries),
    ]
    for table in filter(None, tables):
        out.print(for_terminal(table))
    sampled = _sampled(records, dataset, chosen.answer_mode) if args.samples > 1 else None
    unverified = _false_positives(records, dataset, console) if chosen.answer_mode is AnswerMode.VALUE else None
    for found in filter(None, (sampled, unverified)):
        out.print(str(found), highlight=False, soft_wrap=True)
    if args.episodes_out:
        write_episodes(args.episodes_out, _about(args, chosen, dataset, summary, dtype), records)
    if args.json:
        print(  # noqa: T201
            summary_json(
                summary,
                policy=args.policy,
                protocol=args.protocol.value,
                data=chosen.data,
                split=args.split.value,
                answer_mode=chosen.answer_mode.value,
                seed=chosen.seed,
                failure_kinds=count_failures(records),
                exploration=explore(records),
                false_positives=unverified,
                sampled=sampled,
            )
        )
    return 0


def _about(
    args: argparse.Namespace, chosen: PlaySettings, dataset: Dataset, summary: EvaluationSummary, dtype: str | None
) -> Evaluation:
    settings = {**asdict(chosen), "temperature": args.temperature, "protocol": args.protocol.value}
    if dtype is not None:
        settings["dtype"] = dtype
    unseen = args.split is Split.EVAL and all(len(splits) == 1 for splits in dataset.splits().values())
    what = (args.policy, chosen.data, args.split.value, chosen.answer_mode.value)
    return Evaluation(args.episodes_out.stem, *what, 0, summary, unseen, settings=settings)


def _sampled(records: Sequence[EpisodeRecord], dataset: Dataset, mode: AnswerMode) -> SampledSuccess | None:
    """Return pass@k and voting; submitted queries vote by the rows that they return."""
    if mode is AnswerMode.VALUE:
        return sampled_success(records)
    with closing(DatabasePool(dataset.databases, EnvSettings().sandbox)) as databases:
        return sampled_success(records, rows_key(databases))


def _false_positives(records: Sequence[EpisodeRecord], dataset: Dataset, console: Console) -> FalsePositives | None:
    with reported("verifying right answers", sum(map(successful, records)), console) as progress:
        return false_positives(records, dataset, progress.advance)


def _saved_with(policy: str, console: Console) -> SavedPlay | None:
    """Return what a model says of how it is to be played. Raises SQLEnvError."""
    named = resolve_policy(policy)
    if named.base_line:
        console.print(named.base_line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"loading {policy}", highlight=False, soft_wrap=True, markup=False)
    return saved_play(named.ref)


def _chosen(args: argparse.Namespace, saved: SavedPlay | None) -> tuple[PlaySettings, Sequence[str]]:
    """Return how the flags and the policy's file have it played, and what to say of that."""
    # The context is the model's, and has no flag.
    said = {name: value for name in SETTING_NAMES if (value := vars(args).get(name)) is not None}
    inherited = PlaySettings() if saved is None else saved.settings
    comparable = said.get("data", inherited.data) == inherited.data and args.split is Split.EVAL
    if not comparable or inherited.eval_episodes == 0:
        # A number of questions belongs to a data set and a split.
        said.setdefault("eval_episodes", -1)
    settled = settle(args.policy, saved, said)
    return settled.settings, settled.lines


def _open_policy(
    args: argparse.Namespace, chosen: PlaySettings, examples: Examples, say: Callable[[str], None]
) -> tuple[HFEngine | VLLMEngine, ChatFormat, RolloutSettings, str | None]:
    """Return what plays as the policy, and its dtype if that is in this process. Servers are asked now.

    Raises SQLEnvError.
    """
    from trainer.engines import open_to_play, token_budget

    def settings(context: int, chat: ChatFormat) -> RolloutSettings:
        return RolloutSettings(
            budget=token_budget(chosen, context, chat),
            temperature=args.temperature,
            max_concurrency=args.max_concurrency,
        )

    def chat_of(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        if args.protocol is not EvaluationProtocol.TEXT_TO_SQL:
            return ChatFormat(tokenizer, chosen.chat, examples.conversations)
        # What the policy was told of the four actions says nothing about one query.
        told = args.custom_system_prompt or SYSTEM_PROMPT
        return ChatFormat(tokenizer, replace(chosen.chat, action_format=ActionFormat.TEXT, custom_system_prompt=told))

    urls = (args.vllm_server_base_url or VLLM_URL) if args.use_vllm else None
    return open_to_play(
        args.policy, urls, chat_of, settings, say, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    )


def _text_of(path: str) -> str:
    try:
        return prompt_in(path)
    except SQLEnvError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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


def choose_questions(dataset: Dataset, split: Split, limit: int) -> list[Question]:
    """The first `limit` questions of the split, taken in turn from each database; all of them for -1."""
    questions = round_robin(dataset.select(split))
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


def play_on(
    engine: HFEngine | VLLMEngine,
    chat: ChatFormat,
    environments: Environments,
    questions: Sequence[Question],
    settings: RolloutSettings,
    seed: int,
    on_episode: Callable[[Episode], None],
    play_episode: PlayEpisode | None = None,
) -> list[Episode]:
    """Play the questions with an engine, and close it; `play_episode` as `RolloutClient`'s."""
    requests = [request_for(question, derive_seed(seed, index)) for index, question in enumerate(questions)]

    async def run() -> list[Episode]:
        client = RolloutClient(engine, environments, chat, settings, play_episode=play_episode)
        try:
            return await client.play(requests, on_episode)
        finally:
            await engine.aclose()

    with RolloutLoop() as loop:  # a thread of its own: in a notebook, this one runs a loop already
        return loop.run(run())


def excluded_by_reason(dataset: Dataset) -> dict[str, int]:
    """How many questions the data set left out, by reason."""
    return dict(Counter(exclusion.reason.value for exclusion in dataset.excluded))


def summary_json(summary: EvaluationSummary, **extra: object) -> str:
    """One JSON object on one line, with `success_rate`, `interval`, `episodes` and `excluded` among its keys.

    What is `extra` may be data classes, too.
    """
    return json.dumps({**extra, **_plain(summary)}, default=_plain, sort_keys=True)


def _plain(instance: Any) -> Any:
    return asdict(instance, dict_factory=intervals_as_pairs)
