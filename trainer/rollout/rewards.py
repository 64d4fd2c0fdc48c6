"""Reward functions: what an episode is worth to GRPO, each one signal, weighted by `--reward_weights`.

A reward function takes an `Episode` and returns a number; or one number per turn, which add up; or None where it does
not apply, and TRL adds up the others. REWARD_FUNCTIONS is the table of them: name, function, default weight; those of
every run. `--reward_functions` adds a user's own, as FILE.py:FUNCTION.
Guarantees:

1. No function sees an episode that the infrastructure failed: its reward is None, so that TRL leaves it out of the
   group's baseline and gives it advantage 0.
2. A function is called once for each episode. An exception in it, or a value that is not a finite number, ends the run
   with the function's name and the fix (RewardError); a user's own are tried on scripted episodes before that.
3. An episode without a right ANSWER collects at most `bound_without_answer`, as far as a user's own stay in [0, 1].
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from numbers import Real
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from env_server.dataset import Dataset, Split
from env_server.environment import EnvironmentFactory
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings, JudgingSettings, RewardSettings
from env_server.types import AnswerMode
from sqlenv.parser import did_you_mean
from trainer.config import ConfigError
from trainer.rollout.episodes import Episode, TokenRow
from trainer.rollout.players import OraclePlayer, Player, RandomPlayer, as_shown_to_players, play

RewardFunction = Callable[[Episode], float | Sequence[float] | None]
OWN_WEIGHT = 0.1
"""Of a user's own function where `--reward_weights` does not say: a shaped reward should not outweigh correctness."""


class RewardError(SQLEnvError):
    """A reward function failed or did not return a reward; the text names it, the episode and the fix."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward function with its default weight; called as TRL calls reward functions."""

    name: str
    function: RewardFunction
    weight: float = OWN_WEIGHT
    source: str = ""
    """FILE.py:FUNCTION of a user's own; "" for the table's."""

    @property
    def __name__(self) -> str:
        """What TRL logs it as: `rewards/reward_NAME/mean`."""
        return f"reward_{self.name}"

    def __call__(self, *, episode: Sequence[Episode], **_: Any) -> list[float | None]:
        """Return the reward of each episode; None for a failed one. Raises RewardError."""
        return [self.of(each) for each in episode]

    def of(self, episode: Episode) -> float | None:
        """Return an episode's reward; None for a failed one, and where the function does not apply."""
        turns = self.of_turns(episode)
        return None if turns is None else math.fsum(turns)

    def of_turns(self, episode: Episode) -> Sequence[float] | None:
        """Return the reward of each turn, which add up to the episode's: a single number is the last turn's."""
        if episode.failed:
            return None
        if self.name not in episode.rewards:
            episode.rewards[self.name] = self._call(episode)
        return episode.rewards[self.name]

    def _call(self, episode: Episode) -> Sequence[float] | None:
        named = self.source or self.name
        try:
            value: Any = self.function(episode)
        except Exception as error:
            at = extract_tb(error.__traceback__)[-1]
            raise RewardError(
                f"--reward_functions {named}: {type(error).__name__}: {error} ({Path(at.filename).name}, line "
                f"{at.lineno}), on episode {episode.episode_id}; make the function take every episode"
            ) from error
        several = isinstance(value, (list, tuple))
        values = value if several else [value]
        if value is None:
            return None
        if not all(isinstance(each, Real) for each in values) or (several and len(values) != len(episode.turns)):
            raise RewardError(
                f"--reward_functions {named} returned {_shown(value)} for episode {episode.episode_id} of "
                f"{len(episode.turns)} turns; return a number, a list with one number per turn, or None"
            )
        if not all(math.isfinite(each) for each in values):
            raise RewardError(
                f"--reward_functions {named} returned {_shown(value)} for episode {episode.episode_id}; return finite "
                "numbers (is something divided by zero?), or None where the reward does not apply"
            )
        before = 0 if several else max(0, len(episode.turns) - 1)
        return [0.0] * before + [float(each) for each in values]


def correctness(episode: Episode) -> float:
    """1 when the ANSWER was judged correct, else 0."""
    return float(episode.correct)


def progress(episode: Episode) -> list[float]:
    """How close the best query came to the gold rows, in [0, 1]: by how much each turn raised it."""
    return [turn.reward.progress / episode.reward_settings.progress_scale for turn in episode.turns]


def operational(episode: Episode) -> list[float]:
    """The operational signals of each turn: step cost, success, new information, repeats."""
    return [turn.reward.operational for turn in episode.turns]


def parseable(episode: Episode) -> list[float]:
    """The share of the turns that were parseable as an action, in [0, 1]."""
    return [turn.parseable / len(episode.turns) for turn in episode.turns]


REWARD_FUNCTIONS = (
    Reward("correctness", correctness, 1.0),
    Reward("progress", progress, 0.2),
    Reward("operational", operational, 0.2),
    Reward("format", parseable, 0.1),
)
"""Those of every run, which need no gold SQL."""
REWARDS = {reward.name: reward for reward in REWARD_FUNCTIONS}


def rewards_of(names: Iterable[str]) -> tuple[Reward, ...]:
    """Return the rewards of a run: REWARD_FUNCTIONS, and those that `--reward_functions` names. Raises ConfigError."""
    rewards = list(REWARD_FUNCTIONS)
    for spec in names:
        reward = _own(spec)
        if any(other.name == reward.name for other in rewards):
            raise ConfigError(f"--reward_functions {spec}: the run has a reward {reward.name} already; rename one")
        rewards.append(reward)
    return tuple(rewards)


