"""Neighbour queries inside expressions: other constants, operators, connectives, arithmetic, and conditions left out.

Each function yields the changes of one kind over all scopes of a query, the likeliest mistakes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from sqlglot import exp

from env_server.test_suites.mutants_scopes import (
    Change,
    Edit,
    Scope,
    binary,
    conjuncts,
    interleaved,
    joined,
    operand,
    reshaped,
    shell,
    sides,
    where,
    whole_number,
)
from env_server.test_suites.mutants_tree import QueryTree

_COMPARISONS = {
    exp.GT: (exp.GTE, exp.LT, exp.LTE, exp.EQ, exp.NEQ),
    exp.GTE: (exp.GT, exp.LTE, exp.LT, exp.EQ, exp.NEQ),
    exp.LT: (exp.LTE, exp.GT, exp.GTE, exp.EQ, exp.NEQ),
    exp.LTE: (exp.LT, exp.GTE, exp.GT, exp.EQ, exp.NEQ),
    exp.EQ: (exp.NEQ, exp.GTE, exp.LTE, exp.GT, exp.LT),
    exp.NEQ: (exp.EQ, exp.GT, exp.LT, exp.GTE, exp.LTE),
}
_ARITHMETIC = {
    exp.Add: (exp.Sub,),
    exp.Sub: (exp.Add,),
    exp.Mul: (exp.Div, exp.Add),
    exp.Div: (exp.Mul,),
    exp.Mod: (exp.Div,),
}
_PREDICATES = (exp.Like, exp.Glob, exp.In, exp.Between, exp.Is, exp.Exists)


def constants(tree: QueryTree) -> Iterator[Change]:
    """Change each number and text, and swap neighbours."""
    streams = []
    for scope, node in tree.nodes(exp.Literal):
        if _is_value(scope, node):
            streams.append(_texts(node) if node.is_string else _numbers(node))
    yield from interleaved([*streams, _swaps(tree)])


def _is_value(scope: Scope, node: exp.Expression) -> bool:
    """Tell whether this is a constant that is compared or computed with, and not a place in the select list."""
    if not isinstance(node, exp.Literal) or isinstance(node.parent, exp.Ordered | exp.Group):
        return False
    return node.parent is not scope.query and scope.clause(node) not in ("limit", "offset")


def _numbers(node: exp.Expression) -> Iterator[Change]:
    negated = isinstance(node.parent, exp.Neg)
    target, sign = (node.parent, -1) if negated else (node, 1)
    integer = whole_number(node)
    if integer is not None:
        number: float = sign * integer
        values = [number + 1, number - 1, 0, -number, number * 10]
    else:
        try:
            number = sign * float(node.this)
        except ValueError:
            return
        unit = 10.0 ** -len(node.this.partition(".")[2])
        values = [number + unit, number - unit, number + 0.5, number - 0.5, 0, -number]
    for value in values:
        if math.isfinite(value):
            literal = exp.Literal.number(str(abs(round(value, 12))))
            yield (Edit(target, exp.Neg(this=literal) if value < 0 else literal),)


def _texts(node: exp.Expression) -> Iterator[Change]:
    text = node.this
    if isinstance(node.parent, exp.Like):
        body = text.strip("%")
        variants = [f"%{body}%", f"{body}%", f"%{body}", body, _other_end(text)]
    else:
        words = text.split()
        shorter = words[0] if len(words) > 1 else text[: len(text) // 2]
        recased = [each for each in (text.lower(), text.title(), text.upper()) if each != text]
        variants = [*recased[:1], _other_end(text), text[:-1], text[1:], shorter, *recased[1:]]
    for variant in variants:
        if variant != text:
            yield (Edit(node, exp.Literal.string(variant)),)


def _other_end(text: str) -> str:
    """Change the last letter or digit to its neighbour."""
    for index in range(len(text) - 1, -1, -1):
        letter = text[index]
        if letter.isascii() and letter.isalnum():
            other = {"9": "8", "z": "y", "Z": "Y"}.get(letter, chr(ord(letter) + 1))
            return text[:index] + other + text[index + 1 :]
    return text


def _swaps(tree: QueryTree) -> Iterator[Change]:
    for scope in tree.scopes:
        for strings in (True, False):
            literals = [node for node in scope.nodes if _is_value(scope, node) and node.is_string is strings]
            for one, other in pairwise(literals):
                if one.this != other.this and not _interchangeable(tree, one, other):
                    yield Edit(one, reshaped(other)), Edit(other, reshaped(one))


def _interchangeable(tree: QueryTree, one: exp.Expression, other: exp.Expression) -> bool:
    """Tell whether two values are compared with the same in the same way, so that their order may say nothing."""
    if one.parent is other.parent:
        return isinstance(one.parent, exp.In)
    alike = type(one.parent) is type(other.parent) and type(one.parent) in _COMPARISONS
    return alike and tree.fragment(one.parent.this) == tree.fragment(other.parent.this)


def operators(tree: QueryTree) -> Iterator[Change]:
    """Exchange comparisons, and put NOT in or take it out."""
    streams = [_comparisons(scope, node) for scope, node in tree.nodes(*_COMPARISONS)]
    streams += [_predicates(node) for _, node in tree.nodes(*_PREDICATES)]
    streams += [iter([(_negation(node),)]) for _, node in tree.nodes(exp.Paren) if _is_condition(node.this)]
    yield from interleaved(streams)


def _comparisons(scope: Scope, node: exp.Expression) -> Iterator[Change]:
    left, right = sides(node)
    if scope.clause(node) == "joins" and isinstance(left, exp.Column) and isinstance(right, exp.Column):
        return  # the join's own rules change it
    if isinstance(right, exp.Literal) and right.is_string and isinstance(node, exp.EQ | exp.NEQ):
        for pattern in (f"%{right.this}%", f"{right.this}%"):
            like = binary(exp.Like, left, exp.Literal.string(pattern))
            yield (Edit(node, shell(exp.Not, this=like) if isinstance(node, exp.NEQ) else like),)
    if isinstance(right, exp.Subquery) and isinstance(node, exp.EQ | exp.NEQ):
        member = shell(exp.In, this=left, query=right)
        yield (Edit(node, shell(exp.Not, this=member) if isinstance(node, exp.NEQ) else member),)
    for kind in _COMPARISONS[type(node)]:
        yield (Edit(node, binary(kind, left, right)),)


def _predicates(node: exp.Expression) -> Iterator[Change]:
    yield (_negation(node),)
    if isinstance(node, exp.Like) and isinstance(node.expression, exp.Literal) and node.expression.is_string:
        if isinstance(node.parent, exp.Escape):
            return
        yield (Edit(node, binary(exp.EQ, node.this, node.expression)),)
        body = exp.Literal.string(node.expression.this.strip("%"))
        yield (Edit(node, binary(exp.EQ, node.this, body)),)
    elif isinstance(node, exp.In):
        choices = node.expressions
        if node.args.get("query"):
            yield (Edit(node, binary(exp.EQ, node.this, node.args["query"])),)
        for choice in choices if len(choices) > 1 else ():
            yield (Edit(node, [each for each in choices if each is not choice], "expressions"),)
        for choice in choices:
            yield (Edit(node, binary(exp.EQ, node.this, choice)),)
    elif isinstance(node, exp.Between):
        yield from _open_bounds(node)
    elif isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        yield (Edit(node, binary(exp.EQ, node.this, exp.Literal.string(""))),)


def _open_bounds(node: exp.Expression) -> Iterator[Change]:
    value, low, high = node.this, node.args["low"], node.args["high"]
    for above, below in ((exp.GT, exp.LT), (exp.GT, exp.LTE), (exp.GTE, exp.LT)):
        bounds = binary(above, value, low), binary(below, value, high)
        yield (Edit(node, shell(exp.Paren, this=joined(bounds))),)
    yield (Edit(node, binary(exp.GTE, value, low)),)
    yield (Edit(node, binary(exp.LTE, value, high)),)


def _negation(node: exp.Expression) -> Edit:
    """Put NOT before a condition, or take it away where it is."""
    if isinstance(node.parent, exp.Not):
        return Edit(node.parent, node)
    if node.args.get("negate"):  # newer versions of sqlglot keep the NOT of NOT LIKE as a flag
        return Edit(node, None, "negate")
    return Edit(node, shell(exp.Not, this=node))


def _is_condition(node: exp.Expression) -> bool:
    return isinstance(node, exp.Connector | exp.Not | exp.Predicate)


def conditions(tree: QueryTree) -> Iterator[Change]:
    """Leave out one condition of several, or a whole WHERE or HAVING; add one on NULL."""
    dropped: list[Change] = []
    for _, node in tree.nodes(exp.And, exp.Or):
        dropped += [(Edit(node, side),) for side in sides(node)]
    for scope in tree.selects():
        dropped += [(Edit(scope.query, None, key),) for key in ("where", "having") if scope.query.args.get(key)]
    dropped += [(Edit(node, node.this),) for _, node in tree.nodes(exp.Filter)]
    yield from dropped
    yield from interleaved([_admitted_nulls(tree), _refused_nulls(tree)])


def _admitted_nulls(tree: QueryTree) -> Iterator[Change]:
    """`a != 1` becomes `a != 1 OR a IS NULL`."""
    for _, node in tree.nodes(exp.NEQ, exp.Not):
        tested = node.this if isinstance(node, exp.NEQ) else getattr(node.this, "this", None)
        if isinstance(tested, exp.Column) and not isinstance(node.this, exp.Is):
            missing = shell(exp.Is, this=tested, expression=exp.Null())
            yield (Edit(node, shell(exp.Paren, this=joined((node, missing), exp.Or))),)


def _refused_nulls(tree: QueryTree) -> Iterator[Change]:
    """Leave NULLs out of what is counted, sorted, searched or shown."""
    for scope in tree.selects():
        tested = [node.this for node in scope.nodes if isinstance(node, exp.Ordered) and not node.args.get("desc")]
        tested += [] if scope.is_operand else scope.projections[:1]
        for node in tested:
            place = scope.resolve(node) if isinstance(node, exp.Column) else None
            if place and place.column.nullable and not place.column.primary_key:
                present = shell(exp.Not, this=shell(exp.Is, this=node, expression=exp.Null()))
                old = scope.query.args.get("where")
                yield (Edit(scope.query, where(joined((old and old.this, present))), "where"),)


def connectives(tree: QueryTree) -> Iterator[Change]:
    """Exchange AND and OR, and move the parentheses between them."""
    for _, node in tree.nodes(exp.And, exp.Or):
        kind = exp.Or if isinstance(node, exp.And) else exp.And
        other = binary(kind, node.this, node.expression)
        yield (Edit(node, other),)
        if isinstance(node.parent, exp.And):
            yield (Edit(node, operand(other)),)
        if isinstance(node, exp.Or):
            yield from _regrouped(node)
    for _, node in tree.nodes(exp.Paren):
        if isinstance(node.this, exp.Or) and isinstance(node.parent, exp.Connector | exp.Not):
            yield (Edit(node, node.this),)
    for _, node in tree.nodes(exp.Not):
        if isinstance(node.this, exp.Paren) and isinstance(node.this.this, exp.Connector):
            inner = node.this.this
            yield (Edit(node, reshaped(inner, this=shell(exp.Not, this=inner.this))),)


def _regrouped(node: exp.Expression) -> Iterator[Change]:
    """`a AND b OR c` becomes `a AND (b OR c)`, and `a OR b AND c` becomes `(a OR b) AND c`."""
    left, right = sides(node)
    if isinstance(left, exp.And):
        *head, last = conjuncts(left)
        yield (Edit(node, joined([*head, joined((last, right), exp.Or)])),)
    if isinstance(right, exp.And):
        first, *tail = conjuncts(right)
        yield (Edit(node, joined([joined((left, first), exp.Or), *tail])),)


def arithmetic(tree: QueryTree) -> Iterator[Change]:
    """Exchange operators and their sides, leave a side out, and take or leave integer division."""
    streams = [_operations(node) for _, node in tree.nodes(*_ARITHMETIC)]
    streams += [iter([(Edit(node, node.this),)]) for _, node in tree.nodes(exp.Cast, exp.Round, exp.Abs)]
    yield from interleaved(streams)


def _operations(node: exp.Expression) -> Iterator[Change]:
    left, right = sides(node)
    if isinstance(node, exp.Div) and not isinstance(left, exp.Cast):
        real = exp.Cast(this=exp.Null(), to=exp.DataType.build("real", dialect="sqlite"))
        real.args["this"] = left
        yield (Edit(node, reshaped(node, this=real)),)
    for kind in _ARITHMETIC[type(node)]:
        yield (Edit(node, binary(kind, left, right)),)
    if isinstance(node, exp.Sub | exp.Div):
        yield (Edit(node, reshaped(node, this=right, expression=left)),)
    yield (Edit(node, left),)
    yield (Edit(node, right),)
