"""Folders with one issue each, as people have them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from env_server.tools.diagnosis import Diagnosis, diagnose
from env_server.tools.findings import Kind, Stated

CUSTOMERS = """\
customer_id,name,city,joined
1,Ada,Oslo,2023-01-15
2,Bo,Lima,2023-03-02
3,Cy,Oslo,2023-07-19
4,Dee,Rome,2024-02-11
5,Eli,Lima,2024-05-30
"""
QUESTIONS = [
    ("How many customers are there?", "SELECT COUNT(*) FROM customers"),
    ("Who lives in Rome?", "SELECT name FROM customers WHERE city = 'Rome'"),
    ("In which city does Bo live?", "SELECT city FROM customers WHERE name = 'Bo'"),
    ("When did Eli join?", "SELECT joined FROM customers WHERE name = 'Eli'"),
    ("When did Ada join?", "SELECT joined FROM customers WHERE name = 'Ada'"),
    ("Who joined on 2023-07-19?", "SELECT name FROM customers WHERE joined = '2023-07-19'"),
    ("Which customer has the number 2?", "SELECT name FROM customers WHERE customer_id = 2"),
    ("Which customer has the number 4?", "SELECT name FROM customers WHERE customer_id = 4"),
    ("In which city does Dee live?", "SELECT city FROM customers WHERE name = 'Dee'"),
    ("In which city does Cy live?", "SELECT city FROM customers WHERE name = 'Cy'"),
    ("How many customers live in Lima?", "SELECT COUNT(*) FROM customers WHERE city = 'Lima'"),
]
"""About the table of customers; nothing is wrong with them."""


def table(header: str, *rows: str) -> str:
    return "\n".join([header, *rows]) + "\n"


@dataclass(frozen=True)
class Planted:
    """An issue, the files that have it, where it is, and what its message and hint say."""

    kind: Kind
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    questions: Sequence[tuple[str, str]] = ()
    where: str = ""
    message: str = ""
    hint: str = ""
    fixed: bool = True
    """Whether the doctor's own fix removes the issue."""


