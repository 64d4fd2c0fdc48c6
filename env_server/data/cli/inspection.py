"""What a data set holds and what was left out, for the person who runs SQLEnv: the text of `sqlenv data inspect`.

It shows gold SQL and gold answers, so it is not for an agent. Reads the schemas of the databases that it lists,
nothing else. The same data set always gives the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from env_server.dataset import Dataset, Exclusion, Hardness, Question, Split
from env_server.errors import DataError
from env_server.settings import DisplaySettings, EnvSettings
from env_server.sql.display import describe_table, format_result
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Schema

MAX_LISTED = 100
"""Databases, and exclusions of one database, that are listed; what is left out is counted."""

SPLITS = (Split.TRAIN, Split.EVAL)


def inspect_text(dataset: Dataset, db_id: str | None = None, samples: int = 3) -> Group:
    """Return the overview of a data set, or of one of its databases, ready for a rich console.

    Raises DataError when `db_id` is unknown.
    """
    pool = DatabasePool(dataset.databases, EnvSettings().sandbox, max_idle=1)
    try:
        if db_id is None:
            listed = list(dataset.databases)[:MAX_LISTED]
            return _overview(dataset, {name: pool.schema(name) for name in listed}, samples)
        if db_id not in dataset.databases:
            raise DataError(_unknown_database(dataset, db_id))
        return _database(dataset, db_id, pool.schema(db_id), samples)
    finally:
        pool.close()


def evenly(questions: Sequence[Question], count: int) -> list[Question]:
    """Return `count` questions (or all, if fewer) from equal distances, the first one among them."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def _overview(dataset: Dataset, schemas: Mapping[str, Schema], samples: int) -> Group:
    families = [question.family for question in dataset.questions]
    parts: list[RenderableType] = [
        _headline(dataset.name, dataset.questions, dataset.excluded, len(dataset.databases)),
        question_counts("split", SPLITS, dataset.questions, lambda question: question.split),
    ]
    if any(families):
        names = sorted(set(families))
        parts.append(question_counts("family", names, dataset.questions, lambda question: question.family))
    parts.append(_exclusion_counts(dataset.excluded))
    parts.append(_database_list(dataset, schemas))
    parts.extend(_sample(question) for question in evenly(dataset.questions, samples))
    return Group(*parts)


def _database(dataset: Dataset, db_id: str, schema: Schema, samples: int) -> Group:
    questions = [question for question in dataset.questions if question.db_id == db_id]
    excluded = [exclusion for exclusion in dataset.excluded if exclusion.db_id == db_id]
    lines = [f"{e.question_id}: {e.reason.value} ({e.detail})" for e in excluded[:MAX_LISTED]]
    return Group(
        _headline(f"{dataset.name}, database {db_id}", questions, excluded, 1),
        Text(f"{dataset.databases[db_id]}\n", style="dim"),
        *(Text(describe_table(table) + "\n") for table in schema.tables),
        question_counts("split", sorted({question.split for question in questions}), questions, lambda q: q.split),
        *([Text("\n".join(["left out", *lines, *_left_out(len(excluded))]) + "\n")] if excluded else []),
        *(_sample(question) for question in evenly(questions, samples)),
    )


def _headline(name: str, questions: Sequence[Question], excluded: Sequence[Exclusion], databases: int) -> Text:
    counts = [
        counted(len(questions), "usable question"),
        counted(databases, "database"),
        f"{counted(len(excluded), 'question')} left out",
    ]
    copies = sum(bool(question.duplicate_of) for question in questions)
    zeros = sum(question.gold.is_zero for question in questions)
    notes = [
        f"{counted(copies, 'duplicate')} (the SQL of an earlier question, up to formatting)" if copies else "",
        f"{counted(zeros, 'question')} with the answer 0" if zeros else "",
    ]
    note = ", ".join(filter(None, notes))
    return Text.assemble((name, "bold"), f": {', '.join(counts)}\n", f"among them {note}\n" if note else "")


