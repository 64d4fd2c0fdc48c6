"""Keys within and between tables: which columns look like one, and what is wrong with them. Pure.

A column is a table's key when it is called so (`id`, `category_id` in `categories`) and every row has a value of its
own. A column looks like a foreign key when it is called like another table's key; `survey.read_references` counts
whether its values are there, and `check_references` judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from env_server.tools.findings import DeclareKey, Finding, Kind, Place
from env_server.tools.survey import ColumnSurvey, DatabaseSurvey, Reference, TableSurvey

MIN_KEY_SHARE = 0.9
"""Of the rows with a value of their own: below, a column that is called id is no key."""
MIN_FOUND_SHARE = 0.9
"""Of the values that have a row: below, a column that is called like a foreign key is none."""
MIN_EXACT_FOUND_SHARE = 0.5
"""The same where a column is called exactly like another table's own key."""
MIN_FOUND = 2
EXACT = 3
KEY_WORDS = ("id", "key", "code", "no", "nr", "number", "num", "uuid")
_GENERIC = frozenset((*KEY_WORDS, "name", "title", "date", "year", "type", "status", "description", "rank", "position"))
_WHOLE = frozenset(("paid", "valid", "grid", "acid", "fluid", "solid", "rapid", "hybrid", "prepaid", "unpaid"))
"""Words that only end like a key."""
_IRREGULAR = {"people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse"}


def table_keys(survey: DatabaseSurvey) -> dict[str, ColumnSurvey]:
    """Return the key of each table that has one column as its primary key, or one that should be."""
    found: dict[str, ColumnSurvey] = {}
    for table in survey.tables:
        declared = [column for column in table.columns if column.primary_key]
        if len(declared) == 1:
            found[table.name] = declared[0]
        elif not declared:
            key = next((c for c in table.columns if c.unique and is_own_key(c.name, table.name)), None)
            if key := key or _first_id(table, survey):
                found[table.name] = key
    return found


def check_keys(survey: DatabaseSurvey) -> Iterator[Finding]:
    """Yield the columns that look like a primary key and are not declared, or are not unique."""
    keys = table_keys(survey)
    for table in survey.tables:
        if table.rows < MIN_FOUND or any(column.primary_key for column in table.columns):
            continue
        if table.name in keys:
            hint = "Declare it, so that DESCRIBE shows it and other tables can refer to it"
            place = Place(survey.db_id, table.name, keys[table.name].name)
            yield Finding(Kind.PRIMARY_KEY, "every row has a value of its own", hint, DeclareKey(), place=place)
            continue
        first = table.columns[0]
        if is_own_key(first.name, table.name) and MIN_KEY_SHARE * table.rows <= first.distinct < table.rows:
            repeated = tuple(str(value) for value, count in (*first.texts, *first.numbers) if count > 1)[:3]
            message = f"{table.rows - first.distinct:,} of {table.rows:,} rows have no value of their own"
            message += f", such as {', '.join(map(repr, repeated))}" if repeated else ""
            hint = "Correct the rows, so that it can be the primary key"
            place = Place(survey.db_id, table.name, first.name)
            yield Finding(Kind.REPEATED_KEY, message, hint, cells=repeated, place=place)


def likely_references(survey: DatabaseSurvey) -> list[Reference]:
    """Return the declared foreign keys, and the columns that are called like one."""
    keys = table_keys(survey)
    found = []
    for table in survey.tables:
        declared: set[str] = set()
        for key in table.schema.foreign_keys:
            declared.update(column.casefold() for column in key.columns)
            parent = survey.table(key.table)
            if len(key.columns) == 1 and len(key.ref_columns) == 1 and parent and parent.rows:
                found.append(Reference(table.name, key.columns[0], parent.name, key.ref_columns[0], declared=True))
        for column in table.columns:
            if column.name.casefold() in declared or keys.get(table.name) is column or not column.distinct:
                continue
            parents = [
                (score, parent)
                for parent, key in keys.items()
                if parent != table.name
                and _is_text(column) == _is_text(key)
                and (score := closeness(column.name, parent, key.name))
            ]
            if parents:
                _, best = max(parents, key=lambda each: each[0])
                found.append(Reference(table.name, column.name, best, keys[best].name, declared=False))
    return found


