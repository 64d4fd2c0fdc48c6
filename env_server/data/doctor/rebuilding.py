"""Makes tables of a SQLite file anew, with other types, keys and cells: the copy that a repair is carried out on.

SQLite cannot change the type of a column or add a key to a table. Its documentation (ALTER TABLE, "Making Other Kinds
Of Table Schema Changes") says how it is done: a new table, the rows, the old name, then indexes and triggers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import apsw
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from env_server.data.doctor.cells import written_number
from env_server.data.doctor.findings import (
    CellRepair,
    DeclareKey,
    DropColumn,
    DropDuplicates,
    TableRepair,
    ToNumbers,
)
from env_server.data.doctor.mending import mended
from env_server.data.doctor.survey import ColumnSurvey, DatabaseSurvey, TableSurvey
from env_server.dataset import SQLValue
from env_server.errors import DataError
from env_server.sql.schema import quote_identifier

Changes = Sequence[tuple[str, CellRepair | TableRepair]]
_NEW = "sqlenv_new_table"


def rebuild(path: Path, changes: Mapping[str, Changes], survey: DatabaseSurvey) -> None:
    """Carry out the repairs of each table. Raises DataError when a table cannot be made anew."""
    connection = apsw.Connection(str(path))
    try:
        connection.execute("PRAGMA foreign_keys = OFF; PRAGMA legacy_alter_table = ON")
        with connection:
            for name, each in changes.items():
                table = survey.table(name)
                if table is not None:
                    _rebuild(connection, table, each)
    except (apsw.Error, SqlglotError) as error:
        fix = "Correct it yourself, or leave it out with --only"
        raise DataError(f"{path.name} cannot be repaired: {error}. {fix}") from error
    finally:
        connection.close(True)


def _rebuild(connection: apsw.Connection, table: TableSurvey, changes: Changes) -> None:
    name = table.name
    stored = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchall()
    beside = connection.execute(
        "SELECT sql FROM sqlite_master WHERE type IN ('index', 'trigger') AND tbl_name = ? AND sql IS NOT NULL", (name,)
    ).fetchall()
    connection.execute(_statement(str(stored[0][0]), table, changes))
    dropped = {column for column, repair in changes if isinstance(repair, DropColumn)}
    kept = [column for column in table.columns if column.name not in dropped]
    cells = []
    for place, column in enumerate(kept):
        repairs = [r for of, r in changes if of == column.name and isinstance(r, CellRepair)]
        quoted = quote_identifier(column.name)
        if repairs:
            function = f"mended_{place}"
            connection.create_scalar_function(function, _function(repairs), 1)
            quoted = f"{function}({quoted})"
        cells.append(quoted)
    distinct = "DISTINCT " if any(isinstance(repair, DropDuplicates) for _, repair in changes) else ""
    columns = ", ".join(quote_identifier(column.name) for column in kept)
    connection.execute(
        f"INSERT INTO {_NEW} ({columns}) SELECT {distinct}{', '.join(cells)} FROM {quote_identifier(name)}"
    )
    connection.execute(f"DROP TABLE {quote_identifier(name)}")
    connection.execute(f"ALTER TABLE {_NEW} RENAME TO {quote_identifier(name)}")
    for (sql,) in beside:
        connection.execute(str(sql))


def _function(repairs: Sequence[CellRepair]) -> apsw.ScalarProtocol:
    def mend(*values: SQLValue) -> SQLValue:
        return mended(values[0], repairs)

    return mend


def _statement(sql: str, table: TableSurvey, changes: Changes) -> str:
    """Return the statement of the new table. Raises DataError when the stored one cannot be read."""
    create = sqlglot.parse_one(sql, read="sqlite")
    if not isinstance(create, exp.Create) or not isinstance(create.this, exp.Schema):
        raise DataError(f"the statement of table {table.name} cannot be read. Correct the table yourself")
    schema = create.this
    schema.set("this", exp.to_table(_NEW))
    definitions = {each.name.casefold(): each for each in schema.find_all(exp.ColumnDef)}
    for each in table.columns:
        if each.declared and each.name.casefold() in definitions:
            # As it was declared: sqlglot's own spelling of a type may have another affinity.
            definitions[each.name.casefold()].set("kind", exp.Var(this=each.declared))
    for column, repair in changes:
        found = table.column(column) if column else None
        definition = definitions.get(column.casefold())
        if found is None or definition is None:
            continue
        if isinstance(repair, DropColumn):
            definition.pop()
        elif isinstance(repair, ToNumbers):
            definition.set("kind", exp.Var(this=_number_type(found, repair)))
        elif isinstance(repair, DeclareKey):
            schema.append("expressions", _key(column, repair))
    return str(create.sql(dialect="sqlite"))


def _key(column: str, repair: DeclareKey) -> exp.Expression:
    of = exp.to_identifier(column, quoted=True)
    if not repair.parent:
        return exp.PrimaryKey(expressions=[of])
    parent = exp.Schema(
        this=exp.to_identifier(repair.parent, quoted=True),
        expressions=[exp.to_identifier(repair.parent_column, quoted=True)],
    )
    return exp.ForeignKey(expressions=[of], reference=exp.Reference(this=parent))


def _number_type(column: ColumnSurvey, repair: ToNumbers) -> str:
    numbers = [number.value(repair.mark) for text, _ in column.texts if (number := written_number(text))]
    numbers += [number for number, _ in column.numbers]
    return "INTEGER" if all(isinstance(number, int) for number in numbers) else "REAL"
