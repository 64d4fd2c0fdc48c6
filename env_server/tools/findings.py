"""What may be wrong with a user's files and questions, and what fixes it. Plain data.

A finding says what is wrong and where, with examples, and what to do about it. Its fix, where it has one, is carried
out on a copy (`env_server.tools.fixes`), never on the user's own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from typing import Self

from env_server.data.cells import DecimalMark
from env_server.dataset import SQLValue


class Severity(StrEnum):
    """How bad it is: answers are lost or silently wrong; they may be; or good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


_E, _W, _N = Severity


class Kind(StrEnum):
    """The kinds of issues, each with its severity and what it is; of one severity the first goes first."""

    _value_: str
    severity: Severity
    description: str

    def __new__(cls, value: str, severity: Severity, description: str) -> Self:
        """Make a kind of its three parts."""
        kind = str.__new__(cls, value)
        kind._value_, kind.severity, kind.description = value, severity, description
        return kind

    UNREADABLE = "unreadable", _E, "a file that cannot be read"
    NOT_UTF8 = "not_utf8", _E, "a file in another encoding than UTF-8"
    UNKNOWN_COLLATION = "unknown_collation", _E, "an order of texts that only the program knows that wrote the database"
    NOT_EXAMINED = "not_examined", _N, "a table or column that cannot be examined"
    EXTRA_LINES = "extra_lines", _E, "lines of a file that are no rows of its table"
    OTHER_DELIMITER = "other_delimiter", _W, "a name with another delimiter in it: the file may be divided wrongly"
    NO_HEADER = "no_header", _E, "a first line that looks like data, not like names"
    RENAMED_COLUMN = "renamed_column", _W, "a header that is blank or occurs twice, so that its column was renamed"
    EMPTY_TABLE = "empty_table", _W, "a table without rows"
    EMPTY_COLUMN = "empty_column", _W, "a column without a value"
    CONSTANT_COLUMN = "constant_column", _N, "a column with the same value in every row"
    NUMBER_AS_TEXT = "number_as_text", _E, "numbers that are text: sums, averages and the order are silently wrong"
    NUMBER_OR_CODE = "number_or_code", _W, "texts that are one number: codes, or quantities that are text"
    BLOB_FOR_VALUE = "blob_for_value", _E, "BLOBs for numbers or texts: sums are silently wrong"
    MIXED_UNITS = "mixed_units", _E, "quantities in different units"
    MIXED_DATES = "mixed_dates", _E, "dates that are written in different ways"
    NON_ISO_DATES = "non_iso_dates", _W, "dates whose order as text is not that of time"
    IMPOSSIBLE_DATE = "impossible_date", _W, "a day that does not exist"
    NULL_PLACEHOLDER = "null_placeholder", _W, "a word for a missing value, which IS NULL does not find"
    SENTINEL_NUMBER = "sentinel_number", _W, "a number that seems to stand for a missing value"
    SURROUNDING_WHITESPACE = "surrounding_whitespace", _W, "white space around a text, so that = does not find it"
    INCONSISTENT_VALUES = "inconsistent_values", _W, "one value in several spellings"
    MIXED_YES_NO = "mixed_yes_no", _W, "yes and no in several spellings"
    MOJIBAKE = "mojibake", _W, "letters that were read in the wrong encoding"
    DECOMPOSED_LETTERS = "decomposed_letters", _W, "letters in parts (NFD), which = does not find"
    DUPLICATE_ROWS = "duplicate_rows", _W, "rows that occur more than once"
    TOTAL_ROW = "total_row", _E, "a line of totals among the rows"
    REPEATED_KEY = "repeated_key", _W, "a key that is not unique"
    PRIMARY_KEY = "undeclared_primary_key", _N, "what looks like the primary key, and is not declared"
    FOREIGN_KEY = "undeclared_foreign_key", _W, "what looks like a foreign key, and is not declared"
    BROKEN_REFERENCE = "broken_reference", _W, "a foreign key whose row is missing"
    QUESTIONS = "question_file", _E, "questions that cannot be read"
    NO_DATABASE = "no_database", _E, "a question whose database cannot be used"
    NO_SQL = "no_sql", _E, "a question with an answer and no SQL, which sql mode cannot use"
    GOLD_FAILS = "gold_fails", _E, "a gold query that fails"
    GOLD_EMPTY = "gold_empty", _E, "a gold query without an answer"
    GOLD_TOO_LARGE = "gold_too_large", _W, "a gold query with more rows than an answer can hold"
    GOLD_REJECTED = "gold_rejected", _E, "a gold answer that the environment judges wrong"
    GOLD_TIE = "gold_depends_on_tie", _W, "a gold query whose result depends on a tie"
    GOLD_TEXT_NUMBERS = "gold_reads_text_as_numbers", _E, "a gold query that compares or sorts numbers that are text"
    GOLD_LACKS_KEY = "gold_sorts_missing_values", _W, "a gold query that keeps rows without the value it sorts by"
    GOLD_ZERO = "gold_zero", _N, "an answer of 0, which is the first guess of many"
    TRIVIAL = "trivially_answerable", _W, "an answer that many wrong queries give as well"
    REDUNDANT_CLAUSE = "redundant_clause", _N, "a clause that does not change the answer"
    UNTESTED_CLAUSE = "untested_clause", _N, "a clause that no test database tests"
    NO_TEST_DATABASES = "no_test_databases", _N, "a question that is judged on one database alone"
    CONTRADICTION = "contradiction", _E, "the same question with different answers"
    SAME_QUESTION = "same_question", _N, "a question that occurs twice"
    FEW_QUESTIONS = "few_questions", _W, "too few questions to train on"
    UNASKED_TABLE = "unasked_table", _N, "a table that no question is about"


