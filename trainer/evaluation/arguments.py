"""The flags of `sqlenv evaluate`."""

from __future__ import annotations

import argparse
import json
import math
from enum import StrEnum
from typing import Any

from env_server.data.loading import SYNTAX
from env_server.dataset import Split
from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from inference.launch.plan import PORT
from sqlenv.parser import Parser, choice, output_file, whole_number
from trainer.config import (
    ACTION_FORMAT_HELP,
    ENV_HELP,
    FEW_SHOT_HELP,
    SYSTEM_PROMPT_HELP,
    THINKING_HELP,
    TOKEN_HELP,
    ActionFormat,
    prompt_in,
)
from trainer.policy import SCRIPTED, PlaySettings
from trainer.rollout.environments import LOCAL
from trainer.rollout.text_to_sql import TEXT_TO_SQL_STEPS

VLLM_URL = f"http://127.0.0.1:{PORT}"
"""Where `sqlenv inference` serves, if it is not told otherwise."""

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
