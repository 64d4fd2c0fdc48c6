"""A gold query as a syntax tree that rules change in place: its scopes, how its tables are linked, and its text.

Promises: a change is undone before its text is returned, so that every rule sees the gold; nothing here depends on
the order of a set or on hashes. A double-quoted word that names no column is text, as SQLite reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel

from env_server.sql.schema import Column, Schema, Table
from env_server.test_suites.mutants_scopes import FROM, Change, Scope, Source, unique


class QueryTree:
    """A query with its scopes, outermost first, on one schema."""

    def __init__(self, root: exp.Expression, schema: Schema) -> None:
        self.schema = schema
        self._tables = {table.name.casefold(): table for table in schema.tables}
        self._generator = sqlglot.Dialect.get_or_raise("sqlite").generator(
            comments=False, unsupported_level=ErrorLevel.IGNORE
        )
        self._holder = exp.Paren(this=root)
        self.original_text = self.text()
        self.scopes: list[Scope] = []
        self._visit(self._holder, Scope(self._holder, None), {})
        self._read_quoted_text()

    def text(self, change: Change = ()) -> str:
        """Return the query's text as it is after the change; the tree stays as it was."""
        undo = []
        try:
            for edit in change:
                node, key, value = edit.target, edit.key, edit.value
                if not key:
                    node, key = edit.target.parent, edit.target.arg_key
                    if isinstance(node.args[key], list):
                        value = [value if each is edit.target else each for each in node.args[key]]
                undo.append((node, key, node.args.get(key)))
                node.args[key] = value
            return self.fragment(self._holder.this)
        finally:
            for node, key, value in reversed(undo):
                node.args[key] = value

    def fragment(self, node: exp.Expression) -> str:
        """Return the text of a part."""
        return str(self._generator.generate(node, copy=False))

    def table(self, name: str) -> Table | None:
        """Return the schema's table of this name, in any case."""
        return self._tables.get(name.casefold())

    def scope_of(self, query: exp.Expression) -> Scope:
        """Return the scope of a query of this tree."""
        return next(scope for scope in self.scopes if scope.query is query)

    def nodes(self, *kinds: type[exp.Expression]) -> Iterator[tuple[Scope, exp.Expression]]:
        """Yield the nodes of these classes with their scopes, outermost scope first."""
        for scope in self.scopes:
            for node in scope.nodes:
                if isinstance(node, kinds):
                    yield scope, node

    def selects(self) -> Iterator[Scope]:
        """Yield the scopes that are a SELECT."""
        return (scope for scope in self.scopes if scope.is_select)

    def compounds(self) -> Iterator[exp.Expression]:
        """Yield the compounds: two queries and UNION, INTERSECT or EXCEPT between them."""
        return (scope.query for scope in self.scopes if not scope.is_select)

    def links(self, one: Source, other: Source) -> list[tuple[Column, Column]]:
        """Return the pairs of columns that two tables may be joined on: foreign keys, then keys of one name."""
        pairs = list(self._declared_links(one, other))
        pairs += [(mine, yours) for yours, mine in self._declared_links(other, one)]
        for name, mine in one.columns.items():
            yours = other.columns.get(name)
            if yours and (mine.primary_key or yours.primary_key):
                pairs.append((mine, yours))
        return unique(pairs, lambda pair: (pair[0].name, pair[1].name))

    def related(self, source: Source) -> list[Table]:
        """Return the tables that can be joined to this one: those that refer to it first."""
        if source.table is None:
            return []
        own = source.table.name.casefold()
        parents = {key.table.casefold() for key in source.table.foreign_keys}
        tables = [table for table in self.schema.tables if table.name.casefold() != own]
        children = [table for table in tables if any(key.table.casefold() == own for key in table.foreign_keys)]
        return unique([*children, *(table for table in tables if table.name.casefold() in parents)], lambda t: t.name)

    def _declared_links(self, child: Source, parent: Source) -> Iterator[tuple[Column, Column]]:
        if child.table is None or parent.table is None:
            return
        for key in child.table.foreign_keys:
            if key.table.casefold() == parent.table.name.casefold():
                names = key.ref_columns or [column.name for column in parent.primary_key]
                for mine, yours in zip(key.columns, names, strict=False):
                    if mine.casefold() in child.columns and yours.casefold() in parent.columns:
                        yield child.columns[mine.casefold()], parent.columns[yours.casefold()]

    def _visit(self, node: exp.Expression, scope: Scope, ctes: dict[str, list[str]]) -> None:
        """Collect the scopes below a node. `ctes` are the common tables in sight, with their columns."""
        children = sorted(node.iter_expressions(), key=lambda child: not isinstance(child, exp.With))
        for child in children:
            if isinstance(child, exp.Select | exp.SetOperation):
                around = scope if isinstance(scope.query, exp.Select) else scope.parent
                inner = Scope(child, around)
                self.scopes.append(inner)
                common = dict(ctes)
                for cte in child.ctes:
                    common[cte.alias.casefold()] = cte.alias_column_names or self._output(cte.this, common)
                self._add_sources(inner, common)
                self._visit(child, inner, common)
            else:
                scope.nodes.append(child)
                self._visit(child, scope, ctes)

    def _add_sources(self, scope: Scope, ctes: dict[str, list[str]]) -> None:
        clause = scope.query.args.get(FROM) if scope.is_select else None
        nodes = [each.this for each in ([clause] if clause else []) + (scope.joins if scope.is_select else [])]
        for node in nodes:
            if isinstance(node, exp.Table):
                table = None if node.name.casefold() in ctes else self.table(node.name)
                columns = list(table.columns) if table else _untyped(ctes.get(node.name.casefold(), []))
            else:
                table = None
                columns = _untyped(self._output(node.this, ctes)) if isinstance(node, exp.Subquery) else []
            scope.sources.append(
                Source(node.alias_or_name, node, table, {column.name.casefold(): column for column in columns})
            )

    def _output(self, query: exp.Expression, ctes: dict[str, list[str]]) -> list[str]:
        """Return the names of a query's columns, as far as they are known."""
        if not isinstance(query, exp.Query):
            return []
        names: list[str] = []
        for node in query.selects:
            if not node.is_star:
                names.append(node.alias_or_name)
                continue
            for table in query.find_all(exp.Table):
                known = self.table(table.name)
                names += ctes.get(table.name.casefold()) or [each.name for each in (known.columns if known else ())]
        return names

    def _read_quoted_text(self) -> None:
        """Turn double-quoted words that name nothing into text."""
        for scope in self.scopes:
            for index, node in enumerate(scope.nodes):
                quoted = isinstance(node, exp.Column) and node.this.args.get("quoted") and not node.table
                if quoted and not scope.resolve(node) and not _is_alias(node, scope):
                    literal = exp.Literal.string(node.name)
                    node.replace(literal)
                    scope.nodes[index] = literal


def _is_alias(column: exp.Expression, scope: Scope | None) -> bool:
    """Tell whether a name is one that a select list gave."""
    while scope:
        if column.name.casefold() in (name.casefold() for name in scope.query.named_selects):
            return True
        scope = scope.parent
    return False


def _untyped(names: Iterable[str]) -> list[Column]:
    return [Column(name, "", nullable=True, primary_key=False) for name in names if name]
