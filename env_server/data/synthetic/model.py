"""A generated database as plain data: tables, columns with their phrases, rows. No I/O, no randomness.

Invariants of every generated `Database`: the first column of a table is its integer primary key, numbered from 1;
a table has at most one NAME column, without NULLs and with distinct values; foreign keys hold and are never NULL;
within a table no two columns share a phrase; no two tables share a noun, and no phrase of a column other than a
foreign key is a noun of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from env_server.data.synthetic.domains import Kind
from env_server.sql.lexer import is_plain_name
from env_server.sql.schema import quote_text

Cell = int | float | str | None

_TYPES = {Kind.ID: "INTEGER", Kind.LINK: "INTEGER", Kind.INTEGER: "INTEGER", Kind.FLAG: "INTEGER", Kind.REAL: "REAL"}


def quoted(identifier: str) -> str:
    """Return the identifier as SQL needs it: in double quotes only where it must be."""
    return identifier if is_plain_name(identifier) else f'"{identifier}"'


def literal(value: Cell) -> str:
    """Return a number or a text as an SQL literal."""
    return quote_text(value) if isinstance(value, str) else str(value)


@dataclass(frozen=True, slots=True)
class Column:
    """A column. For a LINK, `target` is the table it refers to and `verb` the words between the two plurals."""

    identifier: str
    phrase: str
    kind: Kind
    sums: bool = False
    averages: bool = False
    nullable: bool = False
    target: str = ""
    verb: str = ""

    @property
    def sql(self) -> str:
        """The identifier as SQL needs it."""
        return quoted(self.identifier)

    @property
    def is_year(self) -> bool:
        """Whether the numbers have an order and nothing else, as years do."""
        return self.kind is Kind.INTEGER and not self.averages

    @property
    def plural(self) -> bool:
        """Whether the phrase reads as a plural ("seats")."""
        if self.phrase.startswith("number of "):
            return False
        return self.phrase.endswith("s") and not self.phrase.endswith(("ss", "us", "is"))

    @property
    def be(self) -> str:
        """The verb that goes with the phrase."""
        return "are" if self.plural else "is"

    @property
    def evident(self) -> bool:
        """Whether "the pet named Rex" can only mean this column."""
        return self.kind is Kind.NAME and self.phrase.rpartition(" ")[2] in ("name", "title")


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its rows; `cells` holds the rows column by column.

    `identified`: the first column tells the rows apart, as a primary key does; so it is in every generated table.
    """

    identifier: str
    singular: str
    plural: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    identified: bool = True
    cells: dict[Column, tuple[Cell, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", dict(zip(self.columns, zip(*self.rows, strict=True), strict=True)))

    @property
    def sql(self) -> str:
        """The identifier as SQL needs it."""
        return quoted(self.identifier)

    @property
    def key(self) -> Column:
        """The primary key."""
        return self.columns[0]

    @property
    def name(self) -> Column | None:
        """The column that tells the rows apart in words, if there is one."""
        return next(iter(self.of(Kind.NAME)), None)

    def of(self, *kinds: Kind) -> list[Column]:
        """Return the columns of these kinds, in the table's order."""
        return [c for c in self.columns if c.kind in kinds]


@dataclass(frozen=True, slots=True)
class Database:
    """A database; tables are listed parents first."""

    db_id: str
    tables: tuple[Table, ...]

    def table(self, identifier: str) -> Table:
        """Return the table of that name."""
        return next(table for table in self.tables if table.identifier == identifier)


def create_statement(table: Table, database: Database) -> str:
    """Return the CREATE TABLE statement of a table."""
    parts = [f"{c.sql} {_TYPES.get(c.kind, 'TEXT')}{_constraint(c, database)}" for c in table.columns]
    return f"CREATE TABLE {table.sql} ({', '.join(parts)})"


def _constraint(column: Column, database: Database) -> str:
    if column.kind is Kind.ID:
        return " PRIMARY KEY"
    if column.kind is Kind.LINK:
        target = database.table(column.target)
        return f" REFERENCES {target.sql}({target.key.sql})"
    return ""
