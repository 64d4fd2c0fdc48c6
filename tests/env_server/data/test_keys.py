"""Keys that a file beside the tables states: what is declared, and what does not hold."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.data.cells import normal
from env_server.data.tabular import KEYS_FILE, Keys, import_tables, keys_text, read_keys
from env_server.errors import DataError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import ForeignKey, Schema, read_schema

STATED = """
[primary_keys]
categories = "category_id"

[foreign_keys.products]
kind = "categories"
"part of" = "products"
"""


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    """Two tables; the first refers to the second, and to itself."""
    products = tmp_path / "products.csv"
    products.write_text("product_id,kind,part of\n1,A,\n2,B,1\n3,A,9\n")
    categories = tmp_path / "categories.csv"
    categories.write_text("category_id,name,note\nA,toys,x\nB,books,x\n")
    return [products, categories]


def imported(tables: list[Path], stated: str) -> Schema:
    (tables[0].parent / KEYS_FILE).write_text(stated, encoding="utf-8")
    path = import_tables("shop", tables, tables[0].parent / "cache")
    with closing(Sandbox(path, SandboxSettings())) as sandbox:
        return read_schema(sandbox)


def test_keys_are_declared(tables: list[Path]) -> None:
    schema = imported(tables, STATED)
    assert [c.name for table in schema.tables for c in table.columns if c.primary_key] == ["product_id", "category_id"]
    assert schema.find("products").foreign_keys == (
        ForeignKey(("kind",), "categories", ("category_id",)),
        ForeignKey(("part of",), "products", ("product_id",)),
    )
    assert schema.find("products").row_count == 3, "a value without its row is kept"


def test_other_keys_are_another_database(tables: list[Path]) -> None:
    cache = tables[0].parent / "cache"
    without = import_tables("shop", tables, cache)
    imported(tables, STATED)
    imported(tables, STATED + "# a remark")
    assert len(list(without.parent.glob("*.sqlite"))) == 2
    (tables[0].parent / KEYS_FILE).unlink()
    assert import_tables("shop", tables, cache) == without


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("primary = 1", "'primary' is not known. It may have [primary_keys] and [foreign_keys.TABLE]"),
        ("primary_keys = 1", "primary_keys is not a table. Write [primary_keys]"),
        ("[primary_keys]\nproducts = 1", 'products in [primary_keys] is not a name. Write products = "NAME"'),
        ("[foreign_keys]\nproducts = 1", "foreign_keys.products is not a table"),
        ("[primary_keys", "is not TOML"),
        ('[primary_keys]\nshops = "id"', "there is no table 'shops'. Name one of products, categories"),
        ('[foreign_keys.products]\nkind = "shops"', "there is no table 'shops'"),
        ('[primary_keys]\ncategories = "id"', "no column 'id'. Name one of category_id, name, note"),
        ('[primary_keys]\ncategories = "note"', "'note', the primary key of 'categories', occurs more than once"),
        ('[primary_keys]\nproducts = "part of"', "'part of', the primary key of 'products', has empty cells"),
        ('[foreign_keys.products]\nkind = "categories"', "table 'categories' has no primary key to refer to"),
    ],
)
def test_what_does_not_hold_is_named(tables: list[Path], stated: str, words: str) -> None:
    with pytest.raises(DataError) as raised:
        imported(tables, stated)
    assert str(raised.value).startswith(str(tables[0].parent / KEYS_FILE))
    assert words in str(raised.value)


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8).map(normal)


@given(st.dictionaries(NAMES, NAMES, max_size=3), st.dictionaries(NAMES, st.dictionaries(NAMES, NAMES, min_size=1)))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, primary: dict[str, str], foreign: dict[str, dict[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    keys = Keys(primary, foreign)
    (folder / KEYS_FILE).write_bytes(keys_text(keys).encode())
    assert read_keys(folder) == keys
