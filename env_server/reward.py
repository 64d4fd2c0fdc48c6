"""The dense reward of an episode: three layers, and the bound on what a wrong episode can collect.

    total = clip(operational + progress) + terminal

1. operational: the step cost; success of an exploring action; new information; repeat. ANSWER gets no success
   bonus, so answering early costs nothing and answering is never worth anything by itself.
2. progress: progress_scale x the rise of the episode's potential, on a successful QUERY. The potential is the
   best phi of any query so far, not the last one's: with the last one's, the clip at `clip_low` would forgive part
   of every fall, and an agent could collect by alternating between a good and a bad query. The best score never
   falls, so the layer telescopes and sums to at most progress_scale, and going back and forth gains nothing.
   It is still potential based (Ng, Harada and Russell, 1999), on the history instead of the last state.
3. terminal: a correct ANSWER, otherwise 0.

Bound: without a correct ANSWER an episode collects at most `wrong_total_bound(settings, step_budget)`, whatever
the agent does: 0.30 for the default settings and 15 steps (fifteen different successful queries that find the gold
rows and no ANSWER; a wrong ANSWER at the end makes it 0.27). Pure; one object per episode; floats are exact sums.

phi: how close the rows of a query are to the gold rows, in {0, 0.25, 0.5, 0.75, 1}.

    score = 0.25 cardinality + 0.50 value overlap + 0.25 numeric proximity

- cardinality: 1 - |p - g| / max(p, g, 1) over the true numbers of rows; an unknown number counts as unbounded: 0.
- value overlap: size of the multiset intersection of the cells over the larger number of cells. Cells are
  compared by key: text normalised as in judging, 1 equal to 1.0 but not to '1', floats to 12 significant digits.
- numeric proximity: mean over the gold's numeric cells of max(0, 1 - |p - g| / max(|g|, 1)), p the nearest
  predicted number that no other gold cell has taken; equal numbers are paired first, the others in ascending
  order. Without a numeric gold cell its weight goes to value overlap.

The score is rounded down to a multiple of 0.25. Overlap and proximity see the first `row_limit` rows of either
side, because no more than that is fetched from a query. phi is 1 only if the number of rows agrees and the cells
seen are the same multiset. It takes O(n log n) in the cells seen, and leaves the server only as part of a reward.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256

from env_server.actions import ACTIONS, TABLE
from env_server.dataset import Gold, Row, SQLValue
from env_server.judging.answers import normalize_text
from env_server.settings import MAX_ARGUMENT_CHARS, RewardSettings
from env_server.sql.lexer import fold, opaque_tokens
from env_server.types import ActionType, RewardComponents

_WORD = re.compile(r"[\w.$]+|[<>=!|]+|\S")
"""What counts as one word: `T1.name` is another text than `T1 . name`."""
_MAX_REMEMBERED = 4_096
_LONGEST_REMEMBERED = 1_000
"""Statements, and characters of one, whose identity is remembered: the rollouts of a group send the same ones."""
_LONGEST_KEPT = 200
"""Characters of an action of an episode that is kept as it is; of a longer one, a hash."""
BINS = 4
ROW_LIMIT = 20
_CARDINALITY, _OVERLAP, _PROXIMITY = 0.25, 0.50, 0.25
_SLACK = 1e-9
"""Keeps a score that is exactly a multiple of 1/4 from falling a bin through float rounding."""
_NAME_QUOTES = {'"': '"', "'": "'", "`": "`", "[": "]"}


def normalize_action(action_type: str, argument: str) -> str:
    """Return the identity of an action, for `repeat` and `new information`.

    The type in upper case. A table name without quotes, case-folded. Anything else is taken as SQL: case-folded
    outside of literals and quoted identifiers, comments, white space and trailing semicolons dropped. An argument
    longer than MAX_ARGUMENT_CHARS, which is refused, stays as it is.
    """
    kind = action_type.strip().upper()
    if len(argument) > MAX_ARGUMENT_CHARS:
        return f"{kind} {argument}"
    if (action := ACTIONS.get(kind)) is not None and action.argument is TABLE:
        return f"{kind} {_normalize_name(argument)}"
    normalize = _normalize_sql if len(argument) > _LONGEST_REMEMBERED else _remembered_sql
    return f"{kind} {normalize(argument)}"


def _normalize_name(name: str) -> str:
    name = name.strip().rstrip(";").rstrip()
    if len(name) >= 2 and _NAME_QUOTES.get(name[0]) == name[-1]:
        name = name[1:-1]
    return fold(name)


def _normalize_sql(sql: str) -> str:
    sql = sql.strip()
    words: list[str] = []
    position = 0
    for token in opaque_tokens(sql):
        words += _WORD.findall(fold(sql[position : token.start()]))
        if token.lastgroup != "comment":
            words.append(token[0])
        position = token.end()
    words += _WORD.findall(fold(sql[position:]))
    while words and words[-1] == ";":
        words.pop()
    return " ".join(words)


_remembered_sql = lru_cache(_MAX_REMEMBERED)(_normalize_sql)


def wrong_total_bound(settings: RewardSettings, step_budget: int) -> float:
    """Return an upper bound of an episode's total reward without a correct ANSWER.

    Every step's operational part is at most `best`, the progress parts are non-negative (or all non-positive, for
    a negative scale) and sum to at most max(0, progress_scale), and clip is monotone and never stretches, so n
    steps collect at most n clip(best) + max(0, progress_scale), and never more than n clip_high. An episode has 1
    to `step_budget` steps. Needs clip_low <= clip_high.
    """
    s = settings
    bonuses = (0.0, s.repeat, s.success, s.success + s.repeat, s.success + s.new_information)
    best = _clip(s.step_cost + max(bonuses), s)
    progress = max(0.0, s.progress_scale)
    return max(min(n * best + progress, n * s.clip_high) for n in range(1, step_budget + 1))


def _clip(value: float, settings: RewardSettings) -> float:
    return min(max(value, settings.clip_low), settings.clip_high)


class EpisodeRewards:
    """The rewards of one episode, in the order of its steps. Holds the actions taken and the best phi."""

    def __init__(
        self,
        gold: Gold,
        settings: RewardSettings,
        *,
        row_limit: int = ROW_LIMIT,
        cached: Callable[[str, Callable[[], float]], float] | None = None,
    ) -> None:
        """`row_limit`: how many rows of a query `explore` is given at most; phi compares that many.

        `cached` may know a query's phi for this gold, and is given the way to compute it.
        """
        self._gold = gold
        self._cached = cached or (lambda _, compute: compute())
        self._target: Target | None = None
        self._settings = settings
        self._row_limit = row_limit
        self._taken: set[str | bytes] = set()
        self._potential = 0.0

    def explore(
        self,
        action_type: str,
        argument: str,
        *,
        ok: bool,
        rows: Sequence[Row] | None = None,
        row_count: int | None = None,
    ) -> RewardComponents:
        """Reward a DESCRIBE, SAMPLE or QUERY, or an invalid action of any kind (`ok` False).

        `rows` and their true number `row_count` (None: unknown) are given for a successful QUERY only.
        """
        repeated = self._take(action_type, argument)
        new_query = ok and not repeated and action_type.strip().upper() == ActionType.QUERY
        before = self._potential
        if rows is not None:
            self._potential = max(before, self._cached(argument, lambda: self._phi(rows, row_count)))
        return self._components(
            success=self._settings.success if ok else 0.0,
            new_information=self._settings.new_information if new_query else 0.0,
            repeat=self._settings.repeat if repeated else 0.0,
            progress=self._settings.progress_scale * (self._potential - before),
        )

    def answer(self, argument: str, *, correct: bool) -> RewardComponents:
        """Reward the ANSWER that ends the episode."""
        repeated = self._take(ActionType.ANSWER, argument)
        return self._components(
            repeat=self._settings.repeat if repeated else 0.0,
            terminal=self._settings.correct if correct else 0.0,
        )

    def _take(self, action_type: str, argument: str) -> bool:
        """Record an action; return whether it was taken before."""
        action = normalize_action(action_type, argument)
        is_long = len(action) > _LONGEST_KEPT
        kept = sha256(action.encode(errors="surrogatepass")).digest() if is_long else action
        repeated = kept in self._taken
        self._taken.add(kept)
        return repeated

    def _phi(self, rows: Sequence[Row], row_count: int | None) -> float:
        self._target = self._target or Target(self._gold, self._row_limit)
        return self._target.phi(rows, row_count)

    def _components(
        self,
        *,
        success: float = 0.0,
        new_information: float = 0.0,
        repeat: float = 0.0,
        progress: float = 0.0,
        terminal: float = 0.0,
    ) -> RewardComponents:
        step_cost = self._settings.step_cost
        operational = step_cost + success + new_information + repeat
        return RewardComponents(
            step_cost=step_cost,
            success=success,
            new_information=new_information,
            repeat=repeat,
            operational=operational,
            progress=progress,
            terminal=terminal,
            total=_clip(operational + progress, self._settings) + terminal,
        )


class Target:
    """Gold rows, ready for many queries to be scored against them."""

    def __init__(self, gold: Gold, row_limit: int = ROW_LIMIT) -> None:
        wanted = [cell for row in gold.rows[:row_limit] for cell in row]
        self._row_limit = row_limit
        self._row_count = len(gold.rows)
        self._cell_count = len(wanted)
        self._keys = Counter(map(_key, wanted))
        self._numbers = Counter(_numbers(wanted))

    def phi(self, rows: Sequence[Row], row_count: int | None) -> float:
        """Score a query's rows. `row_count` is their true number, or None when it is not known."""
        predicted = [cell for row in rows[: self._row_limit] for cell in row]
        cardinality = _cardinality(row_count, self._row_count)
        overlap = self._overlap(predicted)
        proximity = _proximity(_numbers(predicted), self._numbers) if self._numbers else overlap
        score = _CARDINALITY * cardinality + _OVERLAP * overlap + _PROXIMITY * proximity
        return math.floor(score * BINS + _SLACK) / BINS

    def _overlap(self, predicted: Sequence[SQLValue]) -> float:
        larger = max(len(predicted), self._cell_count)
        if larger == 0:
            return 1.0
        wanted = self._keys
        common = sum(min(count, wanted[key]) for key, count in Counter(map(_key, predicted)).items() if key in wanted)
        return common / larger


