"""The card of an exported policy: what it is, how well it did, how it was made, how to use it. Pure: data in, text out.

`model_card.md` is its text. Every number in it comes from the run's files. What is not known is left out; a licence is
never claimed, and no path of this machine is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined

from env_server.types import AnswerMode
from trainer.eval.run_files import Evaluation
from trainer.policy import PlaySettings
from trainer.report.tables import Table, counted, group_table, success_table
from trainer.rollout.rewards import REWARD_FUNCTIONS

TEMPLATE = Path(__file__).with_name("model_card.md")
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
    shown = [e for label in _SHOWN for e in facts.evaluations if e.label == label]
    summaries = {_SHOWN[e.label]: e.summary for e in shown}
    tables = [success_table(summaries, ""), group_table("difficulty", summaries, intervals=True)] if shown else []
    on_hub = facts.base is not None and _HUB_NAME.fullmatch(facts.base)
    head = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=facts.base if on_hub else None,
        tags=["sqlenv", "text-to-sql", *(["grpo"] if facts.config else [])],
    )
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        card_data=head.to_yaml(),
        name=facts.name,
        play=facts.play,
        by_value=facts.play.answer_mode is AnswerMode.VALUE,
        dtype=facts.dtype,
        parameters=facts.parameters,
        config=facts.config,
        base=_base(facts.base) if facts.base else "",
        evaluation=shown[0] if shown else None,
        evaluated=any(e.label == "after" for e in shown),
        best_of=max((e.best_of for e in shown), default=0),
        tables=list(filter(None, tables)),
        made=list(_made(facts)),
        counted=counted,
        data_name=data_name,
        markdown=_markdown,
    )


def _base(base: str) -> str:
    """The base's name; of a folder the last part alone."""
    if _HUB_NAME.fullmatch(base):
        return f"[{base}](https://huggingface.co/{base})"
    return f"`{base.rstrip('/').rpartition('/')[2]}` (a folder)"


def _markdown(table: Table) -> str:
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [table.header, rule, *table.rows])


def _made(facts: CardFacts) -> Iterator[str]:
    """How the policy was made, line by line."""
    if facts.base:
        yield f"Base model: {_base(facts.base)}"
    if facts.adapter is not None:
        rank, alpha = facts.adapter.get("r"), facts.adapter.get("lora_alpha")
        yield f"LoRA of rank {rank} and alpha {alpha}, merged into the base (summed in float32, rounded once)"
    model = facts.config.get("model", {})
    if bits := 4 if model.get("load_in_4bit") else 8 if model.get("load_in_8bit") else 0:
        yield (
            f"Trained on a base quantised to {bits} bits, and merged into the base in full precision: the evaluation "
            "above is of the quantised base with the adapter"
        )
    elif facts.config and facts.adapter is None:
        yield "All weights were trained"
    if facts.config:
        yield from _training(facts.config, facts.play)
    if facts.step is not None:
        best = any(e.best_of for e in facts.evaluations)
        chosen = ", of which the policy of the best evaluation was kept" if best else ""
        yield f"Training steps: {facts.step:,}{chosen}"
    for verb, versions in (("Trained", facts.config.get("versions")), ("Exported", facts.versions)):
        if versions:
            yield f"{verb} with {', '.join(f'{name} {version}' for name, version in versions.items())}"


def _training(config: Mapping[str, Any], play: PlaySettings) -> Iterator[str]:
    grpo, ours = config.get("grpo", {}), config.get("sqlenv", {})
    own = [name.rpartition(":")[2] for name in ours.get("reward_functions") or []]
    names = [*(reward.name for reward in REWARD_FUNCTIONS), *own]
    weights = grpo.get("reward_weights") or [1.0] * len(names)
    rewards = ", ".join(f"{name} {weight:g}" for name, weight in zip(names, weights, strict=False) if weight)
    adaptive = "; adaptive, these being the most" if ours.get("reward_weighting") == "adaptive" else ""
    told = {
        "Learning rate": grpo.get("learning_rate"),
        "episodes per question": grpo.get("num_generations"),
        "temperature": grpo.get("temperature"),
        "KL weight": grpo.get("beta"),
        "loss": grpo.get("loss_type"),
        "seed": grpo.get("seed"),
    }
    yield f"Data: the training questions of `{data_name(play.data)}`, answer mode `{play.answer_mode.value}`"
    yield f"Reward weights: {rewards}{adaptive}"
    yield "; ".join(f"{name} {value}" for name, value in told.items() if value is not None)
    yield (
        f"At most {play.step_budget} steps and {play.max_completion_length:,} tokens an episode, "
        f"{play.max_turn_length:,} tokens a turn"
    )


def data_name(spec: str) -> str:
    """Return a data set's name without the path of a folder, for what is published."""
    kind, colon, path = spec.partition(":")
    last = (path if colon else kind).rstrip("/").rpartition("/")[2]
    return f"{kind}:{last}" if colon else last
