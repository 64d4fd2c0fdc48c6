"""The reward functions that GRPOTrainer calls, one signal each, weighted by `reward_weights`.

They read the structured fields that the rollout hands over, one value per row, never text. A row whose episode
failed has None in every field, so TRL leaves it out of the group's baseline and gives it advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from sqlglot import exp

from env_server.settings import RewardSettings
from env_server.sql.lexer import folded
from env_server.sql.parsing import parse_query
from env_server.types import ActionType
from trainer.rollout.episodes import Episode, Outcome

Rewards = list[float | None]
_CLAUSES = (
    *(exp.Where, exp.Group, exp.Having, exp.Order, exp.Limit),
    *(exp.Distinct, exp.Join, exp.SetOperation, exp.AggFunc),
)


def reward_correctness(*, correctness: Sequence[float | None], **_: Any) -> Rewards:
    """1.0 when the ANSWER was judged correct, else 0.0."""
    return list(correctness)


def reward_progress(*, progress: Sequence[float | None], **_: Any) -> Rewards:
    """How close the episode's best query came to the gold rows, in [0, 1]."""
    return list(progress)


def reward_operational(*, operational: Sequence[float | None], **_: Any) -> Rewards:
    """Sum of the operational signals (step cost, success, new information, repeats) over the episode."""
    return list(operational)


def reward_format(*, format_share: Sequence[float | None], **_: Any) -> Rewards:
    """Share of the turns that were parseable as an action, in [0, 1]."""
    return list(format_share)


def reward_structure(*, structure: Sequence[float | None], **_: Any) -> Rewards:
    """How much of the gold SQL's tables, columns and clauses the episode's best query shares, in [0, 1].

    None where the question has no gold SQL: TRL then adds up the other rewards.
    """
    return list(structure)


REWARD_FUNCTIONS: tuple[Callable[..., Rewards], ...] = (
    reward_correctness,
    reward_progress,
    reward_operational,
    reward_format,
)
"""Those of every run, which need no gold SQL."""
ALL_REWARDS = (*REWARD_FUNCTIONS, reward_structure)
"""What `sqlenv train` logs. Those that are not in REWARD_FUNCTIONS weigh nothing where no weight is given."""
REWARD_NAMES = tuple(function.__name__.removeprefix("reward_") for function in ALL_REWARDS)


def all_weights(weights: Sequence[float] | None) -> list[float]:
    """Return the weights of ALL_REWARDS: 1 each of REWARD_FUNCTIONS where there are none, and 0 for those left out."""
    given = [1.0] * len(REWARD_FUNCTIONS) if weights is None else list(weights)
    return given + [0.0] * (len(ALL_REWARDS) - len(given))


def most_without_answer(weights: Sequence[float], settings: RewardSettings, step_budget: int) -> float:
    """Return an upper bound of the weighted sum of the rewards for an episode without a correct ANSWER.

    It is what GRPO optimises, and so what farming pays; `env_server.reward.wrong_total_bound` is that of the
    environment's own total. Progress, format and structure lie in [0, 1]; the operational signals of n steps,
    unclipped, between n times the worst and n times the best step. `weights` are in the order of ALL_REWARDS.
    """
    _, progress, operational, format_share, structure = all_weights(weights)
    bonuses = (0.0, settings.repeat, settings.success, settings.success + settings.repeat)
    steps = [settings.step_cost + bonus for bonus in (*bonuses, settings.success + settings.new_information)]
    paid = max(operational * step for step in steps)
    shares = max(0.0, progress) + max(0.0, format_share) + max(0.0, structure)
    return shares + max(paid, step_budget * paid)


@lru_cache(4_096)
def query_parts(sql: str) -> frozenset[tuple[str, str]] | None:
    """Return the tables, columns and clauses of a query, each as its kind and name; None for what is not one query.

    Names of SQLite in lower case, without what qualifies them; those that the query itself gives are left out. A column
    in quotes may be a text to SQLite, as in many gold queries, and is left out where nothing qualifies it.
    """
    tree = parse_query(sql)
    if tree is None:
        return None
    own = {folded(node.alias) for node in tree.find_all(exp.CTE, exp.Alias) if node.alias != node.this.name}
    parts = set()
    for node in tree.walk():
        name = folded(node.name)
        if isinstance(node, exp.Table) and name not in own:
            parts.add(("table", name))
        elif isinstance(node, exp.Column) and (node.table or not (name in own or node.this.args.get("quoted"))):
            parts.add(("column", name))
        elif isinstance(node, exp.Star):
            parts.add(("column", "*"))
        elif isinstance(node, _CLAUSES):
            parts.add(("clause", node.key))
        elif isinstance(node, exp.Select) and node.find_ancestor(exp.Select):
            parts.add(("clause", "nested"))
    return frozenset(parts)


def structure_rises(episode: Episode) -> list[float] | None:
    """Return by how much each turn raised the best query's overlap with the gold SQL; they add up to at most 1.

    The overlap is the Jaccard index of their parts. Only a QUERY that ran raises it. None where the question has no
    gold SQL, or none that sqlglot can parse.
    """
    gold = query_parts(episode.gold_sql)
    if gold is None:
        return None
    overlaps = [
        _overlap(gold, query_parts(turn.argument)) if turn.action_type == ActionType.QUERY and not turn.error else 0.0
        for turn in episode.turns
    ]
    return [after - before for before, after in pairwise(accumulate(overlaps, max, initial=0.0))]


def _overlap(gold: frozenset[tuple[str, str]], query: frozenset[tuple[str, str]] | None) -> float:
    if query is None:
        return 0.0
    return len(gold & query) / len(gold | query) if gold | query else 1.0


def reward_fields(episodes: Sequence[Episode], settings: RewardSettings) -> dict[str, Rewards]:
    """The fields that the reward functions read, one value per episode; None for a failed one."""

    def field(of: Callable[[Episode], float | None]) -> Rewards:
        return [None if e.outcome is Outcome.FAILED else of(e) for e in episodes]

    return {
        "correctness": field(lambda e: float(e.correct)),
        "progress": field(lambda e: sum(t.reward.progress for t in e.turns) / settings.progress_scale),
        "operational": field(lambda e: sum(t.reward.operational for t in e.turns)),
        "format_share": field(lambda e: sum(t.parseable for t in e.turns) / max(1, len(e.turns))),
        "structure": field(lambda e: None if (rises := structure_rises(e)) is None else min(1.0, sum(rises))),
    }


def reward_columns(episodes: Sequence[Episode], settings: RewardSettings) -> list[list[float]]:
    """The values of each reward function over the episodes that did not fail, in the order of ALL_REWARDS."""
    fields = reward_fields([e for e in episodes if e.outcome is not Outcome.FAILED], settings)
    return [[value or 0.0 for value in function(**fields)] for function in ALL_REWARDS]