@dataclass(frozen=True, slots=True)
class Stated:
    """What the user states where the data leave it open: without it, such cells are found and not fixed."""

    day_first: bool | None = None
    decimal_mark: DecimalMark | None = None
    pivot_year: int | None = None
    encoding: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is: a database, and a table or a column in it; or a question. "" for what does not apply."""

    db_id: str = ""
    table: str = ""
    column: str = ""
    question_id: str = ""


class Order(IntEnum):
    """The order in which fixes of one column go, whatever order they were chosen in."""

    LETTERS = auto()
    WHITESPACE = auto()
    TEXTS = auto()
    VALUES = auto()


@dataclass(frozen=True, slots=True)
class CellFix:
    """Converts the cells of a column one by one; a cell that `convert` cannot read stays as it is.

    `column_type`: the type that the column has afterwards; "" for the one that it has.
    """

    order: Order
    convert: Callable[[SQLValue], SQLValue]
    column_type: str = ""


class TableFix(Enum):
    """Leave out a column, rows that occur already, or the last row."""

    DROP_COLUMN = auto()
    DROP_DUPLICATES = auto()
    DROP_LAST_ROW = auto()


@dataclass(frozen=True, slots=True)
class DropLines:
    """Leave out the records of a CSV file that begin on these lines."""

    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeclareKey:
    """Declare the column as its table's primary key or, with a parent, as a foreign key to the parent's key."""

    parent: str = ""
    parent_column: str = ""


@dataclass(frozen=True, slots=True)
class Recode:
    """Write the file of the place as UTF-8."""

    encoding: str


@dataclass(frozen=True, slots=True)
class QuestionFix:
    """Give the question another gold query; "": leave it out."""

    sql: str


ColumnFix = CellFix | TableFix | DropLines | DeclareKey
Fix = ColumnFix | Recode | QuestionFix


@dataclass(frozen=True, slots=True)
class Finding:
    """One issue. `message`: what was found, with examples; `hint`: what to do; `fix`: what the doctor could do.

    `cells`: texts of the column that the issue is about, to find their lines by.
    """

    kind: Kind
    message: str
    hint: str
    fix: Fix | None = None
    cells: tuple[str, ...] = ()
    place: Place = Place()

    @property
    def severity(self) -> Severity:
        """How bad its kind is."""
        return self.kind.severity
