"""What may be wrong with a user's files and questions, and the repair of each that has one. Plain data.

A finding says what is wrong and where, with examples, and what to do about it. A repair is a small description that
`env_server.data.doctor.repairs` carries out on a copy; it never means the user's own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from env_server.data.doctor.cells import DecimalMark


class Severity(StrEnum):
    """How bad it is: answers are lost or silently wrong; they may be; or good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Kind(StrEnum):
    """The kinds of trouble."""

    UNREADABLE = "unreadable"
    NOT_UTF8 = "not_utf8"
    NOT_EXAMINED = "not_examined"
    NO_HEADER = "no_header"
    RENAMED_COLUMN = "renamed_column"
    EMPTY_TABLE = "empty_table"
    EMPTY_COLUMN = "empty_column"
    CONSTANT_COLUMN = "constant_column"
    NUMBER_AS_TEXT = "number_as_text"
    MIXED_UNITS = "mixed_units"
    MIXED_DATES = "mixed_dates"
    UNSORTABLE_DATES = "unsortable_dates"
    IMPOSSIBLE_DATE = "impossible_date"
    MISSING_WORD = "missing_word"
    SENTINEL_NUMBER = "sentinel_number"
    OUTER_BLANKS = "outer_blanks"
    SPELLINGS = "spellings"
    MIXED_YES_NO = "mixed_yes_no"
    BROKEN_LETTERS = "broken_letters"
    DUPLICATE_ROWS = "duplicate_rows"
    TOTAL_ROW = "total_row"
    REPEATED_KEY = "repeated_key"
    PRIMARY_KEY = "undeclared_primary_key"
    FOREIGN_KEY = "undeclared_foreign_key"
    BROKEN_REFERENCE = "broken_reference"

    QUESTIONS = "question_file"
    NO_DATABASE = "no_database"
    NO_SQL = "no_sql"
    GOLD_FAILS = "gold_fails"
    GOLD_EMPTY = "gold_empty"
    GOLD_TOO_LARGE = "gold_too_large"
    GOLD_CHANCE = "gold_left_to_chance"
    GOLD_TEXT_NUMBERS = "gold_reads_text_as_numbers"
    GOLD_ZERO = "gold_zero"
    GUESSABLE = "guessable"
    LUCKY = "lucky"
    NO_VARIANTS = "no_variants"
    CONTRADICTION = "contradiction"
    SAME_QUESTION = "same_question"
    FEW_QUESTIONS = "few_questions"
    UNASKED_TABLE = "unasked_table"


