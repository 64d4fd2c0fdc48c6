"""The exploring player: it finds its way to the right answer by other ways than the shortest, and out of mistakes.

The oracle never errs, so who learns from it alone has never seen an error, an empty result or a table too many, and
does not know how to go on from there. This player describes tables in any order, samples, looks up the values that it
is going to compare with, runs a part of a query before the whole; it also misnames a column, asks the wrong table,
misspells a value or asks beside the question, sees it, and mends it. In the end it is right.

What is no good to imitate, a mistake or a table that nobody needed, is in `unlearned`: it belongs to what a policy
reads, not to what it learns. `convincing` says whether an episode came out as it was meant: the mistakes showed, and
nothing else went wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from env_server.dataset import Question
from env_server.judging.answers import format_answer
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.rollout.episodes import Episode, Turn
from trainer.rollout.players import mentioned_tables, table_names
from trainer.warmup.nearby import damage, lookups, misnamed, misplaced, misquoted, parts

STUMBLE = 0.6
"""How often an episode has a mistake in it; the others only look around."""
SAMPLE, DETOUR, STEP = 0.25, 0.25, 0.5
"""How often a table is sampled too, a table is described that is not needed, and a query comes before the whole."""


class _Move(NamedTuple):
    kind: ActionType
    argument: str
    mistaken: bool = False
    """A mistake that must show."""
    needless: bool = False
    """No mistake, but nothing to imitate either."""


class ExploringPlayer:
    """Knows the gold, and takes a way that `rng` draws."""

    def __init__(self, question: Question, rng: random.Random, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._question = question
        self._rng = rng
        self._answer_mode = answer_mode
        self._moves: list[_Move] = []
        self._plan: Iterator[_Move] = iter(())

    @property
    def unlearned(self) -> frozenset[int]:
        """The numbers of the turns that are not to be imitated."""
        return frozenset(n for n, move in enumerate(self._moves) if move.mistaken or move.needless)

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next move of the plan."""
        if not self._moves:
            self._moves = self._make_plan(table_names(observation))
            self._plan = iter(self._moves)
        move = next(self._plan)
        return SQLAction(action_type=move.kind.value, argument=move.argument)

    def convincing(self, episode: Episode) -> bool:
        """Whether a played episode is right, its mistakes showed, and nothing else failed."""
        if not episode.correct or len(episode.turns) != len(self._moves):
            return False
        *_, last, _ = episode.turns
        return all(
            _is_off(turn, last) if move.mistaken else not turn.error
            for move, turn in zip(self._moves, episode.turns, strict=True)
        )

    def _make_plan(self, tables: Sequence[str]) -> list[_Move]:
        rng, sql = self._rng, self._question.gold_sql
        needed = mentioned_tables(sql, tables)
        rng.shuffle(needed)
        others = [table for table in tables if table not in needed]
        moves = [_Move(ActionType.DESCRIBE, table) for table in needed]
        if rng.random() < SAMPLE:
            # Some time after it was described.
            at = rng.randrange(len(needed))
            moves.insert(rng.randint(at + 1, len(moves)), _Move(ActionType.SAMPLE, needed[at]))
        if others and rng.random() < DETOUR:
            moves.insert(rng.randint(0, len(moves)), _Move(ActionType.DESCRIBE, rng.choice(others), needless=True))
        steps = [*lookups(sql), *parts(sql)]
        if steps and rng.random() < STEP:
            moves.append(_Move(ActionType.QUERY, rng.choice(steps)))
        if rng.random() < STUMBLE:
            moves = self._stumble(moves, needed, others)
        by_value = self._answer_mode is AnswerMode.VALUE
        answer = format_answer(self._question.gold.rows) if by_value else sql
        return [*moves, _Move(ActionType.QUERY, sql), _Move(ActionType.ANSWER, answer)]

    def _stumble(self, moves: list[_Move], needed: Sequence[str], others: Sequence[str]) -> list[_Move]:
        """Put a mistake among the moves, and after it what finds the way out where the moves do not yet."""
        ways: list[Callable[[], list[_Move] | None]] = [
            lambda: self._misname(moves, needed),
            lambda: self._misname(moves, needed),
            lambda: self._misplace(moves, others),
            lambda: self._misspell(moves),
            lambda: self._invent_table(moves, needed),
            lambda: [*moves, self._wrong(damage(self._question.gold_sql, self._rng))],
        ]
        self._rng.shuffle(ways)
        return next((found for way in ways if (found := way()) is not None), moves)

    def _misname(self, moves: list[_Move], needed: Sequence[str]) -> list[_Move] | None:
        """A column that is not there, best of a table that was not described yet."""
        at = self._rng.randint(0, len(moves))
        unseen = [move.argument for move in moves[at:] if move.kind is ActionType.DESCRIBE]
        query = misnamed(self._question.gold_sql, unseen or needed, self._rng)
        return None if query is None else [*moves[:at], self._wrong(query), *moves[at:]]

    def _misplace(self, moves: list[_Move], others: Sequence[str]) -> list[_Move] | None:
        """The query of a table that does not have what is asked for."""
        found = misplaced(self._question.gold_sql, others, self._rng)
        if found is None:
            return None
        query, table = found
        looks = [] if self._rng.random() < STEP else [_Move(ActionType.DESCRIBE, table, needless=True)]
        return [*looks, self._wrong(query), *(move for move in moves if move.argument != table)]

    def _misspell(self, moves: list[_Move]) -> list[_Move] | None:
        """A value that the column does not hold so; a look at its values tells."""
        sql = self._question.gold_sql
        query = misquoted(sql, self._rng)
        if query is None:
            return None
        seen = {move.argument for move in moves}
        looks = [_Move(ActionType.QUERY, look) for look in lookups(sql) if look not in seen]
        return [*moves, self._wrong(query), *looks[:1]]

    def _invent_table(self, moves: list[_Move], needed: Sequence[str]) -> list[_Move]:
        """A table under a name that it does not have; the error lists those that are there."""
        table = self._rng.choice(needed)
        names = [table[:-1] if table.endswith("s") else f"{table}s", f"{table}_info", f"all_{table}"]
        return [_Move(ActionType.DESCRIBE, self._rng.choice(names), mistaken=True), *moves]

    def _wrong(self, sql: str) -> _Move:
        return _Move(ActionType.QUERY, sql, mistaken=True)


def _is_off(turn: Turn, right: Turn) -> bool:
    """Whether a mistake can be seen: it failed, or its result has another shape than the right one, or is nothing."""
    return bool(turn.error) or _shape(turn.result) != _shape(right.result)


def _shape(result: str) -> tuple[int, int, bool]:
    """Rows and columns of a result, and whether it is a single cell that says that there is nothing."""
    header, *rows = result.splitlines()
    return len(rows), header.count(" | "), rows in (["0"], ["NULL"], ["no rows"])
