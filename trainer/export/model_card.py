"""The card of an exported policy: what it is, how well it did, how it was made, how to use it. Pure: data in, text out.

Every number in it comes from the run's files. What is not known is left out; a licence is never claimed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.eval.run_files import Evaluation
from trainer.eval.statistics import HARDNESS, interval_text, percent
from trainer.policy import PlaySettings
from trainer.rollout.rewards import REWARD_FUNCTIONS

TRANSFORMERS_SCRIPT = """\
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

policy = "exported"
tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
with open(cached_file(policy, "sqlenv.json")) as file:
    play = json.load(file)
question = "Question: How many singers are there?\\nTables: concert, singer"
chat = [{"role": "system", "content": play["system_prompt"]}, {"role": "user", "content": question}]
tools = play.get("tools") or None
inputs = tokenizer.apply_chat_template(
    chat, tools, add_generation_prompt=True, return_dict=True, return_tensors="pt", **play["chat_template_kwargs"]
)
output = model.generate(**inputs, max_new_tokens=play["max_turn_length"])
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
VLLM_SCRIPT = """\
import json
from transformers.utils import cached_file
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    policy = "exported"
    with open(cached_file(policy, "sqlenv.json")) as file:
        play = json.load(file)
    question = "Question: How many singers are there?\\nTables: concert, singer"
    chat = [{"role": "system", "content": play["system_prompt"]}, {"role": "user", "content": question}]
    sampling = SamplingParams(temperature=0, max_tokens=play["max_turn_length"])
    llm = LLM(policy, max_model_len=play["max_context_length"])
    tools, variables = play.get("tools") or None, play["chat_template_kwargs"]
    print(llm.chat(chat, sampling, tools=tools, chat_template_kwargs=variables)[0].outputs[0].text)
"""
"""Both name the policy "exported"."""