def check_references(survey: DatabaseSurvey, references: Sequence[Reference]) -> Iterator[Finding]:
    """Yield the foreign keys that are not declared, and those that have values without a row."""
    for each in references:
        place = Place(survey.db_id, each.table, each.column)
        target = f"{each.parent}.{each.parent_column}"
        found = each.distinct - each.lost
        is_exact = closeness(each.column, each.parent, each.parent_column) == EXACT
        share = MIN_EXACT_FOUND_SHARE if is_exact else MIN_FOUND_SHARE
        if not each.declared and (found < MIN_FOUND or found < share * each.distinct):
            continue
        if each.lost:
            lost = f"{each.lost:,} of its {each.distinct:,} values {'has' if each.lost == 1 else 'have'}"
            message = f"{lost} no row in {target}, such as {', '.join(map(repr, each.examples))}"
            hint = "Add the rows, or correct the values: a join loses these rows"
            yield Finding(Kind.BROKEN_REFERENCE, message, hint, cells=each.examples, place=place)
        if not each.declared:
            message = f"{'nearly each' if each.lost else 'each'} of its {each.distinct:,} values is in {target}"
            hint = f"Declare that it refers to {each.parent}, so that DESCRIBE shows it and test databases keep it"
            yield Finding(Kind.FOREIGN_KEY, message, hint, DeclareKey(each.parent, each.parent_column), place=place)


def closeness(column: str, parent: str, key: str) -> int:
    """Tell how much a column is called like the key of the table `parent`: 0 for not at all."""
    words = words_of(column)
    if words == words_of(key) and not (len(words) == 1 and words[0] in _GENERIC):
        return EXACT if is_own_key(column, parent) else 2
    bare = words[:-1] if words and words[-1] in KEY_WORDS else words
    singular = words_of(singular_of(parent))
    if not bare or not singular:
        return 0
    if bare in (singular, words_of(parent)):
        return EXACT
    return 1 if words != bare and bare[-len(singular) :] == singular else 0


def is_own_key(column: str, table: str) -> bool:
    """Tell whether a column is called like its table's key: `id`, `category_id` in `categories`."""
    words = words_of(column)
    owners = (words_of(table), words_of(singular_of(table)))
    return is_called_key(column) and (words in (["id"], ["uuid"]) or words[:-1] in owners)


def is_called_key(column: str) -> bool:
    """Tell whether a column's name ends as those of keys and codes do."""
    return words_of(column)[-1:] in [[word] for word in KEY_WORDS]


def words_of(name: str) -> list[str]:
    """Return the words of an identifier in lower case; `customerID` and `customerid` are both customer and id."""
    split = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3 \2\4", name)
    words = re.findall(r"[^\W_]+", split.casefold())
    if len(words) == 1 and len(words[0]) > len("xid") and words[0].endswith("id") and words[0] not in _WHOLE:
        return [words[0][:-2], "id"]
    return words


def singular_of(noun: str) -> str:
    """Return the singular of a table's name, as far as its ending tells it."""
    lower = noun.casefold()
    for plural, singular in _IRREGULAR.items():
        if lower == plural or lower.endswith("_" + plural):
            return noun[: len(noun) - len(plural)] + singular
    if lower.endswith(("series", "species", "ss", "us", "is", "news")):
        return noun
    if lower.endswith("ies") and len(lower) > 4:
        return noun[:-3] + "y"
    if lower.endswith(("sses", "shes", "ches", "xes", "zes")):
        return noun[:-2]
    return noun.removesuffix("s").removesuffix("S")


def _first_id(table: TableSurvey, survey: DatabaseSurvey) -> ColumnSurvey | None:
    """Return the first column where it is an id of its own: not one that a larger table has as its first one."""
    first = table.columns[0]
    if not first.unique or words_of(first.name)[-1:] != ["id"]:
        return None
    same = [t for t in survey.tables if t.columns[0].name.casefold() == first.name.casefold() and t.columns[0].unique]
    return first if max(same, key=lambda each: each.rows) is table else None


def _is_text(column: ColumnSurvey) -> bool:
    return column.text_cells > column.number_cells