def counted(count: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def question_counts(
    title: str, groups: Iterable[str], questions: Sequence[Question], key: Callable[[Question], str]
) -> Table:
    """Count databases, and questions by hardness, in each group; a last line for all groups."""
    levels = levels_of(questions)
    table = _table(title, "databases", *levels, "questions")
    groups = list(groups)
    members = {group: [question for question in questions if key(question) == group] for group in groups}
    for name, chosen in [*members.items(), *([("all", list(questions))] if len(groups) > 1 else [])]:
        hardness = Counter(question.hardness for question in chosen)
        databases = len({question.db_id for question in chosen})
        numbers = [databases, *(hardness[level] for level in levels), len(chosen)]
        table.add_row(Text(name or "(none)"), *(f"{number:,}" for number in numbers))
    return table


def levels_of(questions: Sequence[Question]) -> list[Hardness]:
    """Return the levels that questions may be counted by: UNKNOWN only where it occurs."""
    unknown = any(question.hardness is Hardness.UNKNOWN for question in questions)
    return [level for level in Hardness if unknown or level is not Hardness.UNKNOWN]


def _exclusion_counts(excluded: Sequence[Exclusion]) -> RenderableType:
    if not excluded:
        return Text("left out: nothing\n")
    table = _table("left out", "questions")
    table.add_column("for example", overflow="fold")
    for reason, count in Counter(exclusion.reason for exclusion in excluded).most_common():
        example = next(exclusion for exclusion in excluded if exclusion.reason is reason)
        table.add_row(reason.value, f"{count:,}", Text(f"{example.question_id}, {example.db_id}: {example.detail}"))
    return table


def _database_list(dataset: Dataset, schemas: Mapping[str, Schema]) -> RenderableType:
    table = _table("database", "questions", "tables", "columns", "rows")
    table.add_column("split")
    counts = Counter(question.db_id for question in dataset.questions)
    splits = dataset.splits()
    for db_id, schema in schemas.items():
        columns = sum(len(each.columns) for each in schema.tables)
        numbers = [counts[db_id], len(schema.tables), columns, sum(each.row_count or 0 for each in schema.tables)]
        table.add_row(Text(db_id), *(f"{number:,}" for number in numbers), " and ".join(splits[db_id]))
    notes = _left_out(len(dataset.databases))
    return Group(table, *(Text(f"{note}; --db shows any of them\n") for note in notes))


def _left_out(count: int) -> list[str]:
    return [f"... and {count - MAX_LISTED:,} more"] if count > MAX_LISTED else []


def _sample(question: Question) -> Group:
    """Show a question with its gold SQL and what the agent would see of its gold rows."""
    tags = (question.split.value, question.hardness.value, question.family, question.db_id)
    rows = question.gold.rows
    gold = QueryResult(("",) * question.gold.width, rows, row_count=len(rows), vm_steps=0)
    lines = {
        "question": question.text,
        "hint": question.evidence,
        "gold SQL": " ".join(question.gold_sql.split()),
        "gold": format_result(gold, DisplaySettings()).partition("\n")[2],
    }
    grid = Table.grid(padding=(0, 2))
    for label, text in lines.items():
        if text:
            grid.add_row(Text("  " + label), Text(text))
    heading = f"{question.question_id} ({', '.join(tag for tag in tags if tag)})"
    return Group(Text(heading, style="bold"), grid, Text())


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _unknown_database(dataset: Dataset, db_id: str) -> str:
    lost = sum(exclusion.db_id == db_id for exclusion in dataset.excluded)
    if lost:
        return f"database {db_id!r} has no usable question: all {lost} were left out"
    close = get_close_matches(db_id, dataset.databases, n=5) or list(dataset.databases)[:5]
    return f"data set {dataset.name} has no database {db_id!r}; it has {len(dataset.databases)}, such as {close}"
