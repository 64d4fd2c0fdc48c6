"""What a statement may cost between two looks at its budget, from the sizes of its values.

SQLite counts a call of a function as one step, however long it takes, and looks at the budget only where its program
jumps. So the size of the values is what bounds the time in between: the longer the program, and the dearer its
functions, the smaller they must be. The costs are upper bounds, measured on each function's worst arguments; a function
that is not known counts as one of the dearest. What is decided here depends on the statement and the schema alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from env_server.dataset import Row

NO_FUNCTION_BYTES = 20_000
"""Largest value in a program that has not been analysed, whatever its functions."""
SMALLEST_VALUE = 16
STEPS_OF_SORTS = 150_000
"""Steps of a statement that uses a function of SORTING. Percentiles sort in one step, in quadratic time at worst, and
recurse as deep as there are values."""

SORTING = frozenset(("median", "percentile", "percentile_cont", "percentile_disc"))
PATTERN = frozenset(("like", "glob"))

# Nanoseconds per byte of the first argument and byte of the second; json_pretty's default indent has 4 bytes.
_PRODUCT_NS = {"instr": 0.05, "replace": 0.05, "unhex": 1.0, "trim": 5.0, "ltrim": 5.0, "rtrim": 5.0}
_PRODUCT_NS |= {"json_pretty": 250.0}
_UNKNOWN_NS = 5.0
_PATTERN_NS = 4.0
_DEFAULT_SECOND = {"trim": 1, "ltrim": 1, "rtrim": 1, "unhex": 1, "json_pretty": 4}
_LIGHT_NS = 5.0
_HEAVY_NS = 60.0
_LOOKUP_NS = 5.0
"""Of a path, per byte of the JSON text that it is looked up in."""
_VIRTUAL_NS = 100.0
_OPCODE_NS = 1.0
"""Any other opcode: a copy or a comparison."""
_OVERHEAD_NS = 200.0

_LIGHT = SORTING | frozenset(
    (
        *("abs", "ceil", "ceiling", "changes", "char", "coalesce", "concat", "concat_ws", "floor", "hex", "if"),
        *("ifnull", "iif", "last_insert_rowid", "length", "likelihood", "likely", "lower", "max", "min", "nullif"),
        *("octet_length", "pi", "quote", "round", "sign", "substr", "substring", "subtype", "total_changes", "trunc"),
        *("typeof", "unicode", "unistr", "unistr_quote", "unlikely", "upper", "zeroblob", "current_date"),
        *("current_time", "current_timestamp", "sqlite_version", "sqlite_source_id"),
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "degrees", "exp", "ln", "log"),
        *("log10", "log2", "mod", "pow", "power", "radians", "sin", "sinh", "sqrt", "tan", "tanh"),
        *("avg", "count", "group_concat", "string_agg", "sum", "total"),
        *("cume_dist", "dense_rank", "first_value", "lag", "last_value", "lead", "nth_value", "ntile"),
        *("percent_rank", "rank", "row_number"),
    )
)
_HEAVY = frozenset(
    (
        *("->", "->>", "format", "printf", "date", "time", "datetime", "julianday", "unixepoch", "strftime"),
        *("timediff", "json", "jsonb", "json_array_length", "json_error_position", "json_quote", "json_type"),
        *("json_valid", "match", "bm25", "highlight", "matchinfo", "offsets", "snippet"),
        *(
            f"json{b}_{name}"
            for b in ("", "b")
            for name in ("array", "array_insert", "extract", "group_array", "group_object", "insert", "object")
        ),
        *(f"json{b}_{name}" for b in ("", "b") for name in ("remove", "replace", "set")),
    )
)

_CALLS = frozenset(("Function", "PureFunc", "AggStep", "AggStep1", "AggInverse", "AggValue", "AggFinal"))
_MASKED = frozenset(("Function", "PureFunc"))
"""Those whose p1 tells which arguments are constant."""
_VIRTUAL = frozenset(("VFilter", "VColumn", "VNext"))
# Opcodes that may put a text into a register, and which of p1, p2, p3 names it.
_WRITES = {"Function": 3, "PureFunc": 3, "Concat": 3, "Column": 3, "VColumn": 3, "AggFinal": 1, "AggValue": 3}
_WRITES |= {"Copy": 2, "SCopy": 2, "Move": 2, "Cast": 1, "Variable": 2, "Param": 2}
_LITERALS = {"String8": 2, "String": 2, "Blob": 2, "Integer": 2, "Int64": 2, "Real": 2, "Null": 2}
_NUMBER_BYTES = 30


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How far a statement may run between two looks at its budget.

    A program of at most `opcodes` opcodes runs with a look every `interval` steps, on values so small that it takes
    no more than `gap_s` seconds in between. One that is larger, or meets larger values, is refused; or, where
    `analysed`, its program is read to see how large they may be.
    """

    gap_s: float
    interval: int
    opcodes: int
    pattern_bytes: int
    """Longest pattern of LIKE and GLOB."""
    analysed: bool = True

    def value_bytes(self, functions: Collection[str]) -> int:
        """Return the largest value for a program that calls these functions, in lower case, any number of times."""
        # Of a call and what hands it its arguments, one half at most is calls.
        calls = (self.interval + self.opcodes) / 2
        size = NO_FUNCTION_BYTES
        while (
            size > SMALLEST_VALUE
            and 1e-9 * calls * max((self._dearest_ns(name, size) for name in functions), default=0.0) > self.gap_s
        ):
            size = size * 4 // 5
        return size

    def _dearest_ns(self, name: str, size: int) -> float:
        return call_ns(name, [size] * (2 if name not in _HEAVY else 5), self.pattern_bytes)