def _cardinality(predicted: int | None, wanted: int) -> float:
    if predicted is None:
        return 0.0
    return 1 - abs(predicted - wanted) / max(predicted, wanted, 1)


def _key(value: SQLValue) -> tuple[str, object]:
    if isinstance(value, str):
        return ("text", normalize_text(value))
    if isinstance(value, float):
        # A sum taken in another order differs in the last bits.
        return ("number", float(f"{value:.12g}")) if math.isfinite(value) else ("special", repr(value))
    if isinstance(value, int):
        return ("number", value)
    return ("other", value)


def _numbers(cells: Sequence[SQLValue]) -> list[int | float]:
    """Return the finite numbers, ascending."""
    return sorted(cell for cell in cells if isinstance(cell, int | float) and math.isfinite(cell))


def _proximity(predicted: list[int | float], wanted: Counter[int | float]) -> float:
    """Return the mean proximity of the wanted numbers, of which there is at least one."""
    found = Counter(predicted)
    common = found & wanted
    rest = sorted((found - common).elements())
    total = float(common.total())
    for number in sorted((wanted - common).elements()):
        if not rest:
            break
        total += _closeness(_take_nearest(rest, number), number)
    return total / wanted.total()


def _take_nearest(numbers: list[int | float], target: int | float) -> int | float:
    """Remove and return the nearest of the ascending numbers; of two equally near, the smaller."""
    index = bisect_left(numbers, target)
    if index == len(numbers) or (index > 0 and target - numbers[index - 1] <= numbers[index] - target):
        index -= 1
    return numbers.pop(index)


def _closeness(number: int | float, target: int | float) -> float:
    return max(0.0, 1 - abs(number - target) / max(abs(target), 1))
