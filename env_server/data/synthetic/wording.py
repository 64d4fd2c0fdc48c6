"""The English of the questions: templates by family, and the phrases that fill them.

Placeholders: `singular` and `plural` name the table's rows, `columns` what is asked for ("name and age"), `be` is
"is" or "are" to go with it (`be_column` to go with `column`), `where` a condition with a leading space or nothing,
`entity` one row ("pet named Rex").
Each template states which columns are wanted. A filled template starts with a capital and ends with a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from env_server.data.synthetic.model import Column, Table

COUNT = (
    "How many {plural}{where} are there?",
    "Count the {plural}{where}.",
    "What is the number of {plural}{where}?",
    "Find the number of {plural}{where}.",
)
COUNT_DISTINCT = (
    "How many different {column} values do the {plural}{where} have?",
    "Count the different {column} values of the {plural}{where}.",
    "How many different values of {column} are there among the {plural}{where}?",
)
FILTER = (
    "Give the {columns} of every {singular}{where}.",
    "List the {columns} of all {plural}{where}.",
    "Show the {columns} of the {plural}{where}.",
    "Find the {columns} of each {singular}{where}.",
    "What {be} the {columns} of each {singular}{where}?",
)
LOOKUP = (
    "What {be} the {columns} of the {entity}?",
    "Give the {columns} of the {entity}.",
    "Find the {columns} of the {entity}.",
    "Show the {columns} of the {entity}.",
)
AGGREGATE = (
    "What {be} the {measure} of the {plural}{where}{rounding}?",
    "Find the {measure} of all {plural}{where}{rounding}.",
    "Give the {measure} among the {plural}{where}{rounding}.",
    "Show the {measure} of the {plural}{where}{rounding}.",
)
TOP_ONE = (
    "Give the {columns} of the {singular} with the {superlative} {column}.",
    "What {be} the {columns} of the {singular} with the {superlative} {column}?",
    "Find the {columns} of the {singular} that has the {superlative} {column}.",
    "Which {singular} has the {superlative} {column}? Give the {columns}.",
)
TOP_ONE_WHERE = (
    "Among the {plural}{where}, give the {columns} of the one with the {superlative} {column}.",
    "Of all {plural}{where}, which has the {superlative} {column}? Give the {columns}.",
)
TOP_SEVERAL = (
    "Give the {columns} of the {k} {plural} with the {superlative} {column}, {superlative} first.",
    "List the {columns} of the {k} {plural} that have the {superlative} {column}, {superlative} first.",
    "For the {k} {plural} with the {superlative} {column}, give the {columns}, {superlative} first.",
)
SORTED = (
    "List the {columns} of the {plural}{where}, sorted by {column}, {superlative} first.",
    "Give the {columns} of all {plural}{where} in order of {column}, {superlative} first.",
)
GROUP_COUNT = (
    "Give each {category} and its number of {plural}{where}.",
    "For each {category}, show the {category} and the number of {plural}{where}.",
    "List every {category} together with its number of {plural}{where}.",
)
GROUP_MEASURE = (
    "For each {category} of the {plural}, give the {category} and the {measure}{rounding}.",
    "List every {category} of the {plural} together with the {measure}{rounding}.",
    "Show each {category} and the {measure} of its {plural}{rounding}.",
)
HAVING_COUNT = (
    "Give every {category} that has {amount} {plural}.",
    "Which {category} values have {amount} {plural}?",
    "List the {category} values with {amount} {plural}.",
)
HAVING_MEASURE = (
    "Give every {category} for which the {measure} of the {plural} is {amount}.",
    "For which {category} values is the {measure} of the {plural} {amount}?",
    "List every {category} where the {measure} of the {plural} is {amount}.",
)
MOST_COMMON = (
    "Which {category} has the {most} {plural}?",
    "Find the {category} with the {most} {plural}.",
    "Give the {category} that has the {most} {plural}.",
)
BEST_GROUP = (
    "Which {category} has the {superlative} {measure} among the {plural}?",
    "Find the {category} of the {plural} with the {superlative} {measure}.",
)
JOIN_LOOKUP = (
    "What {be} the {columns} of the {parent} of the {entity}?",
    "Give the {columns} of the {parent} of the {entity}.",
    "Show the {columns} of the {parent} of the {entity}.",
)
JOIN_FILTER = (
    "Give the {columns} of all {plural} that {verb} {target}.",
    "List the {columns} of the {plural} that {verb} {target}.",
    "Show the {columns} of the {plural} that {verb} {target}.",
)
JOIN_COUNT = (
    "How many {plural} {verb} {target}?",
    "Count the {plural} that {verb} {target}.",
    "Find the number of {plural} that {verb} {target}.",
)
JOIN_MEASURE = (
    "What is the {measure} of the {plural} that {verb} {target}{rounding}?",
    "Find the {measure} of all {plural} that {verb} {target}{rounding}.",
)
JOIN_PARENTS = (
    "Give the {columns} of every {parent} that has at least one {singular}{where}, without repeats.",
    "List the different {columns} values of the {plural_parents} that have some {singular}{where}.",
)
JOIN_MOST = (
    "Which {parent} has the {most} {plural}? Give the {columns}.",
    "Give the {columns} of the {parent} with the {most} {plural}.",
    "Find the {columns} of the {parent} that has the {most} {plural}.",
)
STAR_PARENTS = (
    "Give the {columns} of all {plural_parents} that have {plural} that {verb} {target}, without repeats.",
    "List the different {columns} values of the {plural_parents} with {plural} that {verb} {target}.",
)
ABOVE_AVERAGE = (
    "Give the {columns} of every {singular} whose {column} {be_column} {side} the average {column} of all {plural}.",
    "List the {columns} of the {plural} with {column} {side} the average {column} of all {plural}.",
)
ABOVE_AVERAGE_COUNT = (
    "How many {plural} have {column} {side} the average {column} of all {plural}?",
    "Count the {plural} whose {column} {be_column} {side} the average {column} of all {plural}.",
)
COMPARED = (
    "Give the {columns} of every {singular} whose {column} {be_column} {side} that of the {entity}.",
    "List the {columns} of all {plural} with {column} {side} that of the {entity}.",
)
COMPARED_COUNT = (
    "How many {plural} have {column} {side} that of the {entity}?",
    "Count the {plural} whose {column} {be_column} {side} that of the {entity}.",
)
WITHOUT = (
    "Give the {columns} of every {parent} that has no {plural}.",
    "List the {columns} of all {plural_parents} without any {plural}.",
    "Which {plural_parents} have no {plural}? Give the {columns}.",
)
WITHOUT_COUNT = (
    "How many {plural_parents} have no {plural}?",
    "Count the {plural_parents} without any {plural}.",
)
INTERSECT = (
    "Which {category} values are found both among the {plural} {first} and among the {plural} {second}?",
    "List every {category} shared by {plural} {first} and {plural} {second}.",
)
EXCEPT = (
    "Which {category} values are found among the {plural} {first} but not among the {plural} {second}?",
    "List every {category} of the {plural} {first} that is not found among the {plural} {second}.",
)
UNION = (
    "Which {category} values are found among the {plural} {first} or among the {plural} {second}?",
    "List every different {category} of the {plural} {first} and of the {plural} {second}.",
)
EXTREME_DATE = (
    "What is the {superlative} {column} of the {plural}{where}?",
    "Find the {superlative} {column} among the {plural}{where}.",
    "Give the {superlative} {column} of all {plural}{where}.",
)
MISSING_COUNT = (
    "How many {plural} have no recorded {column}?",
    "Count the {plural} with no recorded {column}.",
    "How many {plural} are missing the {column}?",
)
MISSING = (
    "Give the {columns} of every {singular} that has no recorded {column}.",
    "List the {columns} of all {plural} with no recorded {column}.",
    "Show the {columns} of the {plural} with a missing {column}.",
)
NUMERALS = {2: "two", 3: "three", 4: "four", 5: "five"}


def fill(templates: Sequence[str], rng: Random, **phrases: object) -> str:
    """Choose a template and fill it."""
    return rng.choice(templates).format(**phrases)


def listed(columns: Sequence[Column]) -> str:
    """Return "name", "name and age" or "name, age and weight"."""
    phrases = [c.phrase for c in columns]
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def asked(columns: Sequence[Column]) -> dict[str, str]:
    """Return the phrases `columns` and `be` for the columns that a question asks for."""
    return {"columns": listed(columns), "be": columns[0].be if len(columns) == 1 else "are"}


def noun(table: Table) -> dict[str, str]:
    """Return the phrases `singular` and `plural` of a table."""
    return {"singular": table.singular, "plural": table.plural}


def entity(table: Table, column: Column, value: object, rng: Random) -> str:
    """Return words for the row that has `value` in a column that tells the rows apart: "pet named Rex"."""
    if column.evident and rng.random() < 0.5:
        return f"{table.singular} {'named' if column.phrase.endswith('name') else 'titled'} {value}"
    if rng.random() < 0.5:
        return f"{table.singular} with {column.phrase} {value}"
    return f"{table.singular} whose {column.phrase} is {value}"
