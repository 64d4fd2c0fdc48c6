"""What may be wrong with a user's files and questions, and what fixes it. Plain data.

A finding says what is wrong and where, with examples, and what to do about it. Its fix, where it has one, is carried
out on a copy (`env_server.tools.fixes`), never on the user's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto

from env_server.data.cells import DecimalMark
from env_server.dataset import SQLValue


class Severity(StrEnum):
    """How bad it is: answers are lost or silently wrong; they may be; or good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Kind(StrEnum):
    """The kinds of issues."""

    UNREADABLE = "unreadable"
    NOT_UTF8 = "not_utf8"
    NOT_EXAMINED = "not_examined"
    EXTRA_LINES = "extra_lines"
    NO_HEADER = "no_header"
    OTHER_DELIMITER = "other_delimiter"
    RENAMED_COLUMN = "renamed_column"
    EMPTY_TABLE = "empty_table"
    EMPTY_COLUMN = "empty_column"
    CONSTANT_COLUMN = "constant_column"
    NUMBER_AS_TEXT = "number_as_text"
    NUMBER_OR_CODE = "number_or_code"
    BLOB_FOR_VALUE = "blob_for_value"
    MIXED_UNITS = "mixed_units"
    MIXED_DATES = "mixed_dates"
    NON_ISO_DATES = "non_iso_dates"
    IMPOSSIBLE_DATE = "impossible_date"
    NULL_PLACEHOLDER = "null_placeholder"
    SENTINEL_NUMBER = "sentinel_number"
    SURROUNDING_WHITESPACE = "surrounding_whitespace"
    INCONSISTENT_VALUES = "inconsistent_values"
    MIXED_YES_NO = "mixed_yes_no"
    MOJIBAKE = "mojibake"
    DECOMPOSED_LETTERS = "decomposed_letters"
    DUPLICATE_ROWS = "duplicate_rows"
    TOTAL_ROW = "total_row"
    REPEATED_KEY = "repeated_key"
    PRIMARY_KEY = "undeclared_primary_key"
    FOREIGN_KEY = "undeclared_foreign_key"
    BROKEN_REFERENCE = "broken_reference"
    UNKNOWN_COLLATION = "unknown_collation"

    QUESTIONS = "question_file"
    NO_DATABASE = "no_database"
    NO_SQL = "no_sql"
    GOLD_FAILS = "gold_fails"
    GOLD_EMPTY = "gold_empty"
    GOLD_TOO_LARGE = "gold_too_large"
    GOLD_REJECTED = "gold_rejected"
    GOLD_TIE = "gold_depends_on_tie"
    GOLD_TEXT_NUMBERS = "gold_reads_text_as_numbers"
    GOLD_LACKS_KEY = "gold_sorts_missing_values"
    GOLD_ZERO = "gold_zero"
    TRIVIAL = "trivially_answerable"
    REDUNDANT_CLAUSE = "redundant_clause"
    UNTESTED_CLAUSE = "untested_clause"
    NO_TEST_DATABASES = "no_test_databases"
    CONTRADICTION = "contradiction"
    SAME_QUESTION = "same_question"
    FEW_QUESTIONS = "few_questions"
    UNASKED_TABLE = "unasked_table"