def call_ns(name: str, sizes: Sequence[int], pattern_bytes: int) -> float:
    """Return the nanoseconds that a call takes at most, on arguments of these sizes in bytes."""
    total = sum(sizes)
    linear = _OVERHEAD_NS + _LIGHT_NS * total
    if name in _LIGHT:
        return linear
    if name in _HEAVY:
        return _OVERHEAD_NS + _HEAVY_NS * total + _LOOKUP_NS * len(sizes) * max(sizes, default=0)
    if name in PATTERN:
        pattern, text = min(sizes[0], pattern_bytes), sizes[1]
        return linear + _PATTERN_NS * pattern * text
    if name in _PRODUCT_NS:
        second = sizes[1] if len(sizes) > 1 else _DEFAULT_SECOND.get(name, 1)
        return linear + _PRODUCT_NS[name] * sizes[0] * second
    first, *others = sorted(sizes, reverse=True) or [0]
    return linear + _UNKNOWN_NS * first * (others[0] if others else first)


class Program:
    """A prepared statement's opcodes, as EXPLAIN lists them."""

    def __init__(self, listing: Iterable[Row]) -> None:
        self._opcodes = 0
        self._virtual = 0
        calls: list[tuple[str, int, int, int]] = []
        literals: dict[int, int] = {}
        written: set[int] = set()
        for _, opcode, *operands, p4, _, _ in listing:
            registers = [value if isinstance(value, int) else 0 for value in operands]
            self._opcodes += 1
            self._virtual += opcode in _VIRTUAL
            if opcode in _CALLS:
                name, _, count = str(p4).rpartition("(")
                mask = registers[0] if opcode in _MASKED else 0
                calls.append((name.lower(), int(count.rstrip(")")), mask, registers[1]))
            if opcode in _LITERALS:
                register = registers[_LITERALS[str(opcode)] - 1]
                literals[register] = max(literals.get(register, 0), _literal_bytes(str(opcode), registers[0], p4))
            elif opcode in _WRITES:
                written.add(registers[_WRITES[str(opcode)] - 1])
        self._calls = [
            (name, [_constant(i, mask, first + i, literals, written) for i in range(count)])
            for name, count, mask, first in calls
        ]

    def value_bytes(self, limits: RunLimits, most: int) -> int:
        """Return the largest value, up to `most`, with which the program keeps to the limits."""
        size = most
        while size > SMALLEST_VALUE and self._gap_s(size, limits) > limits.gap_s:
            size = size * 4 // 5
        return size

    def _gap_s(self, size: int, limits: RunLimits) -> float:
        costs = [
            call_ns(name, [size if known is None else known for known in sizes], limits.pattern_bytes)
            for name, sizes in self._calls
        ]
        costs.extend([_VIRTUAL_NS * size] * self._virtual)
        once = sum(costs) + _OPCODE_NS * size * self._opcodes
        dearest = max(costs, default=0.0) + _OPCODE_NS * size
        return 1e-9 * (once + dearest * limits.interval / 2)


def _literal_bytes(opcode: str, length: int, p4: object) -> int:
    if opcode in ("String", "Blob"):
        return length
    return len(p4.encode(errors="surrogatepass")) if opcode == "String8" and isinstance(p4, str) else _NUMBER_BYTES


def _constant(index: int, mask: int, register: int, literals: dict[int, int], written: set[int]) -> int | None:
    """Return an argument's size where it is a literal: its register then belongs to it alone."""
    if index < 31 and mask >> index & 1 and register not in written:
        return literals.get(register)
    return None