_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE
MEANINGS: Mapping[Kind, tuple[Severity, str]] = {
    Kind.UNREADABLE: (_E, "a file that cannot be read"),
    Kind.NOT_UTF8: (_E, "a file in another encoding than UTF-8"),
    Kind.NOT_EXAMINED: (_N, "a column too large to look through"),
    Kind.NO_HEADER: (_E, "a first line that looks like data, not like names"),
    Kind.RENAMED_COLUMN: (_W, "a header that is blank or occurs twice, so that its column was renamed"),
    Kind.EMPTY_TABLE: (_W, "a table without rows"),
    Kind.EMPTY_COLUMN: (_W, "a column without a value"),
    Kind.CONSTANT_COLUMN: (_N, "a column with the same value in every row"),
    Kind.NUMBER_AS_TEXT: (_E, "numbers that are text: sums, averages and the order are silently wrong"),
    Kind.MIXED_UNITS: (_E, "quantities in different units"),
    Kind.MIXED_DATES: (_E, "dates that are written in different ways"),
    Kind.UNSORTABLE_DATES: (_W, "dates that are written so that their order is not that of time"),
    Kind.IMPOSSIBLE_DATE: (_W, "a day that there never was"),
    Kind.MISSING_WORD: (_W, "a word for a missing value, which no IS NULL finds"),
    Kind.SENTINEL_NUMBER: (_W, "a number that seems to stand for a missing value"),
    Kind.OUTER_BLANKS: (_W, "blanks around a text, so that = does not find it"),
    Kind.SPELLINGS: (_W, "one value in several spellings"),
    Kind.MIXED_YES_NO: (_W, "yes and no in several spellings"),
    Kind.BROKEN_LETTERS: (_W, "letters that were read in the wrong encoding"),
    Kind.DUPLICATE_ROWS: (_W, "rows that are there more than once"),
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
    Kind.GOLD_CHANCE: (_W, "an answer that is left to chance"),
    Kind.GOLD_TEXT_NUMBERS: (_E, "a gold query that computes with numbers that are text"),
    Kind.GOLD_ZERO: (_N, "an answer of 0, which is the first guess of many"),
    Kind.GUESSABLE: (_W, "an answer that many wrong queries give as well"),
    Kind.LUCKY: (_N, "a condition that changes nothing, so that whoever forgets it is right by luck"),
    Kind.NO_VARIANTS: (_N, "a question without variants, which is judged on one database"),
    Kind.CONTRADICTION: (_E, "the same question with different answers"),
    Kind.SAME_QUESTION: (_N, "a question that is there twice"),
    Kind.FEW_QUESTIONS: (_W, "too few questions to train on"),
    Kind.UNASKED_TABLE: (_N, "a table that no question is about"),
}
"""Each kind's severity and what it means."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is: a database, and a table or a column in it; or a question. "" for what does not apply."""

    db_id: str = ""
    table: str = ""
    column: str = ""
    question_id: str = ""


@dataclass(frozen=True, slots=True)
class ToNumbers:
    """Make numbers of a column's text; what stands for nothing becomes NULL, and what is no number stays."""

    mark: DecimalMark


@dataclass(frozen=True, slots=True)
class ToDates:
    """Write a column's dates as 2024-05-01; what stands for nothing becomes NULL, and what is no date stays."""

    day_first: bool


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace whole texts of a column; None: by NULL."""

    texts: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class ClearNumbers:
    """Replace numbers of a column by NULL."""

    numbers: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Trim:
    """Take the blanks around a column's texts away."""


@dataclass(frozen=True, slots=True)
class MendLetters:
    """Read a column's texts in the right encoding."""


@dataclass(frozen=True, slots=True)
class DropColumn:
    """Leave the column out."""


@dataclass(frozen=True, slots=True)
class DropDuplicates:
    """Keep each row of the table once."""


@dataclass(frozen=True, slots=True)
class DropLastRow:
    """Leave the table's last row out."""


@dataclass(frozen=True, slots=True)
class DeclareKey:
    """Declare the column as its table's primary key, or, with a parent, as a foreign key to the parent's key."""

    parent: str = ""
    parent_column: str = ""


@dataclass(frozen=True, slots=True)
class Recode:
    """Write the files of the place as UTF-8."""

    file: str
    encoding: str


@dataclass(frozen=True, slots=True)
class ReplaceSQL:
    """Give the question another gold query."""

    sql: str


@dataclass(frozen=True, slots=True)
class DropQuestion:
    """Leave the question out."""


CellRepair = ToNumbers | ToDates | Replace | ClearNumbers | Trim | MendLetters
TableRepair = DropColumn | DropDuplicates | DropLastRow | DeclareKey
QuestionRepair = ReplaceSQL | DropQuestion
Repair = CellRepair | TableRepair | QuestionRepair | Recode


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble. `said` is what was found, with examples; `advice` what to do; `repair` what could do it.

    `shown`: cells of the column that the trouble is about, to find their lines by.
    """

    kind: Kind
    place: Place
    said: str
    advice: str
    repair: Repair | None = None
    shown: tuple[str, ...] = ()

    @property
    def severity(self) -> Severity:
        """How bad its kind is."""
        return MEANINGS[self.kind][0]