_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE
DESCRIPTIONS: Mapping[Kind, tuple[Severity, str]] = {
    Kind.UNREADABLE: (_E, "a file that cannot be read"),
    Kind.NOT_UTF8: (_E, "a file in another encoding than UTF-8"),
    Kind.UNKNOWN_COLLATION: (_E, "an order of texts that only the program knows that wrote the database"),
    Kind.NOT_EXAMINED: (_N, "a table or column that cannot be examined"),
    Kind.EXTRA_LINES: (_E, "lines of a file that are no rows of its table"),
    Kind.OTHER_DELIMITER: (_W, "a column's name that holds another delimiter: the file may be divided wrongly"),
    Kind.NO_HEADER: (_E, "a first line that looks like data, not like names"),
    Kind.RENAMED_COLUMN: (_W, "a header that is blank or occurs twice, so that its column was renamed"),
    Kind.EMPTY_TABLE: (_W, "a table without rows"),
    Kind.EMPTY_COLUMN: (_W, "a column without a value"),
    Kind.CONSTANT_COLUMN: (_N, "a column with the same value in every row"),
    Kind.NUMBER_AS_TEXT: (_E, "numbers that are text: sums, averages and the order are silently wrong"),
    Kind.NUMBER_OR_CODE: (_W, "texts that are one number: codes, or quantities that are text"),
    Kind.BLOB_FOR_VALUE: (_E, "numbers or texts that are BLOBs: sums are silently wrong, and = does not find them"),
    Kind.MIXED_UNITS: (_E, "quantities in different units"),
    Kind.MIXED_DATES: (_E, "dates that are written in different ways"),
    Kind.NON_ISO_DATES: (_W, "dates whose order as text is not that of time"),
    Kind.IMPOSSIBLE_DATE: (_W, "a day that does not exist"),
    Kind.NULL_PLACEHOLDER: (_W, "a word for a missing value, which IS NULL does not find"),
    Kind.SENTINEL_NUMBER: (_W, "a number that seems to stand for a missing value"),
    Kind.SURROUNDING_WHITESPACE: (_W, "white space around a text, so that = does not find it"),
    Kind.INCONSISTENT_VALUES: (_W, "one value in several spellings"),
    Kind.MIXED_YES_NO: (_W, "yes and no in several spellings"),
    Kind.MOJIBAKE: (_W, "letters that were read in the wrong encoding"),
    Kind.DECOMPOSED_LETTERS: (_W, "letters in Unicode's decomposed form, so that = does not find them"),
    Kind.DUPLICATE_ROWS: (_W, "rows that occur more than once"),
    Kind.TOTAL_ROW: (_E, "a line of totals among the rows"),
    Kind.REPEATED_KEY: (_W, "a key that is not unique"),
    Kind.PRIMARY_KEY: (_N, "a column that looks like the primary key, and is not declared"),
    Kind.FOREIGN_KEY: (_W, "a column that looks like a foreign key, and is not declared"),
    Kind.BROKEN_REFERENCE: (_W, "a foreign key whose row is missing"),
    Kind.QUESTIONS: (_E, "questions that cannot be read"),
    Kind.NO_DATABASE: (_E, "a question whose database cannot be used"),
    Kind.NO_SQL: (_E, "a question with an answer and no SQL, which sql mode cannot use"),
    Kind.GOLD_FAILS: (_E, "a gold query that fails"),
    Kind.GOLD_EMPTY: (_E, "a gold query without an answer"),
    Kind.GOLD_TOO_LARGE: (_W, "a gold query with more rows than an answer can hold"),
    Kind.GOLD_REJECTED: (_E, "a gold answer that the environment judges wrong, so that nobody could be right"),
    Kind.GOLD_TIE: (_W, "a gold query whose result depends on a tie"),
    Kind.GOLD_TEXT_NUMBERS: (_E, "a gold query that computes with, compares or sorts numbers that are text"),
    Kind.GOLD_LACKS_KEY: (_W, "a gold query whose ORDER BY with LIMIT keeps rows without a value to sort by"),
    Kind.GOLD_ZERO: (_N, "an answer of 0, which is the first guess of many"),
    Kind.TRIVIAL: (_W, "an answer that many wrong queries give as well"),
    Kind.REDUNDANT_CLAUSE: (_N, "a clause that does not change the answer, so that a query without it passes"),
    Kind.UNTESTED_CLAUSE: (_N, "a clause that no test database tests"),
    Kind.NO_TEST_DATABASES: (_N, "a question without test databases, which is judged on one database"),
    Kind.CONTRADICTION: (_E, "the same question with different answers"),
    Kind.SAME_QUESTION: (_N, "a question that occurs twice"),
    Kind.FEW_QUESTIONS: (_W, "too few questions to train on"),
    Kind.UNASKED_TABLE: (_N, "a table that no question is about"),
}
"""Each kind's severity and description."""


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
        return DESCRIPTIONS[self.kind][0]
