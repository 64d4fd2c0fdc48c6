"""A user's database as the generator sees one: tables with nouns, columns with phrases and kinds, rows. Pure.

What a column holds is told by its values and its name: a key, a link to another table, a name that tells rows apart, a
category, an amount that can be added up, a date. What fits none of these, and what the doctor finds issues with, is
left out, so that nobody is asked about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from env_server.data.cells import ISO_FORM, NO, YES, read_date
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.model import Cell, Column, Database, Table
from env_server.dataset import Row
from env_server.tools.keys import is_called_key, singular_of, table_keys, words_of
from env_server.tools.survey import ColumnSurvey, DatabaseSurvey, Reference, TableSurvey

MAX_TEXT = 40
"""Letters of the longest text that one is asked for, or about."""
MAX_CATEGORIES = 30
_SUMMED = frozenset(
    (
        *("amount", "total", "price", "cost", "quantity", "qty", "stock", "count", "sum", "salary", "income", "budget"),
        *("revenue", "sales", "profit", "balance", "points", "population", "units", "minutes", "hours", "days", "fee"),
        *("bonus", "attendance", "seats", "capacity", "votes", "views", "orders", "members", "payment", "bytes"),
    )
)
"""Words of columns whose sum means something; an age has an average alone."""
_YEARS = frozenset(("year", "years"))
"""Words of columns of which neither means anything: they are early or late."""
_MAX_DECIMALS = 4
"""Of numbers that one can be asked about; coordinates and measurements have more."""
_NAMES = frozenset(("name", "title", "label", "surname", "lastname", "firstname", "nickname", "headline", "subject"))
_VERB = "belong to"


def custom_schema(
    survey: DatabaseSurvey,
    rows: Mapping[str, Sequence[Row]],
    references: Sequence[Reference],
    faulty: set[tuple[str, str]],
) -> Database | None:
    """Describe a database. `rows`: some of each table, whole; `faulty`: columns to leave out. None: nothing is left.

    `references` are the foreign keys, declared or likely; one that does not hold is no link, and no number either.
    """
    keys = table_keys(survey)
    # All questions about a table of one row have the same answer.
    usable = {table.name for table in survey.tables if len(rows.get(table.name, ())) > 1}
    held = [r for r in references if {r.table, r.parent} <= usable and r.distinct and not r.lost]
    links = _links(held, keys)
    faulty = faulty | {(r.table, r.column) for r in references}
    nouns = {table.name: nouns_of(table.name) for table in survey.tables}
    taken = {noun for pair in nouns.values() for noun in pair}
    tables = []
    for table in survey.tables:
        if table.name in usable:
            found = _table(table, rows[table.name], keys.get(table.name), links, nouns, taken, faulty)
            if found is not None:
                tables.append(found)
    known = {table.identifier for table in tables}
    complete = [_without_links_to(table, known) for table in tables]
    return Database(survey.db_id, tuple(complete)) if complete else None


def _links(references: Sequence[Reference], keys: Mapping[str, ColumnSurvey]) -> dict[tuple[str, str], str]:
    """Return the parent of each column that links: two links to one parent would both be "belong to", so none does."""
    found = [r for r in references if r.parent in keys and keys[r.parent].name.casefold() == r.parent_column.casefold()]
    pairs = [(r.table, r.parent) for r in found]
    return {
        (r.table, r.column): r.parent for r in found if pairs.count((r.table, r.parent)) == 1 and r.table != r.parent
    }


def _table(
    table: TableSurvey,
    rows: Sequence[Row],
    key: ColumnSurvey | None,
    links: Mapping[tuple[str, str], str],
    nouns: Mapping[str, tuple[str, str]],
    taken: set[str],
    faulty: set[tuple[str, str]],
) -> Table | None:
    singular, plural = nouns[table.name]
    phrases = _Phrases(table.name, taken)
    columns: list[Column] = []
    places: list[int] = []
    name = _name_column(table, faulty)
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in rows]
        if column is key:
            found: Column | None = Column(column.name, phrases.of(column.name), Kind.ID)
        elif (table.name, column.name) in links:
            parent = links[table.name, column.name]
            found = Column(column.name, nouns[parent][0], Kind.LINK, target=parent, verb=_VERB)
        elif (table.name, column.name) in faulty:
            found = None
        else:
            found = _described(column, cells, phrases.of, is_name=column is name)
        if found is not None:
            columns.append(found)
            places.append(place)
    if not columns:
        return None
    if key is not None:
        first = next(i for i, column in enumerate(columns) if column.kind is Kind.ID)
        columns.insert(0, columns.pop(first))
        places.insert(0, places.pop(first))
    cells_of = tuple(tuple(_cell(row[place]) for place in places) for row in rows)
    return Table(table.name, singular, plural, tuple(columns), cells_of, identified=key is not None)


def _described(
    column: ColumnSurvey, cells: Sequence[object], phrase: Callable[[str], str], *, is_name: bool
) -> Column | None:
    present = [cell for cell in cells if cell is not None]
    nullable = column.nulls > 0
    if not present or column.problem:
        return None
    if all(isinstance(cell, int | float) for cell in present) and not column.text_cells:
        return _number(column, present, phrase, nullable)
    if not all(isinstance(cell, str) for cell in present) or column.number_cells:
        return None
    texts = [str(cell) for cell in present]
    if max(map(len, texts)) > MAX_TEXT or any(re.search(r"[\n\r|\"\\]", text) for text in texts):
        return None
    if all((written := read_date(text)) is not None and written.form == ISO_FORM for text in texts):
        return Column(column.name, phrase(_date_name(column.name)), Kind.DATE, nullable=nullable)
    if is_name:
        return Column(column.name, phrase(column.name), Kind.NAME)
    if column.distinct < column.rows - column.nulls and column.distinct <= MAX_CATEGORIES:
        name = f"{column.name}_value" if {text.casefold() for text in texts} <= YES | NO else column.name
        return Column(column.name, phrase(name), Kind.CATEGORY, nullable=nullable)
    return None


def _date_name(column: str) -> str:
    """Return a name that can stand behind "the": `joined` and `joined_at` are the joined date."""
    words = words_of(column)
    if words[-1:] in (["at"], ["on"]) and len(words) > 1:
        words = words[:-1]
    return "_".join([*words, "date"] if words and words[-1].endswith("ed") else words)


def _number(
    column: ColumnSurvey, present: Sequence[object], phrase: Callable[[str], str], nullable: bool
) -> Column | None:
    words = set(words_of(column.name))
    if is_called_key(column.name) and not words & _SUMMED:
        return None
    if set(present) == {0, 1} and all(isinstance(cell, int) for cell in present):
        return None if nullable else Column(column.name, phrase(column.name), Kind.FLAG)
    kind = Kind.INTEGER if all(isinstance(cell, int) for cell in present) else Kind.REAL
    if any(isinstance(cell, float) and round(cell, _MAX_DECIMALS) != cell for cell in present):
        return None
    sums = bool(words & _SUMMED)
    averages = sums or not words & _YEARS
    return Column(column.name, phrase(column.name), kind, sums, averages, nullable)


def _name_column(table: TableSurvey, faulty: set[tuple[str, str]]) -> ColumnSurvey | None:
    """Return the column that tells the rows apart in words: one called name, else the first that does."""
    unique = [
        column
        for column in table.columns
        if column.unique and column.text_cells == column.rows and (table.name, column.name) not in faulty
    ]
    named = [column for column in unique if _NAMES & set(words_of(column.name)[-1:])]
    return next(iter(named or [column for column in unique if not is_called_key(column.name)]), None)


class _Phrases:
    """Gives each column of a table a phrase of its own, which is no table's noun."""

    def __init__(self, table: str, taken: set[str]) -> None:
        self._own = words_of(singular_of(table))
        self._taken = set(taken)

    def of(self, column: str) -> str:
        words = words_of(column) or [column.casefold()]
        short = words[len(self._own) :] if words[: len(self._own)] == self._own else words
        options = [" ".join(short), " ".join(words), " ".join([*self._own, *words]), f"{' '.join(words)} value"]
        phrase = next((each for each in options if each and each not in self._taken), f"{' '.join(words)} column")
        self._taken.add(phrase)
        return phrase


def nouns_of(table: str) -> tuple[str, str]:
    """Return the words for one row and for several rows of a table."""
    words = words_of(table) or [table.casefold()]
    singular = " ".join([*words[:-1], singular_of(words[-1])])
    plural = " ".join(words)
    return (singular, plural) if plural != singular else (singular, _plural(singular))


def _plural(noun: str) -> str:
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def _without_links_to(table: Table, known: set[str]) -> Table:
    kept = [i for i, column in enumerate(table.columns) if column.kind is not Kind.LINK or column.target in known]
    if len(kept) == len(table.columns):
        return table
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    columns = tuple(table.columns[i] for i in kept)
    return Table(table.identifier, table.singular, table.plural, columns, rows, identified=table.identified)


def _cell(value: object) -> Cell:
    return value if isinstance(value, int | float | str) else None