def weights_of(rewards: Sequence[Reward], given: Sequence[float] | None) -> list[float]:
    """Return the weight of each reward: as given, and the default where no more are given. Raises ConfigError."""
    given = list(given or [])
    fewest = len(REWARD_FUNCTIONS) if given else 0
    if not fewest <= len(given) <= len(rewards):
        names = ", ".join(reward.name for reward in rewards)
        count = f"{fewest} to {len(rewards)}" if fewest < len(rewards) else str(fewest)
        raise ConfigError(
            f"--reward_weights takes {count} numbers ({names}) and got {len(given)}; --reward_functions adds rewards"
        )
    return given + [reward.weight for reward in rewards[len(given) :]]


def _own(spec: str) -> Reward:
    """Load a user's own function. Raises ConfigError."""
    place, colon, name = spec.rpartition(":")
    if not (colon and name.isidentifier() and place.endswith(".py")):
        raise ConfigError(
            f"--reward_functions {spec}: name a function of your own as FILE.py:FUNCTION; every run has "
            f"{', '.join(REWARDS)}"
        )
    path = Path(place)
    if not path.is_file():
        near = did_you_mean(path.name, (each.name for each in path.parent.glob("*.py")))
        raise ConfigError(f"--reward_functions {spec}: there is no file {path.absolute()}{near}")
    module = _loaded(path.resolve(), path.stat().st_mtime_ns)
    function = getattr(module, name, None)
    if not callable(function):
        there = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"--reward_functions {spec}: {place} has no function {name}{did_you_mean(name, there)}")
    try:
        inspect.signature(function).bind(object())
    except (TypeError, ValueError):
        raise ConfigError(
            f"--reward_functions {spec}: write it as `def {name}(episode):`; it is called with the episode alone"
        ) from None
    return Reward(name, function, source=spec)


@lru_cache
def _loaded(path: Path, _modified: int) -> ModuleType:
    name = f"sqlenv_reward_functions_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        at = getattr(error, "lineno", None) or extract_tb(error.__traceback__)[-1].lineno
        raise ConfigError(
            f"--reward_functions {path}: it cannot be imported: {type(error).__name__}: {error} (line {at})"
        ) from error
    return module


def _shown(value: object) -> str:
    """A value that is no reward, in a message."""
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def try_rewards(rewards: Sequence[Reward], dataset: Dataset, answer_mode: AnswerMode) -> None:
    """Call a user's own functions on two scripted episodes, so that an error comes before the first rollout.

    Raises RewardError.
    """
    own = [reward for reward in rewards if reward.source]
    questions = dataset.select(Split.TRAIN)
    if not own or not questions:
        return
    question = next((each for each in questions if each.gold_sql), questions[0])
    settings = EnvSettings(judging=JudgingSettings(variants=False))
    with EnvironmentFactory(dataset, settings, answer_mode) as factory:
        players: list[Player] = [RandomPlayer(0, answer_mode)]
        if question.gold_sql:
            players.append(OraclePlayer(as_shown_to_players(question, factory.pool), answer_mode))
        for player in players:
            played, _ = play(factory.make(), question, player)
            # As a policy's: with tokens.
            turns = tuple(replace(turn, tokens=8) for turn in played.turns)
            tokens = 8 * len(turns)
            row = TokenRow([0], [0] * tokens, [-1.0] * tokens, [1] * tokens, [at // 8 for at in range(tokens)])
            for reward in own:
                reward.of(replace(played, turns=turns, row=row, prompt_tokens=tokens))


def bound_without_answer(
    rewards: Sequence[Reward], weights: Sequence[float], settings: RewardSettings, step_budget: int
) -> float:
    """Return an upper bound of the weighted sum of the rewards for an episode without a correct ANSWER.

    It is what GRPO optimises, and so what reward hacking pays; `env_server.reward.wrong_total_bound` is that of the
    environment's own total. The operational signals of n steps, unclipped, lie between n times the worst and n times
    the best step; the others in [0, 1], a user's own by convention.
    """
    bonuses = (0.0, settings.repeat, settings.success, settings.success + settings.repeat)
    steps = [settings.step_cost + bonus for bonus in (*bonuses, settings.success + settings.new_information)]
    bound = 0.0
    for reward, weight in zip(rewards, weights, strict=True):
        if reward.name == "operational":
            paid = max(weight * step for step in steps)
            bound += max(paid, step_budget * paid)
        elif reward.name != "correctness":
            bound += max(0.0, weight)
    return bound


def reward_hacking_advice(
    rewards: Sequence[Reward], given: Sequence[float] | None, aggregation: str, step_budget: int
) -> list[str]:
    """Say when the weights pay as much for no answer as for a right one. Raises ConfigError for a wrong count."""
    weights = weights_of(rewards, given)
    if aggregation == "normalize_then_sum":
        return [
            "--multi_objective_aggregation normalize_then_sum scales each reward to the same spread, so no weights "
            "keep an episode without a right answer from being paid like one with it"
        ]
    bound = bound_without_answer(rewards, weights, EnvSettings().reward, step_budget)
    if bound < weights[0]:
        return []
    shown = " ".join(f"{weight:g}" for weight in weights)
    return [
        f"--reward_weights {shown}: an episode without a right answer can collect {bound:.2f}, and a right answer pays "
        f"{weights[0]:g}; lower the weights of {', '.join(reward.name for reward in rewards[1:])}"
    ]


def total_reward(episode: Episode, rewards: Sequence[Reward], weights: Sequence[float]) -> float:
    """Return the weighted sum of an episode's rewards."""
    return sum(weight * (reward.of(episode) or 0.0) for reward, weight in zip(rewards, weights, strict=True))
