"""The noisy expert: it finds its way to the right answer by other ways than the shortest, and out of mistakes.

The oracle never errs, so a policy that learns from it alone has never seen an error, an empty result or a table too
many. The noisy expert describes tables in any order, samples, looks up the values that it is going to compare with,
runs a part of a query before the whole; it also misnames a column, asks the wrong table, misspells a value or asks
beside the question, sees it, and corrects it. In the end it is right.

What should not be imitated, a mistake or a needless table, is in `masked_turns`: the policy reads it and is
not trained on it. `convincing` says whether an episode came out as it was meant: the mistakes showed, and nothing else
went wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sqlglot import exp

from env_server.dataset import Question
from env_server.judging.answers import format_answer
from env_server.sql.display import sql_name
from env_server.sql.lexer import Token, tokens
from env_server.sql.parsing import parse_query
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.rollout.episodes import Episode, Turn
from trainer.rollout.players import mentioned_tables, table_names

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


class NoisyExpert:
    """Knows the gold, and takes a way that `rng` draws."""

    def __init__(self, question: Question, rng: random.Random, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._question = question
        self._rng = rng
        self._answer_mode = answer_mode
        self._moves: list[_Move] = []
        self._plan: Iterator[_Move] = iter(())

    @property
    def masked_turns(self) -> frozenset[int]:
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


_SWAPS = (
    ("MAX(", "MIN("),
    ("AVG(", "SUM("),
    ("COUNT(DISTINCT ", "COUNT("),
    (" > ", " < "),
    (" >= ", " <= "),
    (" = '", " != '"),
    (" DESC", " ASC"),
    (" AND ", " OR "),
    (" NOT IN ", " IN "),
    (" INTERSECT ", " UNION "),
    (" EXCEPT ", " INTERSECT "),
)
_CLAUSE = re.compile(r" (?:WHERE|HAVING) .*?(?= GROUP BY | ORDER BY | LIMIT |$)", re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""The words of which a column's name is made: `Song_release_year`, `petAge`."""


def damage(sql: str, rng: random.Random) -> str:
    """Return a nearby wrong query: a condition lost, or an operator, aggregate or direction turned around."""
    candidates = [sql.replace(a, b, 1) for a, b in _SWAPS if a in sql]
    candidates += [sql.replace(b, a, 1) for a, b in _SWAPS if b in sql and a not in sql]
    if _CLAUSE.search(sql):
        candidates.append(_CLAUSE.sub("", sql, count=1))
    if " LIMIT " in sql:
        candidates.append(sql[: sql.rindex(" LIMIT ")])
    return rng.choice([c for c in candidates if c != sql] or [f"{sql} LIMIT 1"])


def lookups(sql: str) -> list[str]:
    """Return queries that show the values of the columns which a query compares with a text."""
    found = []
    for node in _walk(sql, exp.EQ, exp.NEQ, exp.Like, exp.In):
        column = node.this
        others = node.expressions if isinstance(node, exp.In) else [node.expression]
        if isinstance(column, exp.Column) and any(_is_text(other) for other in others):
            table = _table_of(column)
            if table:
                found.append(f"SELECT DISTINCT {sql_name(column.name)} FROM {sql_name(table)}")
    return list(dict.fromkeys(found))


def parts(sql: str) -> list[str]:
    """Return the queries that a query is made of and that stand for themselves; none where it is a single one."""
    found = []
    for select in _walk(sql, exp.Select):
        inside = {name for table in select.find_all(exp.Table) for name in (table.name, table.alias)}
        qualifiers = {column.table for column in select.find_all(exp.Column) if column.table}
        if select.parent is not None and qualifiers <= inside:
            found.append(select.sql(dialect="sqlite"))
    return list(dict.fromkeys(found))


def misnamed(sql: str, of: Sequence[str], rng: random.Random) -> str | None:
    """Return a query with a column under a name that it might have had, one of the tables `of` if they have any.

    None where the query names no column.
    """
    columns = [column for column in _walk(sql, exp.Column) if column.name != "*" and not _is_text(column)]
    names = {column.name.casefold() for column in columns}
    wanted = {table.casefold() for table in of}
    first = [column for column in columns if _table_of(column).casefold() in wanted]
    candidates = []
    for column in first or columns:
        words = [word.lower() for word in _WORD.findall(column.name)]
        table = _table_of(column).lower().rstrip("s")
        invented = {
            "_".join(words),
            "".join(words),
            words[-1] if words else "",
            f"{table}_{'_'.join(words)}" if table else "",
            "_".join(words[1:]),
            f"{'_'.join(words)}_name",
        }
        candidates += [(column.name, name) for name in sorted(invented - names - {""})]
    if not candidates:
        return None
    name, instead = rng.choice(candidates)
    return _renamed(sql, name, instead)


def misplaced(sql: str, others: Sequence[str], rng: random.Random) -> tuple[str, str] | None:
    """Return a query of another table, and that table; None where the query has several, or there is no other."""
    named = list(_walk(sql, exp.Table))
    if len(named) != 1 or not others:
        return None
    other = rng.choice(others)
    return _renamed(sql, named[0].name, sql_name(other)), other


def misquoted(sql: str, rng: random.Random) -> str | None:
    """Return a query with a text constant written otherwise than the database writes it; None without one."""
    texts = {node.name for node in _walk(sql, exp.Literal, exp.Column) if _is_text(node)}
    places = [token for token in tokens(sql) if token.lastgroup in ("literal", "quoted") and token[0][1:-1] in texts]
    if not places:
        return None
    token = rng.choice(places)
    text = token[0][1:-1]
    ways = {text.lower(), text.upper(), text.title(), f"{text}s", text.split(" ")[0]} - {text, ""}
    return _replaced(sql, token, token[0][0] + rng.choice(sorted(ways)) + token[0][-1])


def _walk(sql: str, *kinds: type[exp.Expression]) -> Iterator[exp.Expression]:
    tree = parse_query(sql)
    return iter(()) if tree is None else tree.find_all(*kinds)


def _is_text(node: exp.Expression) -> bool:
    """Whether a node is a text; a lone double-quoted word beside a comparison is one in Spider."""
    if isinstance(node, exp.Literal):
        return bool(node.is_string)
    name = node.this if isinstance(node, exp.Column) else None
    return (
        isinstance(name, exp.Identifier)
        and bool(name.quoted)
        and not node.text("table")
        and isinstance(node.parent, exp.Binary | exp.In | exp.Between)
        and node.parent.this is not node
    )


def _table_of(column: exp.Expression) -> str:
    """The table that a column is of, by its qualifier or because there is no other; "" where that is not told."""
    select = column.find_ancestor(exp.Select)
    if select is None:
        return ""
    tables = [table for table in select.find_all(exp.Table) if table.find_ancestor(exp.Select) is select]
    qualifier = column.text("table").casefold()
    if not qualifier:
        return tables[0].name if len(tables) == 1 else ""
    return next((table.name for table in tables if table.alias_or_name.casefold() == qualifier), "")


def _renamed(sql: str, name: str, instead: str) -> str:
    """Put a name in the place of another, wherever that one stands."""

    def write(token: Token) -> str:
        kind, text = token.lastgroup, token[0]
        plain = text[1:-1] if kind == "quoted" else text
        return instead if kind in ("word", "quoted") and plain.casefold() == name.casefold() else text

    return "".join(map(write, tokens(sql)))


def _replaced(sql: str, token: Token, text: str) -> str:
    return sql[: token.start()] + text + sql[token.end() :]