_SHOWN = {
    "random": "a random player",
    "before": "before training",
    "after": "**this policy**",
    "oracle": "the oracle, which knows the answers",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says. `evaluations` are those of the run, `step` the last that the policy was trained for.

    `config` is the run's config.json; empty where the policy lies in no run. `base` is the name of the model that
    was trained, None where it is not known; only a name on the Hub is given as `base_model` to the Hub.
    """

    name: str
    play: PlaySettings
    dtype: str
    parameters: int
    base: str | None = None
    adapter: Mapping[str, Any] | None = None
    """adapter_config.json, where an adapter was merged."""
    step: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of SQLEnv and what it is built on, when the policy was exported."""


def model_card(facts: CardFacts) -> str:
    """Return the README.md of an exported policy."""
    sections = [
        _front_matter(facts),
        f"# {facts.name}\n\n{_introduction(facts)}",
        _results(facts),
        f"## How it was made\n\n{_how(facts)}",
        f"## How to use it\n\n{_use(facts)}",
        f"## Limits\n\n{_limits(facts)}",
        f"## Licence\n\n{_licence(facts)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(facts: CardFacts) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    if facts.base and _HUB_NAME.fullmatch(facts.base):
        lines.append(f"base_model: {json.dumps(facts.base)}")
    lines += ["tags:", "- sqlenv", "- text-to-sql", *(["- grpo"] if facts.config else [])]
    return "\n".join(["---", *lines, "---"])


def _introduction(facts: CardFacts) -> str:
    trained = "was trained with GRPO" if facts.config else "was trained"
    base = f" from {_base(facts)}" if facts.base else ""
    answer = "the answer's values" if facts.play.answer_mode.value == "value" else "a SQL query as the answer"
    return (
        f"This policy {trained}{base} to answer questions about SQLite databases that it cannot see: it explores them "
        f"step by step (DESCRIBE, SAMPLE, QUERY) and then gives {answer} (ANSWER), in the episodes of SQLEnv. It has "
        f"{facts.parameters:,} parameters, in {facts.dtype}."
    )


def _base(facts: CardFacts) -> str:
    """The base's name; of a folder the last part alone, since a card is published."""
    base = str(facts.base)
    if _HUB_NAME.fullmatch(base):
        return f"[{base}](https://huggingface.co/{base})"
    return f"`{base.rstrip('/').rpartition('/')[2]}` (a folder)"


def _results(facts: CardFacts) -> str:
    evaluations = [e for label in _SHOWN for e in facts.evaluations if e.label == label]
    if not evaluations:
        return "## Evaluation\n\nThis policy has not been evaluated."
    first = evaluations[0]
    what = "databases that no training question is about" if first.unseen_databases else "questions not trained on"
    about = (
        f"Greedy play on {first.summary.episodes} questions over {_count(first.summary.databases, 'database')} of "
        f"`{data_name(first.data)}`, {what}; {facts.play.step_budget} steps at most. The intervals are of 95%, with "
        "the database as the unit that was sampled."
    )
    if not any(e.label == "after" for e in evaluations):
        about += " **This policy is a checkpoint of the run, and was not evaluated itself.**"
    best_of = max(e.best_of for e in evaluations)
    if best_of:
        about += (
            f" This policy was chosen as the best of {best_of} evaluations on these very questions, so that its "
            "success is overestimated."
        )
    header = ["player", "success", "95% interval", "questions", "steps", "parsed"]
    rows = [
        [
            _SHOWN[e.label],
            percent(e.summary.success_rate),
            interval_text(e.summary.interval),
            str(e.summary.episodes),
            f"{e.summary.mean_steps:.1f}",
            percent(e.summary.parse_rate),
        ]
        for e in evaluations
    ]
    return "\n\n".join(["## Evaluation", about, _table(header, rows), "By difficulty:", _by_difficulty(evaluations)])


def _by_difficulty(evaluations: Sequence[Evaluation]) -> str:
    levels = [level for level in HARDNESS if any(level in e.summary.by_hardness for e in evaluations)]
    sizes = [
        max(e.summary.by_hardness[level].episodes for e in evaluations if level in e.summary.by_hardness)
        for level in levels
    ]
    rows = []
    for evaluation in evaluations:
        groups = [evaluation.summary.by_hardness.get(level) for level in levels]
        cells = ["-" if g is None else f"{percent(g.success_rate)} ({interval_text(g.interval)})" for g in groups]
        rows.append([_SHOWN[evaluation.label], *cells])
    return _table(["player", *(f"{level} ({size})" for level, size in zip(levels, sizes, strict=True))], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def _how(facts: CardFacts) -> str:
    lines = []
    if facts.base:
        lines.append(f"Base model: {_base(facts)}")
    if facts.adapter is not None:
        rank, alpha = facts.adapter.get("r"), facts.adapter.get("lora_alpha")
        lines.append(f"LoRA of rank {rank} and alpha {alpha}, merged into the base (summed in float32, rounded once)")
    model = facts.config.get("model", {})
    bits = 4 if model.get("load_in_4bit") else 8 if model.get("load_in_8bit") else 0
    if bits:
        lines.append(
            f"Trained on a base quantised to {bits} bits, and merged into the base in full precision: the evaluation "
            "above is of the quantised base with the adapter"
        )
    elif facts.config and facts.adapter is None:
        lines.append("All weights were trained")
    if facts.config:
        lines += _training(facts.config, facts.play)
    if facts.step is not None:
        chosen = (
            ", of which the policy of the best evaluation was kept" if any(e.best_of for e in facts.evaluations) else ""
        )
        lines.append(f"Training steps: {facts.step:,}{chosen}")
    trained_with = facts.config.get("versions")
    if trained_with:
        lines.append(f"Trained with {_versions(trained_with)}")
    lines.append(f"Exported with {_versions(facts.versions)}")
    return "\n".join(f"- {line}" for line in lines)


def _training(config: Mapping[str, Any], play: PlaySettings) -> list[str]:
    grpo = config.get("grpo", {})
    named = config.get("sqlenv", {}).get("reward_functions") or []
    names = [*(reward.name for reward in REWARD_FUNCTIONS), *(name.rpartition(":")[2] for name in named)]
    weights = grpo.get("reward_weights") or [1.0] * len(names)
    rewards = ", ".join(f"{name} {weight:g}" for name, weight in zip(names, weights, strict=False) if weight)
    if config.get("sqlenv", {}).get("reward_weighting") == "adaptive":
        rewards += "; adaptive, these being the most"
    told = [
        ("Learning rate", grpo.get("learning_rate")),
        ("episodes per question", grpo.get("num_generations")),
        ("temperature", grpo.get("temperature")),
        ("KL weight", grpo.get("beta")),
        ("loss", grpo.get("loss_type")),
        ("seed", grpo.get("seed")),
    ]
    return [
        f"Data: the training questions of `{data_name(play.data)}`, answer mode `{play.answer_mode.value}`",
        f"Reward weights: {rewards}",
        "; ".join(f"{name} {value}" for name, value in told if value is not None),
        f"At most {play.step_budget} steps and {play.max_completion_length:,} tokens an episode, "
        f"{play.max_turn_length:,} tokens a turn",
    ]


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _use(facts: CardFacts) -> str:
    name = json.dumps(facts.name)
    transformers, vllm = (s.replace('"exported"', name) for s in (TRANSFORMERS_SCRIPT, VLLM_SCRIPT))
    return (
        "`sqlenv.json` holds the system prompt and the lengths that it was trained with. The first turn of an episode "
        f"with transformers:\n\n```python\n{transformers}```\n\nWith vLLM:\n\n```python\n{vllm}```\n\n"
        "Whole episodes, with SQLEnv installed: "
        f"`sqlenv evaluate --policy {facts.name} --data YOUR_DATA`."
    )


def _limits(facts: CardFacts) -> str:
    context = facts.play.max_context_length
    limits = [
        "It knows SQLite's dialect and the actions of SQLEnv, and was not trained for anything else.",
        "The evaluation holds for the questions and databases that it was made on; measure it on your own.",
        "Its answers may be wrong and look right. Let it query with rights to read alone, and with a limit on time.",
        "Text in a database reaches the policy as an observation, and may sway what it does next.",
    ]
    if context:
        limits.append(f"It was trained with a context of {context:,} tokens; the oldest turns were dropped beyond it.")
    return "\n".join(f"- {limit}" for limit in limits)


def _licence(facts: CardFacts) -> str:
    base = f"{_base(facts)}" if facts.base else "the base model"
    return f"This policy is a derivative of {base}, whose licence applies. The terms of the training data may, too."


def data_name(spec: str) -> str:
    """Return a data set's name without the path of a folder, for what is published."""
    kind, colon, path = spec.partition(":")
    last = (path if colon else kind).rstrip("/").rpartition("/")[2]
    return f"{kind}:{last}" if colon else last


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