ITEMS = "item,price"
PLANTED = [
    Planted(
        Kind.NUMBER_AS_TEXT,
        {"items.csv": table(ITEMS, "lamp,$5", 'desk,"1,234.50"', "chair,3", "sofa,N/A")},
        where="items.csv, lines 2, 3, 5, column price",
        message="3 of 4 cells are numbers, but it is text for cells such as '$5', '1,234.50', 'N/A'",
        hint="'$5' as 5, '1,234.50' as 1234.5, 'N/A' as NULL",
    ),
    Planted(
        Kind.NUMBER_AS_TEXT,
        {"items.csv": table("item;price", "lamp;1,5", "desk;1.234,50", "chair;-", "sofa;20")},
        message="'1,5', '1.234,50', '-'",
        hint="'1,5' as 1.5, '1.234,50' as 1234.5, '-' as NULL",
    ),
    Planted(
        Kind.NUMBER_AS_TEXT,
        {"items.csv": table("item;price", "lamp;1,5", "desk;1.5", "chair;7")},
        where="column price",
        hint="",
    ),
    Planted(
        Kind.NUMBER_OR_CODE,
        {"items.csv": table("item,model", "lamp,1.1", "desk,1.2", "chair,1.10")},
        where="items.csv, lines 2, 4, column model",
        message="'1.1', '1.10' are one number and two texts",
    ),
    Planted(
        Kind.MIXED_UNITS,
        {"items.csv": table("item,weight", "lamp,2 kg", "desk,900 g", "chair,7 kg")},
        where="items.csv, lines 2, 3, 4, column weight",
        message="'2 kg', '900 g'",
        fixed=False,
    ),
    Planted(
        Kind.MIXED_DATES,
        {"trips.csv": table("trip,day", "a,2024-01-15", "b,15/02/2024", "c,March 3 2024", "d,2024-04-01")},
        where="trips.csv, lines 3, 4, column day",
        message="'2024-01-15', '15/02/2024', 'March 3 2024'",
    ),
    Planted(
        Kind.NON_ISO_DATES,
        {"trips.csv": table("trip,day", "a,31.1.2024", "b,5.2.2024", "c,1.12.2023")},
        message="whose order as text is not that of time",
    ),
    Planted(
        Kind.NON_ISO_DATES,
        {"trips.csv": table("trip,day", "a,03/04/2024", "b,05/06/2023", "c,07/08/2024")},
        hint="state it with --dates day-first or month-first",
        fixed=False,
    ),
    Planted(
        Kind.IMPOSSIBLE_DATE,
        {"trips.csv": table("trip,day", "a,2023-02-30", "b,2023-03-01", "c,2023-04-01")},
        where="trips.csv, line 2, column day",
        message="there is no '2023-02-30'",
        fixed=False,
    ),
    Planted(
        Kind.NULL_PLACEHOLDER,
        {"items.csv": table("item,colour", "lamp,red", "desk,n/a", "chair,blue", "sofa,-")},
        where="items.csv, lines 3, 5, column colour",
        message="2 cells: '-', 'n/a'",
    ),
    Planted(
        Kind.SENTINEL_NUMBER,
        {"items.csv": table("item,stock", "lamp,4", "desk,-999", "chair,-999", "sofa,12")},
        where="items.csv, lines 3, 4, column stock",
        message="2 cells are -999; all others lie between 4 and 12",
    ),
    Planted(
        Kind.SURROUNDING_WHITESPACE,
        {"items.csv": table("item,colour", "lamp,red", "desk,red ", "chair,blue")},
        where="items.csv, line 3, column colour",
        message="1 cell with white space around, such as 'red '",
    ),
    Planted(
        Kind.INCONSISTENT_VALUES,
        {"items.csv": table("item,colour", "lamp,red", "desk,Red", "chair,blue", "sofa,red", "rug,blue")},
        where="items.csv, line 3, column colour",
        hint="Write red for 'Red'",
    ),
    Planted(
        Kind.MIXED_YES_NO,
        {"items.csv": table("item,sold", "lamp,yes", "desk,Y", "chair,no", "sofa,yes", "rug,N")},
        where="items.csv, lines 3, 6, column sold",
        message="'N', 'Y', 'no'",
    ),
    Planted(
        Kind.MOJIBAKE,
        {"items.csv": table("item,town", "lamp,ZÃ¼rich", "desk,Oslo")},
        where="items.csv, line 2, column town",
        hint="as in 'Zürich'",
    ),
    Planted(Kind.MOJIBAKE, {"items.csv": table("item,town", "lamp,Z\ufffdrich", "desk,Oslo")}, fixed=False),
    Planted(
        Kind.EMPTY_COLUMN,
        {"items.csv": table("item,note", "lamp,", "desk, ")},
        where="items.csv, column note",
        message="none of its 2 rows has a value",
    ),
    Planted(
        Kind.CONSTANT_COLUMN,
        {"items.csv": table("item,origin", *(f"{name},EU" for name in "abcde"))},
        message="all of its 5 rows have 'EU'",
        fixed=False,
    ),
    Planted(Kind.EMPTY_TABLE, {"items.csv": "item,price\n"}, where="items.csv", fixed=False),
    Planted(
        Kind.DUPLICATE_ROWS,
        {"tags.csv": table("item,tag", "lamp,new", "lamp,new", "desk,old", "lamp,new")},
        where="tags.csv",
        message="2 rows occur already, such as (lamp, new)",
    ),
    Planted(
        Kind.TOTAL_ROW,
        {"items.csv": table(ITEMS, "lamp,5.5", "desk,20", "Total,25.5")},
        where="items.csv, line 4",
        message="the last row is called 'Total' and has the sum of the others, 25.5",
    ),
    Planted(
        Kind.REPEATED_KEY,
        {"items.csv": table("item_id,price", *(f"{n},{n * n}" for n in range(12)), "3,7")},
        where="items.csv, lines 5, 14, column item_id",
        message="1 of 13 rows have no value of their own, such as '3'",
        fixed=False,
    ),
    Planted(
        Kind.PRIMARY_KEY,
        {"categories.csv": table("category_id,label", "7,toys", "9,books")},
        where="categories.csv, column category_id",
    ),
    Planted(
        Kind.FOREIGN_KEY,
        {"orders.csv": table("order_id,customer_id,item", "1,1,lamp", "2,1,desk", "3,5,lamp")},
        where="orders.csv, column customer_id",
        message="each of its 2 values is in customers.customer_id",
    ),
    Planted(
        Kind.FOREIGN_KEY,
        {
            "orders.csv": table("order_id,category", "1,A", "2,B"),
            "categories.csv": table("category_code,label", "A,x", "B,x", "C,y"),
        },
        message="each of its 2 values is in categories.category_code",
    ),
    Planted(
        Kind.BROKEN_REFERENCE,
        {"orders.csv": table("order_id,customer_id,item", "1,1,lamp", "2,2,desk", "3,9,lamp")},
        where="orders.csv, line 4, column customer_id",
        message="1 of its 3 values has no row in customers.customer_id, such as '9'",
        fixed=False,
    ),
    Planted(
        Kind.NO_HEADER,
        {"items.csv": table("3,2024-01-01,lamp", "4,2024-02-01,desk", "5,2024-03-01,sofa")},
        where="items.csv",
        fixed=False,
    ),
    Planted(
        Kind.EXTRA_LINES,
        {
            "items.csv": table(
                "Stock 2024,,", ",,", "item,price,weight", ",EUR,kg", "lamp,5,2", "desk,7,9", "Source: me,,"
            )
        },
        where="items.csv",
        message="line 1 is a title, 'Stock 2024'; line 2 is blank; line 4 is units, 'EUR kg'; and 1 more",
    ),
    Planted(
        Kind.OTHER_DELIMITER,
        {"items.csv": table("item,price;weight", "lamp,a", "desk,b")},
        message="column 'price;weight' holds another delimiter than ','",
        hint="sep=;",
        fixed=False,
    ),
    Planted(
        Kind.RENAMED_COLUMN,
        {"items.csv": table("item,price,price,Price,price_2", "lamp,5,6,7,8", "desk,7,8,9,6")},
        message="column 3 is another 'price', and was called price_3; column 4 is another 'Price', and was called "
        "Price_4",
        fixed=False,
    ),
    Planted(
        Kind.NOT_UTF8,
        {"items.csv": "item,town\nlamp,Zürich\n".encode("cp1252")},
        where="items.csv",
        hint="with --encoding",
        fixed=False,
    ),
    Planted(
        Kind.UNREADABLE,
        {"items.csv": table(ITEMS, "lamp,5", "desk,7,8")},
        message="items.csv, line 3: has 3 cells, but the header has 2",
        fixed=False,
    ),
    Planted(
        Kind.QUESTIONS, {"questions.jsonl": '{"question": "Who?"}\n'}, message='the key "sql" is missing', fixed=False
    ),
    Planted(
        Kind.GOLD_FAILS,
        questions=[("Who is in Rome?", "SELECT nmae FROM customers WHERE city = 'Rome'")],
        where="question questions-0011",
        message="no such column: nmae",
        hint="Did you mean name? SELECT name FROM customers WHERE city = 'Rome'",
    ),
    Planted(
        Kind.GOLD_EMPTY,
        questions=[("Who lives in Oslo?", 'SELECT name FROM customers WHERE city = "oslo"')],
        hint="customers.city has 'Oslo', not 'oslo': SELECT name FROM customers WHERE city = \"Oslo\"",
    ),
    Planted(
        Kind.GOLD_TOO_LARGE,
        questions=[("Which pairs are there?", "SELECT a.name, b.name FROM customers a, customers b")],
        message="more than 20 rows",
        fixed=False,
    ),
    Planted(
        Kind.GOLD_TIE,
        questions=[("Where do most live?", "SELECT city FROM customers GROUP BY 1 ORDER BY COUNT(*) DESC LIMIT 1")],
        message="the result depends on a tie",
        fixed=False,
    ),
    Planted(
        Kind.GOLD_TEXT_NUMBERS,
        {"items.csv": table(ITEMS, "lamp,$5", 'desk,"1,234.50"', "chair,3", "sofa,N/A")},
        [("What is the average price?", "SELECT AVG(price) FROM items")],
        where="question questions-0011",
        message="computes with items.price, whose numbers are text; its answer is 1.0",
        fixed=False,
    ),
    Planted(
        Kind.GOLD_ZERO,
        questions=[("How many customers live in Paris?", "SELECT COUNT(*) FROM customers WHERE city = 'Paris'")],
        message="the answer is 0",
        fixed=False,
    ),
    Planted(
        Kind.REDUNDANT_CLAUSE,
        questions=[("Who joined last, after 2020?", "SELECT MAX(joined) FROM customers WHERE joined > '2020'")],
        message="the answer is the same without WHERE joined > '2020'",
        fixed=False,
    ),
    Planted(
        Kind.CONTRADICTION,
        questions=[("how many customers are there", "SELECT COUNT(DISTINCT city) FROM customers")],
        where="question questions-0011",
        message="its answer is 3, and that of questions-0000 is 5",
        fixed=False,
    ),
    Planted(
        Kind.SAME_QUESTION,
        questions=[("How many customers are there?", "SELECT COUNT(name) FROM customers")],
        message="is asked by questions-0000 already",
    ),
    Planted(
        Kind.UNASKED_TABLE,
        {"items.csv": table(ITEMS, "lamp,5", "desk,7")},
        where="items.csv",
        hint="sqlenv data suggest",
        fixed=False,
    ),
]


def plant(planted: Planted, root: Path) -> Path:
    """Make the folder, and return it."""
    folder = root / "shop"
    folder.mkdir()
    questions = [{"question": text, "sql": sql} for text, sql in (*QUESTIONS, *planted.questions)]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    for name, text in {"customers.csv": CUSTOMERS, "questions.jsonl": lines, **planted.files}.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def look(folder: Path, stated: Stated | None = None, *, test_databases: bool = False) -> Diagnosis:
    """Diagnose the folder, by default without test databases."""
    return diagnose(str(folder), folder.parent / "cache", test_databases=test_databases, stated=stated)


def database(folder: Path, name: str, script: str) -> Path:
    """Make a SQLite file."""
    folder.mkdir(exist_ok=True)
    with closing(sqlite3.connect(folder / name)) as connection:
        connection.executescript(script)
    return folder / name
